"""Arguments that a script changes after its Trainer was made: which take effect, warn, or raise."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from hftrainer.arguments.validation import out_of_range
from hftrainer.errors import InvalidArgument

if TYPE_CHECKING:
    from hftrainer.arguments.base import BaseArguments
    from hftrainer.releases.policy import ReleasePolicy

logger = logging.getLogger(__name__)

#: Read once. Too much depends on them to continue with the old value and a warning.
_REFUSED = ("lightning_config", "deepspeed")


def take_changes(engine: Any, args: BaseArguments, policy: ReleasePolicy, *, own_loader: bool) -> None:
    """Apply the current values of the arguments to a run, as far as transformers does.

    Most arguments are read when they are needed. Those that the engine stores are passed to it. Those that are read
    once, when the Trainer is made, keep their first value, and a warning names them.

    Args:
        engine: the engine of the Trainer, with the plan that was made from the arguments.
        args: the arguments with their current values.
        policy: what the followed release of transformers does.
        own_loader: whether the script makes the training loader, and so may read the batch size again.

    Raises:
        InvalidArgument: for a change that needs another engine, and for numbers out of range.
    """
    if wrong := list(out_of_range(args)):
        raise InvalidArgument("\n".join(wrong))
    plan = engine.plan
    again = () if policy.reads_batch_size_once and not own_loader else ("per_device_train_batch_size",)
    once = {name: value for name, value in plan.read_once.items() if name not in again}
    now = {name: getattr(args, name, None) for name in once}
    changed = {name: value for name, value in once.items() if not _is_same(value, now[name])}
    if refused := _refused(engine, args, changed):
        raise InvalidArgument(
            f"{', '.join(refused)} changed after the Trainer was made, which depends on it: make another Trainer."
        )
    if changed and changed != engine.ignored_changes:
        logger.warning(
            "Changed after the Trainer was made, which reads it once, as in transformers: %s. The first value stays in "
            "use; make another Trainer for the second.",
            ", ".join(f"{name} ({_shown(value)} → {_shown(now[name])})" for name, value in changed.items()),
        )
    engine.ignored_changes = changed
    engine.take(accumulate_grad_batches=args.gradient_accumulation_steps, default_root_dir=str(args.output_dir))


def _refused(engine: Any, args: BaseArguments, changed: dict[str, Any]) -> list[str]:
    plan, strategy = engine.plan, engine.strategy
    refused = [name for name in _REFUSED if name in changed]
    if str(args.device) != plan.device:
        refused.append(f"use_cpu={args.use_cpu} (the device, {plan.device} → {args.device})")
    before, now = plan.accumulate_grad_batches, args.gradient_accumulation_steps
    if strategy.fixes_accumulation and now != before:
        refused.append(f"gradient_accumulation_steps ({before} → {now}), which {strategy.argument} has read too,")
    return refused


def _is_same(before: Any, now: Any) -> bool:
    return before is now or bool(before == now)


def _shown(value: Any) -> str:
    return repr(getattr(value, "value", value))
