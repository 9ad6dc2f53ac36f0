"""Arguments that are changed after the Trainer was made: each takes effect when it does in transformers, or not at all.

Every argument is given another value at each of three times. What both libraries then leave behind must be the same, or
ours must say in an error why it cannot be.
"""

import dataclasses
import importlib
import json
import logging

import pytest
import torch

import hftrainer
from hftrainer.arguments.table import READ_ONCE, TABLE
from hftrainer.errors import InvalidArgument
from tests.support.arguments import DEFAULTS, HANDLED, STEPS
from tests.support.parity import EVENTS, accuracy, alike, assert_equal, comparable, make_recorder
from tests.support.tiny import MODELS

#: When the script changes the argument: after the Trainer was made, between two runs, in `on_train_begin`.
TIMES = ("before", "between", "at the start")
#: argument → another value, and what is set from the beginning; the rest is that of `test_every_argument`.
VALUES = {
    **HANDLED,
    "gradient_accumulation_steps": (2, {}),
    "bf16": (True, {}),
    "fp16": (True, {}),
    "full_determinism": (True, {}),
    "use_cpu": (False, {}),
    "output_dir": ("elsewhere", {"save_strategy": "epoch"}),
    "ddp_backend": ("gloo", {}),
    "ddp_timeout": (5, {}),
    "ddp_find_unused_parameters": (True, {}),
    "ddp_bucket_cap_mb": (1, {}),
    "ddp_broadcast_buffers": (True, {}),
    "ddp_static_graph": (True, {}),
    "fsdp": ("full_shard", {}),
    "fsdp_config": ({"version": 2}, {}),
    "parallelism_config": (None, {}),
    "deepspeed": ({"zero_optimization": {"stage": 2}}, {}),
    "lightning_config": ({"limit_val_batches": 1}, {}),
    "optim": ("sgd", {}),
    "report_to": ("tensorboard", {}),
    "metric_for_best_model": ("accuracy", STEPS),
    "load_best_model_at_end": (True, {**STEPS, "metric_for_best_model": "loss", "learning_rate": 0.5}),
    "activation_checkpointing": (True, {"model": "bert"}),
    "gradient_checkpointing": (True, {"model": "bert"}),
    "neftune_noise_alpha": (5.0, {"model": "llama"}),
    "average_tokens_across_devices": (False, {"model": "llama"}),
    "label_smoothing_factor": (0.1, {"model": "bert"}),
    "include_num_input_tokens_seen": ("all", {"model": "bert"}),
    "do_train": (True, {}),
    "do_eval": (True, {}),
    "do_predict": (True, {}),
    "resume_from_checkpoint": ("nowhere", {}),
    "local_rank": (3, {}),
}
#: argument → (the class of ours, why the change cannot be taken over).
REFUSED = {
    "lightning_config": (InvalidArgument, "of hftrainer alone: the engine is built by it"),
    "deepspeed": (InvalidArgument, "the engine is another one with it; transformers goes on without DeepSpeed"),
}
#: argument → why both libraries end with an error.
FAILS_IN_BOTH = {
    "batch_eval_metrics": "compute_metrics takes no compute_result",
    "eval_do_concat_batches": "compute_metrics gets lists",
    "use_liger_kernel": "liger-kernel is not installed",
}
#: argument → where its change is compared.
ELSEWHERE = {
    "dataloader_multiprocessing_context": "other processes import the test's own",
    "eval_memmap_dir": "of hftrainer alone, read with each evaluation",
    "save_on_interrupt": "of hftrainer alone, read when a signal comes",
    "report_to": "test_read_once_is_said",
    "parallelism_config": "test_read_once_is_said",
    "gradient_checkpointing": "test_old_names_of_checkpointing",
    "gradient_checkpointing_kwargs": "test_old_names_of_checkpointing",
    **dict.fromkeys(
        "push_to_hub hub_model_id hub_strategy hub_token hub_private_repo hub_always_push hub_revision".split(),
        "test_uploads_turned_on_later",
    ),
    **dict.fromkeys(
        "run_name project trackio_space_id trackio_bucket_id trackio_static_space_id".split(),
        "read by the tracker when it is opened",
    ),
}
#: What became of each (argument, time): printed when the tests have run.


def left_behind(library_name, name, value, also, time, folder) -> dict:
    """What a run leaves in which an argument was changed at some time; without a name nothing is."""
    library = importlib.import_module(library_name)
    settings = {**DEFAULTS, **also}
    make_model, make_data = MODELS[settings.pop("model", "plain")]
    data, model = make_data(22), make_model()
    args = library.TrainingArguments(str(folder / "out"), **settings)
    value = str(folder / value) if name == "output_dir" else value

    class Changes(library.TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            if time == "at the start" and name:
                setattr(args, name, value)

    recorder = make_recorder(library)
    trainer = library.Trainer(
        model,
        args,
        train_dataset=data,
        eval_dataset=data[:11],
        callbacks=[recorder, Changes()],
        compute_metrics=accuracy,
    )
    if time == "before" and name:
        setattr(args, name, value)
    trainer.train()
    if time == "between":
        if name:
            setattr(args, name, value)
        trainer.train()
    return {
        "logs": json.dumps(comparable(trainer.state.log_history)),
        "events": [event for event in recorder.events if event[0] in EVENTS],
        "checkpoints": sorted(str(path.relative_to(folder)) for path in folder.rglob("checkpoint-*")),
        "weights": [tensor.sum().item() for tensor in model.state_dict().values()],
        "checkpointing": getattr(model, "is_gradient_checkpointing", None) if settings.get("model") else None,
    }


@pytest.fixture(autouse=True)
def _put_back():
    levels = {name: logging.getLogger(name).level for name in ("hftrainer", "transformers")}
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    torch.use_deterministic_algorithms(False)


def attempt(*case) -> dict | Exception:
    try:
        return left_behind(*case)
    except Exception as error:
        return error


def test_every_argument_is_here():
    known = {name for name, row in TABLE.items() if row.kind != "refused"}
    of_today = {field.name for field in dataclasses.fields(importlib.import_module("transformers").TrainingArguments)}
    own = {"lightning_config", "eval_memmap_dir", "save_on_interrupt"}
    assert VALUES.keys() == known & (of_today | own)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize("name", sorted(VALUES.keys() - ELSEWHERE.keys()))
def test_as_in_transformers(tmp_path, capsys, name, time):
    value, also = VALUES[name]
    ours = attempt("hftrainer", name, value, also, time, tmp_path / "ours")
    if name in REFUSED and time != "at the start":  # where nothing reads it any more, in neither library
        assert type(ours) is REFUSED[name][0]
        assert f"{name} changed after the Trainer was made" in str(ours)
        return
    theirs = attempt("transformers", name, value, also, time, tmp_path / "theirs")
    failed = isinstance(ours, Exception)
    assert not failed or name in FAILS_IN_BOTH, ours
    assert failed == isinstance(theirs, Exception), theirs
    assert failed or ours == theirs


#: Changes of the accumulation that the table above does not make, in the middle of a run.
IN_THE_MIDDLE = {
    "larger at the second epoch": ("on_epoch_begin", 1, 3, 10),
    "smaller at the second epoch": ("on_epoch_begin", 4, 1, 3),
    "larger after a step": ("on_step_end", 1, 3, 2),
    "smaller after a step": ("on_step_end", 3, 2, 1),
}


@pytest.mark.parametrize("case", sorted(IN_THE_MIDDLE))
def test_accumulation_in_the_middle_of_a_run(tmp_path, case):
    event, first, then, step = IN_THE_MIDDLE[case]

    def run(name):
        library = importlib.import_module(name)

        def change(self, args, state, control, **kwargs):
            if state.global_step == step:
                args.gradient_accumulation_steps = then

        callback = type("Changes", (library.TrainerCallback,), {event: change})
        recorder = make_recorder(library)
        make_model, make_data = MODELS["plain"]
        model = make_model()
        args = library.TrainingArguments(
            str(tmp_path / name),
            num_train_epochs=2,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=first,
            logging_steps=1,
            learning_rate=1e-2,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = library.Trainer(model, args, train_dataset=make_data(), callbacks=[recorder, callback()])
        trainer.train()
        weights = [tensor.sum().item() for tensor in model.state_dict().values()]
        assert args.gradient_accumulation_steps == then
        return comparable(trainer.state.log_history), recorder.events, weights

    alike(run, assert_equal)


def test_accumulation_changed_by_an_override(tmp_path):
    """As ms-swift does, to keep the samples of a step when batches become smaller."""

    def run(name):
        library = importlib.import_module(name)

        class Smaller(library.Trainer):
            def _inner_training_loop(self, *args, **kwargs):
                self.args.gradient_accumulation_steps *= 2
                return super()._inner_training_loop(*args, **kwargs)

        make_model, make_data = MODELS["plain"]
        args = library.TrainingArguments(
            str(tmp_path / name),
            num_train_epochs=1,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
        )
        trainer = Smaller(make_model(), args, train_dataset=make_data())
        return trainer.train().global_step, comparable(trainer.state.log_history)

    assert alike(run, assert_equal)[0] == 3


def make_trainer(tmp_path, kind=hftrainer.Trainer, **settings):
    make_model, make_data = MODELS["plain"]
    given = {"max_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    args = hftrainer.TrainingArguments(str(tmp_path), **{**given, **settings})
    data = make_data()
    return kind(make_model(), args, train_dataset=data, eval_dataset=data)


@pytest.mark.parametrize("name", sorted(set(READ_ONCE) - {"lightning_config", "deepspeed"}))
def test_read_once_is_said(tmp_path, caplog, name):
    values = {**VALUES, "parallelism_config": ({"dp_shard_size": 2}, {}), "log_level": ("info", {})}
    trainer = make_trainer(tmp_path)
    setattr(trainer.args, name, values[name][0])
    with caplog.at_level(logging.WARNING, logger="hftrainer"):
        trainer.train()
        trainer.train()
        trainer.evaluate()
    found = [record.message for record in caplog.records if "reads it once" in record.message]
    assert len(found) == 1  # once for each set of changes
    assert f"{name} (" in found[0]


def test_arguments_that_are_replaced(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.args = dataclasses.replace(trainer.args, gradient_accumulation_steps=3, max_steps=2, logging_steps=1)
    assert trainer.train().global_step == 2
    assert len([line for line in trainer.state.log_history if "loss" in line]) == 2
    trainer.args = hftrainer.TrainingArguments(str(tmp_path), lightning_config={"limit_val_batches": 1}, use_cpu=True)
    with pytest.raises(InvalidArgument, match=r"lightning_config changed after the Trainer was made"):
        trainer.evaluate()


def test_old_names_of_checkpointing(tmp_path):
    """As in transformers until v5.22: the newest reads the new names alone, and runs out of memory in silence."""
    data = MODELS["bert"][1]()
    args = hftrainer.TrainingArguments(str(tmp_path), max_steps=1, save_strategy="no", report_to="none", use_cpu=True)
    trainer = hftrainer.Trainer(MODELS["bert"][0](), args, train_dataset=data)
    args.gradient_checkpointing, args.gradient_checkpointing_kwargs = True, {"use_reentrant": False}
    assert (args.activation_checkpointing, args.activation_checkpointing_kwargs) == (True, {"use_reentrant": False})
    trainer.train()
    assert trainer.model.is_activation_checkpointing
    args.gradient_checkpointing = False
    assert args.activation_checkpointing is False


def test_numbers_out_of_range(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.args.gradient_accumulation_steps = 0
    with pytest.raises(InvalidArgument, match="gradient_accumulation_steps=0: give a number of at least 1"):
        trainer.train()


def test_lightning_writes_where_the_arguments_say(tmp_path):
    trainer = make_trainer(tmp_path / "first")
    trainer.args.output_dir = str(tmp_path / "second")
    trainer.train()
    assert trainer.lightning_trainer.default_root_dir == str(tmp_path / "second")


def test_uploads_turned_on_later(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(hftrainer.Trainer, "init_hf_repo", lambda self: opened.append(self.args.hub_model_id))
    trainer = make_trainer(tmp_path)
    trainer.train()
    assert not opened
    trainer.args.push_to_hub, trainer.args.hub_model_id = True, "owner/name"
    trainer.train()
    assert opened == ["owner/name"]


@pytest.mark.parametrize(("release", "steps"), [("4.57", 5), ("5.2", 5), ("5.3", 10)])
def test_batch_size_by_release(tmp_path, caplog, release, steps):
    trainer = make_trainer(
        tmp_path,
        max_steps=-1,
        num_train_epochs=1,
        per_device_train_batch_size=4,
        lightning_config={"behaviour": release},
    )
    trainer.args.per_device_train_batch_size = 8
    assert trainer.train().global_step == steps
    assert ("per_device_train_batch_size (4" in caplog.text) == (release == "5.3")


def test_a_loader_of_the_script_may_read_the_batch_size_again(tmp_path, caplog):
    class OwnLoader(hftrainer.Trainer):
        def get_train_dataloader(self):
            size = self.args.per_device_train_batch_size
            return self.accelerator.prepare(torch.utils.data.DataLoader(self.train_dataset, batch_size=size))

    trainer = make_trainer(tmp_path, kind=OwnLoader, max_steps=-1, num_train_epochs=1, per_device_train_batch_size=4)
    trainer.args.per_device_train_batch_size = 8
    assert trainer.train().global_step == 5
    assert "per_device_train_batch_size" not in caplog.text
