"""Arguments that no release of transformers has, for the training data and its optimizer."""

from __future__ import annotations

from dataclasses import dataclass

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
    on_divergence: str | None = arg(
        None,
        "What to do about a step whose loss is not finite or a spike (`divergence_threshold`), or whose gradients are "
        "not finite, before it changes the weights: 'rollback' goes back to the last checkpoint and skips the step's "
        "samples, listed in `skipped_samples.jsonl`; 'stop' raises an error that names them; None does nothing.",
        OURS,
        "training.divergence",
        choices=("rollback", "stop"),
    )
    divergence_threshold: float | None = arg(
        None,
        "With `on_divergence`: the loss of a step is a spike if it exceeds the mean of the last 100 by this many "
        "standard deviations, such as 10; None for no spikes.",
        OURS,
        "training.divergence",
    )
    max_rollbacks: int = arg(
        3,
        "With `on_divergence='rollback'`: rollbacks after which the next divergence is an error; a resumed run goes on "
        "counting.",
        OURS,
        "training.divergence",
        minimum=0,
    )
