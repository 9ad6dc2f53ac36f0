"""One pass over an evaluation or test set: what `Trainer.evaluation_loop` does per batch and at the end."""

from __future__ import annotations

import functools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset

from hftrainer.compat.overrides import has_length, takes
from hftrainer.data.loaders import PreparedDataLoader
from hftrainer.data.samplers import gives_its_length
from hftrainer.errors import InvalidArgument
from hftrainer.evaluation import gathering
from hftrainer.evaluation.metrics import TorchMetrics, as_metrics
from hftrainer.evaluation.outputs import OutputCollector
from hftrainer.trainer_pt_utils import find_batch_size, without_rows
from hftrainer.trainer_utils import EvalLoopOutput, EvalPrediction, denumpify_detensorize

if TYPE_CHECKING:
    from hftrainer.training.components import Components


class _Drawn(NamedTuple):
    """The loader's flags when it yielded a batch; Lightning may read the next batch before this one is evaluated."""

    at_end: bool
    filler: bool
    counted: int | None
    started: int


#: For a loader that the Trainer has not prepared: each batch counts in full.
_NO_LOADER = _Drawn(at_end=False, filler=False, counted=None, started=0)


@dataclass(frozen=True)
class PassSettings:
    """The arguments of one pass.

    Args:
        dataloader: the batches.
        predict: `Trainer.prediction_step` of the model: inputs → `(loss, logits, labels)`, each possibly None.
        prefix: prefix of each metric's name, followed by an underscore.
        returns_predictions: keep the predictions even if the metrics do not need them.
        loss_only: whether only the loss is predicted.
        ignore_keys: outputs of the model that are left out; None for those that its config names.
    """

    dataloader: Any
    predict: Callable[..., tuple[Any, Any, Any]]
    prefix: str
    returns_predictions: bool
    loss_only: bool
    ignore_keys: list[str] | None


class EvaluationPass:
    """A pass that one of Lightning's loops runs batch by batch.

    Args:
        components: the parts of the Trainer.
        settings: the arguments of the pass.

    Attributes:
        metrics: the metrics to compute.
        preparation_time: seconds that preparing the model took, for the metrics; measured here if it is NaN.
        output: the result, once the pass has finished.
        has_labels: whether a batch had all labels.
        computed: whether there are metrics besides the loss.
    """

    def __init__(self, components: Components, settings: PassSettings) -> None:
        self.components = components
        self.settings = settings
        self.dataloader = settings.dataloader
        self.trainer = trainer = components.trainer
        self.args = args = trainer.args
        self.metrics = as_metrics(trainer.compute_metrics, by_batch=args.batch_eval_metrics)
        processes = trainer.accelerator.processes
        if isinstance(self.metrics, TorchMetrics) and processes.tp_size > 1:
            self.metrics.gather_by(processes.distinct_parts)
        self.preparation_time: float | None = getattr(trainer, "model_preparation_time", None)
        self.seen_samples = self.seen_batches = 0
        self.output: EvalLoopOutput | None = None
        self.has_labels = self.computed = False
        self._preprocess_logits = _preprocessor(trainer.preprocess_logits_for_metrics)
        self._drawn: deque[_Drawn] = deque()
        rows, folder = self._known_samples() or 0, getattr(args, "eval_memmap_dir", None)
        concatenate = args.eval_do_concat_batches
        self._kept = {
            "losses": OutputCollector(concatenate, rows),
            **{name: OutputCollector(concatenate, rows, folder) for name in ("predictions", "label_ids", "inputs")},
        }
        self._keeps_rows = settings.returns_predictions or self.metrics.needs_whole_set
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
            settings = self.settings
            predicted = settings.predict(inputs, settings.loss_only, ignore_keys=settings.ignore_keys)
            rows = self._rows(*predicted, inputs, drawn)
            self._keep(rows, inputs, last, full=not (drawn.at_end or drawn.filler))
        finally:
            self._set_flags(ahead)
        self.components.announce("on_prediction_step")
        self.components.run.interruption.check()
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
            main, labels, logits = (
                each if each is None else gathering.padded(self.trainer.accelerator, self.args, each)
                for each in (main, labels, logits)
            )
        if logits is not None and self._preprocess_logits is not None:
            logits = self._preprocess_logits(logits, labels)
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
        self.components.strategy.end_batch()
        return rows

    def _main_input(self, inputs: Any) -> Any:
        name = getattr(self.trainer.model, "main_input_name", "input_ids")
        if name not in inputs:
            raise InvalidArgument(
                f"include_for_metrics=['inputs'] keeps the model's main input, {name!r}, and the batch has "
                f"only {', '.join(inputs)}: set main_input_name on the model's class to the name of its input."
            )
        return self.trainer._prepare_input(inputs[name])

    def _keep(self, rows: dict[str, Any], inputs: Any, last: bool, *, full: bool) -> None:
        unchanged = full and gathering.changes_nothing(self.trainer)
        gathers_all = self._keeps_rows or self.metrics.needs_batches
        gathered: dict[str, Any] = {}
        for name, value in rows.items():
            if value is None or not (gathers_all or name == "losses"):
                continue
            gathered[name] = value if unchanged else self.trainer.gather_function(value)
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
        gather = functools.partial(self.trainer.accelerator.processes.gather, distinct=True)
        metrics = dict(denumpify_detensorize(self.metrics.compute(self._prediction(whole), gather)))
        self.computed = bool(metrics)
        losses = whole["losses"]
        if losses is not None:
            metrics[f"{self.settings.prefix}_loss"] = self._mean(
                np.concatenate(losses) if isinstance(losses, list) else losses
            )
        if self.preparation_time is not None:
            metrics[f"{self.settings.prefix}_model_preparation_time"] = self.preparation_time
        # Log lines list metrics that already had the prefix first, as in transformers.
        start = f"{self.settings.prefix}_"
        prefixed = {name: value for name, value in metrics.items() if name.startswith(start)}
        prefixed |= {start + name: value for name, value in metrics.items() if not name.startswith(start)}
        samples = self._known_samples() or int(gather(np.array([self.seen_samples])).sum())
        self.output = EvalLoopOutput(whole["predictions"], whole["label_ids"], prefixed, samples)
        return prefixed

    def _mean(self, losses: np.ndarray) -> float:
        finite = np.isfinite(losses)
        filters = self.args.logging_nan_inf_filter and self.components.policy.filters_nonfinite_eval_losses
        if filters and finite.any():
            losses = losses[finite]
        return float(losses.mean())

    def _known_samples(self) -> int | None:
        dataset: Any = getattr(self.dataloader, "dataset", None)
        if has_length(dataset):
            return len(dataset)
        return self.trainer.num_examples(self.dataloader) if has_length(self.dataloader) else None


def _repeated(loss: Any, times: int) -> Any:
    """`loss.repeat(times)`, faster for a single number; a copy in any case. Overrides may return an array."""
    if not isinstance(loss, torch.Tensor) or loss.ndim or times == 1:
        return loss.repeat(times)
    return loss.expand(times).contiguous()


def _preprocessor(function: Callable[..., Any] | None) -> Callable[[Any, Any], Any] | None:
    """`preprocess_logits_for_metrics`, as a function of logits and labels; it may take the logits alone."""
    if function is None or takes(function, None, None) or not takes(function, None):
        return function
    return lambda logits, labels: function(logits)
