"""`EvaluationPass`: the work of `Trainer.evaluation_loop`, for each batch and at the end."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from hftrainer.base.nested import drop_all_rows, find_batch_size
from hftrainer.base.part import temporary_attributes
from hftrainer.base.signatures import can_call
from hftrainer.base.tracebacks import note_batch
from hftrainer.compat.libraries import has_length
from hftrainer.data.loaders import BatchPosition, PreparedDataLoader
from hftrainer.data.samplers import has_exact_length
from hftrainer.errors import InvalidArgument
from hftrainer.evaluation.collecting import OutputCollector, can_skip_gathering
from hftrainer.evaluation.metrics import FunctionMetrics, TorchMetrics, as_metrics
from hftrainer.trainer_utils import EvalLoopOutput, EvalPrediction, denumpify_detensorize

if TYPE_CHECKING:
    from hftrainer.assembly.trainer_parts import TrainerParts


@dataclass(eq=False, repr=False)
class EvaluationPass:
    """A pass over an evaluation or test set. One of Lightning's loops runs it batch by batch.

    Args:
        parts: the parts of the Trainer.
        dataloader: the batches.
        predict: `Trainer.prediction_step` of the model: inputs → `(loss, logits, labels)`, each possibly None.
        prefix: prefix of each metric's name, before an underscore.
        returns_predictions: whether to keep the predictions even if the metrics do not need them.
        loss_only: whether only the loss is predicted.
        ignore_keys: outputs of the model to exclude; None excludes those that the model's config names.

    Attributes:
        metrics: the metrics to compute.
        preparation_time: seconds that preparing the model took, for the metrics; measured here if it is NaN.
        output: the result, once the pass has finished.
        has_labels: whether a batch had all labels.
        has_metrics: whether there are metrics besides the loss.
    """

    parts: TrainerParts
    dataloader: Any
    predict: Callable[..., tuple[Any, Any, Any]]
    prefix: str
    returns_predictions: bool
    loss_only: bool
    ignore_keys: list[str] | None

    def __post_init__(self) -> None:
        self.trainer = trainer = self.parts.trainer
        self.args = args = trainer.args
        self.metrics = as_metrics(trainer.compute_metrics, is_batchwise=args.batch_eval_metrics)
        processes = trainer.accelerator.processes
        if isinstance(self.metrics, TorchMetrics) and processes.tp_size > 1:
            self.metrics.set_gather_function(processes.gather_for_torchmetrics)
        self.preparation_time: float | None = getattr(trainer, "model_preparation_time", None)
        self.seen_samples = self.seen_batches = 0
        self.output: EvalLoopOutput | None = None
        self.has_labels = self.has_metrics = False
        preprocess: Any = trainer.preprocess_logits_for_metrics
        self._preprocess_logits = preprocess
        # The `preprocess_logits_for_metrics` of a script for an earlier release may accept only the logits.
        if preprocess is not None and not can_call(preprocess, None, None) and can_call(preprocess, None):
            self._preprocess_logits = lambda logits, _: preprocess(logits)
        self._positions: deque[BatchPosition | None] = deque()
        rows = self._count_known_samples() or 0
        folder = args.eval_memmap_dir
        self._collectors = {
            name: OutputCollector(args.eval_do_concat_batches, rows, None if name == "losses" else folder)
            for name in ("losses", "predictions", "label_ids", "inputs")
        }
        self._gathers_rows = self.returns_predictions or isinstance(self.metrics, FunctionMetrics)
        # Lists of samples are not padded: their lengths differ by rank.
        self._pads_rows = self._gathers_rows and not (args.world_size > 1 and args.eval_use_gather_object)
        metrics_need_all_rows = isinstance(self.metrics, FunctionMetrics) and not self.metrics.is_batchwise
        self._keeps_rows = self.returns_predictions or metrics_need_all_rows
        self._creation_time = time.time()
        self.metrics.reset()

    def __iter__(self) -> Iterator[Any]:
        """Yields the batches, in the order in which `predict_batch` receives them."""
        loader = self.dataloader
        for inputs in loader:
            self._positions.append(loader.position if isinstance(loader, PreparedDataLoader) else None)
            yield inputs

    def __len__(self) -> int:
        """Number of batches according to the loader. Raises TypeError for a stream."""
        if isinstance(getattr(self.dataloader, "dataset", None), IterableDataset):
            raise TypeError("the number of batches of a stream is unknown")
        return len(self.dataloader)

    @property
    def has_exact_length(self) -> bool:
        """Whether `len()` is exact. If not, the pass evaluates every batch of the loader, as in transformers."""
        return has_exact_length(self.dataloader)

    def record_batches(self) -> list[list[int]] | None:
        """A list that receives each batch's sample indices, or None if the loader provides none."""
        return self.dataloader.record_batches() if isinstance(self.dataloader, PreparedDataLoader) else None

    def predict_batch(self, inputs: Any, is_last: bool) -> Any:
        """Predict one batch, keep the required outputs, and return the predictions.

        Args:
            inputs: the batch.
            is_last: whether this is the last batch.
        """
        if self.preparation_time is not None and math.isnan(self.preparation_time):
            self.preparation_time = round(time.time() - self._creation_time, 4)
        self.seen_batches += 1
        position = self._positions.popleft()
        # `gather_for_metrics` reads the loader's position, and Lightning may have read the next batch already.
        is_ahead = position is not None and position is not self.dataloader.position
        with temporary_attributes(self.dataloader, position=position) if is_ahead else contextlib.nullcontext():
            # Batches of an unprepared loader count in full.
            position = position or BatchPosition()
            try:
                outputs = self.predict(inputs, self.loss_only, ignore_keys=self.ignore_keys)
            except Exception as error:
                note_batch(error, f"batch {self.seen_batches} of an evaluation", inputs, self.trainer.model)
                raise
            rows = self._make_rows(*outputs, inputs, position)
            self._collect_rows(rows, inputs, is_last, is_full=not (position.is_last or position.is_filler))
        self.parts.call_callbacks("on_prediction_step")
        self.parts.run.signal_listener.abort_if_signalled()
        if is_last:
            # Computing the metrics may take long.
            self.parts.run.heartbeat.beat(is_slow=True)
        if self.seen_batches % (self.args.eval_accumulation_steps or 1) == 0:
            for collector in self._collectors.values():
                collector.move_to_cpu()
        return rows["predictions"]

    def _make_rows(self, loss: Any, logits: Any, labels: Any, inputs: Any, position: BatchPosition) -> dict[str, Any]:
        """The outputs of a batch, before gathering."""
        self.has_labels |= labels is not None
        main_input = self._main_input(inputs) if "inputs" in self.args.include_for_metrics else None
        if self._pads_rows:
            pad = self.trainer.accelerator.pad_across_processes
            main_input, labels, logits = (
                rows if rows is None else pad(rows, dim=1, pad_index=-100) for rows in (main_input, labels, logits)
            )
        if logits is not None and self._preprocess_logits is not None:
            logits = self._preprocess_logits(logits, labels)
        # Repeat the mean once per sample of a full batch; gathering trims the last batch. For one number, `expand` is
        # faster. An override may return an array.
        is_number = isinstance(loss, torch.Tensor) and not loss.ndim
        size = self.args.eval_batch_size
        losses = None if loss is None else loss.expand(size).contiguous() if is_number else loss.repeat(size)
        rows = {"losses": losses, "inputs": main_input, "predictions": logits, "label_ids": labels}
        if isinstance(self.metrics, TorchMetrics):
            counted_losses = None if losses is None else losses[: position.counted_samples]
            self.metrics.update(self._make_prediction({**rows, "losses": counted_losses}), position.is_filler)
        if position.is_filler:
            rows = drop_all_rows(rows, lists_of_samples=self.args.eval_use_gather_object)
        else:
            self.seen_samples += find_batch_size(inputs) or 0
        self.parts.strategy.run_recorded_xla_operations()
        return rows

    def _main_input(self, inputs: Any) -> Any:
        name = getattr(self.trainer.model, "main_input_name", "input_ids")
        if name not in inputs:
            raise InvalidArgument(
                f"include_for_metrics=['inputs'] keeps the model's main input, {name!r}, but the batch has "
                f"only {', '.join(inputs)}: set main_input_name on the model's class to the name of its input."
            )
        return self.trainer._prepare_input(inputs[name])

    def _collect_rows(self, rows: dict[str, Any], inputs: Any, is_last: bool, *, is_full: bool) -> None:
        """Gather a batch's rows from all ranks, and collect them or update the metrics."""
        skips_gathering = is_full and can_skip_gathering(self.trainer)
        gathered_rows: dict[str, Any] = {}
        for name, value in rows.items():
            if value is None or not (self._gathers_rows or name == "losses"):
                continue
            gathered_rows[name] = value if skips_gathering else self.trainer.gather_function(value)
            if self._keeps_rows or name == "losses":
                self._collectors[name].add(gathered_rows[name])
        if isinstance(self.metrics, FunctionMetrics) and self.metrics.is_batchwise:
            # The function gets the complete batch of inputs, as in transformers.
            full_inputs = {"inputs": inputs} if "inputs" in gathered_rows else {}
            self.metrics.update(self._make_prediction({**gathered_rows, **full_inputs}), is_last)

    def _make_prediction(self, rows: dict[str, Any]) -> EvalPrediction:
        losses = rows.get("losses") if "loss" in self.args.include_for_metrics else None
        return EvalPrediction(rows.get("predictions"), rows.get("label_ids"), rows.get("inputs"), losses)

    def compute_output(self) -> dict[str, Any]:
        """Compute the metrics over all batches, and set `output`."""
        arrays = {name: collector.arrays() for name, collector in self._collectors.items()}
        gather = functools.partial(self.trainer.accelerator.processes.gather, one_per_tp_group=True)
        metrics = dict(denumpify_detensorize(self.metrics.compute(self._make_prediction(arrays), gather)))
        self.has_metrics = bool(metrics)
        prefix = f"{self.prefix}_"
        if (losses := arrays["losses"]) is not None:
            metrics[f"{prefix}loss"] = self._mean_loss(np.concatenate(losses) if isinstance(losses, list) else losses)
        if self.preparation_time is not None:
            metrics[f"{prefix}model_preparation_time"] = self.preparation_time
        # Metrics that already had the prefix come first in log lines, as in transformers.
        prefixed_metrics = {name: value for name, value in metrics.items() if name.startswith(prefix)}
        prefixed_metrics |= {prefix + name: value for name, value in metrics.items() if not name.startswith(prefix)}
        samples = self._count_known_samples() or int(gather(np.array([self.seen_samples])).sum())
        self.output = EvalLoopOutput(arrays["predictions"], arrays["label_ids"], prefixed_metrics, samples)
        return prefixed_metrics

    def _mean_loss(self, losses: np.ndarray) -> float:
        is_finite = np.isfinite(losses)
        drops_nonfinite = self.args.logging_nan_inf_filter and self.parts.policy.filters_nonfinite_eval_losses
        if drops_nonfinite and is_finite.any():
            losses = losses[is_finite]
        return float(losses.mean())

    def _count_known_samples(self) -> int | None:
        dataset: Any = getattr(self.dataloader, "dataset", None)
        if has_length(dataset):
            return len(dataset)
        return self.trainer.num_examples(self.dataloader) if has_length(self.dataloader) else None
