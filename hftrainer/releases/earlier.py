"""The table of releases: a subclass of `ReleasePolicy` for each release after which `transformers` changed.

Each class restores what the next release changed; `own_changes` describes it, and turns off the switches that it names.
To drop releases, delete the last subclasses.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from hftrainer.compat import libraries
from hftrainer.releases.policy import Release, ReleasePolicy, get_parameter_names


class EarlierLengths(NamedTuple):
    """The lengths of a run, as `set_initial_training_values` of v4.49 to v5.2 orders them.

    Attributes:
        num_train_epochs, num_update_steps_per_epoch, num_examples, num_train_samples, max_steps: as in v5.
        epoch_based: whether `num_train_epochs` sets the length of the run.
        len_dataloader: micro-batches in one pass of this process; None when the loader has no length.
    """

    num_train_epochs: int
    num_update_steps_per_epoch: int
    num_examples: int
    num_train_samples: float
    epoch_based: bool
    len_dataloader: int | None
    max_steps: int

    @classmethod
    def from_lengths(cls, lengths: Any, *, epoch_based: bool, has_length: bool) -> EarlierLengths:
        """The same lengths in the earlier order."""
        values = lengths._asdict()
        del values["total_train_batch_size"]
        micro_batches = values.pop("micro_batches_in_epoch")
        return cls(epoch_based=epoch_based, len_dataloader=micro_batches if has_length else None, **values)


class PolicyUntil5_22(ReleasePolicy):
    last_release = Release(5, 22)
    own_changes = {
        "filters_nonfinite_eval_losses": "eval_loss is nan or infinite if the loss of one batch is",
        "skips_logits": "with use_liger_kernel, an evaluation that needs only the loss computes the logits too",
    }


class PolicyUntil5_18(PolicyUntil5_22):
    last_release = Release(5, 18)
    own_changes = {
        "averages_train_loss_over_call": "train_loss of a resumed run is the loss sum of this call divided by all "
        "steps, including those before the checkpoint",
        "num_items": "num_items_in_batch is an integer",
    }

    def num_items(self, count: torch.Tensor) -> torch.Tensor | int:
        return count


class PolicyUntil5_17(PolicyUntil5_18):
    last_release = Release(5, 17)
    own_changes = {
        "aligns_only_set_tokens": "the model's configs lose special tokens that the tokenizer lacks, and lists of end "
        "tokens become one token (transformers#48708)"
    }


class PolicyUntil5_15(PolicyUntil5_17):
    last_release = Release(5, 15)
    own_changes = {
        "evaluation_generator": "an evaluation grouped by length draws its order from torch's generator, which "
        "training uses too"
    }

    def evaluation_generator(self, seed: int) -> torch.Generator | None:
        return None


class PolicyUntil5_14(PolicyUntil5_15):
    last_release = Release(5, 14)
    own_changes = {
        "smooths_over_items": "label smoothing divides by the labels of its micro-batch, even where the loss is summed "
        "over an optimizer step (transformers#47261)"
    }


class PolicyUntil5_9(PolicyUntil5_14):
    last_release = Release(5, 9)
    own_changes = {
        "counted_labels": "every label is counted in num_items_in_batch, including the first of a causal sequence "
        "(transformers#46204)"
    }

    def counted_labels(self, batch: Any, *, shifts: bool) -> Any:
        return batch["labels"]


class PolicyUntil5_5(PolicyUntil5_9):
    last_release = Release(5, 5)
    own_changes = {"gradient_divisor": "since 5.2, accelerate divides gradients by gradient_accumulation_steps again"}

    def gradient_divisor(self, args: Any) -> int:
        return int(args.gradient_accumulation_steps)


class PolicyUntil5_3(PolicyUntil5_5):
    last_release = Release(5, 3)
    own_changes = {
        "evaluates_last_step": "with eval_strategy='steps', the last step is evaluated only if it is a multiple of "
        "eval_steps (transformers#44146)"
    }


class PolicyUntil5_2(PolicyUntil5_3):
    last_release = Release(5, 2)
    own_changes = {
        "epoch_before_training": "state.epoch is None before training, and evaluate() does not log it",
        "loads_best_after_logging": "the best model is loaded before the last log line",
        "logs_grad_norm_without_clipping": "grad_norm is logged only when gradients are clipped",
        "makes_model_before_trial": "model_init is called with the seed of the trial",
        "reads_batch_size_once": "train() reads per_device_train_batch_size again",
        "returns_steps_in_epoch": "set_initial_training_values returns epoch_based and len_dataloader as its fifth and "
        "sixth values",
    }
    epoch_before_training = None


class PolicyUntil5_1(PolicyUntil5_2):
    last_release = Release(5, 1)
    own_changes = {"resumes_with_batch_size_of_arguments": "a resumed run has the batch size of its checkpoint"}
    gradient_divisor = ReleasePolicy.gradient_divisor


class PolicyUntil5_0(PolicyUntil5_1):
    last_release = Release(5, 0)
    own_changes = {
        "calls_create_scheduler": "train() calls create_optimizer_and_scheduler, even if create_optimizer and "
        "create_scheduler are overridden too"
    }


class PolicyUntil4_57(PolicyUntil5_0):
    last_release = Release(4, 57)
    own_changes = {
        "estimates_total_flos": "total_flos is the result of the model's own floating_point_ops",
        "logged_loss": "the loss is logged with four decimal places (transformers#42104)",
        "printed": "numbers in printed log lines have all digits",
        "sets_use_cache": "the model's config keeps its use_cache",
    }

    def logged_loss(self, mean: float) -> float:
        return round(mean, 4)

    def printed(self, logs: dict[str, Any], *, above_bar: bool = False) -> dict[str, Any]:
        return logs | {"epoch": round(logs["epoch"], 2)} if above_bar and "epoch" in logs else logs


class PolicyUntil4_56(PolicyUntil4_57):
    last_release = Release(4, 56)
    own_changes = {
        "divides_eval_loss_by_items": "the loss of an evaluation batch is the model's own mean (transformers#41183)"
    }


class PolicyUntil4_55(PolicyUntil4_56):
    last_release = Release(4, 55)
    own_changes = {"aligns_special_tokens": "the model's configs keep their special tokens (transformers#38441)"}


class PolicyUntil4_54(PolicyUntil4_55):
    last_release = Release(4, 54)
    own_changes = {"loss_divisor": "a loss not divided by num_items_in_batch is divided by gradient_accumulation_steps"}

    def loss_divisor(self, micro_batches: int, args: Any) -> int:
        return int(args.gradient_accumulation_steps)


class PolicyUntil4_52(PolicyUntil4_54):
    last_release = Release(4, 52)
    own_changes = {
        "decay_parameter_names": "weight decay excludes the layers in ALL_LAYERNORM_LAYERS, but not those that are "
        "named norm (transformers#38922)",
        "divides_uncounted_loss": "the loss of a model that accepts num_items_in_batch is never divided for "
        "accumulation",
    }

    def decay_parameter_names(self, model: nn.Module) -> list[str]:
        return get_parameter_names(model, libraries.normalization_layers(), ["bias", "layernorm", "rmsnorm"])


class PolicyUntil4_51(PolicyUntil4_52):
    last_release = Release(4, 51)
    own_changes = {
        "logs_tokens_per_second": "train_tokens_per_second is not logged",
        "seeds_workers_by_rank": "loader workers of all ranks have the same seeds",
        "steps_of_epoch": "the steps of an epoch are rounded down, so training ends earlier when its last optimizer "
        "step has fewer micro-batches (transformers#37923)",
    }

    def steps_of_epoch(self, micro_batches: int, accumulation_steps: int) -> int:
        return max(1, micro_batches // accumulation_steps)


class PolicyUntil4_50(PolicyUntil4_51):
    last_release = Release(4, 50)
    own_changes = {
        "counts_items_only_if_used": "items are counted for every model, and passed to overrides of compute_loss",
        "logs_rate_of_step": "the logged learning rate is that of the next step (transformers#36973)",
    }


class PolicyUntil4_49(PolicyUntil4_50):
    last_release = Release(4, 49)
    own_changes = {
        "num_items": "num_items_in_batch is a Python int",
        "records_best_step": "best_global_step is not set; best_model_checkpoint is set at the evaluation, even "
        "without a save",
        "saves_last_step_with": "with save_strategy='epoch' too, the last step is saved at once, and again at the end "
        "of the epoch",
        "saves_tokenizer_of_collator": "without a processing class, the tokenizer of the data collator is not saved",
    }
    saves_last_step_with = ("steps", "epoch")

    def num_items(self, count: torch.Tensor) -> torch.Tensor | int:
        return int(count)


class PolicyUntil4_48(PolicyUntil4_49):
    last_release = Release(4, 48)
    own_changes = {
        "decay_parameter_names": "weight decay excludes normalization layers by their class only (transformers#35927)",
        "excludes_past_key_values": "only the keys in the config's list are excluded from predictions",
        "saves_scaler": "the loss scale is not saved; a resumed run starts with the initial scale",
    }

    def decay_parameter_names(self, model: nn.Module) -> list[str]:
        names = get_parameter_names(model, libraries.normalization_layers())
        return [name for name in names if "bias" not in name]


#: The policies, from the oldest release to the newest.
POLICIES: tuple[type[ReleasePolicy], ...] = PolicyUntil4_48.__mro__[:-1]
