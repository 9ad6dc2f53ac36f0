import importlib.util
import os

import pytest

from tests.support.launchers import free_port

#: `make test-adapters` has an environment of its own for these.
collect_ignore_glob = [] if importlib.util.find_spec("deepspeed") else ["test_*.py"]


@pytest.fixture
def one_process(monkeypatch):
    """This process is the only rank, as a launcher would start it."""
    from tests.adapters.deepspeed.training_cases import without_compiler

    without_compiler()
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in place.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(autouse=True)
def _variables():
    """DeepSpeed needs LOCAL_RANK in the process that trains; scripts of later tests would take it for theirs."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
