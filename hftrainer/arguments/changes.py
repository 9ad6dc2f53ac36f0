"""Applies the arguments that a script changes after it has made the Trainer, or refuses the change."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from hftrainer.arguments.base import BaseArguments
from hftrainer.arguments.checks.validation import check_ranges
from hftrainer.errors import InvalidArgument
from hftrainer.releases.policy import ReleasePolicy

if TYPE_CHECKING:
    from hftrainer.plugins import LightningEngine

logger = logging.getLogger(__name__)

#: Changing these raises an error, since most of the Trainer was built from them.
_NEED_NEW_TRAINER = ("lightning_config", "deepspeed")


def apply_to_engine(
    engine: LightningEngine, args: BaseArguments, policy: ReleasePolicy, *, has_custom_loader: bool
) -> None:
    """Apply changed arguments to the next run, where transformers would apply them.

    Most arguments are read when they are needed. Those that the engine stores are passed to it. Those that are read
    once, when the Trainer is made, keep their first value, and a warning names them.

    Args:
        engine: the engine of the Trainer, with the plan that was made from the arguments.
        args: the arguments with their current values.
        policy: the policy of the followed release of transformers.
        has_custom_loader: whether the script makes the training loader, and so may read the batch size again.

    Raises:
        InvalidArgument: for a change that needs another engine, and for numbers out of range.
    """
    if errors := list(check_ranges(args)):
        raise InvalidArgument("\n".join(errors))
    reread_names = () if policy.reads_batch_size_once and not has_custom_loader else ("per_device_train_batch_size",)
    first_values = {name: value for name, value in engine.plan.read_once.items() if name not in reread_names}
    current = {name: getattr(args, name, None) for name in first_values}
    changed = {name: old for name, old in first_values.items() if old is not current[name] and old != current[name]}
    if refused_changes := _refused_changes(engine, args, changed):
        raise InvalidArgument(
            f"{', '.join(refused_changes)} changed after the Trainer was made, which depends on it: make a new Trainer."
        )
    if changed and changed != engine.ignored_changes:
        logger.warning(
            "Changed after the Trainer was made, which reads such arguments once, as in transformers: %s. The first "
            "value stays in use; make a new Trainer to use the second.",
            ", ".join(
                f"{name} ({_plain_value(old)!r} → {_plain_value(current[name])!r})" for name, old in changed.items()
            ),
        )
    engine.ignored_changes = changed
    engine.update_plan(accumulate_grad_batches=args.gradient_accumulation_steps, default_root_dir=str(args.output_dir))


def _refused_changes(engine: LightningEngine, args: BaseArguments, changed_values: dict[str, Any]) -> list[str]:
    plan, strategy = engine.plan, engine.strategy
    refused_changes = [name for name in _NEED_NEW_TRAINER if name in changed_values]
    if str(args.device) != plan.device:
        refused_changes.append(f"use_cpu={args.use_cpu} (the device, {plan.device} → {args.device})")
    previous_steps, current_steps = plan.accumulate_grad_batches, args.gradient_accumulation_steps
    if strategy.has_fixed_accumulation and current_steps != previous_steps:
        refused_changes.append(
            f"gradient_accumulation_steps ({previous_steps} → {current_steps}), which {strategy.argument} has read,"
        )
    return refused_changes


def _plain_value(value: Any) -> Any:
    return getattr(value, "value", value)
