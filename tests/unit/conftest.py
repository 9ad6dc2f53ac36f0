import importlib.util

import pytest

from hftrainer import TrainingArguments


@pytest.fixture
def deepspeed_installed(monkeypatch):
    """Pretend that DeepSpeed is installed, for code that only asks."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *of: True if name == "deepspeed" else find(name, *of))


@pytest.fixture(autouse=True)
def _no_process_group(monkeypatch):
    """The launchers of these tests are made up: their variables name processes that are not there."""
    monkeypatch.setattr(TrainingArguments, "_join_process_group", lambda self: None)


@pytest.fixture
def make_args(tmp_path):
    def make(**settings):
        defaults = {"max_steps": 2, "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
        return TrainingArguments(str(tmp_path / "out"), **{**defaults, **settings})

    return make
