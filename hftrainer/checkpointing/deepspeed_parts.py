"""The files in which DeepSpeed keeps a checkpoint in parts; needs no DeepSpeed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from hftrainer.compat.reading import fitting, plain_name

_LATEST, _UNIVERSAL = "latest", "latest_universal"
#: A process's part of parameters or optimizer states: its rank, and what it shares with the parts of other ranks.
_PART = re.compile(r"^(?:bf16_)?zero_pp_rank_(\d+)_(\w+\.pt)$")
_MODEL = "model_states.pt"


def has_states(folder: str, *, universal: bool = False) -> bool:
    """Whether a checkpoint holds DeepSpeed states."""
    return os.path.isfile(os.path.join(folder, _UNIVERSAL if universal else _LATEST))


def read_tag(folder: str, *, universal: bool = False) -> str:
    """The name of the folder of the newest states, in a checkpoint; '' if nothing names it.

    Raises:
        DamagedCheckpoint: if the name is not that of a folder in the checkpoint.
    """
    path = os.path.join(folder, _UNIVERSAL if universal else _LATEST)
    if not os.path.isfile(path):
        return ""
    with fitting(path), open(path, encoding="utf-8") as file:
        return plain_name(file.read().strip())


def write_tag(folder: str, tag: str) -> None:
    """Name the newest states of a checkpoint, as DeepSpeed does."""
    with open(os.path.join(folder, _LATEST), "w", encoding="utf-8") as file:
        file.write(tag)


def holds_parts(folder: str) -> bool:
    """Whether a checkpoint holds the model in DeepSpeed's files, as far as they name each other."""
    tags = (read_tag(folder, universal=universal) for universal in (False, True))
    return any(name.endswith(_MODEL) for tag in tags if tag for name in _names(os.path.join(folder, tag)))


def missing_part(folder: str) -> str | None:
    """The first missing file of the states that are there; None if none is missing, or if there are no states."""
    if not (tag := read_tag(folder)):
        return None
    states = os.path.join(folder, tag)
    found = _names(states)
    if not found:
        return None
    if not any(name.endswith(_MODEL) for name in found):
        return os.path.join(states, f"mp_rank_00_{_MODEL}")
    missing = [name for name in _all_parts(found) if name not in found]
    return os.path.join(states, missing[0]) if missing else None


def _names(folder: str) -> list[str]:
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def _all_parts(found: Iterable[str]) -> list[str]:
    """The parts that ranks 0 to the highest write, if each writes what any of them has written."""
    parts = [(name, match) for name in found if (match := _PART.match(name))]
    ranks = range(1 + max((int(match[1]) for _, match in parts), default=-1))
    kinds = {(name[: match.start(1)], match[2]) for name, match in parts}
    return [f"{before}{rank}_{after}" for rank in ranks for before, after in sorted(kinds)]
