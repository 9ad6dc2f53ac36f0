"""Lightning's trainer with its signals, log lines, profilers and process launcher, and private names of strategies."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.strategies.ddp import _DDPForwardRedirection
from lightning.pytorch.strategies.launchers import subprocess_script
from lightning.pytorch.strategies.xla import XLAStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

from hftrainer.parallel.process_group import device_mesh


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


def start_script_again(environment: ClusterEnvironment, processes: int) -> Any:
    """Start this command line again for each further process. Returns Lightning's launcher, which ends them.

    Lightning would build the command from `sys.argv`, which lacks `python -m hftrainer run` and contains the script's
    changes.
    """
    module: Any = subprocess_script
    launcher = module._SubprocessScriptLauncher(environment, processes, num_nodes=1)
    original_command = module._basic_subprocess_cmd
    module._basic_subprocess_cmd = lambda: [sys.executable, *sys.orig_argv[1:]]
    try:
        launcher.launch(lambda: None)
    finally:
        module._basic_subprocess_cmd = original_command
    return launcher


class NoProfiler(PassThroughProfiler):
    """Profiles nothing, at no cost. Lightning's class opens a generator around every hook."""

    def profile(self, action_name: str) -> Any:
        return _NULL_CONTEXT


_NULL_CONTEXT = contextlib.nullcontext()


def needs_lightning_hooks(trainer: pl.Trainer) -> bool:
    """Whether a callback or a profiler needs the hooks of Lightning's loops. Neither changes while a trainer runs."""
    return bool(trainer.callbacks) or not isinstance(trainer.profiler, NoProfiler)  # type: ignore[attr-defined]


def call_hooks(trainer: pl.Trainer, name: str, *args: Any) -> None:
    """Call a hook of the callbacks, and the module's for a profiler."""
    if needs_lightning_hooks(trainer):
        call._call_callback_hooks(trainer, name, *args)
        call._call_lightning_module_hook(trainer, name, *args)


def copy_profiler(profiler: Any) -> Any:
    """A copy of `profiler` with the same records, for Lightning to attach to a module. A name stays unchanged.

    The user's profiler belongs to the training arguments, which each checkpoint holds and which must not hold a module.
    """
    if not isinstance(profiler, Profiler):
        return profiler
    # copy.copy would drop settings of AdvancedProfiler.
    copy = object.__new__(type(profiler))
    vars(copy).update(vars(profiler))
    return copy


# ---- Strategies and precision plugins -------------------------------------------------------------------------------


class PrecisionFromPlan(Strategy):
    """Uses the plan's precision plugin in strategies that require a plugin of Lightning's.

    Lightning's FSDP plugin autocasts on CUDA only and cannot clip by norm; its XLA plugin casts by environment
    variables. Lightning's trainer reads the private attribute before the public one.
    """

    _precision_plugin: Precision | None = None

    @property
    def precision_plugin(self) -> Any:
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = precision_plugin


class _BackwardWithinForward(_DDPForwardRedirection):
    """Runs the training step, which includes backward, as the `forward` of DDP's wrapper."""

    def on_after_inner_forward(self, wrapper_module: Any, original_module: Any) -> None:
        """Let the wrapper prepare nothing now: `pre_backward` has."""
        self._syncs_buffers = wrapper_module.require_forward_param_sync
        wrapper_module.require_backward_grad_sync = False

    def on_after_outer_forward(self, wrapper_module: Any, original_module: Any) -> None:
        wrapper_module.require_backward_grad_sync = True
        wrapper_module.require_forward_param_sync = self._syncs_buffers


class StepDDPStrategy(DDPStrategy):
    """DDP for a training step that includes backward. Lightning does the same, for its manual optimization alone."""

    _is_static_graph_ready = False

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._forward_redirection = _BackwardWithinForward()

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        """Prepare the reducer."""
        model: Any = self.model
        prepare_for_backward(model, closure_loss)

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Start the first all-reduce of a static graph."""
        model: Any = self.model
        if model.static_graph and not self._is_static_graph_ready:
            model.reducer._delay_all_reduce()
            self._is_static_graph_ready = True


class SharedMeshStrategy(ModelParallelStrategy):
    """Reuses the device mesh of earlier runs. Lightning would create one, with new process groups, for each run."""

    def setup_environment(self) -> None:
        super(ModelParallelStrategy, self).setup_environment()
        self._setup_distributed()
        sizes = int(self._data_parallel_size), int(self._tensor_parallel_size)
        self._device_mesh = device_mesh(self.root_device.type, sizes, ("data_parallel", "tensor_parallel"))
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh


class LaunchedXLAStrategy(XLAStrategy):
    """Skips Lightning's launcher, since torch_xla has started the processes already."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._launched = True

    def _configure_launcher(self) -> None:
        pass
