"""`TrainerCallback`, and what its events receive: the state of a run, the control flags, and metrics."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hftrainer.base.content_checks import check_fields, name_file_in_errors
from hftrainer.base.messages import log_once
from hftrainer.errors import InvalidArgument

if TYPE_CHECKING:
    from hftrainer.arguments.base import BaseArguments

#: Required fields of `trainer_state.json`.
_REQUIRED_FIELDS = {"global_step", "max_steps", "num_train_epochs", "total_flos"}
_COUNT_FIELDS = {"global_step", "epoch", "logging_steps", "eval_steps", "save_steps", "num_input_tokens_seen"}
#: A larger number is an error in the file, and would take very long to count to.
_MAX_COUNT = 10**18


class TrainerCallback:
    """Base class of callbacks: override the methods of the events that you need.

    Every event receives `args`, `state` and `control`, and as keyword arguments `model`, `processing_class`,
    `optimizer`, `lr_scheduler`, `train_dataloader` and `eval_dataloader`; `on_log` also `logs`, `on_evaluate` and
    `on_predict` also `metrics`. A method that changes `control` may return it.

    An `on_step_end` that names them also gets `loss` (the step's logged loss, shape `()`, on the device), `inputs` (its
    last micro-batch) and `outputs` (the model's, for that micro-batch).
    """

    def on_init_end(self, args, state, control, **kwargs):
        """The Trainer is built."""

    def on_train_begin(self, args, state, control, **kwargs):
        """Training begins."""

    def on_train_end(self, args, state, control, **kwargs):
        """Training has ended; the best model is loaded with `load_best_model_at_end`."""

    def on_epoch_begin(self, args, state, control, **kwargs):
        """An epoch begins."""

    def on_epoch_end(self, args, state, control, **kwargs):
        """An epoch has ended."""

    def on_step_begin(self, args, state, control, **kwargs):
        """The first micro-batch of an optimizer step is about to run."""

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        """Gradients are complete and clipped; the optimizer has not stepped (since v4.46)."""

    def on_optimizer_step(self, args, state, control, **kwargs):
        """The optimizer has stepped; the gradients have not been cleared yet (since v4.46)."""

    def on_substep_end(self, args, state, control, **kwargs):
        """A micro-batch has run, and it was not the last of its optimizer step."""

    def on_step_end(self, args, state, control, **kwargs):
        """An optimizer step is complete."""

    def on_evaluate(self, args, state, control, **kwargs):
        """An evaluation is complete."""

    def on_predict(self, args, state, control, metrics, **kwargs):
        """A prediction is complete."""

    def on_save(self, args, state, control, **kwargs):
        """A checkpoint has been written."""

    def on_log(self, args, state, control, **kwargs):
        """A log line was added to `state.log_history`."""

    def on_prediction_step(self, args, state, control, **kwargs):
        """A batch of an evaluation or prediction is complete."""

    def on_push_begin(self, args, state, control, **kwargs):
        """An upload to the Hub begins (since v5.0)."""


class ExportableState:
    """An object whose state is saved in `trainer_state.json` and restored on resume (since v4.42).

    `state()` returns `{"args": constructor arguments, "attributes": attributes to set afterwards}`, JSON values only.
    """

    def state(self) -> dict[str, Any]:
        """The state to save."""
        raise NotImplementedError(f"{type(self).__name__} is an ExportableState and must define state()")

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> ExportableState:
        """A new object from the dict that `state()` returned."""
        instance = cls(**state["args"])
        for name, value in state["attributes"].items():
            setattr(instance, name, value)
        return instance


@dataclass
class TrainerState:
    """The progress of a training run; the contents of `trainer_state.json`.

    A step is an optimizer step, whatever its number of micro-batches.

    Attributes:
        epoch: epochs completed, including the fraction of the current one.
        global_step: optimizer steps completed.
        max_steps: optimizer steps of the complete run.
        logging_steps, eval_steps, save_steps: optimizer steps between two log lines, evaluations or saves;
            already converted from fractions to steps.
        train_batch_size: samples in a micro-batch of one process.
        num_train_epochs: epochs that the run begins; the last may be incomplete.
        num_input_tokens_seen: input tokens over all processes, if they are counted.
        total_flos: floating-point operations so far.
        log_history: every log line, in order.
        best_metric, best_global_step, best_model_checkpoint: value, step and folder of the best model so far.
        stateful_callbacks: states of the callbacks that export one, by class name.
    """

    epoch: float | None = 0
    global_step: int = 0
    max_steps: int = 0
    logging_steps: float = 500
    eval_steps: float = 500
    save_steps: float = 500
    train_batch_size: int | None = None
    num_train_epochs: int = 0
    num_input_tokens_seen: int = 0
    total_flos: float = 0
    log_history: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None
    stateful_callbacks: Any = None

    def __post_init__(self) -> None:
        # Files of v4 may have null.
        if self.log_history is None:
            self.log_history = []
        if not isinstance(self.stateful_callbacks, dict):
            self.stateful_callbacks = export_states(self.stateful_callbacks or [])
        self._log_texts: list[tuple[Any, str]] = []
        #: On the CPU, the first step of a log line whose loss is not finite, which the line shows; 0 if there is none.
        self.non_finite_step = 0

    def save_to_json(self, json_path: str) -> None:
        """Write the state as JSON. Each log line is serialized once, so that saves do not become slower."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values = as_json(values | {"log_history": []}, "trainer_state.json")
        text = json.dumps(values, indent=2, sort_keys=True)
        if self.log_history:
            lines = "[\n    " + ",\n    ".join(self._log_lines_as_json()) + "\n  ]"
            text = text.replace('\n  "log_history": []', f'\n  "log_history": {lines}')
        Path(json_path).write_text(text + "\n", encoding="utf-8")

    def _log_lines_as_json(self) -> list[str]:
        """Each log line as JSON, from a cache. Changed and new lines are serialized again."""
        cache = iter(self._log_texts)
        self._log_texts = []
        for line in self.log_history:
            cached_line, text = next(cache, (None, ""))
            plain_line = line if is_plain(line) else as_json(line, "log_history")
            if plain_line != cached_line:
                text = json.dumps(plain_line, indent=2, sort_keys=True).replace("\n", "\n    ")
            self._log_texts.append((dict(plain_line), text))
        return [text for _, text in self._log_texts]

    @classmethod
    def load_from_json(cls, json_path: str) -> TrainerState:
        """Read a state. Unknown fields, which other releases write, are ignored."""
        values = json.loads(Path(json_path).read_text(encoding="utf-8"))
        field_names = {field.name for field in dataclasses.fields(cls)}
        with name_file_in_errors(json_path):
            if not isinstance(values, dict):
                raise TypeError(f"it is {reprlib.repr(values)}")
            # Files of v4 have null for unset intervals: use the default.
            fields_with_values = {
                name: value for name, value in values.items() if value is not None or name in _REQUIRED_FIELDS
            }
            check_fields(fields_with_values, cls)
            for name in _COUNT_FIELDS & fields_with_values.keys():
                # This also rejects NaN.
                if not 0 <= fields_with_values[name] <= _MAX_COUNT:
                    raise ValueError(f"{name} is {fields_with_values[name]}")
            return cls(**{name: value for name, value in fields_with_values.items() if name in field_names})

    def compute_steps(self, args: BaseArguments, max_steps: int) -> None:
        """Convert intervals that are fractions of `max_steps` into optimizer steps."""
        for name in ("logging_steps", "eval_steps", "save_steps"):
            if (steps := getattr(args, name)) is not None:
                setattr(self, name, math.ceil(max_steps * steps) if steps < 1 else steps)

    def init_training_references(self, trainer: Any, max_steps: int, num_train_epochs: int, trial: Any) -> None:
        """Set the length of the run, this process's rank, and the trial (since v4.52).

        Args:
            trainer: the Trainer that runs.
            max_steps: optimizer steps of the run.
            num_train_epochs: epochs that the run begins.
            trial: the trial, or None.
        """
        self.max_steps = max_steps
        self.num_train_epochs = num_train_epochs
        self.is_local_process_zero = trainer.is_local_process_zero()
        self.is_world_process_zero = trainer.is_world_process_zero()
        self.trial_params = None if trial is None else dict(hyperparameters(trial))
        if trial is not None and trainer.hp_name is not None:
            self.trial_name = trainer.hp_name(trial)


def drop_from_json(path: str, name: str) -> None:
    """Remove a key from a JSON file that holds an object."""
    values = json.loads(Path(path).read_text(encoding="utf-8"))
    values.pop(name, None)
    Path(path).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def export_states(callbacks: Sequence[Any]) -> dict[str, Any]:
    """States of the callbacks by class name. Several of one class become a list."""
    states: dict[str, list[Any]] = {}
    for callback in callbacks:
        states.setdefault(type(callback).__name__, []).append(callback.state())
    return {name: group if len(group) > 1 else group[0] for name, group in states.items()}


def has_saved_state(callback: Any) -> bool:
    """Whether the callback exports a state; true for transformers' callbacks with the same protocol."""
    return callable(getattr(callback, "state", None)) and callable(getattr(type(callback), "from_state", None))


@dataclass
class TrainerControl(ExportableState):
    """The flags with which callbacks control training.

    Attributes:
        should_training_stop: end training; stays set.
        should_epoch_stop: end this epoch; cleared when the next begins.
        should_save, should_evaluate, should_log: save, evaluate or log at this step; cleared when the next begins.
    """

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False

    def _new_training(self) -> None:
        """Clear the flags of a run. This and the next two are for scripts' own loops, as in transformers."""
        self.should_training_stop = False

    def _new_epoch(self) -> None:
        """Clear the flags of an epoch."""
        self.should_epoch_stop = False

    def _new_step(self) -> None:
        """Clear the flags of an optimizer step."""
        self.should_save = self.should_evaluate = self.should_log = False

    def state(self) -> dict[str, Any]:
        """The current flags."""
        return {"args": dataclasses.asdict(self), "attributes": {}}


def hyperparameters(trial: Any) -> Mapping[str, Any]:
    """The hyperparameters that a trial of a search has chosen.

    Raises:
        InvalidArgument: if `trial` is neither a trial nor a mapping.
    """
    values = trial if isinstance(trial, Mapping) else getattr(trial, "params", None)
    if not isinstance(values, Mapping):
        raise InvalidArgument(f"trial={trial!r}: pass a trial of Optuna, or a dict of hyperparameters.")
    return values


logger = logging.getLogger(__name__)

_PLAIN = (int, float, str, bool, type(None))


def as_json(value: Any, name: str) -> Any:
    """A copy of a value in JSON types: arrays and tensors become lists or numbers, sets become sorted lists.

    Other objects become their `repr`, with a warning that names them: a value in the log must not end a run.

    Args:
        value: numbers, text, arrays, tensors (dense or sparse), and mappings, lists, tuples and sets of them.
        name: the value's name, for the warning.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping):
        return {_as_json_key(key): as_json(item, f"{name}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=repr)
    if isinstance(value, (list, tuple)):
        return [as_json(item, name) for item in value]
    # Imported late: commands read states, whose values are plain, without torch.
    import torch

    if isinstance(value, torch.Tensor):
        value = value.detach().to_dense() if value.layout != torch.strided else value.detach()
    elif callable(getattr(value, "toarray", None)):
        # scipy's sparse arrays have this method.
        value = value.toarray()
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    if isinstance(value, _PLAIN):
        return value
    log_once(logger, f"{name} is of type {type(value).__name__}, which JSON does not have: its repr is written.")
    return repr(value)


def is_plain(line: Mapping[str, Any]) -> bool:
    """Whether all values of a log line are numbers, text or None, and all names text."""
    return all(type(name) is str and type(value) in _PLAIN for name, value in line.items())


def _as_json_key(key: Any) -> str:
    """A key as JSON writes it, since keys of mixed types cannot be sorted."""
    return key if isinstance(key, str) else json.dumps(key) if isinstance(key, _PLAIN) else str(key)


def is_measurement(name: str) -> bool:
    """Whether a metric is a measurement of time or memory."""
    has_time = name.endswith(("_runtime", "_per_second", "_model_preparation_time"))
    return has_time or "_mem_cpu" in name or "_mem_gpu" in name


def evaluation_key(metric: str) -> str:
    """The name of a metric in the results of an evaluation, with the prefix 'eval_'."""
    return metric if metric.startswith("eval_") else f"eval_{metric}"
