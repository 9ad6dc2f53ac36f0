"""`python -m hftrainer explain`: how each argument is handled, without running anything."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from dataclasses import dataclass
from typing import Any

from hftrainer.arguments import legacy
from hftrainer.arguments.base import BaseArguments
from hftrainer.arguments.resolved import ResolvedArguments
from hftrainer.releases.followed import installed_release
from hftrainer.releases.policy import NEWEST, ReleasePolicy

WIDTH = 80
TITLES = {
    "mapped": "Settings of Lightning",
    "handled": "Done by hftrainer",
    "inert": "Accepted, without effect",
    "refused": "Refused",
}


@dataclass(frozen=True)
class Line:
    """One argument that was given: its value, its kind, and how it is handled."""

    argument: str
    value: Any
    kind: str
    detail: str


@dataclass(frozen=True)
class Explanation:
    """How training arguments are handled.

    Attributes:
        lines: the arguments that differ from their defaults.
        errors: what is wrong with their values.
        call: the equivalent `lightning.Trainer(...)`.
        policy: the policy of the release that is followed.
    """

    lines: tuple[Line, ...]
    errors: tuple[str, ...]
    call: str
    policy: ReleasePolicy

    def to_json(self) -> str:
        """The explanation as JSON, for programs."""
        shown = {
            "arguments": [dataclasses.asdict(line) for line in self.lines],
            "errors": list(self.errors),
            "call": self.call,
            "behaviour": {"release": str(self.policy.release), "differences": self.policy.differences()},
        }
        return json.dumps(shown, indent=2)

    def __str__(self) -> str:
        parts = []
        for kind, title in TITLES.items():
            shown = [f"{line.argument}={line.value!r}: {line.detail}" for line in self.lines if line.kind == kind]
            if kind == "refused":
                shown += [error for error in self.errors if _argument(error) not in self.refused]
            if shown:
                parts += [title, *(text for sentence in shown for text in _wrap_indented(sentence)), ""]
        if not self.lines:
            parts += ["All arguments have their defaults.", ""]
        if self.refused:
            parts += [*_wrap_indented(f"A Trainer refuses {', '.join(self.refused)}, for the reasons above."), ""]
        if self.refused or self.errors:
            return "\n".join(parts)
        return "\n".join([*parts, *_shown(self.policy), "", "Lightning's Trainer gets", *_wrap_indented(self.call)])

    @property
    def refused(self) -> list[str]:
        """The arguments that a Trainer refuses."""
        return [line.argument for line in self.lines if line.kind == "refused"]


def explain(args: BaseArguments) -> Explanation:
    """How the arguments are handled; found without starting anything, or importing lightning or transformers."""
    from hftrainer.arguments.support import given_arguments, make_plan
    from hftrainer.arguments.validation import check_values

    values = args.to_dict()
    resolved = ResolvedArguments(args)
    errors = check_values(resolved)
    wrong = {_argument(error): error for error in errors}
    lines = []
    for name, (given, about) in given_arguments(args).items():
        if name in values or name in legacy.HIDDEN_FIELDS:
            value = values.get(name, given)
            detail = about.detail or about.help
            detail = f"off; with True: {detail}" if value is False else detail
            detail = wrong.get(name, detail).removeprefix(f"{name}={value!r}: ")
            is_refused = name in wrong or about.refuses(value)
            lines.append(Line(name, value, "refused" if is_refused else about.kind, detail))
    plan = make_plan(resolved)
    call = ", ".join(f"{name}={value!r}" for name, value in plan.trainer_keywords().items())
    if plan.spreads_model:
        flattens = plan.sharding is not None and plan.sharding.version == 1
        kind = "DeepSpeed" if plan.deepspeed is not None else "FSDP" if flattens else "ModelParallel"
        call += f", strategy={kind}Strategy()"
    return Explanation(tuple(lines), tuple(errors), f"lightning.Trainer({call})", ResolvedArguments.of(args).policy)


def _argument(error: str) -> str:
    """The argument that an error is about, which it names first."""
    return error.partition("=")[0]


def _shown(policy: ReleasePolicy) -> list[str]:
    differences = policy.differences()
    if not differences:
        shown = [f"Behaves as transformers {policy.release}, the newest release that is known."]
        if (installed := installed_release()) != policy.release:
            shown += _wrap_indented(
                f"install() and `python -m hftrainer run` follow the installed {installed}; "
                f"lightning_config={{'behaviour': '{installed}'}} follows it here too, and shows what differs."
            )
        return shown
    heading = f"Behaves as transformers {policy.release}, where it differs from {NEWEST}:"
    return [heading, *(line for name, text in differences.items() for line in _wrap_indented(f"{name}: {text}"))]


def _wrap_indented(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False)
