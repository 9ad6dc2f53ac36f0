"""Metrics of an evaluation: a function of all outputs or of each batch, or torchmetrics."""

from __future__ import annotations

import inspect
import logging
import math
import reprlib
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from hftrainer.base.messages import log_once
from hftrainer.base.nested import drop_all_rows, iterate_arrays
from hftrainer.base.signatures import accepts, can_call
from hftrainer.base.tracebacks import add_note, describe_shapes, describe_type
from hftrainer.compat import libraries
from hftrainer.errors import InvalidArgument
from hftrainer.parallel import devices
from hftrainer.trainer_utils import EvalPrediction, denumpify_detensorize

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection

    AnyTorchMetric = Metric | MetricCollection | Mapping[str, Metric | MetricCollection]
    #: What the Trainer takes as `compute_metrics`.
    ComputeMetrics: TypeAlias = "Callable[..., Mapping[str, Any]] | AnyTorchMetric | TorchMetrics"

logger = logging.getLogger(__name__)


class FunctionMetrics:
    """Metrics from a function of all outputs or of each batch, or no metrics.

    Args:
        function: `EvalPrediction` of arrays → dict of metrics, or None.
        is_batchwise: call `function(EvalPrediction of tensors, compute_result)` with each batch instead. The function
            keeps its state, and returns the metrics when `compute_result` is True: `batch_eval_metrics` (since v4.42).
    """

    def __init__(self, function: Callable[..., Any] | None, is_batchwise: bool = False) -> None:
        self.function = function
        self.is_batchwise = is_batchwise
        self.reset()

    def reset(self) -> None:
        """Forget the last evaluation."""
        self._result: Any = {}

    def update(self, batch: EvalPrediction, is_last: bool) -> None:
        """Call a function per batch with a batch gathered from all ranks."""
        if self.is_batchwise:
            self._call_function(batch, compute_result=is_last)

    def compute(self, prediction: EvalPrediction, gather: Callable[..., Any]) -> dict[str, Any]:
        """The metrics of all outputs, or the result for the last batch. Empty without predictions and labels."""
        if not self.is_batchwise:
            self._call_function(prediction)
        metrics = self._result
        if self.is_batchwise and not metrics:
            return {}
        if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
            raise InvalidArgument(
                f"compute_metrics returned {reprlib.repr(metrics)}: it must return a dict with a name for each metric."
            )
        for name, value in metrics.items():
            if (size := math.prod(getattr(value, "shape", ()))) > 1:
                log_once(logger, f"compute_metrics[{name!r}] is an array of {size}: return a number.")
        return dict(metrics)

    def _call_function(self, prediction: EvalPrediction, **keywords: Any) -> None:
        if self.function is None or prediction.predictions is None or prediction.label_ids is None:
            return
        if not can_call(self.function, prediction, **keywords):
            raise InvalidArgument(
                "compute_metrics is called with one argument, an EvalPrediction, but yours takes "
                f"{inspect.signature(self.function)}. "
                "Write `def compute_metrics(prediction): logits, labels = prediction`."
            )
        try:
            self._result = self.function(prediction, **keywords)
        except Exception as error:
            given = {"predictions": prediction.predictions, "label_ids": prediction.label_ids}
            add_note(error, f"This happened while compute_metrics ran, with {describe_shapes(given)}.")
            raise


class TorchMetrics:
    """Metrics of torchmetrics, updated batch by batch on the device, in constant memory.

    Pass it as `compute_metrics`. A bare `Metric`, a `MetricCollection` or a dict of them is the same as
    `TorchMetrics(metric)`. torchmetrics itself synchronizes the processes.

    Args:
        metrics: a `torchmetrics.Metric`, a `MetricCollection`, or a dict of them by name.
        adapter: `EvalPrediction` of one batch's tensors → `(preds, target)`, or a dict of keyword arguments of
            `update`. Default: predictions and labels, unchanged.

    Raises:
        InvalidArgument: when `metrics` holds any other object, or nothing.
    """

    def __init__(self, metrics: AnyTorchMetric, adapter: Callable[[EvalPrediction], Any] | None = None) -> None:
        from torchmetrics import Metric, MetricCollection

        if isinstance(metrics, Mapping):
            metrics = dict(metrics)  # torchmetrics takes no other mapping
        named_metrics = list(metrics.items()) if isinstance(metrics, dict) else [("metrics", metrics)]
        for name, metric in named_metrics:
            _refuse_class(f"compute_metrics[{name!r}]", metric)
            if not isinstance(metric, (Metric, MetricCollection)):
                raise InvalidArgument(
                    f"compute_metrics[{name!r}] is {describe_type(metric)}, but a dict of metrics may hold only "
                    "torchmetrics. To use a function, pass the function itself."
                )
        if not named_metrics:
            raise InvalidArgument("compute_metrics is an empty dict: add at least one metric, or remove it.")
        self.collection = metrics if isinstance(metrics, MetricCollection) else MetricCollection(metrics)
        self.adapter = adapter
        self.reset()

    def reset(self) -> None:
        """Forget the last evaluation."""
        self.collection.reset()
        self._updates = 0
        self._first_arguments: Any = None

    def set_gather_function(self, gather: Callable[..., list[torch.Tensor]]) -> None:
        """Gather metric states with `gather` (tensor → tensors of distinct ranks), not with torchmetrics."""
        for metric in self.collection.values(copy_state=False):
            metric.dist_sync_fn = gather

    def update(self, prediction: EvalPrediction, is_filler: bool) -> None:
        """Update the metrics with this rank's batch, unless it is a filler."""
        if prediction.predictions is None or (self.adapter is None and prediction.label_ids is None):
            return
        arguments = self.adapter(prediction) if self.adapter is not None else _predictions_and_labels(prediction)
        if not self._updates:
            self._first_arguments = drop_all_rows(arguments, lists_of_samples=True) if is_filler else arguments
        if not is_filler:
            self._update_collection(arguments)
            self._updates += 1
        if self._updates > 1:
            self._first_arguments = None

    def _update_collection(self, arguments: Any) -> None:
        tensors = (array for array in iterate_arrays(arguments) if isinstance(array, torch.Tensor))
        if not self._updates and (first := next(tensors, None)) is not None:
            self.collection.to(first.device)
        try:
            if isinstance(arguments, Mapping):
                self.collection.update(**arguments)
            else:
                self.collection.update(*arguments)
        except Exception as error:
            text = describe_shapes(arguments if isinstance(arguments, Mapping) else tuple(arguments))
            adjective = "smaller" if devices.is_out_of_memory(error) else "other"
            called = [id(frame.f_locals.get("self")) for frame, _ in traceback.walk_tb(error.__traceback__)]
            metrics = self.collection.items(keep_base=True, copy_state=False)
            names = [f"{name} ({type(metric).__name__})" for name, metric in metrics if id(metric) in called]
            advice = f"Select {adjective} tensors with TorchMetrics(metrics, adapter=...)."
            add_note(error, f"{', '.join(names) or 'The metrics'} got {text}. {advice}")
            raise

    def compute(self, prediction: EvalPrediction, gather: Callable[..., Any]) -> dict[str, Any]:
        """The metrics over all processes: numbers, or lists for metrics with several values."""
        if not self._updates and self._first_arguments is None:
            return {}
        if (gather(np.array([self._updates])) > 0).all():
            return self._compute_values()
        # A rank without batches has no states of the right shapes. Every other rank then has one batch, so gather the
        # batches instead.
        arguments = gather(self._first_arguments, objects=True)
        self.collection.reset()
        self._update_collection(arguments)
        available_fns = {metric: metric.distributed_available_fn for metric in self.collection.values(copy_state=False)}
        try:
            for metric in available_fns:
                # Every rank has all rows, so torchmetrics must not gather.
                metric.distributed_available_fn = lambda: False
            return self._compute_values()
        finally:
            for metric, is_distributed in available_fns.items():
                metric.distributed_available_fn = is_distributed

    def _compute_values(self) -> dict[str, Any]:
        return {name: _to_plain_values(value) for name, value in self.collection.compute().items()}


def _refuse_class(argument: str, value: Any) -> None:
    if isinstance(value, type) and hasattr(value, "compute"):
        raise InvalidArgument(f"{argument} is the class {value.__name__}: pass an instance, {value.__name__}(...).")


def as_metrics(compute_metrics: Any, *, is_batchwise: bool = False) -> FunctionMetrics | TorchMetrics:
    """Wrap `compute_metrics` in `FunctionMetrics` or `TorchMetrics`.

    Args:
        compute_metrics: the Trainer's argument.
        is_batchwise: `batch_eval_metrics`.

    Raises:
        InvalidArgument: when `compute_metrics` is neither a function nor metrics of torchmetrics.
    """
    if isinstance(compute_metrics, TorchMetrics):
        return compute_metrics
    _refuse_class("compute_metrics", compute_metrics)
    # For a function, `isinstance` would ask all classes that derive from Mapping: half a second with many libraries.
    is_function = inspect.isroutine(compute_metrics)
    if not is_function and (libraries.is_torchmetric(compute_metrics) or isinstance(compute_metrics, Mapping)):
        return TorchMetrics(compute_metrics)
    if compute_metrics is not None and not callable(compute_metrics):
        raise InvalidArgument(
            f"compute_metrics must be one function, which may call others, a torchmetrics Metric or MetricCollection, "
            f"or a dict of these metrics, got {type(compute_metrics).__name__}."
        )
    if compute_metrics is None or not is_batchwise:
        return FunctionMetrics(compute_metrics)
    method = compute_metrics if is_function else type(compute_metrics).__call__
    if not accepts(method, "compute_result"):
        raise InvalidArgument(
            "batch_eval_metrics=True calls compute_metrics(prediction, compute_result=...) for every batch, but yours "
            "does not accept compute_result: add it, or remove batch_eval_metrics."
        )
    return FunctionMetrics(compute_metrics, is_batchwise=True)


def _predictions_and_labels(prediction: EvalPrediction) -> tuple[Any, Any]:
    predictions = prediction.predictions
    labels = prediction.label_ids
    for name, value in (("outputs", predictions), ("labels", labels)):
        if not isinstance(value, torch.Tensor):
            raise InvalidArgument(
                f"torchmetrics needs one tensor of predictions and one of labels, but the model's {name} are a "
                f"{type(value).__name__}: select one, as in "
                "TorchMetrics(metric, adapter=lambda p: (p.predictions[0], p.label_ids))."
            )
    return predictions, labels


def _to_plain_values(value: Any) -> Any:
    value = denumpify_detensorize(value)
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_to_plain_values(item) for item in value]
    return {name: _to_plain_values(item) for name, item in value.items()} if isinstance(value, Mapping) else value
