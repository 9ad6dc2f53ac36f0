"""`CallbackHandler`: calls the callbacks of a Trainer."""

from __future__ import annotations

import functools
import inspect
import logging
import reprlib
import types
from typing import Any

from torch import nn

from hftrainer.arguments.base import BaseArguments
from hftrainer.callbacks.base import TrainerCallback, is_kind, library_of, make_callback, pop_from
from hftrainer.callbacks.flow import DefaultFlowCallback
from hftrainer.callbacks.state import TrainerControl, TrainerState
from hftrainer.compat.overrides import accepted_by
from hftrainer.errors import NotACallback

logger = logging.getLogger(__name__)


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
            logger.warning("Without DefaultFlowCallback, the Trainer does not log, evaluate or save automatically.")

    def __getstate__(self) -> dict[str, Any]:
        return {
            **vars(self),
            "train_dataloader": None,
            "eval_dataloader": None,
        }  # loaders of a run, with worker processes

    def add_callback(self, callback: Any) -> None:
        """Add a callback, as a class or as an instance. A progress bar replaces the existing one.

        Raises:
            NotACallback: for an object that handles none of the events.
        """
        kind = callback if isinstance(callback, type) else type(callback)
        if issubclass(kind, nn.Module):  # LightningModules have hooks of the same names
            raise TypeError(f"callbacks: {kind.__name__} is a module, not a callback.")
        if any(library_of(base) == "pytorch_lightning" for base in kind.__mro__):
            raise TypeError(
                f"callbacks: {kind.__name__} comes from pytorch_lightning, which is another package: import it from "
                "lightning.pytorch."
            )
        if not any(callable(getattr(callback, event, None)) for event in EVENTS):
            given = f"{reprlib.repr(callback)} ({type(callback).__name__})"
            raise NotACallback(f"callbacks: {given} is not a callback: it handles none of the events")
        instance = make_callback(callback)
        if is_kind(instance, *BARS):
            self.drop_bars()
        if type(instance) in {type(present) for present in self.callbacks}:
            logger.warning("The callbacks contain a %s already: %s", type(instance).__name__, self.callback_list)
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
        """The class names, one per line."""
        return "\n".join(type(callback).__name__ for callback in self.callbacks)

    def call_event(
        self, event: str, args: BaseArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Call an event of every callback; returns the control object after the last of them."""
        for callback in self.callbacks:
            handler = getattr(callback, event, None)
            if handler is None or getattr(handler, "__func__", None) is _NOTHING[event]:
                continue
            given = {
                "model": self.model,
                **_by_its_names(handler, self.processing_class),
                "optimizer": self.optimizer,
                "lr_scheduler": self.lr_scheduler,
                "train_dataloader": self.train_dataloader,
                "eval_dataloader": self.eval_dataloader,
                **kwargs,
            }
            if isinstance(getattr(handler, "__func__", handler), types.FunctionType):
                given = accepted_by(handler, given)
            result = handler(args, state, control, **given)
            if result is None:
                continue
            if not hasattr(result, "should_training_stop"):
                name = f"{type(callback).__name__}.{event}"
                raise NotACallback(f"{name} returned {reprlib.repr(result)}: return the control, or nothing.")
            control = result
        return control

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Announce a log line, and clear `should_log`."""
        control.should_log = False
        return self.call_event("on_log", args, state, control, logs=logs, **kwargs)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        """Announce an evaluation, and clear `should_evaluate`."""
        control.should_evaluate = False
        return self.call_event("on_evaluate", args, state, control, metrics=metrics, **kwargs)

    def on_predict(self, args, state, control, metrics=None, **kwargs):
        """Announce a prediction."""
        return self.call_event("on_predict", args, state, control, metrics=metrics, **kwargs)


def _by_its_names(handler: Any, processing_class: Any) -> dict[str, Any]:
    """`processing_class`, and also as `tokenizer` (its name before v4.46) for a handler that uses that name.

    Other handlers must not get it: they may not accept a keyword that transformers does not pass.
    """
    given = {"processing_class": processing_class}
    return {**given, "tokenizer": processing_class} if _names_tokenizer(handler) else given


def _names_tokenizer(handler: Any) -> bool:
    """Whether a handler has a parameter `tokenizer`, or reads `kwargs["tokenizer"]`."""
    function = getattr(handler, "__func__", handler)
    known = isinstance(function, types.FunctionType)  # other callables may not be hashable
    return _has_tokenizer(function) if known else _has_tokenizer.__wrapped__(function)


@functools.lru_cache(maxsize=256)  # called at every step
def _has_tokenizer(function: Any) -> bool:
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:  # a C function, or a callable object
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


#: The callbacks that show a progress bar; only one is kept.
BARS = ("ProgressCallback", "NotebookProgressCallback")
EVENTS = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))
#: Event → the control flag that is cleared before it is announced.
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
