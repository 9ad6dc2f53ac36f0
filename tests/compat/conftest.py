import pytest

from hftrainer.arguments import behaviours
from hftrainer.cli import install


@pytest.fixture(scope="module")
def as_installed():
    """Ours follows the installed release, as after `install()`, for tests that compare with it."""
    release = behaviours.installed_release()
    behaviours.follow(release)
    install._set_defaults(behaviours.earlier_defaults(release))
    yield
    install.uninstall()
