import pytest

from tests.support.checks import SECOND


@pytest.fixture
def put(monkeypatch):
    """Sets environment variables, given as a shell has them."""

    def put(variables):
        for word in variables.split():
            monkeypatch.setenv(*word.split("=", 1))

    return put


@pytest.fixture
def two_processes(put):
    """As in the second process that torchrun has started."""
    put(SECOND)
