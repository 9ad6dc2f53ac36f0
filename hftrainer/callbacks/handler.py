"""`CallbackHandler`: calls the callbacks of a Trainer."""

from __future__ import annotations

import difflib
import functools
import inspect
import itertools
import logging
import reprlib
import types
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from hftrainer.arguments.base import BaseArguments
from hftrainer.base.signatures import accepted_args, can_begin_call, can_call
from hftrainer.callbacks.flow_callbacks import DefaultFlowCallback
from hftrainer.callbacks.state import TrainerCallback, TrainerControl, TrainerState, export_states, has_saved_state
from hftrainer.compat.overrides import names_in_code
from hftrainer.errors import NotACallback

logger = logging.getLogger(__name__)


class CallbackHandler(TrainerCallback):
    """The callbacks of one Trainer, called in the order in which they were added.

    Attributes:
        stopped_by: the class of the callback that stopped the run, or empty.
    """

    stopped_by = ""

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
            logger.warning("Without DefaultFlowCallback, the Trainer does not log, evaluate or save automatically.")

    def __getstate__(self) -> dict[str, Any]:
        # Loaders with worker processes cannot be pickled.
        return {**vars(self), "train_dataloader": None, "eval_dataloader": None}

    def add_callback(self, callback: Any) -> None:
        """Add a callback, as a class or as an instance. A progress bar replaces the existing one.

        Raises:
            NotACallback: for a module, and an object that handles no event, or one with too few parameters.
        """
        callback_class = callback if isinstance(callback, type) else type(callback)
        # LightningModules have hooks with the names of events.
        if issubclass(callback_class, nn.Module):
            raise NotACallback(f"callbacks: {callback_class.__name__} is a module, not a callback.")
        if "pytorch_lightning" in map(defining_package, callback_class.__mro__):
            problem = f"callbacks: {callback_class.__name__} comes from pytorch_lightning, which is another package"
            raise NotACallback(f"{problem}: import it from lightning.pytorch.")
        if not any(callable(getattr(callback, event, None)) for event in EVENTS):
            description = f"{getattr(callback, '__name__', reprlib.repr(callback))} ({type(callback).__name__})"
            remedy = "pass a TrainerCallback or a Lightning callback."
            raise NotACallback(f"callbacks: {description} handles no event, such as on_step_end: {remedy}")
        if any(base.__name__ == "TrainerCallback" for base in callback_class.__mro__):
            warn_about_misspelt_events(callback_class, EVENTS, _EVENT_BY_HOOK)
        instance = make_callback(callback)
        for event, handler in ((event, getattr(instance, event, None)) for event in EVENTS):
            is_inherited = getattr(handler, "__func__", None) is getattr(TrainerCallback, event, handler)
            # The keywords that it needs are known when it is called.
            if callable(handler) and not is_inherited and not can_begin_call(handler, None, None, None):
                raise _wrong_parameters(instance, event, handler)
        if is_instance_by_name(instance, *PROGRESS_BAR_CALLBACKS):
            self.remove_progress_bars()
        if type(instance) in {type(existing_callback) for existing_callback in self.callbacks}:
            logger.warning("The callbacks already contain a %s: %s", type(instance).__name__, self.callback_list)
        self.callbacks.append(instance)

    def remove_progress_bars(self) -> bool:
        """Remove the callbacks that show a progress bar, and return whether any existed."""
        count = len(self.callbacks)
        self.callbacks[:] = [
            callback for callback in self.callbacks if not is_instance_by_name(callback, *PROGRESS_BAR_CALLBACKS)
        ]
        return len(self.callbacks) < count

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, by class or instance, and return it; None if not found."""
        return remove_callback_like(self.callbacks, callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, by class or instance."""
        self.pop_callback(callback)

    @property
    def callback_list(self) -> str:
        """The class names, one per line."""
        return "\n".join(type(callback).__name__ for callback in self.callbacks)

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Call `on_log` of every callback, after clearing `should_log`."""
        control.should_log = False
        return self.call_event("on_log", args, state, control, logs=logs, **kwargs)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        """Call `on_evaluate` of every callback, after clearing `should_evaluate`."""
        control.should_evaluate = False
        return self.call_event("on_evaluate", args, state, control, metrics=metrics, **kwargs)

    def on_predict(self, args, state, control, metrics=None, **kwargs):
        """Call `on_predict` of every callback."""
        return self.call_event("on_predict", args, state, control, metrics=metrics, **kwargs)

    def call_event(
        self, event: str, args: BaseArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Call an event of every callback, and return the resulting control object."""
        empty_handler = _EMPTY_HANDLERS.get(event)
        for callback in self.callbacks:
            handler = getattr(callback, event, None)
            function = getattr(handler, "__func__", handler)
            if handler is None or function is empty_handler:
                continue
            arguments = self._arguments_for(handler, function, kwargs)
            was_stopped = control.should_training_stop
            try:
                result = handler(args, state, control, **arguments)
            except TypeError:
                if not can_call(handler, args, state, control, **arguments):
                    raise _wrong_parameters(callback, event, handler) from None
                raise
            if result is not None and not hasattr(result, "should_training_stop"):
                name = f"{type(callback).__name__}.{event}"
                raise NotACallback(f"{name} returned {reprlib.repr(result)}: return the control object, or nothing.")
            control = control if result is None else result
            if control.should_training_stop and not was_stopped:
                self.stopped_by = type(callback).__name__
        return control

    def _arguments_for(self, handler: Any, function: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The keyword arguments for a callback's method for an event, whose function is `function`."""
        # Callables of other types may not be hashable.
        is_plain = isinstance(function, types.FunctionType)
        needs_tokenizer = (_needs_tokenizer if is_plain else _needs_tokenizer.__wrapped__)(function)
        arguments = {
            "model": self.model,
            "processing_class": self.processing_class,
            # Other handlers must not get it: they may not accept a keyword that transformers does not pass.
            **({"tokenizer": self.processing_class} if needs_tokenizer else {}),
            "optimizer": self.optimizer,
            "lr_scheduler": self.lr_scheduler,
            "train_dataloader": self.train_dataloader,
            "eval_dataloader": self.eval_dataloader,
            **kwargs,
        }
        return accepted_args(handler, arguments) if is_plain else arguments


def _wrong_parameters(callback: Any, event: str, handler: Any) -> NotACallback:
    call = f"{type(callback).__name__}.{event} is called with (args, state, control, **kwargs)"
    return NotACallback(f"{call}, but takes {inspect.signature(handler)}.")


def warn_about_misspelt_events(kind: type, events: Collection[str], event_by_name: Mapping[str, str]) -> None:
    """Warn about uncalled methods of a callback whose names nearly match an event.

    Args:
        kind: the class of the callback.
        events: the names of the methods that are called.
        event_by_name: further names → the events that they stand for.
    """
    candidates = {**event_by_name, **{name.replace("start", "begin"): name for name in events}}
    for name in dir(kind):
        normalized_name = name.replace("start", "begin").replace("finish", "end")
        if (
            name.startswith("on_")
            and name not in events
            and (matches := difflib.get_close_matches(normalized_name, candidates, 1, 0.9))
            and name not in names_in_code(kind)
        ):
            logger.warning("%s.%s is never called; did you mean %s?", kind.__name__, name, candidates[matches[0]])


# Cached, since it is called at every step.
@functools.lru_cache(maxsize=256)
def _needs_tokenizer(function: Any) -> bool:
    """Whether a function has a parameter `tokenizer` (the name before v4.46), or reads `kwargs["tokenizer"]`."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    # C functions and callable objects have no code.
    if code is None:
        return False
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return "tokenizer" in parameters or bool(code.co_flags & inspect.CO_VARKEYWORDS and "tokenizer" in code.co_consts)


def is_instance_by_name(callback: Any, *names: str) -> bool:
    """Whether the callback is an instance of a class with one of these names, ours or transformers'."""
    bases = [base for base in type(callback).__mro__ if base.__name__ in names]
    return any(defining_package(base) in ("hftrainer", "transformers") for base in bases)


def defining_package(cls: type) -> str:
    """The package that defines a class."""
    return cls.__module__.partition(".")[0]


def _is_like(callback: Any, target: Any) -> bool:
    if not isinstance(target, type):
        return bool(callback == target)
    # A script that names transformers' ProgressCallback means ours.
    is_theirs = defining_package(target) == "transformers"
    return isinstance(callback, target) or (is_theirs and is_instance_by_name(callback, target.__name__))


def remove_callback_like(callbacks: list[Any], callback: Any) -> Any:
    """Remove and return the first match of `callback`, or return None if not found.

    A match is `callback` itself or an instance of it. A class of transformers also matches ours of the same name.
    """
    for number, candidate in enumerate(callbacks):
        if _is_like(candidate, callback):
            return callbacks.pop(number)
    return None


def make_callback(callback: Any) -> Any:
    """The callback itself, or an instance of the given class.

    Raises:
        NotACallback: for a class whose constructor needs arguments.
    """
    if not isinstance(callback, type):
        return callback
    try:
        # Skip `object`, whose signature takes a millisecond to inspect.
        if not {"__init__", "__new__"}.isdisjoint(itertools.chain(*map(vars, callback.__mro__[:-1]))):
            inspect.signature(callback).bind()
    except TypeError as error:
        name = callback.__name__
        raise NotACallback(f"callbacks: {name}() fails ({error}): pass an instance, {name}(...).") from None
    return callback()


def _make_event_method(event: str):
    flags = FLAGS_CLEARED_BY_EVENT.get(event, ())

    def call_event_method(self, args, state, control, **kwargs):
        for flag in flags:
            setattr(control, flag, False)
        return self.call_event(event, args, state, control, **kwargs)

    call_event_method.__name__ = event
    call_event_method.__qualname__ = f"CallbackHandler.{event}"
    call_event_method.__doc__ = f"Call {event} of every callback."
    return call_event_method


#: The callbacks that show a progress bar; only one is kept.
PROGRESS_BAR_CALLBACKS = ("ProgressCallback", "NotebookProgressCallback")
EVENTS = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))
#: Hook of Lightning, with 'begin' for 'start' → the event.
_EVENT_BY_HOOK = {
    "on_fit_begin": "on_train_begin",
    "on_fit_end": "on_train_end",
    "on_train_epoch_begin": "on_epoch_begin",
    "on_train_epoch_end": "on_epoch_end",
    "on_train_batch_begin": "on_step_begin",
    "on_train_batch_end": "on_step_end",
    "on_validation_epoch_end": "on_evaluate",
    "on_validation_end": "on_evaluate",
    "on_save_checkpoint": "on_save",
}
#: Event → the Lightning hook that it stands for in a Lightning callback.
HOOK_BY_EVENT = {event: hook.replace("begin", "start") for hook, event in _EVENT_BY_HOOK.items()}
#: Event → the control flags that are cleared before it is called.
FLAGS_CLEARED_BY_EVENT = {
    "on_train_begin": ("should_training_stop",),
    "on_epoch_begin": ("should_epoch_stop",),
    "on_step_begin": ("should_log", "should_evaluate", "should_save"),
    "on_save": ("should_save",),
}
#: The base class's empty handlers: a callback that inherits one is not called, which saves a few µs per step.
_EMPTY_HANDLERS = {event: getattr(TrainerCallback, event) for event in EVENTS}
for _event in EVENTS:
    if _event not in vars(CallbackHandler):
        setattr(CallbackHandler, _event, _make_event_method(_event))


def restore_callbacks(handler: CallbackHandler, control: TrainerControl, states: dict[str, Any]) -> TrainerControl:
    """Restore the exported states of callbacks by class name. Returns the restored control."""
    remaining = {name: list(value) if isinstance(value, list) else [value] for name, value in states.items()}
    for target in [*handler.callbacks, control]:
        if saved := remaining.get(type(target).__name__):
            logger.info("Restoring the state of %s from the checkpoint.", type(target).__name__)
            state = saved.pop(0)
            for name, value in {**state.get("args", {}), **state.get("attributes", {})}.items():
                setattr(target, name, value)
    if missing_names := [name for name, saved in remaining.items() if saved]:
        logger.warning("The checkpoint has states of callbacks that this run lacks: %s.", ", ".join(missing_names))
    return control


def warn_about_unrestored_callbacks(callbacks: list[Any], states: dict[str, Any]) -> None:
    """Log a warning about callbacks whose saved state is not restored, such as early stopping."""
    for name, current_state in export_states([callback for callback in callbacks if has_saved_state(callback)]).items():
        saved_state = states.get(name)
        if not (isinstance(current_state, dict) and isinstance(saved_state, dict)):
            continue
        saved_attributes = saved_state.get("attributes", {})
        differences = {
            key: value
            for key, value in current_state["attributes"].items()
            if key in saved_attributes and saved_attributes[key] != value
        }
        if differences:
            description = "; ".join(
                f"{key}={value!r}, {saved_attributes[key]!r} in the checkpoint" for key, value in differences.items()
            )
            advice = "set restore_callback_states_from_checkpoint=True to restore it"
            logger.warning("%s starts from scratch (%s): %s.", name, description, advice)
