"""Errors of communication between processes, which torch's backends tell in different ways."""

from __future__ import annotations

import torch

#: What gloo says, in plain RuntimeErrors, when another process is gone or late.
_OF_GLOO = ("gloo", "Connection closed by peer", "Connection reset by peer", "Timed out waiting", "Application timeout")


def is_of_communication(error: BaseException) -> bool:
    """Whether a collective operation failed because of another process."""
    if isinstance(error, getattr(torch.distributed, "DistError", ())):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OF_GLOO)
