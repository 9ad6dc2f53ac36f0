"""Each argument has the effect that it has in transformers, until the same time, and has a case."""

import dataclasses
import functools
import importlib
import logging
import tempfile
from pathlib import Path

import pytest
import torch
import transformers

import hftrainer
from hftrainer.arguments.fields.table import ARGUMENTS
from hftrainer.errors import InvalidArgument
from tests.support import parity
from tests.support.arguments import CASES, DEFAULTS, TIMES, make_quiet_trainer
from tests.support.known_differences import OWN_FILES
from tests.support.parity import EVALUATED, EVERY_STEP, accuracy, assert_agree, comparable, compare, record
from tests.support.small_models import MODELS, make_plain, plain_data

ROOT = Path(__file__).parents[2]
READ_ONCE = {name for name, about in ARGUMENTS.items() if about.read_once}


@pytest.fixture(autouse=True)
def _global_state_stays():
    levels = {name: logging.getLogger(name).level for name in ("hftrainer", "transformers")}
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.shown])
def test_case_names_an_existing_test(name):
    path, _, test = CASES[name].shown.partition("::")
    assert f"def {test}(" in (ROOT / path).read_text()


def changed_run(library_name, folder, needs, time, **change):
    """Everything comparable of a run whose arguments are changed at one of `TIMES`."""
    library = importlib.import_module(library_name)
    settings = {**DEFAULTS, **needs, **(change if time == "given" else {})}
    make_model, make_data = MODELS[settings.pop("model", "plain")]
    model, data, seen, loaders = make_model(), make_data(22), [], []
    transformers.logging.set_verbosity_warning()

    class Changes(library.TrainerCallback):
        def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):
            loaders.append(train_dataloader)
            change_at("at the start")

    def metrics(prediction, compute_result=True):
        seen.append((type(prediction.predictions), prediction.inputs is None, prediction.losses is None))
        return accuracy(prediction) if hasattr(prediction.predictions, "astype") else {}

    def change_at(this_time):
        for name, value in change.items() if time == this_time else ():
            setattr(args, name, value)

    args = library.TrainingArguments(**{"output_dir": str(folder / "out"), **settings})
    recorder = parity.make_recorder(library)
    trainer_kwargs = {"train_dataset": data, "eval_dataset": data[:11], "callbacks": [recorder, Changes()]}
    trainer = library.Trainer(model, args, compute_metrics=metrics, **trainer_kwargs)
    change_at("before")
    trained = trainer.train()
    if time == "between":
        change_at("between")
        trained = trainer.train()
    loader = loaders[-1]
    files = [path.relative_to(folder) for path in folder.rglob("checkpoint-*/*") if path.name not in OWN_FILES]
    return {
        "logs": comparable(trainer.state.log_history),
        "events": recorder.events,
        "files": sorted(files),
        "weights": {name: tensor.tolist() for name, tensor in model.state_dict().items()},
        "metrics": sorted(trained.metrics.keys() - {"total_flos"}),  # compatibility.toml: PrinterCallback
        "seen": seen,
        "best": trainer.state.best_metric,
        "use_cache": getattr(model, "config", None) and model.config.use_cache,
        "checkpointing": getattr(model, "is_gradient_checkpointing", None),
        "verbosity": transformers.logging.get_verbosity(),
        "callbacks": [type(callback).__name__ for callback in trainer.callback_handler.callbacks],
        "fused": trainer.optimizer.defaults.get("fused"),
        "workers": (loader.num_workers, loader.prefetch_factor, loader.persistent_workers, loader.in_order),
        "loader": (type(loader.multiprocessing_context), type(loader.collate_fn).__name__),
    }


@functools.cache
def unchanged_run(name, twice):
    with tempfile.TemporaryDirectory() as folder:
        return changed_run("hftrainer", Path(folder), CASES[name].needs, "between" if twice else "given")


def times_to_change(case):
    """The last time with an effect and the first without one: a library that reads later fails at the second."""
    if case.until is None:
        return ["between"] if case.shown else ["given"]
    last = TIMES.index(case.until)
    return TIMES[last : last + 2]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("name", "time"), [(name, time) for name, case in CASES.items() if not case.alone for time in times_to_change(case)]
)
def test_argument_has_the_same_effect_until_the_same_time(tmp_path, capsys, name, time):
    case = CASES[name]

    def run(library):
        value = str(tmp_path / library / case.value) if name == "output_dir" else case.value
        return changed_run(library, tmp_path / library, case.needs, time, **{name: value})

    ours = assert_agree(run)
    takes_effect = case.until is not None and TIMES.index(time) <= TIMES.index(case.until)
    assert (ours != unchanged_run(name, time == "between")) is takes_effect


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", ["overwrite_output_dir", "jit_mode_eval", "use_ipex"])
def test_argument_without_effect_changes_nothing(tmp_path, name):
    assert changed_run("hftrainer", tmp_path, CASES[name].needs, "given", **{name: True}) == unchanged_run(name, False)


@pytest.mark.parametrize(
    "settings",
    [
        {"logging_strategy": "no"},
        {"eval_strategy": "steps"},  # eval_steps are logging_steps
        {"eval_strategy": "epoch", "eval_delay": 2},
        {**EVALUATED, "logging_steps": 0.2, "eval_steps": 0.3, "save_strategy": "steps", "save_steps": 0.15},
        {"num_train_epochs": 1.35},
        {"num_train_epochs": 0.2},
        {"max_steps": 23},
        {"max_steps": 0},
        {**EVERY_STEP, "load_best_model_at_end": True},
        {**EVERY_STEP, "load_best_model_at_end": True, "save_total_limit": 1},
        {**EVERY_STEP, "load_best_model_at_end": True, "save_total_limit": 2},
        {**EVERY_STEP, "save_total_limit": 2},
        {**EVALUATED, "save_strategy": "best", "metric_for_best_model": "loss"},
        {"max_grad_norm": 0.0},
        {"max_grad_norm": -1},
        {**EVALUATED, "eval_delay": -1},
        {"full_determinism": True},
        {**EVERY_STEP, "dataloader_num_workers": 1, "dataloader_persistent_workers": True},
    ],
    ids=str,
)
def test_combined_settings_train_alike(tmp_path, settings):
    compare(tmp_path, "plain", trainer={"compute_metrics": accuracy}, **settings)


def test_max_grad_norm_none_clips_nothing(tmp_path):
    """Until v4.57 None clips nothing, as 0 does; v5 fails at the first step."""
    weights = []
    for value in (None, 0.0):
        trainer = make_quiet_trainer(tmp_path, max_grad_norm=value, learning_rate=0.5, max_steps=2)
        trainer.train()
        weights.append([tensor.tolist() for tensor in trainer.model.state_dict().values()])
    assert weights[0] == weights[1]


def test_which_processes_log_and_save_on_the_second_node(monkeypatch):
    for name, value in {"WORLD_SIZE": "4", "RANK": "2", "LOCAL_RANK": "0"}.items():  # the first of the second node
        monkeypatch.setenv(name, value)
    levels = {"log_level": "warning", "log_level_replica": "error"}
    args = hftrainer.TrainingArguments(**levels)
    assert (args.should_log, args.should_save, args.get_process_log_level()) == (True, False, logging.WARNING)
    args = hftrainer.TrainingArguments(**levels, log_on_each_node=False, save_on_each_node=True)
    assert (args.should_log, args.should_save, args.get_process_log_level()) == (False, True, logging.ERROR)


@pytest.mark.parametrize("pins", [True, False])
def test_dataloader_pin_memory_reaches_the_loader(tmp_path, monkeypatch, pins):
    for library in (hftrainer, transformers):
        assert library.TrainingArguments(use_cpu=True).dataloader_pin_memory is False
        assert library.TrainingArguments(dataloader_pin_memory=pins).dataloader_pin_memory is pins
    args = hftrainer.TrainingArguments(str(tmp_path), dataloader_pin_memory=pins)
    trainer = hftrainer.Trainer(make_plain(), args, train_dataset=plain_data())
    # As on a GPU: without one, torch itself ignores it.
    monkeypatch.setattr(type(args), "device", property(lambda self: torch.device("cuda")))
    assert trainer.get_train_dataloader().pin_memory is pins


@pytest.mark.parametrize(
    ("event", "first", "then", "step"),
    [("on_epoch_begin", 1, 3, 10), ("on_epoch_begin", 4, 1, 3), ("on_step_end", 1, 3, 2), ("on_step_end", 3, 2, 1)],
)
def test_accumulation_changed_by_a_callback(tmp_path, event, first, then, step):
    def run(name):
        def change(self, args, state, control, **kwargs):
            if state.global_step == step:
                args.gradient_accumulation_steps = then

        # In three epochs: a wrong number of windows in the second shows in the third.
        settings = {"logging_steps": 1, "num_train_epochs": 3, "gradient_accumulation_steps": first}
        trainer, recorder = parity.build(name, "plain", tmp_path / name, **settings)
        trainer.add_callback(type("Changes", (importlib.import_module(name).TrainerCallback,), {event: change}))
        trainer.train()
        assert trainer.args.gradient_accumulation_steps == then
        return record(trainer, recorder, tmp_path / name)

    assert_agree(run)


def test_accumulation_changed_by_an_override(tmp_path):
    """As ms-swift does, to keep the samples of a step when batches become smaller."""

    def smaller(library):
        class Smaller(library.Trainer):
            def _inner_training_loop(self, *args, **kwargs):
                self.args.gradient_accumulation_steps *= 2
                return super()._inner_training_loop(*args, **kwargs)

        return Smaller

    settings = {"num_train_epochs": 1, "logging_steps": 1, "per_device_train_batch_size": 8}
    ours = compare(tmp_path, "plain", trainer_class=smaller, **settings)
    assert ours.extra["global_step"] == 3


@pytest.mark.parametrize("name", ["lightning_config", "deepspeed"])
@pytest.mark.parametrize("runs", [0, 1])
def test_changing_engine_arguments_after_construction_is_refused(tmp_path, name, runs):
    """They decide which engine is built. transformers would train on without DeepSpeed."""
    trainer = make_quiet_trainer(tmp_path)
    for _ in range(runs):
        trainer.train()
    setattr(trainer.args, name, CASES[name].value)
    for method in (trainer.train, trainer.evaluate):
        with pytest.raises(InvalidArgument, match=f"{name} changed after the Trainer was made"):
            method()


@pytest.mark.parametrize("name", sorted(READ_ONCE - {"lightning_config", "deepspeed"}))
def test_changing_an_argument_that_is_read_once_warns(tmp_path, caplog, name):
    trainer = make_quiet_trainer(tmp_path)
    setattr(trainer.args, name, "info" if name == "log_level" else CASES[name].value)
    with caplog.at_level(logging.WARNING, logger="hftrainer"):
        trainer.train()
        trainer.train()
        trainer.evaluate()
    (message,) = [record.message for record in caplog.records if "reads such arguments once" in record.message]
    assert f"{name} (" in message


def test_replacing_the_arguments_of_a_trainer_takes_effect(tmp_path):
    trainer = make_quiet_trainer(tmp_path)
    trainer.args = dataclasses.replace(trainer.args, gradient_accumulation_steps=3, max_steps=2, logging_steps=1)
    assert trainer.train().global_step == 2
    assert len([line for line in trainer.state.log_history if "loss" in line]) == 2
    trainer.args = hftrainer.TrainingArguments(str(tmp_path), lightning_config={"limit_val_batches": 1}, use_cpu=True)
    with pytest.raises(InvalidArgument, match=r"lightning_config changed after the Trainer was made"):
        trainer.evaluate()


def test_gradient_checkpointing_sets_activation_checkpointing(tmp_path):
    """As in transformers until v5.22; later releases silently ignore the old names."""
    trainer = make_quiet_trainer(tmp_path, model="bert")
    args = trainer.args
    args.gradient_checkpointing, args.gradient_checkpointing_kwargs = True, {"use_reentrant": False}
    assert (args.activation_checkpointing, args.activation_checkpointing_kwargs) == (True, {"use_reentrant": False})
    trainer.train()
    assert trainer.model.is_activation_checkpointing
    args.gradient_checkpointing = False
    assert args.activation_checkpointing is False


def test_accumulation_set_to_zero_is_refused(tmp_path):
    trainer = make_quiet_trainer(tmp_path)
    trainer.args.gradient_accumulation_steps = 0
    with pytest.raises(InvalidArgument, match="gradient_accumulation_steps=0: use a number of at least 1"):
        trainer.train()


def test_default_root_dir_of_lightning_follows_output_dir(tmp_path):
    trainer = make_quiet_trainer(tmp_path / "first")
    trainer.args.output_dir = str(tmp_path / "second")
    trainer.train()
    assert trainer.lightning_trainer.default_root_dir == str(tmp_path / "second")


def test_push_to_hub_turned_on_between_runs_opens_the_repository(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(hftrainer.Trainer, "init_hf_repo", lambda self: opened.append(self.args.hub_model_id))
    trainer = make_quiet_trainer(tmp_path)
    trainer.train()
    assert not opened
    trainer.args.push_to_hub, trainer.args.hub_model_id = True, "owner/name"
    trainer.train()
    assert opened == ["owner/name"]


class OwnLoader(hftrainer.Trainer):
    def get_train_dataloader(self):
        size = self.args.per_device_train_batch_size
        return self.accelerator.prepare(torch.utils.data.DataLoader(self.train_dataset, batch_size=size))


@pytest.mark.parametrize(
    ("kind", "release", "steps"),
    [*((hftrainer.Trainer, *case) for case in (("4.57", 5), ("5.2", 5), ("5.3", 10))), (OwnLoader, "5.23", 5)],
)
def test_changed_batch_size_takes_effect_as_in_each_release(tmp_path, caplog, kind, release, steps):
    """38 samples make 5 batches of 8. Since v5.3 the Trainer keeps its 4, but the script's loader may read 8."""
    trainer = make_quiet_trainer(
        tmp_path, kind, max_steps=-1, num_train_epochs=1, lightning_config={"behaviour": release}
    )
    trainer.args.per_device_train_batch_size = 8
    assert trainer.train().global_step == steps
    assert ("per_device_train_batch_size (4" in caplog.text) == (steps == 10)
