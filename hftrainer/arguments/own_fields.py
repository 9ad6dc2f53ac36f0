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
    tokens_per_batch: int | None = arg(
        None,
        "Most tokens, padding included, in a training micro-batch of one process; replaces "
        "per_device_train_batch_size. Batches have samples of similar lengths.",
        OURS,
        "data.token_batches",
    )
    flatten_batches: bool = arg(
        False,
        "Train a causal LM on batches without padding: the samples of a batch form one row, with position_ids.",
        OURS,
        "data.token_batches",
    )
