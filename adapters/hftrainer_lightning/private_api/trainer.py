"""The Lightning trainer, and its signals, log lines, profilers and process launcher."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from lightning.pytorch.strategies.launchers import subprocess_script
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector


class _Interrupted(BaseException):
    """Carries a KeyboardInterrupt past Lightning, which would exit the process and leave Ctrl-C ignored."""

    def __init__(self, original: KeyboardInterrupt) -> None:
        super().__init__()
        self.original = original


class _NoSignals(_SignalConnector):
    """Leaves signals to the script: Lightning would end training at SIGTERM, and requeue a SLURM job at SIGUSR1."""

    def register_signal_handlers(self) -> None:
        self.received_sigterm = False

    def teardown(self) -> None:
        pass


@contextlib.contextmanager
def _keyboard_interrupts_carried() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise _Interrupted(interrupt) from None


class Trainer(pl.Trainer):
    """A Lightning trainer that leaves Ctrl-C and all other signals to its caller."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._signal_connector.__class__ = _NoSignals

    _fit_impl = _keyboard_interrupts_carried()(pl.Trainer._fit_impl)
    _validate_impl = _keyboard_interrupts_carried()(pl.Trainer._validate_impl)
    _test_impl = _keyboard_interrupts_carried()(pl.Trainer._test_impl)
    _predict_impl = _keyboard_interrupts_carried()(pl.Trainer._predict_impl)


@contextlib.contextmanager
def keyboard_interrupts_restored() -> Iterator[None]:
    """Turn what `Trainer` carried past Lightning back into the user's KeyboardInterrupt."""
    try:
        yield
    except _Interrupted as carried:
        raise carried.original from None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep Lightning's tips and advertisements out of the user's log; its warnings and errors stay."""
    loggers = [logging.getLogger(f"lightning.{part}.utilities.rank_zero") for part in ("pytorch", "fabric")]

    def passes(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING

    for logger in loggers:
        logger.addFilter(passes)  # not setLevel, which empties the caches of all loggers of the process
    try:
        with warnings.catch_warnings():
            # The Trainer chooses the device itself, and logs it.
            warnings.filterwarnings("ignore", message="GPU available but not used")
            warnings.filterwarnings("ignore", message="MPS available but not used")
            # The training step sets training mode, as transformers does; code before it may see the model's own mode.
            warnings.filterwarnings("ignore", message="Found .* in eval mode at the start of training")
            # Intended with `prediction_loss_only`.
            warnings.filterwarnings("ignore", message="predict returned None if it was on purpose")
            # Metrics are gathered from all ranks before they are logged.
            warnings.filterwarnings("ignore", message="It is recommended to use `self.log.*sync_dist=True")
            # Manual optimization: the Trainer makes and announces the steps.
            warnings.filterwarnings("ignore", message="SWA is currently only supported every epoch")
            warnings.filterwarnings(
                "ignore", message="When using `Trainer.accumulate_grad_batches != 1.` and overriding"
            )
            # Intended: without log lines, nothing is logged.
            warnings.filterwarnings("ignore", message="The number of training batches .* is smaller than the logging")
            # Lightning 2.6 uses a name that torch 2.13 deprecates; users cannot change that.
            warnings.filterwarnings("ignore", message=".*isinstance\\(treespec, LeafSpec\\)")
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(passes)


def start_script_again(environment: ClusterEnvironment, processes: int) -> Any:
    """Start this command line again for each further process; returns Lightning's launcher, which ends them.

    Lightning would build the command from `sys.argv`, which lacks `python -m hftrainer run` and contains the script's
    changes.
    """
    module: Any = subprocess_script
    launcher = module._SubprocessScriptLauncher(environment, processes, num_nodes=1)
    usual = module._basic_subprocess_cmd
    module._basic_subprocess_cmd = lambda: [sys.executable, *sys.orig_argv[1:]]
    try:
        launcher.launch(lambda: None)
    finally:
        module._basic_subprocess_cmd = usual
    return launcher


class NoProfiler(PassThroughProfiler):
    """Profiles nothing, at no cost: Lightning's class opens a generator around every hook."""

    def profile(self, action_name: str) -> Any:
        return _NOTHING


_NOTHING = contextlib.nullcontext()


def is_watched(trainer: pl.Trainer) -> bool:
    """Whether a callback or a profiler follows the loops; if not, they need not announce each hook."""
    return bool(trainer.callbacks) or not isinstance(trainer.profiler, NoProfiler)  # type: ignore[attr-defined]


def copy_profiler(profiler: Any) -> Any:
    """A copy that shares the records of `profiler`, for Lightning to attach to a module; a name is returned as it is.

    The user's profiler belongs to the training arguments, which each checkpoint holds and which must not hold a module.
    """
    if not isinstance(profiler, Profiler):
        return profiler
    copied = object.__new__(type(profiler))  # copy.copy would drop settings of AdvancedProfiler
    vars(copied).update(vars(profiler))
    return copied
