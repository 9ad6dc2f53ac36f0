"""Lightning's trainer without its signals, and without its tips and advertisements."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector


class _CarriedInterrupt(BaseException):
    """Carries a KeyboardInterrupt past Lightning, which would exit the process and leave Ctrl-C ignored."""

    def __init__(self, original: KeyboardInterrupt) -> None:
        super().__init__()
        self.original = original


class _WithoutSignalHandlers(_SignalConnector):
    """Leaves signals to the script. Lightning would end training at SIGTERM, and requeue a SLURM job at SIGUSR1."""

    def register_signal_handlers(self) -> None:
        self.received_sigterm = False

    def teardown(self) -> None:
        pass


@contextlib.contextmanager
def _carry_keyboard_interrupts() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise _CarriedInterrupt(interrupt) from None


class TrainerWithoutSignals(pl.Trainer):
    """A Lightning trainer that leaves Ctrl-C and all other signals to its caller."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._signal_connector = _WithoutSignalHandlers(self)

    _fit_impl = _carry_keyboard_interrupts()(pl.Trainer._fit_impl)
    _validate_impl = _carry_keyboard_interrupts()(pl.Trainer._validate_impl)
    _test_impl = _carry_keyboard_interrupts()(pl.Trainer._test_impl)
    _predict_impl = _carry_keyboard_interrupts()(pl.Trainer._predict_impl)


# Messages name the class that users know.
TrainerWithoutSignals.__name__ = "Trainer"


#: Starts of Lightning's warnings that do not concern our users, as regular expressions.
_HIDDEN_WARNINGS = (
    # The Trainer chooses the device itself, and logs it.
    "GPU available but not used",
    "MPS available but not used",
    # The training step sets training mode, as transformers does; code before it may see the model's own mode.
    "Found .* in eval mode at the start of training",
    # Intended with `prediction_loss_only`.
    "predict returned None if it was on purpose",
    # Metrics are gathered from all ranks before they are logged.
    "It is recommended to use `self.log.*sync_dist=True",
    # The run steps its schedule, and clears the gradients, itself.
    "SWA is currently only supported every epoch",
    "When using `Trainer.accumulate_grad_batches != 1.` and overriding",
    # Intended: without log lines, nothing is logged.
    "The number of training batches .* is smaller than the logging",
    # The evaluation raises an error that names the reason.
    "Total length of `_EvaluationBatches` across ranks is zero",
    # Lightning 2.6 uses a name that torch 2.13 deprecates; users cannot change that.
    r".*isinstance\(treespec, LeafSpec\)",
)


@contextlib.contextmanager
def quiet_lightning() -> Iterator[None]:
    """Hide Lightning's tips and advertisements, but not its warnings and errors.

    Raises the original KeyboardInterrupt that `TrainerWithoutSignals` has carried past Lightning.
    """
    loggers = [logging.getLogger(f"lightning.{part}.utilities.rank_zero") for part in ("pytorch", "fabric")]

    def is_warning(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING

    for logger in loggers:
        # Unlike this, setLevel empties the caches of all loggers of the process.
        logger.addFilter(is_warning)
    try:
        with warnings.catch_warnings():
            for message in _HIDDEN_WARNINGS:
                warnings.filterwarnings("ignore", message=message)
            yield
    except _CarriedInterrupt as interrupt:
        raise interrupt.original from None
    finally:
        for logger in loggers:
            logger.removeFilter(is_warning)
