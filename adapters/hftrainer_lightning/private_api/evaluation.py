"""Lightning's evaluation loops: run at any point of training, on any loader, alone or in a group."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import RunningStage, TrainerFn

from hftrainer.base.part import temporary_attributes
from hftrainer_lightning.private_api.callback_hooks import needs_lightning_hooks

if TYPE_CHECKING:
    from hftrainer.evaluation.evaluation_pass import EvaluationPass
    from hftrainer_lightning.module import TrainerModule


class ValidationGroup:
    """Evaluations of several sets within `fit` that Lightning's callbacks see as one validation.

    Callbacks read the monitored metric at the end of a validation, so the metrics of all sets must exist by then.

    Attributes:
        has_begun: whether callbacks have seen the start of the validation.
    """

    has_begun = False


class _TrainerEvaluationLoop(_EvaluationLoop):
    """Announces the start of a group at its first evaluation, and leaves the end to `end_group`."""

    group: ValidationGroup | None = None

    def _on_evaluation_start(self, *args: Any, **kwargs: Any) -> None:
        if self.group is None or not self.group.has_begun:
            super()._on_evaluation_start(*args, **kwargs)
        if self.group is not None:
            self.group.has_begun = True

    def _on_evaluation_end(self, *args: Any, **kwargs: Any) -> None:
        if self.group is None:
            super()._on_evaluation_end(*args, **kwargs)
        else:
            # The next set of the group must not add to the metrics of this one.
            self.trainer._logger_connector.reset_results()


class _FastEvaluationLoop(_TrainerEvaluationLoop):
    """Calls no hook for a batch, for runs without Lightning callbacks and profilers."""

    def _on_before_fetch(self) -> None:
        """Tell no profiler."""

    _on_after_fetch = _on_before_fetch

    def _evaluation_step(self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        strategy = self.trainer.strategy
        progress = self.batch_progress
        progress.increment_ready()
        progress.increment_started()
        step = strategy.test_step if self._stage is RunningStage.TESTING else strategy.validation_step
        step(batch, batch_idx)
        progress.increment_processed()
        progress.increment_completed()
        self._has_run = True
        self._seen_batches_per_dataloader[dataloader_idx] += 1


def make_evaluation_loop(pl_trainer: pl.Trainer, function: TrainerFn, stage: RunningStage) -> _EvaluationLoop:
    """The loop for the evaluations of a trainer. Callbacks and profilers see each of its batches."""
    loop = _TrainerEvaluationLoop if needs_lightning_hooks(pl_trainer) else _FastEvaluationLoop
    return loop(pl_trainer, function, stage, verbose=False, inference_mode=False)


def install_evaluation_loops(pl_trainer: pl.Trainer) -> None:
    """Put our loops in place of those that `lightning.Trainer` makes for `validate` and `test`."""
    pl_trainer.validate_loop = make_evaluation_loop(pl_trainer, TrainerFn.VALIDATING, RunningStage.VALIDATING)
    pl_trainer.test_loop = make_evaluation_loop(pl_trainer, TrainerFn.TESTING, RunningStage.TESTING)


def validate_in_fit(
    pl_trainer: pl.Trainer,
    pl_module: TrainerModule,
    dataloader: Any,
    evaluation: EvaluationPass,
    group: ValidationGroup | None = None,
    all_batches: bool = False,
) -> None:
    """Run Lightning's validation loop at any point of `fit`, on any loader, with its callbacks.

    Lightning runs it at fixed points, on one loader, and only from the epoch loop, but the Trainer evaluates when its
    callbacks request it. `all_batches` ignores `limit_val_batches`, for predictions.
    """
    loop: Any = pl_trainer.fit_loop.epoch_loop.val_loop
    loop._combined_loader = None
    loop._data_source.instance = dataloader
    loop.restarting = False
    limit = pl_trainer.limit_predict_batches if all_batches else pl_trainer.limit_val_batches
    try:
        with (
            temporary_attributes(pl_module, evaluation_pass=evaluation, evaluation_loop=loop),
            temporary_attributes(pl_trainer, limit_val_batches=limit),
            temporary_attributes(loop, group=group),
            _switch_to_validation(pl_trainer, pl_module),
        ):
            loop.run()
    except BaseException:
        # WeightAveraging has put its averages into the model. Restore the weights, since a checkpoint may follow.
        if pl_module.is_validating:
            pl_module.is_validating = False
            for callback in pl_trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, WeightAveraging):
                    callback.on_validation_epoch_end(pl_trainer, pl_module)
        raise
    finally:
        release_data(loop)


class SeenBatches(_IndexBatchSamplerWrapper):
    """Passes each batch's sample indices to prediction writers. Lightning reads only samplers that it has wrapped."""

    def __init__(self, indices: list[list[int]]) -> None:
        self.seen_batch_indices = indices


def release_data(loop: Any) -> None:
    """Release the loader of an evaluation that has ended, and its predictions."""
    loop._data_source.instance = loop._combined_loader = None
    if loop._data_fetcher is not None:
        loop._data_fetcher.teardown()
        loop._data_fetcher = None


def end_group(
    pl_trainer: pl.Trainer, pl_module: TrainerModule, group: ValidationGroup, metrics: dict[str, float]
) -> None:
    """Announce the end of a group's validation.

    Args:
        pl_trainer: the trainer that runs `fit`.
        pl_module: the module that is trained.
        group: the group.
        metrics: metrics that callbacks see besides those of each set.
    """
    numbers = {name: torch.tensor(float(value)) for name, value in metrics.items() if can_be_logged(name, value)}
    with _switch_to_validation(pl_trainer, pl_module):
        # An override of `evaluation_loop` skips Lightning's loop, so call its hooks here.
        if not group.has_begun and numbers:
            call._call_callback_hooks(pl_trainer, "on_validation_start")
        pl_trainer._logger_connector._callback_metrics.update(numbers)
        if group.has_begun:
            pl_trainer.fit_loop.epoch_loop.val_loop._on_evaluation_end()
        elif numbers:
            call._call_callback_hooks(pl_trainer, "on_validation_end")


#: Suffixes of the names that a progress bar already shows, lacks space for, or rounds to zero.
_NOT_IN_BARS = ("epoch", "learning_rate", "_per_second", "_runtime", "_time", "total_flos")


def show_values(pl_trainer: pl.Trainer, values: Mapping[str, Any]) -> None:
    """Show the numbers of a log line in Lightning's progress bars. These read only what a module's hooks log."""
    bar_values = {name: value for name, value in values.items() if not name.endswith(_NOT_IN_BARS)}
    numbers = {name: float(value) for name, value in bar_values.items() if can_be_logged(name, value)}
    pl_trainer._logger_connector._progress_bar_metrics.update(numbers)


def can_be_logged(name: str, value: Any) -> bool:
    """Whether Lightning accepts this metric. `compute_metrics` may return any value under any name."""
    is_reserved = "/dataloader_idx_" in name
    return not is_reserved and (
        isinstance(value, float) or (isinstance(value, int) and abs(value) <= sys.float_info.max)
    )


@contextlib.contextmanager
def _switch_to_validation(pl_trainer: pl.Trainer, pl_module: TrainerModule) -> Iterator[None]:
    """Set Lightning's state to validating, and restore the state of training afterwards."""
    connector = pl_trainer._logger_connector
    first_iteration = connector._first_loop_iter
    hook = pl_module._current_fx_name
    pl_trainer.validating = True
    try:
        yield
    finally:
        pl_trainer.training = True
        connector._first_loop_iter = first_iteration
        pl_module._current_fx_name = hook
