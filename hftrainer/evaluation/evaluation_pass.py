"""One pass over an evaluation or test set: what `Trainer.evaluation_loop` does with each batch, and at the end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hftrainer.data.loaders import PreparedDataLoader
from hftrainer.evaluation.outputs import OutputCollector
from hftrainer.trainer_pt_utils import find_batch_size
from hftrainer.trainer_utils import EvalLoopOutput, EvalPrediction, denumpify_detensorize, has_length
from hftrainer.training_args import TrainingArguments


@dataclass
class EvaluationPass:
    """Runs batch by batch, driven by Lightning's validation or prediction loop.

    Args:
        args: the training arguments.
        dataloader: the batches.
        predict: `Trainer.prediction_step` for one batch of inputs: `(loss, logits, labels)`, each possibly None.
        announce_batch: called after each batch.
        num_examples: samples in the loader when its dataset does not say.
        main_input: the model's main input, for `include_for_metrics`.
        compute_metrics, preprocess_logits: the Trainer's callables, or None.
        prefix: put before each metric's name, with an underscore.
        counts_last_batch_by_size: whether a ragged last batch counts by its true size.
        preparation_time: seconds that preparing the model took, for the metrics; measured here if it is NaN.

    Attributes:
        output: the result, once the pass has finished.
    """

    args: TrainingArguments
    dataloader: Any
    predict: Callable[[Any], tuple[Any, Any, Any]]
    announce_batch: Callable[[], None]
    num_examples: Callable[[Any], int]
    main_input: str
    compute_metrics: Callable[[EvalPrediction], Mapping[str, Any]] | None
    preprocess_logits: Callable[[Any, Any], Any] | None
    prefix: str
    counts_last_batch_by_size: bool = True
    preparation_time: float | None = None
    seen_samples: int = 0
    seen_batches: int = 0
    output: EvalLoopOutput | None = None
    _kept: dict[str, OutputCollector] = field(init=False)

    def __post_init__(self) -> None:
        concatenate = self.args.eval_do_concat_batches
        self._kept = {name: OutputCollector(concatenate) for name in ("losses", "logits", "labels", "inputs")}
        self._created = time.time()

    def step(self, inputs: Any) -> Any:
        """Predict one batch, keep what is asked for, and return the predictions."""
        if self.preparation_time is not None and math.isnan(self.preparation_time):
            self.preparation_time = round(time.time() - self._created, 4)
        size = find_batch_size(inputs)
        self.seen_samples += size or 0
        self.seen_batches += 1
        loss, logits, labels = self.predict(inputs)
        if loss is not None:
            self._kept["losses"].add(loss.repeat(self._loss_weight(size)))
        if "inputs" in self.args.include_for_metrics:
            self._kept["inputs"].add(inputs[self.main_input])
        if logits is not None:
            self._kept["logits"].add(self.preprocess_logits(logits, labels) if self.preprocess_logits else logits)
        if labels is not None:
            self._kept["labels"].add(labels)
        self.announce_batch()
        every = self.args.eval_accumulation_steps
        if every is not None and self.seen_batches % every == 0:
            for kept in self._kept.values():
                kept.to_host()
        return logits

    def _loss_weight(self, size: int | None) -> int:
        """How often the batch's mean loss counts: as Hugging Face counts it, the nominal batch size.

        Only the ragged last batch of a loader that the Trainer prepared counts its true size.
        """
        loader = self.dataloader
        remainder = loader.remainder if isinstance(loader, PreparedDataLoader) and loader.at_end else None
        if remainder is None or size is None or not self.counts_last_batch_by_size:
            return self.args.eval_batch_size
        return size if remainder < 0 else remainder

    def finish(self) -> dict[str, Any]:
        """Compute the metrics over all batches; `output` then has them and what was kept."""
        self.output = self._output()
        return self.output.metrics or {}

    def _output(self) -> EvalLoopOutput:
        losses, logits, labels, inputs = (
            self._kept[name].arrays() for name in ("losses", "logits", "labels", "inputs")
        )
        metrics: dict[str, Any] = {}
        if self.compute_metrics is not None and logits is not None and labels is not None:
            prediction = EvalPrediction(
                predictions=logits,
                label_ids=labels,
                inputs=inputs,
                losses=losses if "loss" in self.args.include_for_metrics else None,
            )
            metrics = dict(denumpify_detensorize(self.compute_metrics(prediction)))
        if losses is not None:
            metrics[f"{self.prefix}_loss"] = self._mean(np.concatenate(losses) if isinstance(losses, list) else losses)
        if self.preparation_time is not None:
            metrics[f"{self.prefix}_model_preparation_time"] = self.preparation_time
        # Log lines list the names that had the prefix first, as those of transformers do.
        start = f"{self.prefix}_"
        prefixed = {name: value for name, value in metrics.items() if name.startswith(start)}
        prefixed |= {start + name: value for name, value in metrics.items() if not name.startswith(start)}
        return EvalLoopOutput(logits, labels, prefixed, self._num_samples())

    def _mean(self, losses: np.ndarray) -> float:
        finite = np.isfinite(losses)
        if self.args.logging_nan_inf_filter and finite.any():
            losses = losses[finite]
        return float(losses.mean())

    def _num_samples(self) -> int:
        dataset = getattr(self.dataloader, "dataset", None)
        if has_length(dataset):
            count = len(dataset)  # type: ignore[arg-type]
        elif has_length(self.dataloader):
            count = self.num_examples(self.dataloader)
        else:
            count = self.seen_samples
        return count or self.seen_samples
