"""The engine: builds a `lightning.Trainer` from a plan, and runs fit, validation and prediction with it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.throughput import get_available_flops as get_available_flops
from lightning.pytorch.loggers import Logger

from hftrainer.checkpointing.resume import load_lightning_callbacks
from hftrainer.compat.overrides import is_overridden
from hftrainer.parallel.environment import find_plugin
from hftrainer.strategies.strategy import Strategy
from hftrainer_lightning import callbacks as lightning_callbacks
from hftrainer_lightning.callbacks import (
    HOOKS as HOOKS,
    has_progress_bar,
    is_lightning_callback as is_lightning_callback,
)
from hftrainer_lightning.launching import LaunchedEnvironment, start_other_processes as start_other_processes
from hftrainer_lightning.loggers import CallbackMetricsLogger, is_lightning_logger as is_lightning_logger
from hftrainer_lightning.module import TrainerModule
from hftrainer_lightning.precision import make_precision_plugin
from hftrainer_lightning.private_api import callback_hooks, evaluation as evaluation_loops, finders
from hftrainer_lightning.private_api.epoch_loop import SingleLoader, install_training_loops, restore_progress
from hftrainer_lightning.private_api.trainer import TrainerWithoutSignals, quiet_lightning
from hftrainer_lightning.strategies import StrategySettings, make_accelerator

if TYPE_CHECKING:
    from hftrainer.evaluation.evaluation_pass import EvaluationPass
    from hftrainer.trainer import Trainer
    from hftrainer.training.lightning_finders import FinderSteps
    from hftrainer.training.steps.loop import TrainingLoop

#: Lightning's loops over an evaluation or test set.
Stage = Literal["validate", "test", "predict"]


class CallbackValues(NamedTuple):
    """What Lightning's callbacks add to a checkpoint.

    Attributes:
        weights: the weights that they save instead of the model's, if those have other names, else None.
        state: the callbacks' state for a resumed run; may be empty.
    """

    weights: dict[str, torch.Tensor] | None
    state: dict[str, Any]


class LightningEngine:
    """Runs a model on Lightning.

    Args:
        strategy: how the processes share the model; it holds the plan.
        callbacks: the user's Lightning callbacks; the list may change between runs.
        get_loggers: returns the loggers when a run starts.
        log_values: called with the numbers that callbacks log, if there are no loggers.

    Attributes:
        plan: the training arguments, translated for Lightning; `update_plan` updates it.
        ignored_changes: argument → the value that stays in effect, for changes that were ignored with a warning.
        scaler: the loss scaler with float16, else None.
        pl_trainer: the `lightning.Trainer` of the last run, or None.
        pl_module: the `TrainerModule` of the last run, or None.
    """

    def __init__(
        self,
        strategy: Strategy,
        callbacks: Sequence[pl.Callback],
        get_loggers: Callable[[], list[Logger]],
        log_values: Callable[[Mapping[str, float]], None],
    ) -> None:
        self.strategy = strategy
        self.plan = plan = strategy.initial_plan
        self.ignored_changes: dict[str, Any] = {}
        self.callbacks = callbacks
        self._get_loggers = get_loggers
        self._fallback_logger = CallbackMetricsLogger(log_values, plan.default_root_dir)
        self.pl_trainer: pl.Trainer | None = None
        self.pl_module: TrainerModule | None = None
        self.is_fitting = self.is_evaluating = False
        strategy.start()
        self.scaler = strategy.make_scaler()
        self._validation_group: evaluation_loops.ValidationGroup | None = None
        self._callback_values: CallbackValues | None = None

    def fit(self, loop: TrainingLoop, model: torch.nn.Module, *, log_every_n_steps: int) -> None:
        """Run training in Lightning's loop.

        Args:
            loop: the loop of the run, whose methods Lightning's hooks call.
            model: the model to train.
            log_every_n_steps: optimizer steps between two values that Lightning's callbacks log.
        """
        attempt = loop.attempt
        optimizer = loop.parts.require_optimizer()
        resume_folder = loop.run.resume_folder
        callback_states = {} if resume_folder is None else load_lightning_callbacks(resume_folder)
        max_epochs = attempt.lengths.num_train_epochs
        with quiet_lightning():
            settings = StrategySettings(self.scaler, loop.parts.model_setup.finds_unused_parameters())
            self.pl_trainer = pl_trainer = self._make_pl_trainer(
                max_epochs=-1 if max_epochs == sys.maxsize else max_epochs,
                accumulate_grad_batches=self.plan.accumulate_grad_batches,
                logger=self._loggers_or_fallback(),
                log_every_n_steps=log_every_n_steps,
                strategy=self.strategy.make_lightning_strategy(settings),
            )
        loggers = pl_trainer.loggers
        self.pl_module = pl_module = TrainerModule(model)
        pl_module.attach(loop, callback_states)
        install_training_loops(pl_trainer, loop, is_epoch_overridden=is_overridden(loop.trainer, "_run_epoch"))
        if attempt.first_epoch or attempt.finished_micro_batches:
            restore_progress(pl_trainer, attempt, loop.trainer.state.global_step)
        self.is_fitting = True
        callback_hooks.reset_averages(self.callbacks)
        rates = [group.get("initial_lr") for group in optimizer.param_groups]
        try:
            with quiet_lightning(), lightning_callbacks.note_wrong_signatures(self.callbacks):
                # The empty validation set is a placeholder for the sets that `evaluate` passes.
                pl_trainer.fit(pl_module, train_dataloaders=SingleLoader(loop.batches), val_dataloaders=[])
        except Exception as error:
            loop.parts.checkpoint_saver.save_after_error(loop, error)
            raise
        finally:
            self.is_fitting = False
            pl_trainer.loggers = loggers
            pl_module.detach()
            callback_hooks.release_callbacks(self.callbacks)
            # StochasticWeightAveraging changes initial_lr, with which the next run would start.
            for group, rate in zip(optimizer.param_groups, rates, strict=False):
                group["initial_lr"] = rate

    def run_epoch(self, arguments: dict[str, Any]) -> None:
        """Run Lightning's epoch for an override of `Trainer._run_epoch`, which received `arguments`."""
        self.pl_trainer.fit_loop.run_epoch(arguments)  # type: ignore[union-attr]

    def update_plan(self, *, accumulate_grad_batches: int, default_root_dir: str) -> None:
        """Update the arguments that may change between runs and within one.

        Args:
            accumulate_grad_batches: micro-batches per optimizer step.
            default_root_dir: where Lightning callbacks write by default.
        """
        self.plan = dataclasses.replace(
            self.plan, accumulate_grad_batches=accumulate_grad_batches, default_root_dir=default_root_dir
        )

    def release(self) -> None:
        """Release the last run's model and everything built around it."""
        self.pl_trainer = self.pl_module = None
        self.strategy.release_model()

    @contextlib.contextmanager
    def autocast_forward(self, model: torch.nn.Module) -> Iterator[None]:
        """Run the model's forward pass in the run's precision, for a script's own loops."""
        if self.is_fitting or not self.strategy.autocasts_own_loops:
            yield
            return
        precision: Any = make_precision_plugin(self.plan, self.scaler)
        precision.convert_module(SimpleNamespace(model=model))
        try:
            yield
        finally:
            precision.teardown()

    @property
    def fitting_strategy(self) -> pl.strategies.Strategy | None:
        """Lightning's strategy within `fit`; None outside of it."""
        return self.pl_trainer.strategy if self.pl_trainer is not None and self.is_fitting else None

    def evaluate(self, evaluation: EvaluationPass, model: torch.nn.Module, stage: Stage = "validate") -> None:
        """Run an evaluation, test or prediction pass, alone or within `fit`.

        Args:
            evaluation: the evaluation pass.
            model: the model to evaluate.
            stage: which of Lightning's loops to run; within `fit` always the validation loop.
        """
        batches = _EvaluationBatches(evaluation, is_limited=self.plan.has_fractional_limit)
        if lightning_callbacks.find_callback(self._training_callbacks, pl.callbacks.BasePredictionWriter) is not None:
            indices = evaluation.record_batches()
            batches.batch_sampler = None if indices is None else evaluation_loops.SeenBatches(indices)
        if not self.is_fitting:
            self._evaluate_alone(evaluation, batches, model, stage)
            return
        assert self.pl_trainer is not None and self.pl_module is not None
        # limit_val_batches does not limit predictions.
        all_batches = stage == "predict"
        evaluation_loops.validate_in_fit(
            self.pl_trainer, self.pl_module, batches, evaluation, self._validation_group, all_batches
        )

    def _evaluate_alone(
        self, evaluation: EvaluationPass, batches: _EvaluationBatches, model: torch.nn.Module, stage: Stage
    ) -> None:
        """Run one of Lightning's evaluation loops outside of `fit`, maybe within another evaluation."""
        outer_run = self.pl_trainer, self.pl_module
        is_nested = self.is_evaluating
        with quiet_lightning(), lightning_callbacks.note_wrong_signatures(self.callbacks):
            # compute_metrics may start a nested evaluation, which needs a second trainer.
            if self.pl_trainer is None or is_nested:
                self.pl_trainer = self._make_pl_trainer(max_epochs=1)
            training_only = lightning_callbacks.TRAINING_ONLY
            callbacks = [callback for callback in self._training_callbacks if not isinstance(callback, training_only)]
            self.pl_trainer.callbacks = callbacks  # type: ignore[attr-defined]
            evaluation_loops.install_evaluation_loops(self.pl_trainer)
            # Lightning opens its loggers, which starts a run. Only callbacks need them here.
            self.pl_trainer.loggers = loggers = self._loggers_or_fallback() if self.callbacks else []
            self.pl_module = pl_module = TrainerModule(model)
            pl_module.evaluation_pass = evaluation
            pl_module.evaluation_loop = evaluation_loop = getattr(self.pl_trainer, f"{stage}_loop")
            self.is_evaluating = True
            options = {"return_predictions": False} if stage == "predict" else {"verbose": False}
            try:
                getattr(self.pl_trainer, stage)(pl_module, dataloaders=batches, **options)
            finally:
                # Lightning attaches a validation's loader to the loop within `fit`, too.
                for loop in (evaluation_loop, self.pl_trainer.fit_loop.epoch_loop.val_loop):
                    evaluation_loops.release_data(loop)
                self.pl_trainer.loggers = loggers
                pl_module.detach()
                self.is_evaluating = is_nested
                if is_nested:
                    self.pl_trainer, self.pl_module = outer_run

    @contextlib.contextmanager
    def evaluation_group(self) -> Iterator[dict[str, float]]:
        """Let Lightning's callbacks see the evaluations in the block as one validation, within `fit`.

        Yields:
            A dict for metrics that callbacks should see besides those of each evaluation.
        """
        metrics: dict[str, float] = {}
        if not self.is_fitting or self._validation_group is not None:
            yield metrics
            return
        group = self._validation_group = evaluation_loops.ValidationGroup()
        try:
            yield metrics
        finally:
            self._validation_group = None
        assert self.pl_trainer is not None and self.pl_module is not None
        evaluation_loops.end_group(self.pl_trainer, self.pl_module, group, metrics)

    @contextlib.contextmanager
    def apply_callback_weights(self, model: torch.nn.Module) -> Iterator[CallbackValues]:
        """Let Lightning's callbacks add to a checkpoint that is written in the block, within `fit`.

        In the block, the model holds the weights that callbacks save instead of its own.

        A nested block yields the values of the outer one.
        """
        if self._callback_values is not None or not self.is_fitting:
            yield self._callback_values or CallbackValues(None, {})
            return
        assert self.pl_trainer is not None and self.pl_module is not None
        weights, state = lightning_callbacks.collect_state(self.pl_trainer, self.pl_module, self._training_callbacks)
        # The state may hold the model's tensors, which change while other weights are in the model.
        state = copy.deepcopy(state) if weights is not None else state
        with lightning_callbacks.put_weights_into_model(model, weights) as renamed_weights:
            self._callback_values = CallbackValues(renamed_weights, state)
            try:
                yield self._callback_values
            finally:
                self._callback_values = None

    def save_lightning_checkpoint(self, path: str) -> bool:
        """Write a Lightning checkpoint of the current or last run. Returns False if there was no run."""
        if self.pl_trainer is None or self.pl_module is None or self.pl_module.make_ckpt_entry is None:
            return False
        self.pl_trainer.save_checkpoint(path)
        return True

    def show_values(self, values: Mapping[str, Any]) -> None:
        """Show the numbers of a log line in Lightning's progress bars."""
        if self.pl_trainer is not None and self.is_fitting and self.callbacks:
            evaluation_loops.show_values(self.pl_trainer, values)

    @property
    def _training_callbacks(self) -> list[pl.Callback]:
        """The callbacks, without the finders, which run before training."""
        return [callback for callback in self.callbacks if not isinstance(callback, lightning_callbacks.FINDERS)]

    @property
    def finds_batch_size(self) -> bool:
        """Whether a callback searches for the batch size."""
        return lightning_callbacks.find_callback(self.callbacks, pl.callbacks.BatchSizeFinder) is not None

    def check_callbacks(self, trainer: Trainer) -> list[str]:
        """An error message for each callback that cannot work in a run of `trainer`, our Trainer."""
        return lightning_callbacks.check_callbacks(self.callbacks, self.strategy, trainer)

    @property
    def should_stop(self) -> bool:
        """Lightning's `should_stop`, which a callback may have set; False outside of `fit`."""
        return self.pl_trainer is not None and self.is_fitting and self.pl_trainer.should_stop

    @should_stop.setter
    def should_stop(self, should_stop: bool) -> None:
        # Outside of `fit` (for a resumed run that was complete) there is nothing to stop.
        if self.pl_trainer is not None and self.is_fitting:
            self.pl_trainer.should_stop = should_stop

    def accumulation_steps_of(self, epoch: int, argument_value: int | None = None) -> int:
        """Micro-batches per optimizer step in an epoch: a callback's value, else the argument's.

        Args:
            epoch: completed passes over the data.
            argument_value: the argument's current value; None uses its value when the run started.
        """
        # Each step calls this.
        for callback in self.callbacks:
            if isinstance(callback, pl.callbacks.GradientAccumulationScheduler):
                return int(callback.get_accumulate_grad_batches(epoch))
        return self.plan.accumulate_grad_batches if argument_value is None else argument_value

    def freeze_before_training(self, model: torch.nn.Module) -> bool:
        """Let callbacks that gradually unfreeze the model freeze it now. Returns False without such a callback."""
        finetuners = [callback for callback in self.callbacks if isinstance(callback, pl.callbacks.BaseFinetuning)]
        for callback in finetuners:
            callback.freeze_before_training(TrainerModule(model))
        return bool(finetuners)

    def search_batch_size(self, steps: FinderSteps, model: torch.nn.Module) -> int | None:
        """The batch size that a `BatchSizeFinder` callback finds; None without such a callback."""
        finder = lightning_callbacks.find_callback(self.callbacks, pl.callbacks.BatchSizeFinder)
        return None if finder is None else finders.search_batch_size(self._make_pl_trainer, finder, steps, model)

    def search_learning_rate(self, steps: FinderSteps, model: torch.nn.Module) -> float | None:
        """The learning rate that a `LearningRateFinder` callback suggests; None without such a callback."""
        finder = lightning_callbacks.find_callback(self.callbacks, pl.callbacks.LearningRateFinder)
        return None if finder is None else finders.search_learning_rate(self._make_pl_trainer, finder, steps, model)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run the backward pass: by Lightning's strategy within `fit`, else by `loss.backward()`."""
        if self.is_fitting:
            pl_trainer: Any = self.pl_trainer
            strategy = pl_trainer.strategy
            with pl_trainer.profiler.profile(f"[Strategy]{type(strategy).__name__}.backward"):
                strategy.backward(loss, None, **kwargs)
        else:
            loss.backward(**kwargs)

    def _loggers_or_fallback(self) -> list[Logger]:
        """The loggers, or a fallback, since some Lightning callbacks refuse to run without a logger."""
        return self._get_loggers() or ([self._fallback_logger] if self.callbacks else [])

    def _make_pl_trainer(
        self, max_epochs: int, callbacks: list[pl.Callback] | None = None, strategy: Any = None, **settings: Any
    ) -> pl.Trainer:
        options = {"logger": False, **self.plan.trainer_keywords(), **settings}
        callbacks = self._training_callbacks if callbacks is None else callbacks
        # The strategy has the precision plugin.
        del options["precision"]
        options["accelerator"] = make_accelerator(options["accelerator"])
        plugin = options.pop("plugins", None) or []
        plugins = plugin if isinstance(plugin, list) else [plugin]
        if find_plugin(plugins, "ClusterEnvironment") is None:
            plugins = [LaunchedEnvironment(self.plan.processes), *plugins]
        options["profiler"] = callback_hooks.copy_profiler(options.get("profiler", callback_hooks.NoProfiler()))
        return TrainerWithoutSignals(
            **options,
            strategy=strategy or self.strategy.make_lightning_strategy(StrategySettings(self.scaler)),
            max_epochs=max_epochs,
            # Never: the Trainer's callbacks decide when to evaluate.
            check_val_every_n_epoch=sys.maxsize,
            num_sanity_val_steps=0,
            callbacks=callbacks,
            plugins=plugins,
            enable_checkpointing=any(isinstance(callback, pl.callbacks.Checkpoint) for callback in callbacks),
            enable_progress_bar=has_progress_bar(callbacks),
            enable_model_summary=False,
            use_distributed_sampler=False,
            inference_mode=False,
        )


class _EvaluationBatches:
    """The batches of an evaluation. Not a `DataLoader`, which Lightning would rebuild with other samplers.

    The iterator is created at the first batch. Lightning calls `iter()` once more as a check, but a `DataLoader` draws
    from torch's generator each time.

    Args:
        evaluation: yields the batches.
        is_limited: whether only a fraction of them is used, which needs a length, even an estimated one.
    """

    #: Prediction writers read the sample indices of each batch from this attribute.
    batch_sampler: evaluation_loops.SeenBatches | None = None

    def __init__(self, evaluation: EvaluationPass, *, is_limited: bool) -> None:
        self.evaluation = evaluation
        self._is_limited = is_limited

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self.evaluation)
        sentinel = object()
        while True:
            # Lightning disables gradients, but collators may need them.
            with torch.enable_grad():
                batch = next(iterator, sentinel)
            if batch is sentinel:
                return
            yield batch

    def __len__(self) -> int:
        if not (self._is_limited or self.evaluation.has_exact_length):
            raise TypeError("the length is an estimate, at which Lightning would stop")
        return len(self.evaluation)
