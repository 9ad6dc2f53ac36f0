"""Errors for users. Each message says what was given, what is allowed, and what to do.

Each class also derives from the one that transformers raises in the same situation, since scripts catch that one.
"""

from __future__ import annotations

import difflib
import pickle
from collections.abc import Iterable

#: A name that users of other libraries give → ours, which is spelled quite differently.
_MEANT: dict[str, str] = {
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "adam": "adamw_torch",
    "adamw": "adamw_torch",
    "accelerator": "use_cpu",
    "ckpt_path": "resume_from_checkpoint",
    "batch_size": "per_device_train_batch_size",
    "device": "use_cpu",
    "epochs": "num_train_epochs",
    "gradient_clip_val": "max_grad_norm",
    "lr": "learning_rate",
    "max_epochs": "num_train_epochs",
    "precision": "bf16",
}


def suggest(name: object, known: Iterable[str], otherwise: str = "") -> str:
    """The end of a sentence about an unknown name: the known one that is probably meant, or else `otherwise`."""
    choices, text = list(known), str(name)
    near = [_MEANT[text]] if _MEANT.get(text) in choices else difflib.get_close_matches(text, choices, n=1, cutoff=0.7)
    return f"; did you mean {near[0]!r}?" if near else otherwise


class InvalidArgument(ValueError):
    """An argument has an invalid value, or contradicts another argument."""


class InvalidSetup(InvalidArgument, RuntimeError):
    """The inputs of a Trainer or a search are incomplete or contradict each other."""


class UnknownKey(InvalidArgument, TypeError):
    """A key in the value of an argument is unknown."""


class WrongObject(InvalidArgument, TypeError, AttributeError):
    """An object has the wrong type, such as a dict instead of the arguments, or a tuple as a sample."""


class MissingFile(InvalidArgument, FileNotFoundError):
    """An argument names a file that does not exist."""


class NotAFolder(InvalidArgument, FileExistsError):
    """An argument names a file where a folder is needed."""


class NotAnObject(InvalidArgument, NotImplementedError):
    """An argument is a class, but an instance of it is needed."""


class MissingMethod(InvalidArgument, AttributeError):
    """An argument needs a method that the model does not have."""


class MissingMonitoredMetric(InvalidArgument, AssertionError):
    """A callback monitors a metric that the arguments do not name, or that evaluations do not return."""


class NotACallback(TypeError, AttributeError):
    """An object is given as a callback but handles none of the events."""


class UnsupportedArgument(ValueError):
    """An argument is known but not supported; the message has the reason and what to use instead."""


class UnknownArgument(TypeError):
    """An argument is unknown in all releases."""


class MissingPackage(ImportError, ValueError, RuntimeError):
    """A feature needs a library that is not installed; the message has the command to install it.

    transformers raises one of the three, depending on the library: ImportError for optimizers, ValueError for some of
    them, and RuntimeError for trackers and search backends.
    """


def unless_absent(error: Exception) -> Exception | None:
    """The cause of a MissingPackage: none if the package is absent, which the message says itself."""
    return None if isinstance(error, ModuleNotFoundError) else error


class RanksLost(RuntimeError):
    """Other ranks have ended, or did not answer within `ddp_timeout`; the message names them and the operation."""


class CheckpointNotFound(ValueError):
    """No checkpoint to resume from was found."""


class InvalidConfig(ValueError):
    """The configuration in an argument cannot be read, or contradicts itself."""


class CheckpointNotWritten(RuntimeError):
    """A checkpoint could not be written, and training is configured to stop in this case."""


class DamagedCheckpoint(ValueError):
    """A file of a checkpoint is truncated or modified."""


class UnsafeCheckpoint(ValueError, pickle.UnpicklingError):
    """A file of a checkpoint has objects that only unpickling could read; the message explains how to allow them."""


class HubError(RuntimeError):
    """The Hub cannot be reached, or refuses a request; the message explains what to do."""


class StorageError(RuntimeError):
    """The storage of `storage_url` cannot be reached, or refuses a request."""


class TrainingDiverged(RuntimeError):
    """Training diverges, and `on_divergence` does not let it go on; the message names the step and its samples."""


class SearchFailed(RuntimeError):
    """A hyperparameter search has not completed any trial; the message lists how they ended."""


class _PlainKeyError(KeyError):
    def __str__(self) -> str:
        """The plain message; KeyError would quote it."""
        return str(self.args[0])


class MetricNotFound(_PlainKeyError, ValueError):
    """Evaluation does not return the metric that an argument names."""


class RemovedColumn(_PlainKeyError):
    """A collator or a loss reads a column that `remove_unused_columns` has removed."""


class UnknownDataset(_PlainKeyError, InvalidArgument, TypeError):
    """The name of an evaluation set that the Trainer does not have."""


# The names until 0.1, which scripts may catch.
WrongConfig = InvalidConfig
MissingFollowedMetric = MissingMonitoredMetric
