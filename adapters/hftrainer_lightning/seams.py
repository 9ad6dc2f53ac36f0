"""Every touch of a private Lightning name, each with its reason. Checked against lightning 2.6.6."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.optimization.automatic import ClosureResult, _AutomaticOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.profilers import PassThroughProfiler, PyTorchProfiler
from lightning.pytorch.strategies.launchers import subprocess_script
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.trainer.states import RunningStage

if TYPE_CHECKING:
    from hftrainer_lightning.events import EvaluationHost, FeedLike
    from hftrainer_lightning.module import HostedModule


class _ScaledLoss(ClosureResult):
    """Takes the loss as it is.

    Lightning divides it by `accumulate_grad_batches`; the Trainer has already divided it by the micro-batches really
    in the window, or by its items. The copy of the loss that Lightning keeps for scaling in place is not needed.
    """

    def _clone_loss(self) -> None:
        if self.closure_loss is not None:
            self.loss = self.closure_loss.detach()

    @classmethod
    def from_training_step_output(cls, training_step_output: Any, normalize: int = 1) -> _ScaledLoss:
        return cls(training_step_output)


class _WindowedEpochLoop(_TrainingEpochLoop):
    """Steps the optimizer when the feed's window closes.

    Lightning counts batches, and always steps at the last; data without a length leaves its last, incomplete window
    for the next epoch to fill.
    """

    feed: FeedLike

    def _should_accumulate(self) -> bool:
        window = self.feed.window
        return window is not None and not window.closes

    def on_advance_end(self, data_fetcher: Any) -> None:
        """Count the step for loggers; when to validate is for the Trainer's callbacks to decide."""
        if not self._should_accumulate():
            self._batches_that_stepped += 1
        self._save_loggers_on_train_batch_end()

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Only schedules by epoch, which callbacks bring: the run's own moves on between the step and its event."""
        if interval == "epoch":
            super().update_lr_schedulers(interval, update_plateau_schedulers)

    def _build_kwargs(self, kwargs: Any, batch: Any, batch_idx: int) -> Any:
        """The arguments of the generated module's `training_step`, which Lightning would inspect at every batch."""
        kwargs["batch"] = batch
        kwargs["batch_idx"] = batch_idx
        return kwargs


class _AnnouncedFitLoop(_FitLoop):
    """Runs each epoch, from its first batch to the end of the epoch, within a call of the host's."""

    def advance(self) -> None:
        """Let the host run the epoch."""
        module: Any = self.trainer.lightning_module
        module.host.around_epoch(self._epoch)

    def _epoch(self) -> None:
        super().advance()
        super().on_advance_end()

    def on_advance_end(self) -> None:
        """Nothing: the epoch has ended within `advance`."""


class _BareOptimization(_AutomaticOptimization):
    """Announces the clearing of gradients only to callbacks; the training run does the clearing, after the step."""

    output_result_cls = _ScaledLoss

    def _make_zero_grad_fn(self, batch_idx: int, optimizer: Any) -> Any:
        return super()._make_zero_grad_fn(batch_idx, optimizer) if self.trainer.callbacks else None  # type: ignore[attr-defined]


class _LazyLoggerConnector(_LoggerConnector):
    """Gathers a training batch's metrics only if some were logged; Lightning asks a dozen properties to find none."""

    def on_batch_start(self, batch: Any, dataloader_idx: int | None = None) -> None:
        if self.trainer.state.stage is not RunningStage.TRAINING:
            super().on_batch_start(batch, dataloader_idx)
            return
        self._first_loop_iter = self._first_loop_iter is None
        results = self.trainer.fit_loop.epoch_loop._results
        results.batch, results.batch_size, results.dataloader_idx = batch, None, dataloader_idx

    def on_batch_end(self) -> None:
        results = self.trainer.fit_loop.epoch_loop._results
        if results or self.trainer.state.stage is not RunningStage.TRAINING:
            super().on_batch_end()
        else:
            results.batch = results.batch_size = None

    def update_train_step_metrics(self) -> None:
        if self.trainer.loggers:
            super().update_train_step_metrics()


class NoProfiler(PassThroughProfiler):
    """Profiles nothing, at no cost: Lightning's own opens a generator around every hook."""

    def profile(self, action_name: str) -> Any:
        return _NOTHING


_NOTHING = contextlib.nullcontext()


def install_window_accumulation(trainer: pl.Trainer, feed: FeedLike) -> None:
    """Let the feed's windows, not Lightning's counting, decide when the optimizer steps and how the loss is divided."""
    trainer.fit_loop.__class__ = _AnnouncedFitLoop
    epoch_loop = trainer.fit_loop.epoch_loop
    epoch_loop.__class__ = _WindowedEpochLoop
    epoch_loop.feed = feed
    epoch_loop.automatic_optimization.__class__ = _BareOptimization
    trainer._logger_connector.__class__ = _LazyLoggerConnector


def switch_optimization(trainer: pl.Trainer, module: HostedModule) -> None:
    """Change between automatic and manual optimization within a run; each of Lightning's loops counts the steps."""
    loop = trainer.fit_loop.epoch_loop
    steps = loop.global_step
    module.automatic_optimization = not module.automatic_optimization
    automatic = loop.automatic_optimization.optim_progress.optimizer.step.total
    manual = loop.manual_optimization.optim_step_progress.total
    for counters in (automatic, manual):
        counters.ready = counters.completed = steps


def restore_progress(trainer: pl.Trainer, *, epoch: int, batch: int, batches_per_epoch: int, global_step: int) -> None:
    """Set the loops' counters as a Lightning checkpoint would, from what `trainer_state.json` tells.

    Args:
        trainer: a trainer that has not run.
        epoch: epochs that are done.
        batch: micro-batches of the next epoch that are done.
        batches_per_epoch: micro-batches in an epoch.
        global_step: optimizer steps that are done.
    """
    state = trainer.fit_loop.state_dict()
    begun = epoch + 1 if batch else epoch
    epochs = {"ready": begun, "started": begun, "processed": epoch, "completed": epoch}
    state["epoch_progress"] = {"total": dict(epochs), "current": dict(epochs)}
    done = dict.fromkeys(("ready", "started", "processed", "completed"), batch)
    total = {name: epoch * batches_per_epoch + count for name, count in done.items()}
    state["epoch_loop.batch_progress"] |= {"total": total, "current": done, "is_last_batch": False}
    steps = {"ready": global_step, "completed": global_step}
    optimizer = state["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    optimizer["step"] |= {"total": dict(steps)}
    state["epoch_loop.manual_optimization.optim_step_progress"] |= {"total": dict(steps)}
    state["epoch_loop.state_dict"]["_batches_that_stepped"] = global_step
    trainer.fit_loop.load_state_dict(state)


class ValidationGroup:
    """Evaluations of several sets within `fit` that are one validation to Lightning's callbacks.

    Callbacks that follow a metric look for it when a validation ends; the metrics of all sets must be there then.

    Attributes:
        begun: whether the start has been announced.
    """

    def __init__(self) -> None:
        self.begun = False


class _BareEvaluationLoop(_EvaluationLoop):
    """Runs a batch at once where nobody listens; Lightning asks for its state forty times a batch to announce it."""

    def _evaluation_step(self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        trainer = self.trainer
        if trainer.callbacks or not isinstance(trainer.profiler, NoProfiler):  # type: ignore[attr-defined]
            super()._evaluation_step(batch, batch_idx, dataloader_idx, dataloader_iter)
            return
        progress = self.batch_progress
        progress.increment_ready()
        progress.increment_started()
        step = trainer.strategy.test_step if self._stage is RunningStage.TESTING else trainer.strategy.validation_step
        step(batch, batch_idx)
        progress.increment_processed()
        progress.increment_completed()
        self._has_run = True
        self._seen_batches_per_dataloader[dataloader_idx] += 1


def install_bare_evaluation(trainer: pl.Trainer) -> None:
    """Let evaluations without Lightning callbacks pass over what is only there to inform them."""
    for loop in (trainer.validate_loop, trainer.test_loop, trainer.fit_loop.epoch_loop.val_loop):
        loop.__class__ = _BareEvaluationLoop


class _GroupedLoop(_BareEvaluationLoop):
    """Announces the start with the group's first evaluation, and leaves the end to `end_group`."""

    group: ValidationGroup

    def _on_evaluation_start(self, *args: Any, **kwargs: Any) -> None:
        if not self.group.begun:
            self.group.begun = True
            super()._on_evaluation_start(*args, **kwargs)

    def _on_evaluation_end(self, *args: Any, **kwargs: Any) -> None:
        self.trainer._logger_connector.reset_results()


def validate_in_fit(
    trainer: pl.Trainer,
    module: HostedModule,
    dataloader: Any,
    evaluation: EvaluationHost,
    group: ValidationGroup | None = None,
    all_batches: bool = False,
) -> None:
    """Run Lightning's own validation loop at any point of `fit`, on any loader, so that its callbacks see it.

    Lightning runs it at fixed points, on one loader, and from the epoch loop only; the Trainer evaluates when its
    callbacks say so. `all_batches` takes `limit_val_batches` off, for predictions.
    """
    loop: Any = trainer.fit_loop.epoch_loop.val_loop
    outer, kind, limit = module.evaluating, loop.__class__, trainer.limit_val_batches
    module.evaluate_with(evaluation, loop)
    loop._combined_loader = None
    loop._data_source.instance = dataloader
    loop.restarting = False
    if group is not None:
        loop.__class__, loop.group = _GroupedLoop, group
    if all_batches:
        trainer.limit_val_batches = trainer.limit_predict_batches
    try:
        with _validating(trainer, module):
            loop.run()
    except BaseException:
        if module.in_validation:  # the weights that it has put aside must come back, for a checkpoint may follow
            module.in_validation = False
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, WeightAveraging):
                    callback.on_validation_epoch_end(trainer, module)
        raise
    finally:
        loop.__class__, trainer.limit_val_batches = kind, limit
        release_data(loop)
        module.evaluate_with(*outer)


class SeenBatches(_IndexBatchSamplerWrapper):
    """Tells prediction writers which samples each batch holds; Lightning asks only what it has wrapped itself."""

    def __init__(self, seen: list[list[int]]) -> None:
        self.seen_batch_indices = seen


@contextlib.contextmanager
def in_previous_epoch(trainer: pl.Trainer) -> Iterator[None]:
    """Let Lightning's epoch be the one that has just ended."""
    progress: Any = trainer.fit_loop.epoch_progress.current
    progress.processed -= 1
    try:
        yield
    finally:
        progress.processed += 1


def release_data(loop: Any) -> None:
    """Let go of the loader of an evaluation that is over, and with it of its predictions."""
    loop._data_source.instance = loop._combined_loader = None
    if loop._data_fetcher is not None:
        loop._data_fetcher.teardown()
        loop._data_fetcher = None


def end_group(trainer: pl.Trainer, module: HostedModule, group: ValidationGroup, metrics: dict[str, float]) -> None:
    """Announce the end of a group's validation.

    Args:
        trainer: of the fit.
        module: of the fit.
        group: the group.
        metrics: what callbacks find besides the metrics of each set.
    """
    numbers = {name: torch.tensor(float(value)) for name, value in metrics.items() if can_be_logged(name, value)}
    with _validating(trainer, module):
        if not group.begun and numbers:  # an evaluation of the user's own, without Lightning's loop
            call._call_callback_hooks(trainer, "on_validation_start")
        trainer._logger_connector._callback_metrics.update(numbers)
        if group.begun:
            trainer.fit_loop.epoch_loop.val_loop._on_evaluation_end()
        elif numbers:
            call._call_callback_hooks(trainer, "on_validation_end")


def can_be_logged(name: str, value: Any) -> bool:
    """Whether Lightning takes this metric; `compute_metrics` may return anything under any name."""
    reserved = "/dataloader_idx_" in name
    return not reserved and (isinstance(value, float) or (isinstance(value, int) and abs(value) <= sys.float_info.max))


@contextlib.contextmanager
def _validating(trainer: pl.Trainer, module: HostedModule) -> Iterator[None]:
    """Let Lightning believe that it validates; afterwards, all that tells it that it is training is put back."""
    connector = trainer._logger_connector
    first_iteration, hook = connector._first_loop_iter, module._current_fx_name
    trainer.validating = True
    try:
        yield
    finally:
        trainer.training = True
        connector._first_loop_iter = first_iteration
        module._current_fx_name = hook


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


class Trainer(pl.Trainer):
    """A Lightning trainer that leaves Ctrl-C and all other signals to its caller."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._signal_connector.__class__ = _NoSignals

    def _fit_impl(self, *args: Any, **kwargs: Any) -> Any:
        with _keyboard_interrupts_carried():
            return super()._fit_impl(*args, **kwargs)

    def _validate_impl(self, *args: Any, **kwargs: Any) -> Any:
        with _keyboard_interrupts_carried():
            return super()._validate_impl(*args, **kwargs)

    def _test_impl(self, *args: Any, **kwargs: Any) -> Any:
        with _keyboard_interrupts_carried():
            return super()._test_impl(*args, **kwargs)

    def _predict_impl(self, *args: Any, **kwargs: Any) -> Any:
        with _keyboard_interrupts_carried():
            return super()._predict_impl(*args, **kwargs)


@contextlib.contextmanager
def _keyboard_interrupts_carried() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise _Interrupted(interrupt) from None


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
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            # The Trainer chooses the device itself, and says so in its own words.
            warnings.filterwarnings("ignore", message="GPU available but not used")
            warnings.filterwarnings("ignore", message="MPS available but not used")
            # The training step sets training mode, as transformers does; what comes before may see the model as it was.
            warnings.filterwarnings("ignore", message="Found .* in eval mode at the start of training")
            # As `prediction_loss_only` asks for.
            warnings.filterwarnings("ignore", message="predict returned None if it was on purpose")
            # Processes share the metrics before they are logged.
            warnings.filterwarnings("ignore", message="It is recommended to use `self.log.*sync_dist=True")
            # Their steps are the Trainer's, and are announced as it announces them.
            warnings.filterwarnings("ignore", message="SWA is currently only supported every epoch")
            warnings.filterwarnings(
                "ignore", message="When using `Trainer.accumulate_grad_batches != 1.` and overriding"
            )
            # Without log lines, nothing is logged on purpose.
            warnings.filterwarnings("ignore", message="The number of training batches .* is smaller than the logging")
            # Lightning 2.6 asks torch 2.13 by a deprecated name: not for the user to mend.
            warnings.filterwarnings("ignore", message=".*isinstance\\(treespec, LeafSpec\\)")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def start_script_again(environment: ClusterEnvironment, processes: int) -> Any:
    """Start this command line once more for each further process; Lightning's launcher, which kills it with them.

    Lightning would put the command together from `sys.argv`, which knows neither `python -m hftrainer run` nor what
    the script has changed.
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


def recorded_events(profiler: PyTorchProfiler) -> Any:
    """The events of a finished recording. The profiler ends it itself when it reports, too late for other names."""
    profiler._delete_profilers()
    return profiler.function_events or []
