"""Arguments that no release of transformers has, for the training data and its optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hftrainer.arguments.field import OURS, arg
from hftrainer.arguments.fields import CurrentArguments


@dataclass(kw_only=True)
class OwnArguments(CurrentArguments):
    """The arguments of training that are ours alone."""

    elastic: bool = arg(
        False,
        "Keep the samples of an optimizer step when a run resumes on another number of processes or with another "
        "per_device_train_batch_size: gradient_accumulation_steps follows. The last step of an epoch is completed with "
        "its first samples.",
        OURS,
        "data.elastic",
    )
    param_groups: list[dict[str, Any]] | str | None = arg(
        None,
        "Settings of the optimizer for parameters by name: a list of dicts, or the path of a JSON file with one. Each "
        "has a `pattern`, and `lr`, `lr_scale`, `layer_decay`, `weight_decay` or other settings of a group.",
        OURS,
        "optimizers.param_groups",
        json=True,
    )
