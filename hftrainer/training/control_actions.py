"""Logs, evaluates and saves after an optimizer step or an epoch, as requested."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import torch

from hftrainer.arguments.choices import SaveStrategy
from hftrainer.base.part import Part
from hftrainer.base.signatures import call_with_accepted, has_parameter
from hftrainer.callbacks.flow_callbacks import EarlyStoppingCallback
from hftrainer.callbacks.state import evaluation_key
from hftrainer.checkpointing import layout
from hftrainer.compat.overrides import is_overridden
from hftrainer.errors import InvalidArgument, MetricNotFound
from hftrainer.optimizers.schedules import needs_metric
from hftrainer.parallel.devices import is_out_of_memory
from hftrainer.reporting.metrics import get_metric, mean_loss


class ControlActions(Part):
    """Logs, evaluates and saves, in this order, as the control flags request.

    Callbacks set the flags, by the arguments in `callbacks/flow_callbacks.py`.
    """

    def log_if_requested(
        self, tr_loss: torch.Tensor, grad_norm: Any, learning_rate: float | None, start_time: float | None
    ) -> None:
        """Write a log line, unless this step has one; None stands for the loop's value."""
        loop = self.run.loop
        if loop is not None:
            grad_norm = loop.grad_norm if grad_norm is None else grad_norm
            learning_rate = loop.learning_rate if learning_rate is None else learning_rate
            start_time = loop.start_time if start_time is None else start_time
        if self.trainer.control.should_log and self.trainer.state.global_step > self.run.attempt.last_logged_step:
            self._log_training_loss(tr_loss, grad_norm, learning_rate, start_time)
            self._sync_flags()

    def evaluate_if_requested(self, trial: Any, ignore_keys: list[str] | None) -> dict[str, float] | None:
        """Evaluate, and judge whether this step is the best. Returns the metrics; None without an evaluation."""
        trainer = self.trainer
        if not trainer.control.should_evaluate:
            return None
        with self.run.measure_activity("evaluation"):
            metrics = trainer._evaluate(trial, ignore_keys)
        self.run.attempt.evaluation_metrics = metrics
        is_new_best = trainer._determine_best_metric(metrics=metrics, trial=trial)
        if trainer.args.save_strategy == SaveStrategy.BEST:
            trainer.control.should_save = is_new_best
        self._sync_flags()
        return metrics

    def save_if_requested(self, model: Any, trial: Any, metrics: dict[str, float] | None) -> None:
        """Save a checkpoint. Until v4.45, overrides accept the metrics of this step's evaluation."""
        if self.trainer.control.should_save:
            # Do not pass the metrics through **kwargs, since an inner override may not accept them.
            save = self.trainer._save_checkpoint
            needs_metrics = is_overridden(self.trainer, "_save_checkpoint") and has_parameter(save, "metrics")
            with self.run.measure_activity("saving"):
                save(model, trial, **({"metrics": metrics} if needs_metrics else {}))
                self.parts.checkpoint_saver.call_on_save()
            self._sync_flags()

    def _sync_flags(self) -> None:
        """Synchronize the control flags of all ranks."""
        if self.run.loop is not None:
            self.run.loop.flag_sync.sync_now()

    def _log_training_loss(
        self, tr_loss: torch.Tensor, grad_norm: Any, learning_rate: float | None, start_time: float | None
    ) -> None:
        """Log the mean loss since the last log line, and reset the sum."""
        attempt, loop = self.run.attempt, self.run.loop
        steps = self.trainer.state.global_step - attempt.last_logged_step
        loss = self.trainer.accelerator.gather(tr_loss).mean() if self.trainer.args.world_size > 1 else tr_loss
        interval_loss, metrics = attempt.logged_metrics.pop(loss, steps)
        # As in transformers, NaN stays NaN, which `zero_()` would reset.
        tr_loss -= tr_loss
        self.parts.strategy.run_recorded_xla_operations()
        logs: dict[str, float] = {"loss": self.parts.policy.logged_loss(interval_loss / steps)}
        if grad_norm is not None:
            logs["grad_norm"] = grad_norm.item() if isinstance(grad_norm, torch.Tensor) else grad_norm
        logs["learning_rate"] = learning_rate if learning_rate is not None else self.trainer._get_learning_rate()
        logs |= metrics
        if loop is not None:
            logs |= loop.monitors.log_values(steps)
        attempt.loss_up_to_log += interval_loss
        attempt.last_logged_step = self.trainer.state.global_step
        self.trainer.store_flos()
        call_with_accepted(self.trainer.log, logs, start_time=start_time)

    def evaluate(self, trial: Any, ignore_keys: list[str] | None, *, steps_schedule: bool) -> dict[str, float]:
        """Evaluate during training, and step a metric-driven schedule with `steps_schedule`."""
        trainer = self.trainer
        self.run.attempt.has_unfinished_evaluation = True
        try:
            with self.parts.engine.evaluation_group() as lightning_metrics:
                if isinstance(trainer.eval_dataset, Mapping):
                    metrics = self._evaluate_sets(trainer.eval_dataset, ignore_keys)
                else:
                    metrics = trainer.evaluate(ignore_keys=ignore_keys)
                lightning_metrics |= metrics
        except Exception as error:
            if not (trainer.args.auto_find_batch_size and is_out_of_memory(error)):
                raise
            raise InvalidArgument(
                "The evaluation did not fit into memory; auto_find_batch_size changes training batches only: reduce "
                f"per_device_eval_batch_size={trainer.args.per_device_eval_batch_size}."
            ) from error
        self.run.attempt.has_unfinished_evaluation = False
        if trainer.args.metric_for_best_model is not None or needs_metric(trainer.lr_scheduler):
            # Metrics may differ between ranks, if they are random or computed from a part of the data.
            rank_metrics = metrics
            metrics = trainer.accelerator.processes.broadcast_from_main(lambda: rank_metrics)
        trainer._report_to_hp_search(trial, trainer.state.global_step, metrics)
        if needs_metric(trainer.lr_scheduler) and steps_schedule:
            trainer.lr_scheduler.step(get_metric(metrics, trainer.args.metric_for_best_model or "loss"))
        return metrics

    def _evaluate_sets(self, sets: Mapping[str, Any], ignore_keys: list[str] | None) -> dict[str, float]:
        """Evaluate several sets. Early stopping may monitor a metric of one set, or the mean loss."""
        callbacks = self.trainer.callback_handler.callbacks
        stoppers = [callback for callback in callbacks if isinstance(callback, EarlyStoppingCallback)]
        for callback in stoppers:
            callback.in_multi_set_evaluation = True
        try:
            set_metrics = self.trainer.evaluate(ignore_keys=ignore_keys)
        finally:
            for callback in stoppers:
                callback.in_multi_set_evaluation = False
        metrics = mean_loss(set_metrics, sets, "eval") | set_metrics
        if evaluation_key(self.trainer.args.metric_for_best_model or "loss") not in set_metrics:
            for callback in stoppers:
                callback.on_evaluate(self.trainer.args, self.trainer.state, self.trainer.control, metrics=metrics)
        return metrics

    def check_best_metric(self) -> None:
        """Reject a metric that no evaluation can return. transformers fails at the first evaluation.

        Raises:
            MetricNotFound: without `compute_metrics`, for anything but the loss and speeds.
        """
        args = self.trainer.args
        trainer = self.trainer
        metric = args.metric_for_best_model or "loss"
        is_built_in = "mem_" in metric or metric.endswith(("loss", "runtime", "per_second", "time"))
        handlers = [getattr(type(callback), "on_evaluate", None) for callback in trainer.callback_handler.callbacks]
        adds_metrics = is_overridden(trainer, "evaluate", "evaluation_loop", "_evaluate", "log") or any(
            not getattr(handler, "__module__", "").startswith(("hftrainer", "transformers")) for handler in handlers
        )
        if args.eval_strategy != "no" and trainer.compute_metrics is None and not (is_built_in or adds_metrics):
            raise MetricNotFound(
                f"metric_for_best_model={metric!r}: compute_metrics is not given, so evaluation returns only "
                "eval_loss, eval_runtime, eval_samples_per_second, eval_steps_per_second. Pass it, or another metric."
            )

    def determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Record the metric if it is the best so far, and return whether it is.

        Raises:
            MetricNotFound: when evaluation does not return the metric; the error names those that it returns.
        """
        args = self.trainer.args
        state = self.trainer.state
        if args.metric_for_best_model is None:
            return False
        value = get_metric(metrics, args.metric_for_best_model)
        if state.best_metric is None:
            state.best_metric = -math.inf if args.greater_is_better else math.inf
        if not (value > state.best_metric if args.greater_is_better else value < state.best_metric):
            return False
        state.best_metric = value
        if not self.parts.policy.records_best_step:
            folder = f"{layout.PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            state.best_model_checkpoint = os.path.join(self.trainer._get_output_dir(trial), folder)
        if args.save_strategy != SaveStrategy.NO:
            state.best_global_step = state.global_step
        return True
