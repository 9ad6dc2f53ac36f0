"""Recognizes errors of communication between processes, which differ by torch's backend."""

from __future__ import annotations

import torch

#: Messages of gloo's plain RuntimeErrors when another process has exited or is late.
_OF_GLOO = ("gloo", "Connection closed by peer", "Connection reset by peer", "Timed out waiting", "Application timeout")


def is_of_communication(error: BaseException) -> bool:
    """Whether a collective operation failed because of another process."""
    if isinstance(error, getattr(torch.distributed, "DistError", ())):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OF_GLOO)
