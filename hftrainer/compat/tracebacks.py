"""Hides the engine's frames in tracebacks of a script's errors, and adds notes to errors.

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

#: Packages whose frames lead from `train()` to the script's code, and from there to the function that fails.
_ENGINE = frozenset(
    """
    hftrainer hftrainer_deepspeed hftrainer_lightning hftrainer_ray hftrainer_tensorflow hftrainer_xla
    accelerate contextlib deepspeed functools lightning torch
    """.split()
)
VARIABLE = "HFTRAINER_TRACEBACK"


class HideEngineFrames:
    """Context manager that removes the engine's frames from tracebacks, except the first and the last.

    Before Python 3.11 tracebacks stay complete, since changes in `__exit__` are lost.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is None or sys.version_info < (3, 11) or os.environ.get(VARIABLE) == "full":
            return
        is_shorter, visited_ids = False, set()
        link: BaseException | None = error
        while link is not None and id(link) not in visited_ids:
            visited_ids.add(id(link))
            frames = _frames(link.__traceback__)
            # The first frame is that of `train()`.
            first = frames[:1] if link is error else []
            rest = frames[len(first) :]
            visible_frames = [frame for frame in rest[:-1] if _package(frame) not in _ENGINE] + rest[-1:]
            is_shorter |= len(visible_frames) < len(rest)
            link.__traceback__ = _join_frames(first + visible_frames)
            link = link.__cause__ or link.__context__
        if is_shorter and isinstance(error, Exception):
            add_note(error, f"(The engine's frames are hidden: {VARIABLE}=full shows them.)")


def _frames(trace: TracebackType | None) -> list[TracebackType]:
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    return frames


def _package(trace: TracebackType) -> str:
    return str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0]


def _join_frames(frames: list[TracebackType]) -> TracebackType | None:
    traceback = None
    for frame in reversed(frames):
        traceback = TracebackType(traceback, frame.tb_frame, frame.tb_lasti, frame.tb_lineno or 0)
    return traceback


def add_note(error: BaseException, text: str) -> None:
    """Add a line below the error's message, once. Log the line if Python shows no notes (3.10)."""
    notes = getattr(error, "__notes__", [])
    if text not in notes:
        vars(error)["__notes__"] = [*notes, text]
        if sys.version_info < (3, 11):
            logger.error(text)


def describe_shapes(value: Any) -> str:
    """The types and shapes in a batch, by key, as text for a message."""
    if isinstance(value, Mapping) and value:
        return ", ".join(f"{name}: {describe_shapes(each)}" for name, each in value.items())
    if isinstance(value, tuple):
        return f"({', '.join(map(describe_shapes, value))})"
    # Nested tensors have no shape.
    if isinstance(value, np.ndarray) or (isinstance(value, torch.Tensor) and not value.is_nested):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return f"a {type(value).__name__}"
