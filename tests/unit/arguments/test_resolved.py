"""What training arguments mean is parsed once for a Trainer, and once for each trial of a search."""

import collections
import contextlib
import copy
import inspect
import pickle
import pkgutil
import sys

import pytest

from hftrainer import Trainer, TrainingArguments
from hftrainer.arguments.resolved import ResolvedArguments
from tests.support.tiny import make_plain, plain_data

#: What is read → the function that reads it, by its module.
READERS = {
    "lightning_config": "hftrainer.parallel.config_files:read_config",
    "fsdp_config": "hftrainer.parallel.fsdp_settings:read_fsdp",
    "launcher's environment": "hftrainer.parallel.environment:find_rank_info",
    "accelerator_config": "hftrainer.arguments.accelerator_config:AcceleratorConfig.read",
}


def code_of(reader):
    found = pkgutil.resolve_name(reader)
    return inspect.unwrap(getattr(found, "__func__", found)).__code__


@contextlib.contextmanager
def counted():
    of_code = {code_of(reader): what for what, reader in READERS.items()}
    found = collections.Counter(dict.fromkeys(READERS, 0))

    def on_event(frame, event, _):
        if event == "call" and (what := of_code.get(frame.f_code)) is not None:
            # One function reads the other configurations too, for their own readers.
            found[what] += frame.f_locals.get("argument", what) == what

    sys.setprofile(on_event)
    try:
        yield found
    finally:
        sys.setprofile(None)


def make(folder, **settings):
    return TrainingArguments(str(folder), max_steps=2, disable_tqdm=True, use_cpu=True, save_strategy="no", **settings)


def test_each_configuration_is_read_once(tmp_path):
    args = make(tmp_path)
    with counted() as made:
        trainer = Trainer(make_plain(), args, train_dataset=plain_data())
    with counted() as trained:
        trainer.train()
    assert dict(made) == dict.fromkeys(READERS, 1)
    # How loaders are prepared is asked again when one is made: a script may have set it on the accelerator.
    assert dict(trained) == {**dict.fromkeys(READERS, 0), "accelerator_config": 1}


def test_once_for_each_trial(tmp_path):
    data = plain_data()
    trainer = Trainer(model_init=make_plain, args=make(tmp_path), train_dataset=data, eval_dataset=data)
    kept = trainer._hftrainer.resolved
    with counted() as reads:
        trainer.hyperparameter_search(lambda trial: {"learning_rate": 0.1}, n_trials=3)
    assert trainer._hftrainer.resolved is not kept
    assert reads["launcher's environment"] == reads["fsdp_config"] == reads["lightning_config"] == 3


def test_a_file_that_changes_is_no_longer_read(tmp_path):
    path = tmp_path / "lightning.yaml"
    path.write_text("precision: bf16-mixed")
    trainer = Trainer(make_plain(), make(tmp_path, lightning_config=str(path)), train_dataset=plain_data())
    path.write_text("no: such: thing")
    assert trainer.args.world_size == 1
    trainer.train()
    assert trainer.accelerator.mixed_precision == "bf16"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda args: pickle.loads(pickle.dumps(args))])
def test_copies_of_arguments_leave_it_behind(tmp_path, monkeypatch, copied):
    """It belongs to a Trainer and to this process."""
    args = make(tmp_path)
    trainer = Trainer(make_plain(), args, train_dataset=plain_data())
    assert ResolvedArguments.from_args(args) is trainer._hftrainer.resolved
    other = copied(args)
    assert other == args
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert (args.world_size, other.world_size) == (1, 3)
