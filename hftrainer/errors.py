"""The errors that users meet. Each says what was given, what is allowed, and what to do.

Each is also of the class that transformers raises in the same situation, since scripts catch that one.
"""

from __future__ import annotations

import pickle


class InvalidArgument(ValueError):
    """An argument has a value that it cannot have, or contradicts another."""


class InvalidSetup(InvalidArgument, RuntimeError):
    """What a Trainer or a search is given is not enough, or contradicts itself."""


class UnknownKey(InvalidArgument, TypeError):
    """A key within the value of an argument is not known."""


class MissingFile(InvalidArgument, FileNotFoundError):
    """An argument names a file that is not there."""


class NotAnObject(InvalidArgument, NotImplementedError):
    """An argument is a class, and an object of it is needed."""


class MissingMethod(InvalidArgument, AttributeError):
    """An argument needs a method that the model does not have."""


class MissingFollowedMetric(InvalidArgument, AssertionError):
    """A callback follows a metric that the arguments do not name, or that no evaluation brings."""


class NotACallback(TypeError, AttributeError):
    """Something is given as a callback that handles none of the events."""


class UnsupportedArgument(ValueError):
    """An argument is known but cannot be honoured; the message says why and what to use instead."""


class UnknownArgument(TypeError):
    """An argument that no release knows."""


class MissingPackage(ImportError, ValueError, RuntimeError):
    """What was asked for comes from a library that is not installed; the message says how to install it.

    transformers raises one of the three, by the library: ImportError for optimizers, but ValueError for some, and
    RuntimeError for trackers and backends of a search.
    """


class CheckpointNotFound(ValueError):
    """There is nothing to resume from where it was looked for."""


class WrongConfig(ValueError):
    """A configuration that an argument gives cannot be read, or contradicts itself."""


class CheckpointNotWritten(RuntimeError):
    """A checkpoint could not be written, and training was told to stop then."""


class DamagedCheckpoint(ValueError):
    """A file of a checkpoint is cut off or altered."""


class UnsafeCheckpoint(ValueError, pickle.UnpicklingError):
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
