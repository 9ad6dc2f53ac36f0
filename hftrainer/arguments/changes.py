"""Arguments that a script changes after its Trainer was made, and those that an older release lacks: `complete`."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from typing import TYPE_CHECKING, Any

from hftrainer.arguments.legacy import FIELDS, HIDDEN, RENAMED, gone
from hftrainer.arguments.validation import ALIASES, choose_start_method, out_of_range
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


def complete(args: BaseArguments, known: type[BaseArguments]) -> None:
    """Set the fields that `args` lack, in place: from their older names, or else our defaults.

    Their own fields and the result of their `to_dict` do not change.

    Args:
        args: the training arguments; instances of `known` lack nothing.
        known: our class, with all fields.
    """
    if isinstance(args, known):
        return
    for field in {**known.__dataclass_fields__, **HIDDEN}.values():
        if field.name not in FIELDS and not hasattr(args, field.name):
            setattr(args, field.name, _value(args, field))
    choose_start_method(args)
    if sentences := gone(args):
        warnings.warn("\n".join(sentences), FutureWarning, stacklevel=3)


def _value(args: BaseArguments, field: dataclasses.Field[Any]) -> Any:
    """The value of a field that `args` lack."""
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    for old, new in ALIASES.items():
        if new == field.name and hasattr(args, old):
            return getattr(args, old)
    for old, rename in RENAMED.items():
        if rename.new == field.name and hasattr(args, old):
            return rename.write(default, getattr(args, old))
    return default
