import pytest

from tests.support.checks import SECOND


@pytest.fixture
def put(monkeypatch):
    """Sets environment variables."""

    def put(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return put


@pytest.fixture
def two_processes(put):
    """As in the second process that torchrun has started."""
    put(SECOND)
