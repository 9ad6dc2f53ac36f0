"""One pass over an evaluation or test set: what `Trainer.evaluation_loop` does with each batch, and at the end."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset

from hftrainer.data.loaders import PreparedDataLoader
from hftrainer.evaluation.metrics import TorchMetrics, WholeSetMetrics
from hftrainer.evaluation.outputs import OutputCollector
from hftrainer.trainer_pt_utils import find_batch_size, without_rows
from hftrainer.trainer_utils import EvalLoopOutput, EvalPrediction, denumpify_detensorize, has_length
from hftrainer.training_args import TrainingArguments


class _Drawn(NamedTuple):
    """What the loader said of a batch when it gave it; Lightning may have drawn the next one before its turn comes."""

    remainder: int | None  # samples of the ragged last batch, -1 when the loader does not know, else None
    filler: bool  # only keeps step with the other processes


@dataclass
class EvaluationPass:
    """Runs batch by batch, driven by one of Lightning's loops.

    Args:
        args: the training arguments.
        dataloader: the batches.
        predict: `Trainer.prediction_step` for one batch of inputs: `(loss, logits, labels)`, each possibly None.
        prepare_input: moves an input to the device.
        announce_batch: called after each batch.
        num_examples: samples in the loader when its dataset does not say.
        main_input: the model's main input, for `include_for_metrics`.
        metrics: what is computed.
        preprocess_logits: the Trainer's callable, or None.
        end_batch: called when a batch has been predicted, before anything of it is read.
        gather: rows of all processes for the rows of this one.
        prefix: put before each metric's name, with an underscore.
        returns_predictions: keep the predictions even if the metrics do not need them.
        counts_last_batch_by_size: whether a ragged last batch counts by its true size.
        preparation_time: seconds that preparing the model took, for the metrics; measured here if it is NaN.

    Attributes:
        output: the result, once the pass has finished.
    """

    args: TrainingArguments
    dataloader: Any
    predict: Callable[[Any], tuple[Any, Any, Any]]
    prepare_input: Callable[[Any], Any]
    announce_batch: Callable[[], None]
    num_examples: Callable[[Any], int]
    main_input: str
    metrics: WholeSetMetrics | TorchMetrics
    preprocess_logits: Callable[[Any, Any], Any] | None
    end_batch: Callable[[], None]
    gather: Callable[..., Any]
    prefix: str
    returns_predictions: bool
    counts_last_batch_by_size: bool = True
    preparation_time: float | None = None
    seen_samples: int = 0
    seen_batches: int = 0
    output: EvalLoopOutput | None = None
    _drawn: deque[_Drawn] = field(default_factory=deque, init=False)
    _kept: dict[str, OutputCollector] = field(init=False)

    def __post_init__(self) -> None:
        rows, folder = self._known_samples() or 0, getattr(self.args, "eval_memmap_dir", None)
        concatenate = self.args.eval_do_concat_batches
        self._kept = {
            "losses": OutputCollector(concatenate, rows),
            **{name: OutputCollector(concatenate, rows, folder) for name in ("predictions", "label_ids", "inputs")},
        }
        self._keeps_rows = self.returns_predictions or self.metrics.needs_whole_set
        self._created = time.time()
        self.metrics.begin()

    def __iter__(self) -> Iterator[Any]:
        """The batches, in the order in which `step` must get them."""
        for inputs in self.dataloader:
            loader = self.dataloader if isinstance(self.dataloader, PreparedDataLoader) else None
            remainder = loader.remainder if loader is not None and loader.at_end else None
            self._drawn.append(_Drawn(remainder, filler=loader is not None and loader.filler))
            yield inputs

    def __len__(self) -> int:
        """Number of batches; a stream's is never known for sure."""
        if isinstance(getattr(self.dataloader, "dataset", None), IterableDataset):
            raise TypeError("a stream has as many batches as it gives")
        return len(self.dataloader)

    def record_batches(self) -> list[list[int]] | None:
        """A list that gets the indices of the samples in each batch; None when the loader does not tell them."""
        return self.dataloader.record_batches() if isinstance(self.dataloader, PreparedDataLoader) else None

    def step(self, inputs: Any, last: bool) -> Any:
        """Predict one batch, keep what is asked for, and return the predictions.

        Args:
            inputs: the batch.
            last: whether it is the last.
        """
        if self.preparation_time is not None and math.isnan(self.preparation_time):
            self.preparation_time = round(time.time() - self._created, 4)
        drawn, size = self._drawn.popleft(), find_batch_size(inputs)
        self.seen_batches += 1
        with self._in_hand(drawn):
            loss, logits, labels = self.predict(inputs)
        if logits is not None and self.preprocess_logits is not None:
            logits = self.preprocess_logits(logits, labels)
        main = self.prepare_input(inputs[self.main_input]) if "inputs" in self.args.include_for_metrics else None
        losses = None if loss is None else self._repeated(loss, drawn, size)
        rows = {"losses": losses, "inputs": main, "predictions": logits, "label_ids": labels}
        self.metrics.add_own(self._prediction(rows), drawn.filler)
        if drawn.filler:
            rows = without_rows(rows, lists_of_samples=self.args.eval_use_gather_object)
        else:
            self.seen_samples += size or 0
        self.end_batch()
        self._keep(rows, inputs, last)
        self.announce_batch()
        every = self.args.eval_accumulation_steps or 1
        if self.seen_batches % every == 0:
            for kept in self._kept.values():
                kept.to_host()
        return logits

    def _keep(self, rows: dict[str, Any], inputs: Any, last: bool) -> None:
        wanted = rows if self._keeps_rows or self.metrics.needs_batches else {"losses": rows["losses"]}
        gathered = {name: self.gather(value) for name, value in wanted.items() if value is not None}
        for name, value in gathered.items():
            if name == "losses" or self._keeps_rows:
                self._kept[name].add(value)
        if self.metrics.needs_batches:  # the function gets the whole batch of inputs, as in transformers
            asked = {"inputs": inputs} if "inputs" in gathered else {}
            self.metrics.add_gathered(self._prediction({**gathered, **asked}), last)

    def _prediction(self, rows: dict[str, Any]) -> EvalPrediction:
        return EvalPrediction(
            predictions=rows.get("predictions"),
            label_ids=rows.get("label_ids"),
            inputs=rows.get("inputs"),
            losses=rows.get("losses") if "loss" in self.args.include_for_metrics else None,
        )

    @contextlib.contextmanager
    def _in_hand(self, drawn: _Drawn) -> Iterator[None]:
        """Let the loader say of the batch in hand whether it is a filler, for `accelerator.gather_for_metrics`."""
        loader = self.dataloader
        if not isinstance(loader, PreparedDataLoader):
            yield
            return
        ahead, loader.filler = loader.filler, drawn.filler
        try:
            yield
        finally:
            loader.filler = ahead if self._drawn else False

    def _repeated(self, loss: torch.Tensor, drawn: _Drawn, size: int | None) -> torch.Tensor:
        """The batch's loss as often as it counts: as Hugging Face counts it, the nominal batch size.

        Only the ragged last batch of a loader that the Trainer prepared counts its true size.
        """
        nominal = self.args.eval_batch_size
        if drawn.remainder is None or size is None or not self.counts_last_batch_by_size:
            return loss.repeat(nominal)
        samples = size if drawn.remainder < 0 else drawn.remainder
        return loss.repeat(max(nominal, samples))[:samples]

    def finish(self) -> dict[str, Any]:
        """Compute the metrics over all batches; `output` then has them and what was kept."""
        whole = {name: kept.arrays() for name, kept in self._kept.items()}
        metrics = dict(denumpify_detensorize(self.metrics.compute(self._prediction(whole), self.gather)))
        losses = whole["losses"]
        if losses is not None:
            metrics[f"{self.prefix}_loss"] = self._mean(np.concatenate(losses) if isinstance(losses, list) else losses)
        if self.preparation_time is not None:
            metrics[f"{self.prefix}_model_preparation_time"] = self.preparation_time
        # Log lines list the names that had the prefix first, as those of transformers do.
        start = f"{self.prefix}_"
        prefixed = {name: value for name, value in metrics.items() if name.startswith(start)}
        prefixed |= {start + name: value for name, value in metrics.items() if not name.startswith(start)}
        samples = self._known_samples() or int(self.gather(np.array([self.seen_samples])).sum())
        self.output = EvalLoopOutput(whole["predictions"], whole["label_ids"], prefixed, samples)
        return prefixed

    def _mean(self, losses: np.ndarray) -> float:
        finite = np.isfinite(losses)
        if self.args.logging_nan_inf_filter and finite.any():
            losses = losses[finite]
        return float(losses.mean())

    def _known_samples(self) -> int | None:
        dataset: Any = getattr(self.dataloader, "dataset", None)
        if has_length(dataset):
            return len(dataset)
        return self.num_examples(self.dataloader) if has_length(self.dataloader) else None
