"""Errors for users. Each message contains the value, the allowed values, and the remedy.

Each class also derives from the class that transformers raises in that case, since scripts catch it.
"""

from __future__ import annotations

import difflib
import pickle
import re
from collections.abc import Iterable

#: A name in other libraries or programs → our name, which is too different for `difflib`.
SYNONYMS: dict[str, str] = {
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "adam": "adamw_torch",
    "adamw": "adamw_torch",
    "ckpt_path": "resume_from_checkpoint",
    "batch_size": "per_device_train_batch_size",
    "device": "use_cpu",
    "epochs": "num_train_epochs",
    "gradient_clip_val": "max_grad_norm",
    "lr": "learning_rate",
    "max_epochs": "num_train_epochs",
    "metrics": "compute_metrics",
    "resume": "resume_from_checkpoint",
    "train": "run",
    "-n": "--nproc",
    "-o": "--out",
    "-v": "--version",
}


def suggest(name: object, known: Iterable[str], otherwise: str = "", *, cutoff: float = 0.7) -> str:
    """The end of an error about an unknown name: the probable name, or else `otherwise`.

    Args:
        name: the unknown name.
        known: the known names.
        otherwise: the text if none of these is similar.
        cutoff: how similar the probable name must be, from 0 to 1.
    """
    choices, text = list(known), str(name)
    names = {choice.lower(): choice for choice in choices}
    names |= {other: ours for other, ours in SYNONYMS.items() if ours in choices}
    matches = [names[name] for name in difflib.get_close_matches(text.lower(), names, n=1, cutoff=cutoff)]
    matches = matches or [choice for choice in choices if len(text) > 2 and choice.startswith(text)]
    return f"; did you mean {matches[0]!r}?" if matches else otherwise


def suggest_nearest(word: str, allowed: Iterable[str]) -> str:
    """The end of an error message about an unknown word: the nearest allowed word, or all of them."""
    return suggest(word, allowed, f": use one of {', '.join(sorted(allowed))}.")


def explain_choice(message: str) -> str:
    """An error message of argparse, which for a value that is not among the choices names the nearest."""
    if not (choice := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)):
        return message
    allowed = re.findall(r"[\w-]+", choice[2])
    names, nearest = f"one of {', '.join(allowed)}", ""
    if len(allowed) > 12:
        names, nearest = "allowed", ", ".join(difflib.get_close_matches(choice[1], allowed, 3, 0))
        nearest = f"; the nearest are {nearest}"
    return f"{message[: choice.start()]}{choice[1]!r} is not {names}{suggest(choice[1], allowed, nearest)}"


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


class FolderNotCreated(PermissionError, FileNotFoundError, InvalidArgument):
    """A folder to write to cannot be created; the message has the reason."""

    def __str__(self) -> str:
        """The message, without the number of the error."""
        return str(self.strerror)


class NotAnObject(InvalidArgument, NotImplementedError):
    """An argument is a class, but an instance of it is needed."""


class MissingMethod(InvalidArgument, AttributeError):
    """The model lacks a method that an argument needs, or the Trainer one of Lightning's."""


class MissingMonitoredMetric(InvalidArgument, AssertionError):
    """A callback monitors a metric that the arguments do not name, or that evaluations do not return."""


class NotACallback(TypeError, AttributeError):
    """An object passed as a callback is none: it handles no event, or cannot be made or called."""


class UnsupportedArgument(ValueError):
    """An argument is known but not supported; the message has the reason and an alternative."""


class UnknownArgument(TypeError):
    """No release has an argument with this name."""


class MissingPackage(ImportError, ValueError, RuntimeError):
    """A feature needs a library that is not installed; the message has the command to install it.

    transformers raises ImportError or ValueError for optimizers, and RuntimeError for trackers and search backends.
    """


def cause_if_installed(error: Exception) -> Exception | None:
    """The cause of a MissingPackage; None if the package is absent, as the message already says so."""
    return None if isinstance(error, ModuleNotFoundError) else error


class RanksLost(RuntimeError):
    """Other ranks have ended, or did not answer within `ddp_timeout`; the message names them and the operation."""


class CheckpointNotFound(ValueError):
    """The checkpoint to resume from does not exist."""


class InvalidConfig(ValueError):
    """The configuration in an argument is unreadable or contradictory."""


class CheckpointNotWritten(RuntimeError):
    """A checkpoint could not be written, and training is configured to stop in this case."""


class DamagedCheckpoint(ValueError):
    """A checkpoint file is truncated or modified."""

    #: The end of its messages.
    REMEDY = ": resume from another checkpoint."


class UnsafeCheckpoint(ValueError, pickle.UnpicklingError):
    """A checkpoint file has objects that require unpickling; the message explains how to allow them."""


class HubError(RuntimeError):
    """The Hub cannot be reached, or refuses a request; the message explains what to do."""


class StorageError(RuntimeError):
    """The storage of `storage_url` cannot be reached, or refuses a request."""


class TrainingDiverged(RuntimeError):
    """Training diverged, and `on_divergence` stops it; the message names the step and its samples."""


class SearchFailed(RuntimeError):
    """A hyperparameter search completed no trial; the message lists how the trials ended."""


class _PlainKeyError(KeyError):
    def __str__(self) -> str:
        """The message without quotes, which KeyError would add."""
        return str(self.args[0])


class MetricNotFound(_PlainKeyError, ValueError):
    """Evaluation does not return the metric that an argument names."""


class RemovedColumn(_PlainKeyError):
    """A collator or a loss reads a column that `remove_unused_columns` removed."""


class UnknownDataset(_PlainKeyError, InvalidArgument, TypeError):
    """The Trainer has no evaluation dataset with this name."""


# Names until 0.1, which scripts may use.
WrongConfig = InvalidConfig
MissingFollowedMetric = MissingMonitoredMetric
