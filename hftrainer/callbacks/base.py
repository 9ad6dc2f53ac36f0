"""`TrainerCallback`, and functions that identify and make callbacks."""

from __future__ import annotations

import inspect
from typing import Any


class TrainerCallback:
    """Base class of callbacks: override the events you need.

    Every event receives `args`, `state` and `control`, and as keywords `model`, `processing_class`, `optimizer`,
    `lr_scheduler`, `train_dataloader` and `eval_dataloader`; `on_log` also `logs`, `on_evaluate` and `on_predict`
    also `metrics`. An event that changes `control` may return it.

    An `on_step_end` with parameters of these names also receives `loss` (a tensor of shape `()` on the device: the
    step's, as it is logged), `inputs` (the step's last micro-batch) and `outputs` (the model's, for that micro-batch).
    """

    def on_init_end(self, args, state, control, **kwargs):
        """The Trainer is built."""

    def on_train_begin(self, args, state, control, **kwargs):
        """Training begins."""

    def on_train_end(self, args, state, control, **kwargs):
        """Training has ended; the best model is loaded with `load_best_model_at_end`."""

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
        """A micro-batch has run, and it was not the last of its optimizer step."""

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
    """Whether the callback's class, or a base class of it, has one of these names: ours or transformers'."""
    kinds = type(callback).__mro__
    return any(kind.__name__ in names and library_of(kind) in ("hftrainer", "transformers") for kind in kinds)


def library_of(kind: type) -> str:
    """The package that a class is defined in."""
    return kind.__module__.partition(".")[0]


def _is_wanted(present: Any, wanted: Any) -> bool:
    if not isinstance(wanted, type):
        return bool(present == wanted)
    # Scripts remove transformers' ProgressCallback: remove ours then.
    return isinstance(present, wanted) or (library_of(wanted) == "transformers" and is_kind(present, wanted.__name__))


def pop_from(callbacks: list[Any], callback: Any) -> Any:
    """Remove and return the first of `callbacks` that is `callback`, or an instance of it; None when there is none.

    A class of transformers also matches ours of the same name.
    """
    for number, present in enumerate(callbacks):
        if _is_wanted(present, callback):
            return callbacks.pop(number)
    return None


def make_callback(callback: Any) -> Any:
    """The callback itself, or an instance of the given class.

    Raises:
        TypeError: for a class whose constructor needs arguments.
    """
    if not isinstance(callback, type):
        return callback
    try:
        # All but object, whose signature takes a millisecond to find.
        if any(name in vars(kind) for kind in callback.__mro__[:-1] for name in ("__init__", "__new__")):
            inspect.signature(callback).bind()
    except TypeError as error:
        name = callback.__name__
        raise TypeError(f"callbacks: the constructor of {name} has a {error}; give an instance, {name}(...).") from None
    return callback()
