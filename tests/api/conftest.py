import importlib.util

import pytest


@pytest.fixture
def deepspeed_installed(monkeypatch):
    """As if DeepSpeed were there, for what asks whether it is and runs none of it."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: True if name == "deepspeed" else find(name, *rest)
    )
