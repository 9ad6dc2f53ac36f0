"""Length of training, and the learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hftrainer.arguments._field import arg
from hftrainer.arguments.choices import SchedulerType


@dataclass(kw_only=True)
class ScheduleArguments:
    """Length of training in samples, batches, optimizer steps and epochs."""

    per_device_train_batch_size: int = arg(8, "Samples per device in a training micro-batch.")
    gradient_accumulation_steps: int = arg(1, "Micro-batches per optimizer step.")
    num_train_epochs: float = arg(3.0, "Passes over the training data; the last may be a fraction.")
    max_steps: int = arg(-1, "Optimizer steps; above 0 it overrides `num_train_epochs`.")
    lr_scheduler_type: SchedulerType | str = arg("linear", "Shape of the learning rate over the optimizer steps.")
    lr_scheduler_kwargs: dict[str, Any] | str | None = arg(
        None, "Further keywords of the chosen scheduler, as a dict or as a JSON object."
    )
    warmup_steps: float = arg(
        0, "Optimizer steps of linear warm-up from 0; below 1 a fraction of all steps (since v5.0)."
    )
    auto_find_batch_size: bool = arg(False, "Retry with a smaller micro-batch after running out of memory.")
