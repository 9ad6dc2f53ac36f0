"""THE TABLE of dated behaviours: what releases of `transformers` do differently, and which release a Trainer follows.

A Trainer reads it once, when it is made, and keeps the frozen result. `from hftrainer import Trainer` follows the
newest release; `install()` and `python -m hftrainer run` follow the installed one; and
`lightning_config={"behaviour": "4.57"}` selects one.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

#: The releases of transformers that the table covers.
RELEASES = (*(f"4.{minor}" for minor in range(48, 58)), *(f"5.{minor}" for minor in range(25)))
NEWEST = RELEASES[-1]


@dataclass(frozen=True)
class Change:
    """A change of behaviour in a release.

    Attributes:
        since: the first release that behaves as the newest one.
        now: its behaviour.
        before: the behaviour of earlier releases.
        decided_in: our module that reads the switch.
        pull_request: its number in huggingface/transformers, if known.
        begun: the first release with `before`; releases before that one behave as the newest.
    """

    since: str
    now: str
    before: str
    decided_in: str
    pull_request: int | None = None
    begun: str = RELEASES[0]

    def is_in(self, release: str) -> bool:
        """Whether a release has the newest behaviour."""
        at = RELEASES.index(release)
        return at >= RELEASES.index(self.since) or at < RELEASES.index(self.begun)


def _since(
    release: str,
    decided_in: str,
    now: str,
    *,
    before: str,
    pull_request: int | None = None,
    begun: str = RELEASES[0],
) -> Any:
    change = Change(release, now, before, decided_in, pull_request, begun)
    return dataclasses.field(default=True, metadata={"change": change})


@dataclass(frozen=True, kw_only=True)
class Behaviours:
    """A switch for each change; all are on in the newest release.

    Attributes:
        release: the release that is followed, such as '4.57'.
    """

    release: str = NEWEST

    # ---- The loss and its divisor ------------------------------------------------------------------------------

    counts_shifted_labels: bool = _since(
        "5.10",
        "training.loader_factory",
        "the first label of a sequence, which a causal model never predicts, is not counted in num_items_in_batch",
        before="every label is counted in num_items_in_batch, also the first of a causal sequence",
        pull_request=46204,
    )
    counts_only_for_those_who_ask: bool = _since(
        "4.51",
        "training.steps",
        "items are counted only for models that take num_items_in_batch, or for compute_loss_func",
        before="items are counted for every model, and passed to overrides of compute_loss",
    )
    counts_items_on_device: bool = _since(
        "4.50",
        "training.steps",
        "num_items_in_batch is a tensor on the device",
        before="num_items_in_batch is a Python int",
    )
    counts_items_as_float: bool = _since(
        "5.19",
        "training.steps",
        "num_items_in_batch is of type float32",
        before="num_items_in_batch is an integer",
    )
    divides_by_window: bool = _since(
        "4.55",
        "training.steps",
        "a loss that is not divided by its items is divided by the number of micro-batches in its window",
        before="a loss that is not divided by its items is always divided by gradient_accumulation_steps",
    )
    divides_uncounted_loss: bool = _since(
        "4.53",
        "training.steps",
        "without items to count, the loss of a model that takes num_items_in_batch is divided for accumulation too",
        before="the loss of a model that takes num_items_in_batch is never divided for accumulation",
    )
    divides_gradients_once: bool = _since(
        "5.6",
        "training.loop",
        "gradients are those of the loss, which is divided for accumulation once",
        before="accelerate divides the gradients by gradient_accumulation_steps once more",
        begun="5.2",
    )
    smooths_over_items: bool = _since(
        "5.15",
        "training.steps",
        "label smoothing divides by num_items_in_batch",
        before="label smoothing divides by the labels of its micro-batch, even where the loss is summed over a window",
        pull_request=47261,
    )

    # ---- Steps and weights -------------------------------------------------------------------------------------

    counts_last_window: bool = _since(
        "4.52",
        "training.planner",
        "a last window with fewer micro-batches is an optimizer step of the epoch",
        before="the steps of an epoch are rounded down, so training ends earlier when its last window is not full",
        pull_request=37923,
    )
    leaves_named_norms_undecayed: bool = _since(
        "4.49",
        "trainer_optimizer",
        "weight decay excludes parameters with layernorm or rmsnorm in their names",
        before="weight decay excludes normalization layers by their class only",
        pull_request=35927,
    )
    decays_by_name: bool = _since(
        "4.53",
        "trainer_optimizer",
        "weight decay excludes nn.LayerNorm, and parameters with bias or norm in their names",
        before="weight decay excludes the layers in ALL_LAYERNORM_LAYERS, but not those that are named norm",
        pull_request=38922,
    )
    sets_use_cache: bool = _since(
        "5.0",
        "assembly.construction",
        "the argument use_cache, False by default, is written into the model's config",
        before="the model's config keeps its use_cache",
    )
    aligns_special_tokens: bool = _since(
        "4.56",
        "training.model_setup",
        "the model's configs get the special tokens of the processing class",
        before="the model's configs keep their special tokens",
        pull_request=38441,
    )
    aligns_tokens_that_are_set: bool = _since(
        "5.18",
        "training.model_setup",
        "special tokens that the tokenizer lacks stay in the model's configs; lists of end tokens are extended",
        before="the configs lose special tokens that the tokenizer lacks, and lists of end tokens become one token",
        pull_request=48708,
    )
    makes_model_before_trial: bool = _since(
        "5.3",
        "training.runner",
        "model_init is called with the seed of the arguments, before a trial changes them",
        before="model_init is called with the seed of the trial",
    )
    takes_given_batch_size: bool = _since(
        "5.2",
        "training.runner",
        "a resumed run has the batch size of the arguments, unless auto_find_batch_size is set",
        before="a resumed run has the batch size of its checkpoint",
    )
    keeps_batch_size: bool = _since(
        "5.3",
        "arguments.changes",
        "per_device_train_batch_size is read when the Trainer is made",
        before="train() reads per_device_train_batch_size again",
    )
    seeds_workers_by_rank: bool = _since(
        "4.52",
        "training.loader_factory",
        "a loading process adds dataloader_num_workers * rank to its seed",
        before="loading processes of all ranks have the same seeds",
    )

    # ---- Log lines ---------------------------------------------------------------------------------------------

    logs_whole_loss: bool = _since(
        "5.0",
        "training.log_save_evaluate",
        "the loss is logged with all digits",
        before="the loss is logged with four decimal places",
        pull_request=42104,
    )
    logs_rate_of_step: bool = _since(
        "4.51",
        "training.loop",
        "the logged learning rate is that of the step",
        before="the logged learning rate is that of the next step",
        pull_request=36973,
    )
    logs_unclipped_norm: bool = _since(
        "5.3",
        "training.loop",
        "grad_norm is measured and logged with max_grad_norm=0 too",
        before="grad_norm is logged only when gradients are clipped",
    )
    logs_tokens_per_second: bool = _since(
        "4.52",
        "training.steps",
        "with include_num_input_tokens_seen, train_tokens_per_second is logged",
        before="train_tokens_per_second is not logged",
    )
    averages_over_own_steps: bool = _since(
        "5.19",
        "training.runner",
        "train_loss of a resumed run is the mean over the steps of this call",
        before="train_loss of a resumed run is the sum of this call over all steps, also those before the checkpoint",
    )
    begins_at_epoch_zero: bool = _since(
        "5.3",
        "assembly.construction",
        "state.epoch is 0 before training, and evaluate() logs it",
        before="state.epoch is None before training, and evaluate() does not log it",
    )
    counts_operations_itself: bool = _since(
        "5.0",
        "training.steps",
        "total_flos is six operations per token and parameter",
        before="total_flos is the result of the model's own floating_point_ops",
    )
    prints_four_digits: bool = _since(
        "5.0",
        "callbacks.progress",
        "numbers in printed log lines have four digits",
        before="numbers in printed log lines have all digits",
    )

    # ---- Evaluation and the best model -------------------------------------------------------------------------

    evaluates_at_last_step: bool = _since(
        "5.4",
        "callbacks.flow",
        "with eval_strategy='steps' the last step is evaluated, whatever eval_steps is",
        before="the last step is evaluated only if it is a multiple of eval_steps",
        pull_request=44146,
    )
    evaluates_by_items: bool = _since(
        "4.57",
        "evaluation.runner",
        "the loss of an evaluation batch is divided by its num_items_in_batch",
        before="the loss of an evaluation batch is the model's own mean",
        pull_request=41183,
    )
    leaves_out_infinite_losses: bool = _since(
        "5.23",
        "evaluation.runner",
        "with logging_nan_inf_filter, eval_loss excludes batches whose loss is nan or infinite",
        before="eval_loss is nan or infinite if the loss of one batch is",
    )
    seeds_order_of_evaluation: bool = _since(
        "5.16",
        "training.loader_factory",
        "an evaluation grouped by length draws its order from its own generator",
        before="an evaluation grouped by length draws its order from torch's generator, which training uses too",
    )
    leaves_out_past: bool = _since(
        "4.49",
        "evaluation.runner",
        "past_key_values are excluded from predictions, also if the config has no list of keys to exclude",
        before="only the keys in the config's list are excluded from predictions",
    )
    skips_logits: bool = _since(
        "5.23",
        "evaluation.runner",
        "with use_liger_kernel, an evaluation that needs only the loss passes skip_logits=True to the model",
        before="with use_liger_kernel, an evaluation that needs only the loss computes the logits too",
    )
    loads_best_after_logging: bool = _since(
        "5.3",
        "training.runner",
        "the best model is loaded after the last log line",
        before="the best model is loaded before the last log line",
    )

    # ---- Checkpoints -------------------------------------------------------------------------------------------

    saves_last_step_by_steps: bool = _since(
        "4.50",
        "callbacks.flow",
        "the last step is saved immediately only with save_strategy='steps'",
        before="the last step is saved immediately with save_strategy='epoch' too, and again at the end of the epoch",
    )
    keeps_best_step: bool = _since(
        "4.50",
        "training.saver",
        "trainer_state.json has best_global_step; best_model_checkpoint is set once that step is saved",
        before="no best_global_step; best_model_checkpoint is set at the evaluation, saved or not",
    )
    saves_tokenizer_of_collator: bool = _since(
        "4.50",
        "training.saver",
        "without a processing class, the tokenizer of the data collator is saved",
        before="the tokenizer of the data collator is not saved",
    )
    saves_scaler: bool = _since(
        "4.49",
        "trainer",
        "the loss scale is saved, with fp16",
        before="the loss scale is not saved; a resumed run starts with the initial scale",
    )

    # ---- Overrides: which are called, with what, and what they return ------------------------------------------

    makes_schedule_apart: bool = _since(
        "5.1",
        "training.preparation",
        "train() calls create_optimizer and create_scheduler",
        before="train() calls create_optimizer_and_scheduler, even if the two others are overridden too",
    )

    returns_steps_in_epoch: bool = _since(
        "5.3",
        "training.planner",
        "set_initial_training_values returns total_train_batch_size and steps_in_epoch as its fifth and sixth values",
        before="set_initial_training_values returns epoch_based and len_dataloader as its fifth and sixth values",
    )

    def differences(self) -> dict[str, Change]:
        """Switch → its change, for the changes that the followed release does not have yet."""
        return {name: change for name, change in TABLE.items() if not getattr(self, name)}


#: Switch → its change.
TABLE: dict[str, Change] = {
    field.name: field.metadata["change"] for field in dataclasses.fields(Behaviours) if "change" in field.metadata
}
#: Argument → (the first release with the current default, the default before it). `install()` sets them.
EARLIER_DEFAULTS: dict[str, tuple[str, Any]] = {
    "average_tokens_across_devices": ("4.54", False),
    "optim": ("4.54", "adamw_torch"),
    "fsdp_min_num_params": ("5.0", 0),
    "report_to": ("5.0", "all"),
    "trackio_space_id": ("5.6", "trackio"),
    "warmup_ratio": ("5.0", 0.0),
}
#: The release that Trainers of this process follow if their arguments choose none.
_followed = NEWEST


def of(release: str) -> Behaviours:
    """The behaviours of a release; those of the newest known one for a later release.

    Args:
        release: such as '4.57' or '4.57.6'.

    Raises:
        ValueError: if the release is not in the table; the message names the known ones.
    """
    if isinstance(release, (int, float)):
        raise ValueError(f"{release!r}: give the release as text: the number 5.10 would be read as 5.1.")
    if not isinstance(release, str):
        raise ValueError(f"{release!r}: give a release as text, such as '{NEWEST}'.")
    name = ".".join(release.split(".")[:2])
    if name not in RELEASES:
        near = _nearest(name) if re.fullmatch(r"\d+\.\d+", name) else None
        if near == NEWEST:
            _inform(newer_than_known(release))
            return _of(NEWEST)
        raise ValueError(
            f"{release!r} is not a release of transformers whose behaviour is known, from {RELEASES[0]} to {NEWEST}"
            + (f"; the nearest is {near!r}." if near else ".")
        )
    return _of(name)


def newer_than_known(version: str) -> str | None:
    """A sentence about a version of transformers later than the newest release in the table; None for others."""
    if _nearest(version) != NEWEST or ".".join(version.split(".")[:2]) == NEWEST:
        return None
    return (
        f"transformers {version} is newer than {NEWEST}, the newest release that this hftrainer knows: what changed "
        f"since then is not followed. Upgrade with pip install --upgrade hftrainer."
    )


@functools.cache
def _inform(sentence: str | None) -> None:
    if sentence:
        logger.info(sentence)


def _nearest(version: str) -> str:
    """The latest known release up to a version; the first known one if all are later."""
    major, minor = (int(part) for part in version.split(".")[:2])
    known = [tuple(int(part) for part in release.split(".")) for release in RELEASES]
    earlier = [release for release, parts in zip(RELEASES, known, strict=True) if parts <= (major, minor)]
    return earlier[-1] if earlier else RELEASES[0]


@functools.cache
def _of(release: str) -> Behaviours:
    return Behaviours(release=release, **{name: change.is_in(release) for name, change in TABLE.items()})


def chosen(config: Mapping[str, Any]) -> Behaviours:
    """The behaviours that a Trainer follows.

    Args:
        config: its `lightning_config`, whose 'behaviour' names a release.
    """
    return of(config.get("behaviour", _followed))


def is_before(release: str) -> bool:
    """Whether the release that Trainers of this process follow is earlier than another."""
    return RELEASES.index(chosen({}).release) < RELEASES.index(release)


def of_arguments(args: Any) -> Behaviours:
    """The behaviours that a Trainer with these arguments follows."""
    from hftrainer.arguments.resolved import ResolvedArguments

    return chosen(ResolvedArguments.of(args).readable_config)


def check_choice(config: Mapping[str, Any]) -> list[str]:
    """An error message if the 'behaviour' in `lightning_config` is not a known release."""
    try:
        chosen(config)
    except ValueError as error:
        return [f"lightning_config['behaviour']: {error}"]
    return []


def follow(release: str) -> None:
    """Set the release that Trainers made from now on follow, if their arguments choose none."""
    global _followed
    _followed = of(release).release


def installed_release() -> str:
    """The release in the table nearest to the installed transformers; the newest if none is installed."""
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return NEWEST
    _inform(newer_than_known(version))
    return _nearest(version)


def earlier_defaults(release: str) -> dict[str, Any]:
    """The defaults of arguments in a release that differ from the current ones."""
    at = RELEASES.index(release)
    return {name: value for name, (since, value) in EARLIER_DEFAULTS.items() if at < RELEASES.index(since)}
