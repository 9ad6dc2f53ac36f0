"""`Explanation`: how each training argument is handled, without starting a run."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from dataclasses import dataclass
from typing import Any

from hftrainer.arguments import old_names
from hftrainer.arguments.base import BaseArguments
from hftrainer.arguments.resolved import ResolvedArguments
from hftrainer.releases.followed import installed_release
from hftrainer.releases.policy import NEWEST, ReleasePolicy

WIDTH = 80
TITLES = {
    "mapped": "Settings of Lightning",
    "handled": "Handled by hftrainer",
    "inert": "Accepted, without effect",
    "refused": "Refused",
}


@dataclass(frozen=True)
class Line:
    """An argument that was set: its value, its kind, and how it is handled."""

    argument: str
    value: Any
    kind: str
    detail: str


@dataclass(frozen=True)
class Explanation:
    """How training arguments are handled.

    Attributes:
        lines: the arguments that differ from their defaults, without those that other arguments set.
        errors: the errors in their values.
        call: the equivalent `lightning.Trainer(...)`.
        policy: the policy of the followed release.
    """

    lines: tuple[Line, ...]
    errors: tuple[str, ...]
    call: str
    policy: ReleasePolicy

    def to_json(self) -> str:
        """The explanation as JSON, for programs."""
        explanation = {
            "arguments": [dataclasses.asdict(line) for line in self.lines],
            "errors": list(self.errors),
            "call": self.call,
            "behaviour": {"release": str(self.policy.release), "differences": self.policy.all_changes()},
        }
        return json.dumps(explanation, indent=2)

    def __str__(self) -> str:
        parts = []
        for kind, title in TITLES.items():
            sentences = [f"{line.argument}={line.value!r}: {line.detail}" for line in self.lines if line.kind == kind]
            if kind == "refused":
                sentences += [error for error in self.errors if _argument(error) not in self.refused]
            if sentences:
                parts += [title, *(text for sentence in sentences for text in _wrap_indented(sentence)), ""]
        if not self.lines:
            parts += ["All arguments have their defaults.", ""]
        if self.refused:
            parts += [*_wrap_indented(f"A Trainer refuses {', '.join(self.refused)}, for the reasons above."), ""]
        if self.refused or self.errors:
            return "\n".join(parts)
        return "\n".join(
            [*parts, *_describe_policy(self.policy), "", "Lightning's Trainer gets", *_wrap_indented(self.call)]
        )

    @property
    def refused(self) -> list[str]:
        """The arguments that a Trainer refuses."""
        return [line.argument for line in self.lines if line.kind == "refused"]


def explain(args: BaseArguments) -> Explanation:
    """How the arguments are handled. Starts no run, and imports neither lightning nor transformers."""
    from hftrainer.arguments.checks.device import check_backend
    from hftrainer.arguments.checks.unsupported import non_neutral_arguments
    from hftrainer.arguments.checks.validation import check_values
    from hftrainer.arguments.lightning_config import check_keywords
    from hftrainer.arguments.lightning_plan import make_plan

    values = args.to_dict()
    resolved = ResolvedArguments(args)
    # Not `check_device`: another device may support the arguments.
    errors = [*check_values(resolved), *check_keywords(resolved.lightning_config), *check_backend(resolved)]
    error_of_argument = {_argument(error): error for error in errors}
    lines = []
    for name, (raw_value, argument) in non_neutral_arguments(args).items():
        if name in values or name in old_names.HIDDEN_FIELDS:
            value = values.get(name, raw_value)
            detail = argument.detail or argument.help
            detail = f"off; with True: {detail}" if value is False else detail
            detail = error_of_argument.get(name, detail).removeprefix(f"{name}={value!r}: ")
            is_refused = name in error_of_argument or argument.refuses(value)
            lines.append(Line(name, value, "refused" if is_refused else argument.kind, detail))
    plan = make_plan(resolved)
    call = ", ".join(f"{name}={value!r}" for name, value in plan.trainer_keywords().items())
    if plan.spreads_model:
        is_fsdp1 = plan.sharding is not None and plan.sharding.version == 1
        kind = "DeepSpeed" if plan.deepspeed is not None else "FSDP" if is_fsdp1 else "ModelParallel"
        call += f", strategy={kind}Strategy()"
    policy = ResolvedArguments.from_args(args).policy
    return Explanation(tuple(lines), tuple(errors), f"lightning.Trainer({call})", policy)


def _argument(error: str) -> str:
    """The argument with which an error message begins."""
    return error.partition("=")[0]


def _describe_policy(policy: ReleasePolicy) -> list[str]:
    differences = policy.all_changes()
    if not differences:
        lines = [f"Behaves like transformers {policy.release}, the newest known release."]
        if (installed := installed_release()) != policy.release:
            lines += _wrap_indented(
                f"install() and `python -m hftrainer run` follow the installed {installed}; "
                f"lightning_config={{'behaviour': '{installed}'}} selects it here too, and lists the differences."
            )
        return lines
    heading = f"Behaves like transformers {policy.release}, which differs from {NEWEST}:"
    return [heading, *(line for name, text in differences.items() for line in _wrap_indented(f"{name}: {text}"))]


def _wrap_indented(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False)
