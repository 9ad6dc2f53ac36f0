import importlib.util

import pytest

from hftrainer import Trainer, TrainingArguments
from tests.support.small_models import make_plain, plain_data


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


@pytest.fixture
def make_trainer(make_args):
    """Makes a Trainer of two steps. Settings that are no training arguments are the Trainer's own."""

    def make(model=None, data=None, kind=Trainer, **settings):
        own = {name: settings.pop(name) for name in [*settings] if name not in TrainingArguments.__dataclass_fields__}
        defaults = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "report_to": "none"}
        args = make_args(**{**defaults, **settings})
        data = plain_data() if data is None else data
        model = make_plain() if model is None and "model_init" not in own else model
        return kind(model, args, train_dataset=data, **{"eval_dataset": plain_data(9), **own})

    return make
