"""Runs the same training with either library, and keeps all that can be compared."""

import importlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tests.support.known_differences import MEASURED, OWN_FILES
from tests.support.small_models import MODELS

LIBRARIES = ("transformers", "hftrainer")
EVENTS = """
    on_init_end on_train_begin on_train_end on_epoch_begin on_epoch_end on_step_begin on_pre_optimizer_step
    on_optimizer_step on_substep_end on_step_end on_evaluate on_predict on_save on_log on_prediction_step
""".split()
#: Functions that make a model and its data, or their key in `tests.support.small_models.MODELS`.
Model = str | tuple[Callable[[], Any], Callable[[], Any]]
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
EVERY_STEP = {**EVALUATED, "save_strategy": "steps", "save_steps": 2}


def make_recorder(library: Any) -> Any:
    """A callback of `library` that writes down every event with what its state says then."""

    class Recorder(library.TrainerCallback):
        def __init__(self) -> None:
            self.events: list[tuple] = []

    def note(event: str):
        def handler(self, args, state, control, **kwargs):
            known = sorted(name for name, value in kwargs.items() if value is not None)
            self.events.append((event, state.global_step, state.epoch, known))

        return handler

    for event in EVENTS:
        setattr(Recorder, event, note(event))
    return Recorder()


@dataclass
class Record:
    logs: list[dict]
    events: list[tuple]
    files: dict[str, list[str]]
    state_keys: list[str]
    weights: dict[str, torch.Tensor]
    extra: dict[str, Any] = field(default_factory=dict)


def comparable(logs: list[dict]) -> list[dict]:
    """Log lines without the values of measured times, whose names stay; NaN equals NaN."""

    def shown(name: str, value: Any) -> Any:
        return "measured" if name.endswith(MEASURED) else "nan" if value != value else value

    return [{name: shown(name, value) for name, value in line.items()} for line in logs]


def accuracy(prediction: Any) -> dict[str, float]:
    predictions = prediction.predictions
    predictions = predictions[0] if isinstance(predictions, tuple) else predictions
    return {"accuracy": float((predictions.argmax(-1) == prediction.label_ids).mean())}


def subclass(**methods: Callable[..., Any]) -> Callable[[Any], type]:
    """Makes a subclass of a library's Trainer, whose methods call the parent's by `super(type(self), self)`."""
    return lambda library: type("Own", (library.Trainer,), methods)


def seq2seq(library: Any) -> type:
    return library.Seq2SeqTrainer


#: Makes a subclass with a training step of its own.
with_own_step = subclass(training_step=lambda self, *args, **kw: super(type(self), self).training_step(*args, **kw))


def callback(**handlers: Callable[..., Any]) -> Callable[[Any], Any]:
    """Makes a callback of a library with these handlers of events."""
    return lambda library: type("OwnCallback", (library.TrainerCallback,), handlers)()


def build(name: str, model: Model, folder: Path, **settings: Any) -> tuple[Any, Any]:
    """A Trainer of library `name`, and its recorder.

    Of the settings, `trainer` has keywords of the Trainer, or a function that makes them for each run, `trainer_class`
    makes a class for a library, and `callback` a callback that is added after the recorder; others are arguments.
    """
    library = importlib.import_module(name)
    make_model, make_data = MODELS[model] if isinstance(model, str) else model
    trainer_settings = settings.pop("trainer", {})
    trainer_settings = trainer_settings() if callable(trainer_settings) else trainer_settings
    make_callback = settings.pop("callback", None)
    trainer_class = settings.pop("trainer_class", lambda library: library.Trainer)(library)
    data = make_data()
    defaults = (
        {"num_train_epochs": 2, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 8}
        | {"learning_rate": 1e-2, "weight_decay": 0.1, "warmup_steps": 2, "logging_steps": 2, "save_strategy": "no"}
        | {"report_to": "none", "disable_tqdm": True, "use_cpu": True}
    )
    generates = isinstance(trainer_class, type) and issubclass(trainer_class, library.Seq2SeqTrainer)
    arguments_class = library.Seq2SeqTrainingArguments if generates else library.TrainingArguments
    args = arguments_class(str(folder), **{**defaults, **settings})
    recorder = make_recorder(library)
    trainer_kwargs = {"train_dataset": data, "eval_dataset": data[:19], "callbacks": [recorder], **trainer_settings}
    if "model_init" not in trainer_kwargs:
        trainer_kwargs.setdefault("model", make_model())
    trainer = trainer_class(args=args, **trainer_kwargs)
    if make_callback is not None:
        trainer.add_callback(make_callback(library))
    return trainer, recorder


def record(trainer: Any, recorder: Any, folder: Path, **extra: Any) -> Record:
    """Everything comparable of a finished run."""
    folders = sorted(path for path in folder.glob("*") if path.is_dir())
    states = sorted(folder.glob("checkpoint-*/trainer_state.json"), key=os.path.getmtime)
    return Record(
        logs=comparable(trainer.state.log_history),
        events=recorder.events,
        files={path.name: sorted(set(os.listdir(path)) - OWN_FILES) for path in folders},
        state_keys=sorted(json.loads(states[-1].read_text())) if states else [],
        weights={name: tensor.clone() for name, tensor in trainer.model.state_dict().items()},
        extra=extra,
    )


def train(name: str, model: Model, folder: Path, resume: Any = None, script: Any = None, **settings: Any) -> Record:
    """Train with library `name` in `folder`; or run `script` on the Trainer, whose value is compared too."""
    trainer, recorder = build(name, model, folder, **settings)
    if script is not None:
        value = script(trainer)
        return record(trainer, recorder, folder, script=value)
    output = trainer.train(resume_from_checkpoint=resume)
    return record(trainer, recorder, folder, global_step=output.global_step, training_loss=output.training_loss)


def assert_same(ours: Record, theirs: Record) -> None:
    """Exactly: every log entry, every event, every file name, every weight."""
    assert ours.logs == theirs.logs
    assert [list(line) for line in ours.logs] == [list(line) for line in theirs.logs]  # the order of keys too
    assert ours.events == theirs.events
    assert ours.files == theirs.files
    assert ours.state_keys == theirs.state_keys
    assert ours.extra == theirs.extra
    assert_same_weights(ours.weights, theirs.weights)


def assert_same_weights(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    different = [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]
    assert not different


def assert_same_but_for_weights(ours: Record, theirs: Record) -> None:
    assert_same(ours, replace(theirs, weights=ours.weights))


def assert_agree(run: Callable[[str], Any], same: Callable[[Any, Any], None] | None = None) -> Any:
    """What `run("hftrainer")` returns, after asserting that `run("transformers")` is the same, or equal."""
    ours, theirs = run("hftrainer"), run("transformers")
    if same is not None:
        same(ours, theirs)
    elif isinstance(ours, Record):
        assert_same(ours, theirs)
    else:
        assert ours == theirs
    return ours


def compare(tmp_path: Path, model: Model, same: Callable[..., None] = assert_same, **settings: Any) -> Record:
    """Our run, after asserting that transformers does the same with the same settings."""
    return assert_agree(lambda name: train(name, model, tmp_path / name, **settings), same)


def compare_resumed(tmp_path: Path, model: Model, step: int, **settings: Any) -> Record:
    """As `compare`; from either library's checkpoint of a step, our run ends with the same weights."""
    whole = compare(tmp_path, model, **settings)
    for writer in LIBRARIES:
        checkpoint = str(tmp_path / writer / f"checkpoint-{step}")
        resumed = train("hftrainer", model, tmp_path / "resumed", checkpoint, **settings)
        assert_same_weights(resumed.weights, whole.weights)
    return whole


def copy_checkpoint(source: Path, target: Path, step: int) -> Path:
    folder = target / f"checkpoint-{step}"
    shutil.copytree(source / folder.name, folder)
    return folder


def leaves(data, path=""):
    """Every leaf of nested outputs, by its path."""
    if isinstance(data, Mapping):
        return {name: leaf for key, value in data.items() for name, leaf in leaves(value, f"{path}.{key}").items()}
    if isinstance(data, (list, tuple)):
        kind = type(data).__name__
        parts = [leaves(value, f"{path}.{kind}{i}") for i, value in enumerate(data)]
        return {name: leaf for part in parts for name, leaf in part.items()}
    return {path: data}


def array_bytes(data: Any) -> dict[str, Any]:
    """Every array of nested outputs by its path, with dtype, shape and bytes."""

    def shown(leaf: Any) -> Any:
        return leaf if leaf is None else (str(leaf.dtype), leaf.shape, leaf.tobytes())

    return {path: shown(leaf) for path, leaf in leaves(data).items()}
