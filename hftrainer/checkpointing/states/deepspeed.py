"""States under DeepSpeed: a part from each process, and the weights beside them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hftrainer.checkpointing import resume
from hftrainer.checkpointing.distributed import to_be_written
from hftrainer.checkpointing.states import MakeOptimizer, PartStates
from hftrainer.checkpointing.weights import load_sharded_weights
from hftrainer.compat import peers
from hftrainer.trainer_pt_utils import nested_apply

if TYPE_CHECKING:
    from hftrainer.parallel.deepspeed.run import DeepSpeedRun

logger = logging.getLogger(__name__)


class DeepSpeedStates(PartStates):
    """The states that DeepSpeed writes into a checkpoint, beside configuration and tokenizer.

    Args:
        run: has DeepSpeed's engine.
    """

    def __init__(self, run: DeepSpeedRun) -> None:
        self._run = run
        self._weights: dict[str, Any] | None = None
        self._saves_states = False

    @property
    def keeps_scheduler(self) -> bool:  # type: ignore[override]
        """Whether the schedule is one of DeepSpeed's."""
        return self._run.keeps_scheduler

    def prepare(self, model: nn.Module, shard: Callable[[], nn.Module], load: Callable[[], None]) -> nn.Module:
        """Outside training only: in training, DeepSpeed's engine shards and loads the model itself."""
        return model

    def cast(self, batch: Any, model: nn.Module) -> Any:
        """The batch with floating-point tensors in the dtype of the weights, which DeepSpeed has chosen."""
        dtype = next((weight.dtype for weight in model.parameters() if weight.is_floating_point()), torch.float32)

        def converted(value: Any) -> Any:
            return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

        return nested_apply(converted, batch)

    def gather(self, model: nn.Module, optimizer: MakeOptimizer | None) -> None:
        """Gather partitioned weights. Without an optimizer, no states are written."""
        self._saves_states = optimizer is not None
        if self._run.config.is_zero3():
            self._weights = self._whole_weights(model)

    @contextlib.contextmanager
    def weights_to_save(self, model: nn.Module, *, saves: bool) -> Iterator[dict[str, Any] | None]:
        """The gathered weights, or weights gathered now; empty if they stay in parts."""
        yield dict(self._weights) if self._weights is not None else self._whole_weights(model)

    def _whole_weights(self, model: nn.Module) -> dict[str, Any]:
        adapters = peers.is_peft(model)
        if not (self._run.gathers or adapters):
            return {}
        return to_be_written(self._run.whole_weights(model, only_trained=adapters), model)

    def files(self, optimizer: MakeOptimizer | None) -> Iterator[tuple[str, Any]]:
        """None: the optimizer's state is in the parts."""
        return iter(())

    def write_parts(self, folder: str, processes: Any) -> None:
        """Write this process's part, once rank 0 has created the folder."""
        if self._folder_is_there(processes) and self._saves_states:
            self._run.save(folder, processes)

    def save_beside(self, folder: str, processes: Any) -> None:
        """Write the parts too, if the weights stay in parts."""
        if self._run.gathers or not self._run.is_training:
            return
        self._run.save(folder, processes)
        logger.warning(
            "stage3_gather_16bit_weights_on_model_save is not set, so %s holds partitioned weights: merge them into "
            "one file by running python zero_to_fp32.py . in that folder.",
            folder,
        )

    def finish(self, processes: Any) -> None:
        """Release the weights."""
        self._end_writing(processes)
        self._weights = None

    def load_weights(self, model: nn.Module, folder: str, *, only_trained: bool) -> Any:
        """Load the weights of any checkpoint."""
        return load_sharded_weights(model, folder, only_trained=only_trained)

    def load_best(self, model: nn.Module, folder: str, *, only_trained: bool) -> Any:
        """Load the weights, and the copies of them in DeepSpeed's optimizer."""
        self._run.load(folder, strict=not peers.is_peft(model))

    def load_optimizer_and_scheduler(
        self, folder: str, model: nn.Module, optimizer: MakeOptimizer, scheduler: Any
    ) -> None:
        """Load the schedule's state: the engine has loaded the optimizer's with the weights."""
        if not self.keeps_scheduler:
            resume.load_scheduler(folder, scheduler)
