"""Arguments that no release of transformers has, for the training data and the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hftrainer.arguments.field import OURS, arg
from hftrainer.arguments.fields import CurrentArguments


@dataclass(kw_only=True)
class OwnArguments(CurrentArguments):
    """The arguments of training that only hftrainer has."""

    elastic: bool = arg(
        False,
        "Keep the samples of an optimizer step when a run resumes on another number of processes or with another "
        "per_device_train_batch_size: gradient_accumulation_steps is adapted. The last step of an epoch is filled "
        "with the epoch's first samples.",
        OURS,
    )

    # ---- Training data of several sources ---------------------------------------------------------------------------

    mixture_weights: dict[str, Any] | str | Any | None = arg(
        None,
        "With a dict of datasets as train_dataset, or mixture_column: the weight of each source in the samples, as a "
        "dict, as a JSON object, or as a function of the optimizer step; None weighs sources by size.",
        OURS,
        json=True,
    )
    mixture_temperature: float = arg(
        1.0,
        "Without mixture_weights, a source of n samples has the weight n ** (1 / mixture_temperature): 1 weighs by "
        "size, larger values bring the weights closer together.",
        OURS,
        minimum=0,
    )
    mixture_column: str | None = arg(None, "The column of train_dataset that names the source of each sample.", OURS)

    param_groups: list[dict[str, Any]] | str | None = arg(
        None,
        "Optimizer settings by parameter name: a list of dicts, or the path of a JSON file with one. Each dict "
        "has a `pattern`, and `lr`, `lr_scale`, `layer_decay`, `weight_decay` or other settings of a group.",
        OURS,
        json=True,
    )
    tokens_per_batch: int | None = arg(
        None,
        "Maximum number of tokens, including padding, in a training micro-batch of one process; replaces "
        "per_device_train_batch_size. A batch has samples of similar lengths.",
        OURS,
    )
    flatten_batches: bool = arg(
        False,
        "Train a causal LM on batches without padding: the samples of a batch form one row, with position_ids.",
        OURS,
    )
    on_divergence: str | None = arg(
        None,
        "What to do about a step whose loss is not finite or a spike (`divergence_threshold`), or whose gradients are "
        "not finite, before it changes the weights: 'rollback' goes back to the last checkpoint and skips the step's "
        "samples, listed in `skipped_samples.jsonl`; 'stop' raises an error that names them; None does nothing.",
        OURS,
        choices=("rollback", "stop"),
    )
    divergence_threshold: float | None = arg(
        None,
        "With `on_divergence`: the loss of a step is a spike if it exceeds the mean of the last 100 by this many "
        "standard deviations, such as 10; None detects no spikes.",
        OURS,
    )
    max_rollbacks: int = arg(
        3,
        "With `on_divergence='rollback'`: rollbacks after which the next divergence is an error; a resumed run "
        "continues the count.",
        OURS,
        minimum=0,
    )
