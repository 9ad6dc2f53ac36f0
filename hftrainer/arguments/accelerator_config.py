"""`accelerator_config`: what accelerate is told about data and accumulation, as one object with attributes."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hftrainer.errors import InvalidArgument, MissingFile, NotAnObject, UnknownKey

_ACCUMULATION = {"num_steps", "adjust_scheduler", "sync_with_dataloader", "sync_each_batch"}


#: Says how the arguments are made, and nothing about a run: it is not among the keys that are written down.
OF_CONSTRUCTION = "use_configured_state"


@dataclass
class AcceleratorConfig:
    """The keys of `accelerator_config`, with the meaning that they have in transformers.

    Scripts and libraries change its attributes before the Trainer is made, which reads them then.

    Attributes:
        split_batches: share each batch of `per_device_train_batch_size` samples out to the processes, rather than
            giving each process batches of its own.
        dispatch_batches: only the main process reads the data and hands it to the others; None does so for streams.
        even_batches: complete the last round of batches with samples from the beginning of the epoch.
        use_seedable_sampler: random orders that depend on the seed and the epoch alone.
        non_blocking: batches move to the device while it computes; needs page-locked memory.
        gradient_accumulation_kwargs: 'num_steps' (micro-batches per optimizer step) and 'sync_each_batch' (average the
            gradients of the processes after each micro-batch); 'adjust_scheduler' and 'sync_with_dataloader' are for
            loops that accelerate accumulates in, and change nothing in a Trainer.
        use_configured_state: the script has set up accelerate's state, and the run takes its device.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = True
    non_blocking: bool = False
    gradient_accumulation_kwargs: dict[str, Any] | None = None
    use_configured_state: bool = False

    @property
    def num_steps(self) -> int | None:
        """Micro-batches per optimizer step, if the config says it."""
        return (self.gradient_accumulation_kwargs or {}).get("num_steps")

    @property
    def sync_each_batch(self) -> bool:
        """Whether the processes average their gradients after each micro-batch."""
        return bool((self.gradient_accumulation_kwargs or {}).get("sync_each_batch"))

    def of_data(self) -> dict[str, Any]:
        """The keys that say which samples a process gets, as plain values."""
        names = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler")
        return {name: getattr(self, name) for name in names}

    def to_dict(self) -> dict[str, Any]:
        """The keys and values, copied; `use_configured_state` only where it is asked for, since it is of one use."""
        return {name: copy.deepcopy(value) for name, value in vars(self).items() if name != OF_CONSTRUCTION or value}

    def pop(self, key: str, default: Any = None) -> Any:
        """Put an attribute back to its default; returns what it was, or `default` if it has been taken before."""
        return vars(self).pop(key, default)

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike[str]) -> AcceleratorConfig:
        """The config from a JSON file; raises as `read` does."""
        return cls.read(os.fspath(json_file))

    @classmethod
    def read(cls, given: Any) -> AcceleratorConfig:
        """A config of its own from None, a dict, the path of a JSON file, or an object of this or transformers' class.

        Raises:
            InvalidArgument: for unknown keys, with the nearest, for values of another type, and for files that are
                missing or malformed.
        """
        keys = _keys(given)
        known = {field.name for field in dataclasses.fields(cls)}
        unknown, wrong = _unknown(keys, known, ""), _wrong_values(keys)
        inner = keys.get("gradient_accumulation_kwargs")
        if isinstance(inner, Mapping):
            unknown += _unknown(inner, _ACCUMULATION, "['gradient_accumulation_kwargs']")
            wrong += _wrong_inner(inner)
        if unknown or wrong:
            raise (UnknownKey if unknown else InvalidArgument)("\n".join([*unknown, *wrong]))
        return cls(**keys)


def as_object(given: Any) -> Any:
    """What `accelerator_config` was given as, with attributes: an object that has them stays the one it is.

    Raises:
        InvalidArgument: as `AcceleratorConfig.read` does.
    """
    config = AcceleratorConfig.read(given)
    return given if callable(getattr(given, "to_dict", None)) else config


def _keys(given: Any) -> dict[str, Any]:
    if given is None or isinstance(given, Mapping):
        return dict(given or {})
    if isinstance(given, type):
        raise NotAnObject(f"accelerator_config={given.__name__} is a class: give an object of it, or a dict.")
    if isinstance(given, AcceleratorConfig):
        return copy.deepcopy(vars(given))
    if callable(getattr(given, "to_dict", None)):
        return given.to_dict()
    if not isinstance(given, (str, os.PathLike)):
        raise InvalidArgument(f"accelerator_config={given!r}: give a dict, or the path of a JSON file.")
    try:
        with open(given, encoding="utf-8") as file:
            keys = json.load(file)
    except OSError as error:
        kind = MissingFile if isinstance(error, FileNotFoundError) else InvalidArgument
        raise kind(f"accelerator_config={str(given)!r} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise InvalidArgument(f"accelerator_config: {given} is no valid JSON: {error}") from error
    if not isinstance(keys, dict):
        raise InvalidArgument(
            f"accelerator_config: {given} must hold a JSON object, and holds a {type(keys).__name__}."
        )
    return keys


def _unknown(keys: Mapping[str, Any], known: set[str], where: str) -> list[str]:
    found = []
    for name in keys:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(sorted(known))}."
            found.append(f"accelerator_config{where} has no key {name!r}: {hint}")
    return found


def _wrong_values(keys: Mapping[str, Any]) -> list[str]:
    found = []
    for field in dataclasses.fields(AcceleratorConfig):
        value = keys.get(field.name, field.default)
        if field.name == "gradient_accumulation_kwargs":
            if not isinstance(value, (Mapping, type(None))):
                found.append(f"accelerator_config[{field.name!r}]={value!r}: give a dict.")
        elif not isinstance(value, bool) and not (value is None and field.default is None):
            found.append(f"accelerator_config[{field.name!r}]={value!r}: give True or False.")
    return found


def _wrong_inner(inner: Mapping[str, Any]) -> list[str]:
    found = []
    for name, value in inner.items():
        is_bool = isinstance(value, bool)
        fits = isinstance(value, int) and value >= 1 and not is_bool if name == "num_steps" else is_bool
        if name in _ACCUMULATION and not fits:
            wanted = "a number of micro-batches, at least 1" if name == "num_steps" else "True or False"
            found.append(f"accelerator_config['gradient_accumulation_kwargs'][{name!r}]={value!r}: give {wanted}.")
    return found


#: The config of a run that is given none.
DEFAULT = AcceleratorConfig()
