"""The callbacks that decide when to log, evaluate, save and stop."""

from __future__ import annotations

import logging
from typing import Any

from hftrainer.arguments.choices import IntervalStrategy, SaveStrategy
from hftrainer.arguments.resolved import ResolvedArguments
from hftrainer.callbacks.state import ExportableState, TrainerCallback, evaluation_key
from hftrainer.errors import MissingMonitoredMetric

logger = logging.getLogger(__name__)


class DefaultFlowCallback(TrainerCallback):
    """Requests logging, evaluation, saving and stopping from the arguments, as the followed release does."""

    def on_step_end(self, args, state, control, **kwargs):
        """Decide what is due at this optimizer step."""
        step = state.global_step
        if (step == 1 and args.logging_first_step) or _is_due(args.logging_strategy, step, state.logging_steps):
            control.should_log = True
        can_evaluate = args.eval_strategy == IntervalStrategy.STEPS and args.eval_delay <= step
        control.should_evaluate |= can_evaluate and _is_due(args.eval_strategy, step, state.eval_steps)
        control.should_save |= _is_due(args.save_strategy, step, state.save_steps)
        if step >= state.max_steps:
            control.should_training_stop = True
            policy = ResolvedArguments.from_args(args).policy
            control.should_evaluate |= can_evaluate and policy.evaluates_last_step
            control.should_save |= args.save_strategy in policy.saves_last_step_with
        return control

    def on_epoch_end(self, args, state, control, **kwargs):
        """Decide what is due at the end of this epoch."""
        control.should_log |= args.logging_strategy == IntervalStrategy.EPOCH
        control.should_evaluate |= args.eval_strategy == IntervalStrategy.EPOCH and args.eval_delay <= state.epoch
        control.should_save |= args.save_strategy == SaveStrategy.EPOCH
        return control


#: The callbacks of every Trainer. A script may change the list, or replace it in `transformers.trainer`.
DEFAULT_CALLBACKS: list[Any] = [DefaultFlowCallback]


def _is_due(strategy: IntervalStrategy | SaveStrategy, step: int, interval: float) -> bool:
    return strategy == IntervalStrategy.STEPS and interval > 0 and step % interval == 0


class EarlyStoppingCallback(TrainerCallback, ExportableState):
    """Stops training when `metric_for_best_model` has stopped improving.

    Args:
        early_stopping_patience: consecutive evaluations without improvement before training stops.
        early_stopping_threshold: smallest difference to the best value that counts as an improvement, in metric units.
    """

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float | None = 0.0) -> None:
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold
        self.early_stopping_patience_counter = 0
        self.in_multi_set_evaluation = False

    def on_train_begin(self, args, state, control, **kwargs):
        """Check that training will report the metric.

        Raises:
            MissingMonitoredMetric: without `metric_for_best_model`, or without evaluation.
        """
        if args.metric_for_best_model is None:
            raise MissingMonitoredMetric("EarlyStoppingCallback requires metric_for_best_model, such as 'loss'.")
        if args.eval_strategy == IntervalStrategy.NO:
            raise MissingMonitoredMetric(
                "EarlyStoppingCallback requires IntervalStrategy of steps or epoch: set eval_strategy."
            )
        if not args.load_best_model_at_end:
            logger.warning(
                "EarlyStoppingCallback without load_best_model_at_end: the final model is the last one, not the best."
            )

    def check_metric_value(self, args, state, control, metric_value):
        """Count an evaluation without improvement, or reset the count. Override it for another rule."""
        if self._is_improvement(args, state, metric_value):
            self.early_stopping_patience_counter = 0
        else:
            self.early_stopping_patience_counter += 1

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        """Count evaluations without improvement, and stop training when `early_stopping_patience` is reached."""
        value = (metrics or {}).get(evaluation_key(args.metric_for_best_model))
        if value is not None:
            self.check_metric_value(args, state, control, value)
            if self.early_stopping_patience_counter >= self.early_stopping_patience:
                control.should_training_stop = True
        elif not self.in_multi_set_evaluation:
            logger.warning(
                "early stopping required metric_for_best_model: %s is not among the metrics %s, so early "
                "stopping is skipped.",
                args.metric_for_best_model,
                sorted(metrics or {}),
            )

    def _is_improvement(self, args, state, value: float) -> bool:
        if state.best_metric is None:
            return True
        gain = value - state.best_metric if args.greater_is_better else state.best_metric - value
        return gain > 0 and gain > (self.early_stopping_threshold or 0.0)

    def state(self) -> dict[str, Any]:
        """Patience, threshold and the current count."""
        return {
            "args": {
                "early_stopping_patience": self.early_stopping_patience,
                "early_stopping_threshold": self.early_stopping_threshold,
            },
            "attributes": {"early_stopping_patience_counter": self.early_stopping_patience_counter},
        }
