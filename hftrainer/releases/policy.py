"""Everything that changed between releases of `transformers`, as the newest release does it; see `earlier.py`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn


class Release(NamedTuple):
    """A release of transformers, which `str()` writes as '4.57'."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"

    @classmethod
    def from_text(cls, version: str) -> Release:
        """The release of a version such as '4.57.6'."""
        major, minor = version.split(".")[:2]
        return cls(int(major), int(minor))


#: The known releases.
RELEASES = (*(Release(4, minor) for minor in range(48, 58)), *(Release(5, minor) for minor in range(25)))
NEWEST = RELEASES[-1]


class ReleasePolicy:
    """The behaviour of the newest release. `earlier.py` describes the effect of each value and method.

    Args:
        release: the followed release.

    Attributes:
        last_release: the last release with this behaviour.
        own_changes: method or value → the different behaviour, as `explain` and COMPATIBILITY.md show it. A switch that
            a subclass names here without setting it is off.
    """

    last_release = NEWEST
    own_changes: dict[str, str] = {}

    def __init_subclass__(cls) -> None:
        # A subclass without a table of its own changes nothing.
        for name in vars(cls).get("own_changes", {}).keys() - vars(cls).keys():
            assert getattr(cls, name) is True, f"{cls.__name__}.{name} is no switch that is on"
            setattr(cls, name, False)

    def __init__(self, release: Release = NEWEST) -> None:
        self.release = release

    def all_changes(self) -> dict[str, str]:
        """Name of a value or method → the followed release's behaviour, where the newest release differs."""
        texts: dict[str, str | None] = {}
        classes: Any = type(self).__mro__[:-2]
        # The text of an earlier release hides that of a later one.
        for policy_class in classes:
            own_changes = policy_class.own_changes
            texts = {name: own_changes.get(name) for name in (*own_changes, *vars(policy_class))} | texts
        return {name: text for name, text in texts.items() if text is not None}

    # ---- The loss and its divisor ------------------------------------------------------------------------------

    counts_items_only_if_used = True
    divides_uncounted_loss = True
    smooths_over_items = True

    def counted_labels(self, batch: Any, *, shifts: bool) -> Any:
        """The labels that count for the loss of a batch. A causal model never predicts the first one.

        Args:
            batch: the batch.
            shifts: whether the model shifts its labels.
        """
        if "shift_labels" in batch:
            return batch["shift_labels"]
        labels = batch["labels"]
        return labels[..., 1:] if shifts and isinstance(labels, torch.Tensor) else labels

    def num_items(self, count: torch.Tensor) -> torch.Tensor | int:
        """`num_items_in_batch` from the number of labels: a float32 on the device."""
        return count / 1

    def loss_divisor(self, micro_batches: int, args: Any) -> int:
        """The divisor of a loss that is not divided by its items: the micro-batches of its optimizer step."""
        return micro_batches

    def gradient_divisor(self, args: Any) -> int:
        """The divisor of the gradients, besides the division of the loss."""
        return 1

    # ---- Steps and weights -------------------------------------------------------------------------------------

    sets_use_cache = True
    aligns_special_tokens = True
    aligns_only_set_tokens = True
    makes_model_before_trial = True
    resumes_with_batch_size_of_arguments = True
    reads_batch_size_once = True
    seeds_workers_by_rank = True

    def steps_of_epoch(self, micro_batches: int, accumulation_steps: int) -> int:
        """Optimizer steps of an epoch; the last may have fewer micro-batches."""
        return math.ceil(micro_batches / accumulation_steps)

    def decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters with weight decay: all but biases and norms, by class or name."""
        norms = (r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
        return get_parameter_names(model, [nn.LayerNorm], [r"bias", *norms])

    # ---- Log lines ---------------------------------------------------------------------------------------------

    epoch_before_training: int | None = 0
    logs_rate_of_step = True
    logs_grad_norm_without_clipping = True
    logs_tokens_per_second = True
    averages_train_loss_over_call = True
    estimates_total_flos = True

    def logged_loss(self, mean: float) -> float:
        """The loss in a log line."""
        return mean

    def printed(self, logs: dict[str, Any], *, above_bar: bool = False) -> dict[str, Any]:
        """A log line as printed, with numbers of four significant digits.

        Args:
            logs: the log line.
            above_bar: whether it is printed above a progress bar.
        """
        return {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in logs.items()}

    # ---- Evaluation and the best model -------------------------------------------------------------------------

    evaluates_last_step = True
    divides_eval_loss_by_items = True
    filters_nonfinite_eval_losses = True
    excludes_past_key_values = True
    skips_logits = True
    loads_best_after_logging = True

    def evaluation_generator(self, seed: int) -> torch.Generator | None:
        """The generator from which an evaluation grouped by length draws its order, or None for torch's."""
        return torch.Generator().manual_seed(seed)

    # ---- Checkpoints -------------------------------------------------------------------------------------------

    #: Values of `save_strategy` with which the last step is saved at once.
    saves_last_step_with: tuple[str, ...] = ("steps",)
    records_best_step = True
    saves_tokenizer_of_collator = True
    saves_scaler = True

    # ---- Overrides: which are called, and what they return -----------------------------------------------------

    calls_create_scheduler = True
    returns_steps_in_epoch = True


def get_parameter_names(
    model: nn.Module, forbidden_layer_types: Sequence[type], forbidden_layer_names: Sequence[str] | None = None
) -> list[str]:
    """Names of the parameters outside the given layer types that match none of the patterns.

    Args:
        model: the model.
        forbidden_layer_types: types of layers whose parameters are excluded.
        forbidden_layer_names: regular expressions, searched in the lower-case name relative to each parent layer.
    """
    patterns = [re.compile(pattern) for pattern in forbidden_layer_names or ()]

    def is_allowed(name: str) -> bool:
        return not any(pattern.search(name.lower()) for pattern in patterns)

    def walk(module: nn.Module) -> list[str]:
        names = []
        for child_name, child in module.named_children():
            if not isinstance(child, tuple(forbidden_layer_types)):
                names += [name for inner_name in walk(child) if is_allowed(name := f"{child_name}.{inner_name}")]
        return names + [name for name in module._parameters if is_allowed(name)]

    return walk(model)
