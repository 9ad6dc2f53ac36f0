"""The errors that users meet. Each says what was given, what is allowed, and what to do."""

from __future__ import annotations


class InvalidArgument(ValueError):
    """An argument has a value that it cannot have, or contradicts another."""


class UnsupportedArgument(ValueError):
    """An argument is known but cannot be honoured; the message says why and what to use instead."""


class UnknownArgument(TypeError):
    """An argument that no release knows."""


class MissingPackage(ImportError):
    """What was asked for comes from a library that is not installed; the message says how to install it."""


class CheckpointNotFound(ValueError):
    """There is nothing to resume from where it was looked for."""


class CheckpointNotWritten(RuntimeError):
    """A checkpoint could not be written, and training was told to stop then."""


class DamagedCheckpoint(ValueError):
    """A file of a checkpoint is cut off or altered."""


class UnsafeCheckpoint(ValueError):
    """A file of a checkpoint holds objects that only unpickling could read; the message says how to allow them."""


class HubError(RuntimeError):
    """The Hub cannot be reached, or refuses what it was asked for; the message says what to do."""


class SearchFailed(RuntimeError):
    """A hyperparameter search has completed no trial; the message says what became of them."""


class MetricNotFound(KeyError, ValueError):
    """Evaluation does not return the metric that an argument names."""

    def __str__(self) -> str:
        """The message as it is; KeyError would quote it."""
        return str(self.args[0])
