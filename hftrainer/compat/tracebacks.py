"""Tracebacks of errors in a script's own code: without the engine's frames, and with notes about the batch.

HFTRAINER_TRACEBACK=full keeps all frames.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)

#: Packages whose frames lead from `train()` to the code of the script, and from there to where torch fails.
_ENGINE = frozenset(
    """
    hftrainer hftrainer_deepspeed hftrainer_lightning hftrainer_ray hftrainer_tensorflow hftrainer_xla
    accelerate contextlib deepspeed functools lightning torch
    """.split()
)
VARIABLE = "HFTRAINER_TRACEBACK"


class HideEngineFrames:
    """Context that leaves the engine's frames out of the traceback of an error: all but the first and the last.

    Before Python 3.11 tracebacks stay whole, since changes made in `__exit__` are lost there.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is None or sys.version_info < (3, 11) or os.environ.get(VARIABLE) == "full":
            return
        is_shorter, seen = False, set()
        link: BaseException | None = error
        while link is not None and id(link) not in seen:
            seen.add(id(link))
            frames = _frames(link.__traceback__)
            first = frames[:1] if link is error else []  # of `train()`
            inner = frames[len(first) :]
            kept = [each for each in inner[:-1] if _package(each) not in _ENGINE] + inner[-1:]
            is_shorter |= len(kept) < len(inner)
            link.__traceback__ = _joined(first + kept)
            link = link.__cause__ or link.__context__
        if is_shorter and isinstance(error, Exception):
            add_note(error, f"(The engine's frames are left out: {VARIABLE}=full shows them.)")


def _frames(trace: TracebackType | None) -> list[TracebackType]:
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    return frames


def _package(trace: TracebackType) -> str:
    return str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0]


def _joined(frames: list[TracebackType]) -> TracebackType | None:
    joined = None
    for each in reversed(frames):
        joined = TracebackType(joined, each.tb_frame, each.tb_lasti, each.tb_lineno or 0)
    return joined


def add_note(error: BaseException, text: str) -> None:
    """Add a line below the error's message, unless it is already there. Where Python shows no notes (3.10), log it."""
    notes = getattr(error, "__notes__", [])
    if text not in notes:
        vars(error)["__notes__"] = [*notes, text]
        if sys.version_info < (3, 11):
            logger.error(text)


def shapes(value: Any) -> str:
    """The contents of a batch, for a message: types and shapes by key."""
    if isinstance(value, Mapping) and value:
        return ", ".join(f"{name}: {shapes(each)}" for name, each in value.items())
    if isinstance(value, tuple):
        return f"({', '.join(map(shapes, value))})"
    if isinstance(value, np.ndarray) or (isinstance(value, torch.Tensor) and not value.is_nested):  # nested: no shape
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return f"a {type(value).__name__}"
