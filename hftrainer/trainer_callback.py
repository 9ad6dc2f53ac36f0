"""The state of a training run, the switches that callbacks set, and the callbacks themselves."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import logging
import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from hftrainer.arguments.behaviours import of_arguments
from hftrainer.errors import MissingFollowedMetric, NotACallback
from hftrainer.trainer_utils import IntervalStrategy, SaveStrategy

if TYPE_CHECKING:
    from hftrainer.reporting.progress import PrinterCallback as PrinterCallback
    from hftrainer.reporting.progress import ProgressCallback as ProgressCallback
    from hftrainer.training_args import TrainingArguments

logger = logging.getLogger(__name__)


class ExportableState:
    """Something whose state goes into `trainer_state.json` and comes back on resume (since v4.42).

    `state()` returns `{"args": constructor arguments, "attributes": what to set afterwards}`, JSON values only.
    """

    def state(self) -> dict[str, Any]:
        """The state to save."""
        raise NotImplementedError(f"{type(self).__name__} is an ExportableState and must define state()")

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> ExportableState:
        """A new object from what `state()` returned."""
        instance = cls(**state["args"])
        for name, value in state["attributes"].items():
            setattr(instance, name, value)
        return instance


@dataclass
class TrainerState:
    """Where a training run stands; what `trainer_state.json` holds.

    A step is an optimizer step, whatever the number of micro-batches behind it.

    Attributes:
        epoch: passes over the data done so far, with the fraction of the current one.
        global_step: optimizer steps done.
        max_steps: optimizer steps that the whole run will do.
        logging_steps, eval_steps, save_steps: optimizer steps between two of each, shares already resolved.
        train_batch_size: samples in a micro-batch of one process.
        num_train_epochs: passes over the data that the run begins, the last possibly cut short.
        num_input_tokens_seen: input tokens over all processes, when they are counted.
        total_flos: floating-point operations done.
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
        if self.log_history is None:  # as in files written by v4
            self.log_history = []
        if not isinstance(self.stateful_callbacks, dict):
            self.stateful_callbacks = export_states(self.stateful_callbacks or [])

    def save_to_json(self, json_path: str) -> None:
        """Write the state as JSON."""
        with open(json_path, "w", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True) + "\n")

    @classmethod
    def load_from_json(cls, json_path: str) -> TrainerState:
        """Read a state; fields that other releases wrote and this one does not know are left out."""
        with open(json_path, encoding="utf-8") as file:
            values = json.load(file)
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})

    def compute_steps(self, args: TrainingArguments, max_steps: int) -> None:
        """Resolve the intervals given as shares of `max_steps` into optimizer steps."""
        for name in ("logging_steps", "eval_steps", "save_steps"):
            steps = getattr(args, name)
            if steps is not None:
                setattr(self, name, math.ceil(max_steps * steps) if steps < 1 else steps)

    def init_training_references(self, trainer: Any, max_steps: int, num_train_epochs: int, trial: Any) -> None:
        """Take over how long a run is, which process this is, and the hyperparameter trial (since v4.52).

        Args:
            trainer: whose run it is.
            max_steps: optimizer steps of the run.
            num_train_epochs: passes over the data that it begins.
            trial: the trial, or None.
        """
        from hftrainer.hyperparameter_search import hyperparameters

        self.max_steps = max_steps
        self.num_train_epochs = num_train_epochs
        self.is_local_process_zero = trainer.is_local_process_zero()
        self.is_world_process_zero = trainer.is_world_process_zero()
        self.trial_params = None if trial is None else dict(hyperparameters(trial))
        if trial is not None and trainer.hp_name is not None:
            self.trial_name = trainer.hp_name(trial)


def drop_from_json(path: str, name: str) -> None:
    """Take a value out of a JSON file that holds an object."""
    with open(path, encoding="utf-8") as file:
        values = json.load(file)
    values.pop(name, None)
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(values, indent=2, sort_keys=True) + "\n")


def export_states(callbacks: Sequence[Any]) -> dict[str, Any]:
    """States of the callbacks by class name; several of one class become a list."""
    states: dict[str, Any] = {}
    for callback in callbacks:
        name = type(callback).__name__
        if name not in states:
            states[name] = callback.state()
        elif isinstance(states[name], list):
            states[name].append(callback.state())
        else:
            states[name] = [states[name], callback.state()]
    return states


def is_exportable(callback: Any) -> bool:
    """Whether the callback exports a state: ours, or transformers' by the same protocol."""
    return callable(getattr(callback, "state", None)) and callable(getattr(type(callback), "from_state", None))


@dataclass
class TrainerControl(ExportableState):
    """The switches by which callbacks steer training.

    Attributes:
        should_training_stop: end training; stays set.
        should_epoch_stop: end this epoch; cleared when the next begins.
        should_save, should_evaluate, should_log: do so at this step; cleared when the next begins.
    """

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False

    def _new_training(self) -> None:
        """Clear what holds for a whole run. This and the next two are for loops of scripts, as in transformers."""
        self.should_training_stop = False

    def _new_epoch(self) -> None:
        """Clear what holds for an epoch."""
        self.should_epoch_stop = False

    def _new_step(self) -> None:
        """Clear what holds for an optimizer step."""
        self.should_save = self.should_evaluate = self.should_log = False

    def state(self) -> dict[str, Any]:
        """The switches as they stand."""
        return {"args": dataclasses.asdict(self), "attributes": {}}


class TrainerCallback:
    """Base of callbacks: override the events you need.

    Every event receives `args`, `state` and `control`, and as keywords `model`, `processing_class`, `optimizer`,
    `lr_scheduler`, `train_dataloader` and `eval_dataloader`; `on_log` also `logs`, `on_evaluate` and `on_predict`
    also `metrics`. An event that changes `control` may return it.

    An `on_step_end` that names them among its parameters also receives `loss` (a tensor of shape `()` on the device:
    the step's, as it is logged), `inputs` (the step's last micro-batch) and `outputs` (the model's, of that
    micro-batch).
    """

    def on_init_end(self, args, state, control, **kwargs):
        """The Trainer is built."""

    def on_train_begin(self, args, state, control, **kwargs):
        """Training begins."""

    def on_train_end(self, args, state, control, **kwargs):
        """Training has ended; the best model is loaded if it was asked for."""

    def on_epoch_begin(self, args, state, control, **kwargs):
        """A pass over the data begins."""

    def on_epoch_end(self, args, state, control, **kwargs):
        """A pass over the data has ended."""

    def on_step_begin(self, args, state, control, **kwargs):
        """The first micro-batch of an optimizer step is about to run."""

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        """Gradients are complete and clipped; the optimizer has not stepped (since v4.46)."""

    def on_optimizer_step(self, args, state, control, **kwargs):
        """The optimizer has stepped; gradients are still there (since v4.46)."""

    def on_substep_end(self, args, state, control, **kwargs):
        """A micro-batch has run that does not end an optimizer step."""

    def on_step_end(self, args, state, control, **kwargs):
        """An optimizer step is complete."""

    def on_evaluate(self, args, state, control, **kwargs):
        """An evaluation is complete."""

    def on_predict(self, args, state, control, metrics, **kwargs):
        """A prediction is complete."""

    def on_save(self, args, state, control, **kwargs):
        """A checkpoint is written."""

    def on_log(self, args, state, control, **kwargs):
        """A log line was added to `state.log_history`."""

    def on_prediction_step(self, args, state, control, **kwargs):
        """A batch of an evaluation or prediction is done."""

    def on_push_begin(self, args, state, control, **kwargs):
        """An upload to the Hub begins (since v5.0)."""


def is_kind(callback: Any, *names: str) -> bool:
    """Whether the callback is of a class of one of these names, or of a subclass: ours or transformers'."""
    kinds = type(callback).__mro__
    return any(kind.__name__ in names and _library(kind) in ("hftrainer", "transformers") for kind in kinds)


def _library(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _is_wanted(present: Any, wanted: Any) -> bool:
    if not isinstance(wanted, type):
        return bool(present == wanted)
    # Scripts remove transformers' ProgressCallback: here that is ours.
    return isinstance(present, wanted) or (_library(wanted) == "transformers" and is_kind(present, wanted.__name__))


def pop_from(callbacks: list[Any], callback: Any) -> Any:
    """Remove the first of `callbacks` that is `callback`, or of that class, and return it; None when there is none.

    A class of transformers also stands for ours of the same name.
    """
    for number, present in enumerate(callbacks):
        if _is_wanted(present, callback):
            return callbacks.pop(number)
    return None


def make_callback(callback: Any) -> Any:
    """The callback itself, or one of the given class.

    Raises:
        TypeError: for a class whose constructor needs arguments.
    """
    if not isinstance(callback, type):
        return callback
    try:
        inspect.signature(callback).bind()
    except TypeError as error:
        name = callback.__name__
        raise TypeError(f"callbacks: the constructor of {name} has a {error}; give an instance, {name}(...).") from None
    return callback()


class CallbackHandler(TrainerCallback):
    """The callbacks of one Trainer, called in the order in which they were added."""

    def __init__(self, callbacks, model, processing_class, optimizer, lr_scheduler):
        self.callbacks: list[Any] = []
        for callback in callbacks:
            self.add_callback(callback)
        self.model = model
        self.processing_class = processing_class
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.train_dataloader = None
        self.eval_dataloader = None
        if not any(isinstance(callback, DefaultFlowCallback) for callback in self.callbacks):
            logger.warning("Without DefaultFlowCallback nothing will be logged, evaluated or saved by itself.")

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "train_dataloader": None, "eval_dataloader": None}  # of a run, with its worker processes

    def add_callback(self, callback: Any) -> None:
        """Add a callback, given as a class or as an instance. A progress bar takes the place of the one that was there.

        Raises:
            NotACallback: for something that handles none of the events.
        """
        kind = callback if isinstance(callback, type) else type(callback)
        if issubclass(kind, nn.Module):  # Lightning's have hooks of the same names
            raise TypeError(f"callbacks: {kind.__name__} is a module, no callback.")
        if any(_library(base) == "pytorch_lightning" for base in kind.__mro__):
            raise TypeError(
                f"callbacks: {kind.__name__} is of the package pytorch_lightning, which is another one: import it from "
                "lightning.pytorch."
            )
        if not any(callable(getattr(callback, event, None)) for event in EVENTS):
            given = f"{reprlib.repr(callback)} ({type(callback).__name__})"
            raise NotACallback(f"callbacks: {given} is no callback: it handles none of the events")
        instance = make_callback(callback)
        if is_kind(instance, *BARS):
            self.drop_bars()
        if type(instance) in {type(present) for present in self.callbacks}:
            logger.warning("There already is a %s among the callbacks: %s", type(instance).__name__, self.callback_list)
        self.callbacks.append(instance)

    def drop_bars(self) -> bool:
        """Remove the callbacks that show a progress bar; returns whether there were any."""
        before = len(self.callbacks)
        self.callbacks[:] = [callback for callback in self.callbacks if not is_kind(callback, *BARS)]
        return len(self.callbacks) < before

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, by class or instance, and return it; None when there is none."""
        return pop_from(self.callbacks, callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, by class or instance."""
        self.pop_callback(callback)

    @property
    def callback_list(self) -> str:
        """The class names, a line each."""
        return "\n".join(type(callback).__name__ for callback in self.callbacks)

    def call_event(
        self, event: str, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Announce an event to every callback; returns the control object that the last of them left."""
        for callback in self.callbacks:
            handler = getattr(callback, event, None)
            if handler is None or getattr(handler, "__func__", None) is _NOTHING[event]:
                continue
            result = handler(
                args,
                state,
                control,
                model=self.model,
                **_by_its_names(handler, self.processing_class),
                optimizer=self.optimizer,
                lr_scheduler=self.lr_scheduler,
                train_dataloader=self.train_dataloader,
                eval_dataloader=self.eval_dataloader,
                **kwargs,
            )
            if result is not None:
                control = result
        return control

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Announce a log line, which is due no more."""
        control.should_log = False
        return self.call_event("on_log", args, state, control, logs=logs, **kwargs)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        """Announce an evaluation, which is due no more."""
        control.should_evaluate = False
        return self.call_event("on_evaluate", args, state, control, metrics=metrics, **kwargs)

    def on_predict(self, args, state, control, metrics=None, **kwargs):
        """Announce a prediction."""
        return self.call_event("on_predict", args, state, control, metrics=metrics, **kwargs)


def _by_its_names(handler: Any, processing_class: Any) -> dict[str, Any]:
    """The processing class by its name, and by that of before v4.46, `tokenizer`, for a handler that asks for it.

    Others must not get it: it would be one keyword more than transformers gives, and than they may take.
    """
    given = {"processing_class": processing_class}
    return {**given, "tokenizer": processing_class} if _names_tokenizer(handler) else given


def _names_tokenizer(handler: Any) -> bool:
    """Whether a handler has a parameter `tokenizer`, or looks it up in its keywords: `kwargs["tokenizer"]`."""
    code = getattr(inspect.unwrap(getattr(handler, "__func__", handler)), "__code__", None)
    if code is None:  # a function of C, or an object that is called
        return False
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return "tokenizer" in parameters or bool(code.co_flags & inspect.CO_VARKEYWORDS and "tokenizer" in code.co_consts)


def _announcer(event: str):
    clears = CLEARS.get(event, ())

    def announce(self, args, state, control, **kwargs):
        for switch in clears:
            setattr(control, switch, False)
        return self.call_event(event, args, state, control, **kwargs)

    announce.__name__ = event
    announce.__qualname__ = f"CallbackHandler.{event}"
    announce.__doc__ = f"Announce {event}."
    return announce


#: The callbacks that show a bar. One is enough.
BARS = ("ProgressCallback", "NotebookProgressCallback")
EVENTS = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))
#: Switches that an event clears before it is announced.
CLEARS = {
    "on_train_begin": ("should_training_stop",),
    "on_epoch_begin": ("should_epoch_stop",),
    "on_step_begin": ("should_log", "should_evaluate", "should_save"),
    "on_save": ("should_save",),
}
#: The base class's empty handlers: a callback that inherits one is not called, which saves a few µs a step.
_NOTHING = {event: getattr(TrainerCallback, event) for event in EVENTS}
for _event in EVENTS:
    if _event not in vars(CallbackHandler):
        setattr(CallbackHandler, _event, _announcer(_event))


class DefaultFlowCallback(TrainerCallback):
    """Logs, evaluates, saves and stops as the arguments say, in the way of the release that they follow."""

    def on_step_end(self, args, state, control, **kwargs):
        """Decide what is due at this optimizer step."""
        step = state.global_step
        if (step == 1 and args.logging_first_step) or _due(args.logging_strategy, step, state.logging_steps):
            control.should_log = True
        evaluates = args.eval_strategy == IntervalStrategy.STEPS and args.eval_delay <= step
        if evaluates and _due(args.eval_strategy, step, state.eval_steps):
            control.should_evaluate = True
        if _due(args.save_strategy, step, state.save_steps):
            control.should_save = True
        if step >= state.max_steps:
            control.should_training_stop = True
            follows = of_arguments(args)
            if evaluates and follows.evaluates_at_last_step:
                control.should_evaluate = True
            by_epochs = args.save_strategy == SaveStrategy.EPOCH and not follows.saves_last_step_by_steps
            if args.save_strategy == SaveStrategy.STEPS or by_epochs:  # even off the beat (since v4.47)
                control.should_save = True
        return control

    def on_epoch_end(self, args, state, control, **kwargs):
        """Decide what is due at the end of this epoch."""
        if args.logging_strategy == IntervalStrategy.EPOCH:
            control.should_log = True
        if args.eval_strategy == IntervalStrategy.EPOCH and args.eval_delay <= state.epoch:
            control.should_evaluate = True
        if args.save_strategy == SaveStrategy.EPOCH:
            control.should_save = True
        return control


#: What every Trainer begins with. A script may change the list, or put another under `transformers.trainer`.
DEFAULT_CALLBACKS: list[Any] = [DefaultFlowCallback]


def _due(strategy: IntervalStrategy | SaveStrategy, step: int, interval: float) -> bool:
    return strategy == IntervalStrategy.STEPS and interval > 0 and step % interval == 0


class EarlyStoppingCallback(TrainerCallback, ExportableState):
    """Stops training when `metric_for_best_model` no longer improves.

    Args:
        early_stopping_patience: evaluations in a row without improvement before training stops.
        early_stopping_threshold: how much better than the best so far counts as an improvement, in metric units.
    """

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float | None = 0.0) -> None:
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold
        self.early_stopping_patience_counter = 0

    def on_train_begin(self, args, state, control, **kwargs):
        """Check that there will be a metric to follow.

        Raises:
            MissingFollowedMetric: without `metric_for_best_model`, or without evaluation.
        """
        if args.metric_for_best_model is None:
            raise MissingFollowedMetric("EarlyStoppingCallback follows metric_for_best_model: name a metric there.")
        if args.eval_strategy == IntervalStrategy.NO:
            raise MissingFollowedMetric("EarlyStoppingCallback needs evaluation during training: set eval_strategy.")
        if not args.load_best_model_at_end:
            logger.warning(
                "EarlyStoppingCallback without load_best_model_at_end: the last model is kept, not the best."
            )

    def check_metric_value(self, args, state, control, metric_value):
        """Count an evaluation without improvement, or begin to count again. Override it for another rule."""
        if self._improves(args, state, metric_value):
            self.early_stopping_patience_counter = 0
        else:
            self.early_stopping_patience_counter += 1

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        """Count the evaluations without improvement, and stop when there were too many."""
        value = (metrics or {}).get(evaluation_key(args.metric_for_best_model))
        if value is None:
            logger.warning("Early stopping found no %s among %s.", args.metric_for_best_model, sorted(metrics or {}))
            return
        self.check_metric_value(args, state, control, value)
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True

    def _improves(self, args, state, value: float) -> bool:
        if state.best_metric is None:
            return True
        gain = value - state.best_metric if args.greater_is_better else state.best_metric - value
        return gain > 0 and gain > (self.early_stopping_threshold or 0.0)

    def state(self) -> dict[str, Any]:
        """Patience, threshold and the count so far."""
        return {
            "args": {
                "early_stopping_patience": self.early_stopping_patience,
                "early_stopping_threshold": self.early_stopping_threshold,
            },
            "attributes": {"early_stopping_patience_counter": self.early_stopping_patience_counter},
        }


def evaluation_key(metric: str) -> str:
    """The name under which evaluation reports a metric: with its 'eval_'."""
    return metric if metric.startswith("eval_") else f"eval_{metric}"


def __getattr__(name: str) -> Any:
    if name in ("PrinterCallback", "ProgressCallback"):  # here by transformers' layout
        return getattr(importlib.import_module("hftrainer.reporting.progress"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
