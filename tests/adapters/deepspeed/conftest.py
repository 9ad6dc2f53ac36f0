import importlib.util
import os

import pytest

#: `make test-adapters` has an environment of its own for these.
collect_ignore_glob = [] if importlib.util.find_spec("deepspeed") else ["test_*.py"]


@pytest.fixture(autouse=True)
def _variables():
    """DeepSpeed needs LOCAL_RANK in the process that trains; scripts of later tests would take it for theirs."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
