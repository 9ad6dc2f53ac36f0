"""Metrics of an evaluation: a function of the whole set, a function per batch, or torchmetrics on the device."""

from __future__ import annotations

import importlib.util
import inspect
import os
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from hftrainer.compat import peers
from hftrainer.compat.overrides import accepts, takes
from hftrainer.errors import InvalidArgument
from hftrainer.trainer_pt_utils import without_rows
from hftrainer.trainer_utils import EvalPrediction, denumpify_detensorize


class WholeSetMetrics:
    """A function of all outputs of an evaluation, called once at the end; or no metrics.

    Args:
        function: `EvalPrediction` of arrays → dict of metrics, or None.
    """

    needs_whole_set = True
    needs_batches = False
    needs_own_rows = False

    def __init__(self, function: Callable[[EvalPrediction], Mapping[str, Any]] | None) -> None:
        self.function = function

    def begin(self) -> None:
        """Nothing to reset."""

    def add_own(self, prediction: EvalPrediction, filler: bool) -> None:
        """Does nothing: only the whole set is used."""

    def add_gathered(self, prediction: EvalPrediction, last: bool) -> None:
        """Does nothing, as `add_own`."""

    def compute(self, whole: EvalPrediction, gather: Callable[..., Any]) -> dict[str, Any]:
        """The metrics of the whole set, if it has predictions and labels."""
        if self.function is None or whole.predictions is None or whole.label_ids is None:
            return {}
        return _by_name(_call(self.function, whole))


class BatchedMetrics(WholeSetMetrics):
    """A function called with each batch, which keeps its own state: `batch_eval_metrics` (since v4.42).

    Args:
        function: `(EvalPrediction of tensors, compute_result)` → the metrics when `compute_result` is True.
    """

    needs_whole_set = False
    needs_batches = True

    def begin(self) -> None:
        """Forget the last result."""
        self.result: Mapping[str, Any] | None = None

    def add_gathered(self, prediction: EvalPrediction, last: bool) -> None:
        """Call the function with the batch gathered from all processes."""
        assert self.function is not None
        if prediction.predictions is not None and prediction.label_ids is not None:
            self.result = _call(self.function, prediction, compute_result=last)

    def compute(self, whole: EvalPrediction, gather: Callable[..., Any]) -> dict[str, Any]:
        """The function's result for the last batch."""
        return _by_name(self.result or {})


def _call(function: Callable[..., Any], prediction: EvalPrediction, **keywords: Any) -> Any:
    if not takes(function, prediction, **keywords):
        raise InvalidArgument(
            f"compute_metrics gets one argument, an EvalPrediction, and yours takes {inspect.signature(function)}. "
            "Write `def compute_metrics(prediction): logits, labels = prediction`."
        )
    return function(prediction, **keywords)


def _by_name(result: Any) -> dict[str, Any]:
    """What `compute_metrics` returned, if it is a dict with names as keys."""
    if not isinstance(result, Mapping) or not all(isinstance(name, str) for name in result):
        raise InvalidArgument(
            f"compute_metrics returned {reprlib.repr(result)}: it must return a dict with a name for each metric."
        )
    return dict(result)


class TorchMetrics:
    """Metrics of torchmetrics, updated batch by batch on the device: memory does not grow with the number of samples.

    Pass it as `compute_metrics`. A bare `Metric`, a `MetricCollection` or a dict of them is the same as
    `TorchMetrics(metric)`. torchmetrics itself synchronizes the processes.

    Args:
        metrics: a `torchmetrics.Metric`, a `MetricCollection`, or a dict of them by name.
        adapter: `EvalPrediction` of one batch's tensors → `(preds, target)`, or a dict of the keywords of `update`.
            Default: predictions and labels, unchanged.
        plot: plot each metric after every evaluation, to `{output_dir}/plots-{global_step}/{prefix}_{name}.png`.

    Raises:
        InvalidArgument: when `metrics` holds something else, or with `plot` when matplotlib is missing.
    """

    needs_whole_set = False
    needs_batches = False
    needs_own_rows = True

    def __init__(
        self, metrics: Any, adapter: Callable[[EvalPrediction], Any] | None = None, plot: bool = False
    ) -> None:
        from torchmetrics import Metric, MetricCollection

        found = list(metrics.items()) if isinstance(metrics, Mapping) else [("metrics", metrics)]
        for name, metric in found:
            if not isinstance(metric, (Metric, MetricCollection)):
                raise InvalidArgument(
                    f"compute_metrics[{name!r}] is a {type(metric).__name__}; a dict of metrics may hold only "
                    "torchmetrics. To use a function, pass the function itself."
                )
        if not found:
            raise InvalidArgument("compute_metrics is an empty dict: add at least one metric, or remove it.")
        if plot and importlib.util.find_spec("matplotlib") is None:
            raise InvalidArgument("plot=True needs matplotlib, which is missing: pip install matplotlib")
        is_collection = isinstance(metrics, MetricCollection)
        self.collection = metrics if is_collection else MetricCollection(metrics)
        self.adapter = adapter
        self.plot = plot
        self.begin()

    def begin(self) -> None:
        """Forget the last evaluation."""
        self.collection.reset()
        self._updates = 0
        self._first: Any = None
        self._drawn: dict[str, Any] = {}

    def gather_by(self, parts: Callable[..., list[torch.Tensor]]) -> None:
        """Gather states with `parts`, in place of torchmetrics' own function: a tensor → those of distinct ranks."""
        for metric in self.collection.values(copy_state=False):
            metric.dist_sync_fn = parts

    def add_own(self, prediction: EvalPrediction, filler: bool) -> None:
        """Update with this process's batch, unless it is a filler."""
        if prediction.predictions is None or (self.adapter is None and prediction.label_ids is None):
            return
        arguments = self.adapter(prediction) if self.adapter is not None else _pair(prediction)
        if not self._updates:
            self._first = without_rows(arguments, lists_of_samples=True) if filler else arguments
        if not filler:
            self._update(arguments)
            self._updates += 1
        if self._updates > 1:
            self._first = None

    def _update(self, arguments: Any) -> None:
        if not self._updates and (device := _device_of(arguments)) is not None:
            self.collection.to(device)
        if isinstance(arguments, Mapping):
            self.collection.update(**arguments)
        else:
            self.collection.update(*arguments)

    def add_gathered(self, prediction: EvalPrediction, last: bool) -> None:
        """Does nothing: torchmetrics gathers states, not batches."""

    def compute(self, whole: EvalPrediction, gather: Callable[..., Any]) -> dict[str, Any]:
        """The metrics over all processes: numbers, or lists for metrics with several values."""
        if not self._updates and self._first is None:
            return {}
        if (gather(np.array([self._updates])) > 0).all():
            return self._values()
        # A process without batches has no states of the right shapes to gather. All others then have only one batch.
        arguments = gather(self._first, objects=True)
        self.collection.reset()
        self._update(arguments)
        asked = {metric: metric.distributed_available_fn for metric in self.collection.values(copy_state=False)}
        try:
            for metric in asked:
                metric.distributed_available_fn = _never  # every process has all rows
            return self._values()
        finally:
            for metric, is_distributed in asked.items():
                metric.distributed_available_fn = is_distributed

    def _values(self) -> dict[str, Any]:
        values = self.collection.compute()
        if self.plot:  # in every process: a metric that does not cache its value is synchronized again
            self._drawn = {name: metric.compute() for name, metric in self.collection.items()}
        return {name: _plain(value) for name, value in values.items()}

    def draw(self, folder: str, prefix: str) -> None:
        """Write a plot of each metric's last value."""
        import matplotlib.pyplot as plt

        os.makedirs(folder, exist_ok=True)
        for name, metric in self.collection.items():
            figure, _ = metric.plot(self._drawn[name])
            figure.savefig(os.path.join(folder, f"{prefix}_{name}.png"))
            plt.close(figure)


def _never() -> bool:
    return False


def as_metrics(compute_metrics: Any, *, by_batch: bool = False) -> WholeSetMetrics | TorchMetrics:
    """Wrap `compute_metrics` in `WholeSetMetrics`, `BatchedMetrics` or `TorchMetrics`.

    Args:
        compute_metrics: the Trainer's argument.
        by_batch: `batch_eval_metrics`.

    Raises:
        InvalidArgument: when it fits none of these.
    """
    if isinstance(compute_metrics, TorchMetrics):
        return compute_metrics
    if peers.is_torchmetric(compute_metrics) or isinstance(compute_metrics, Mapping):
        return TorchMetrics(compute_metrics)
    if compute_metrics is not None and not callable(compute_metrics):
        raise InvalidArgument(
            f"compute_metrics must be a function, a torchmetrics Metric or MetricCollection, or a dict of these, got "
            f"{type(compute_metrics).__name__}."
        )
    if compute_metrics is None or not by_batch:
        return WholeSetMetrics(compute_metrics)
    called = compute_metrics if inspect.isroutine(compute_metrics) else type(compute_metrics).__call__
    if not accepts(called, "compute_result"):
        raise InvalidArgument(
            "batch_eval_metrics=True calls compute_metrics(prediction, compute_result=...) for every batch, but yours "
            "does not take compute_result: add it, or remove batch_eval_metrics."
        )
    return BatchedMetrics(compute_metrics)


def _pair(prediction: EvalPrediction) -> tuple[Any, Any]:
    predictions, labels = prediction.predictions, prediction.label_ids
    for name, given in (("outputs", predictions), ("labels", labels)):
        if not isinstance(given, torch.Tensor):
            raise InvalidArgument(
                f"torchmetrics takes one tensor of predictions and one of labels, but the model's {name} are a "
                f"{type(given).__name__}: select one, as in "
                "TorchMetrics(metric, adapter=lambda p: (p.predictions[0], p.label_ids))."
            )
    return predictions, labels


def _device_of(data: Any) -> torch.device | None:
    if isinstance(data, torch.Tensor):
        return data.device
    values = data.values() if isinstance(data, Mapping) else data if isinstance(data, (list, tuple)) else ()
    return next((device for value in values if (device := _device_of(value)) is not None), None)


def _plain(value: Any) -> Any:
    value = denumpify_detensorize(value)
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return {name: _plain(item) for name, item in value.items()} if isinstance(value, Mapping) else value
