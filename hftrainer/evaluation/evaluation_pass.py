"""One pass over an evaluation or test set: what `Trainer.evaluation_loop` does per batch and at the end."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset

from hftrainer.compat.functions import has_length
from hftrainer.data.loaders import PreparedDataLoader
from hftrainer.data.samplers import gives_its_length
from hftrainer.errors import InvalidArgument
from hftrainer.evaluation.metrics import TorchMetrics, WholeSetMetrics
from hftrainer.evaluation.outputs import OutputCollector
from hftrainer.trainer_pt_utils import find_batch_size, without_rows
from hftrainer.trainer_utils import EvalLoopOutput, EvalPrediction, denumpify_detensorize
from hftrainer.training_args import TrainingArguments


class _Drawn(NamedTuple):
    """The loader's flags when it yielded a batch; Lightning may read the next batch before this one is evaluated."""

    at_end: bool
    filler: bool
    counted: int | None
    started: int


#: For a loader that the Trainer has not prepared: each batch counts in full.
_NO_LOADER = _Drawn(at_end=False, filler=False, counted=None, started=0)


@dataclass
class EvaluationPass:
    """A pass that one of Lightning's loops runs batch by batch.

    Args:
        args: the training arguments.
        dataloader: the batches.
        predict: `Trainer.prediction_step` of the model: inputs → `(loss, logits, labels)`, each possibly None.
        prepare_input: moves an input to the device.
        announce_batch: called after each batch.
        num_examples: samples in a loader whose dataset has no length.
        main_input: the name of the model's main input, for `include_for_metrics`.
        metrics: the metrics to compute.
        preprocess_logits: the Trainer's callable, or None.
        end_batch: called after a batch is predicted, before its results are read.
        gather: gathers rows from all processes, without fillers: `Trainer.gather_function`.
        gathering_changes_nothing: whether that returns the rows of a full batch as they are.
        pad: pads rows in their second dimension to the longest of all processes.
        collect: gathers all rows from all processes.
        prefix: prefix of each metric's name, followed by an underscore.
        returns_predictions: keep the predictions even if the metrics do not need them.
        only_finite_losses: whether nan and infinite losses are excluded from the mean.
        preparation_time: seconds that preparing the model took, for the metrics; measured here if it is NaN.
        loss_only: whether only the loss is predicted.
        ignore_keys: outputs of the model that are left out; None for those that its config names.

    Attributes:
        output: the result, once the pass has finished.
        has_labels: whether a batch had all labels.
        computed: whether there are metrics besides the loss.
    """

    args: TrainingArguments
    dataloader: Any
    predict: Callable[..., tuple[Any, Any, Any]]
    prepare_input: Callable[[Any], Any]
    announce_batch: Callable[[], None]
    num_examples: Callable[[Any], int]
    main_input: str
    metrics: WholeSetMetrics | TorchMetrics
    preprocess_logits: Callable[[Any, Any], Any] | None
    end_batch: Callable[[], None]
    gather: Callable[[Any], Any]
    gathering_changes_nothing: Callable[[], bool]
    pad: Callable[[Any], Any]
    collect: Callable[[Any], Any]
    prefix: str
    returns_predictions: bool
    only_finite_losses: bool = True
    preparation_time: float | None = None
    loss_only: bool = False
    ignore_keys: list[str] | None = None
    seen_samples: int = 0
    seen_batches: int = 0
    output: EvalLoopOutput | None = None
    has_labels: bool = False
    computed: bool = False
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
            self._drawn.append(self._flags())
            yield inputs

    @property
    def _is_prepared(self) -> bool:
        return isinstance(self.dataloader, PreparedDataLoader)

    def __len__(self) -> int:
        """Batches according to the loader; a stream's number is never known."""
        if isinstance(getattr(self.dataloader, "dataset", None), IterableDataset):
            raise TypeError("the number of batches of a stream is unknown")
        return len(self.dataloader)

    @property
    def length_is_sure(self) -> bool:
        """Whether this length is exact; if not, all batches that come are evaluated, as in transformers."""
        return gives_its_length(self.dataloader)

    def record_batches(self) -> list[list[int]] | None:
        """A list that gets the sample indices of each batch; None when the loader does not provide them."""
        return self.dataloader.record_batches() if self._is_prepared else None

    def step(self, inputs: Any, last: bool) -> Any:
        """Predict one batch, keep the required outputs, and return the predictions.

        Args:
            inputs: the batch.
            last: whether it is the last.
        """
        if self.preparation_time is not None and math.isnan(self.preparation_time):
            self.preparation_time = round(time.time() - self._created, 4)
        drawn = self._drawn.popleft()
        self.seen_batches += 1
        ahead = self._flags()
        self._set_flags(drawn)
        try:
            predicted = self.predict(inputs, self.loss_only, ignore_keys=self.ignore_keys)
            rows = self._rows(*predicted, inputs, drawn)
            self._keep(rows, inputs, last, full=not (drawn.at_end or drawn.filler))
        finally:
            self._set_flags(ahead)
        self.announce_batch()
        every = self.args.eval_accumulation_steps or 1
        if self.seen_batches % every == 0:
            for kept in self._kept.values():
                kept.to_host()
        return rows["predictions"]

    def _rows(self, loss: Any, logits: Any, labels: Any, inputs: Any, drawn: _Drawn) -> dict[str, Any]:
        """The outputs of a batch, before gathering."""
        self.has_labels |= labels is not None
        main = self._main_input(inputs) if "inputs" in self.args.include_for_metrics else None
        if self._keeps_rows or self.metrics.needs_batches:
            main, labels, logits = (each if each is None else self.pad(each) for each in (main, labels, logits))
        if logits is not None and self.preprocess_logits is not None:
            logits = self.preprocess_logits(logits, labels)
        # The mean is repeated once per sample of a full batch; gathering corrects that for the last batch.
        losses = None if loss is None else _repeated(loss, self.args.eval_batch_size)
        rows = {"losses": losses, "inputs": main, "predictions": logits, "label_ids": labels}
        if self.metrics.needs_own_rows:
            of_own = None if losses is None else losses[: drawn.counted]
            self.metrics.add_own(self._prediction({**rows, "losses": of_own}), drawn.filler)
        if drawn.filler:
            rows = without_rows(rows, lists_of_samples=self.args.eval_use_gather_object)
        else:
            self.seen_samples += find_batch_size(inputs) or 0
        self.end_batch()
        return rows

    def _main_input(self, inputs: Any) -> Any:
        if self.main_input not in inputs:
            raise InvalidArgument(
                f"include_for_metrics=['inputs'] keeps the model's main input, {self.main_input!r}, and the batch has "
                f"only {', '.join(inputs)}: set main_input_name on the model's class to the name of its input."
            )
        return self.prepare_input(inputs[self.main_input])

    def _keep(self, rows: dict[str, Any], inputs: Any, last: bool, *, full: bool) -> None:
        unchanged = full and self.gathering_changes_nothing()
        gathers_all = self._keeps_rows or self.metrics.needs_batches
        gathered: dict[str, Any] = {}
        for name, value in rows.items():
            if value is None or not (gathers_all or name == "losses"):
                continue
            gathered[name] = value if unchanged else self.gather(value)
            if self._keeps_rows or name == "losses":
                self._kept[name].add(gathered[name])
        if self.metrics.needs_batches:  # the function gets the complete batch of inputs, as in transformers
            asked = {"inputs": inputs} if "inputs" in gathered else {}
            self.metrics.add_gathered(self._prediction({**gathered, **asked}), last)

    def _prediction(self, rows: dict[str, Any]) -> EvalPrediction:
        return EvalPrediction(
            predictions=rows.get("predictions"),
            label_ids=rows.get("label_ids"),
            inputs=rows.get("inputs"),
            losses=rows.get("losses") if "loss" in self.args.include_for_metrics else None,
        )

    def _flags(self) -> _Drawn:
        loader = self.dataloader
        if not self._is_prepared:
            return _NO_LOADER
        return _Drawn(loader.at_end, loader.filler, loader.counted, loader.started)

    def _set_flags(self, flags: _Drawn) -> None:
        """Set the loader's flags, for `accelerator.gather_for_metrics`: to those of this batch, and back."""
        if self._flags() != flags:
            vars(self.dataloader).update(flags._asdict())

    def finish(self) -> dict[str, Any]:
        """Compute the metrics over all batches, and set `output`."""
        whole = {name: kept.arrays() for name, kept in self._kept.items()}
        metrics = dict(denumpify_detensorize(self.metrics.compute(self._prediction(whole), self.collect)))
        self.computed = bool(metrics)
        losses = whole["losses"]
        if losses is not None:
            metrics[f"{self.prefix}_loss"] = self._mean(np.concatenate(losses) if isinstance(losses, list) else losses)
        if self.preparation_time is not None:
            metrics[f"{self.prefix}_model_preparation_time"] = self.preparation_time
        # Log lines list metrics that already had the prefix first, as in transformers.
        start = f"{self.prefix}_"
        prefixed = {name: value for name, value in metrics.items() if name.startswith(start)}
        prefixed |= {start + name: value for name, value in metrics.items() if not name.startswith(start)}
        samples = self._known_samples() or int(self.collect(np.array([self.seen_samples])).sum())
        self.output = EvalLoopOutput(whole["predictions"], whole["label_ids"], prefixed, samples)
        return prefixed

    def _mean(self, losses: np.ndarray) -> float:
        finite = np.isfinite(losses)
        if self.only_finite_losses and finite.any():
            losses = losses[finite]
        return float(losses.mean())

    def _known_samples(self) -> int | None:
        dataset: Any = getattr(self.dataloader, "dataset", None)
        if has_length(dataset):
            return len(dataset)
        return self.num_examples(self.dataloader) if has_length(self.dataloader) else None


def _repeated(loss: Any, times: int) -> Any:
    """`loss.repeat(times)`, faster for a single number; a copy in any case. Overrides may return an array."""
    if not isinstance(loss, torch.Tensor) or loss.ndim or times == 1:
        return loss.repeat(times)
    return loss.expand(times).contiguous()
