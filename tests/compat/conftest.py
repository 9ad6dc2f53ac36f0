import pytest

from hftrainer.arguments import old_names
from hftrainer.cli import install
from hftrainer.releases import followed


@pytest.fixture(scope="module")
def as_installed():
    """Ours follows the installed release, as after `install()`, for tests that compare with it."""
    followed.follow(followed.installed_release())
    install._set_defaults(old_names.earlier_defaults())
    yield
    install.uninstall()
