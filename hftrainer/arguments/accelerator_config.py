"""`accelerator_config`: accelerate's settings for data and accumulation, as one object."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hftrainer.errors import InvalidArgument, MissingFile, NotAnObject, UnknownKey, suggest
from hftrainer.parallel.config_files import read_mapping

_ACCUMULATION = {"num_steps", "adjust_scheduler", "sync_with_dataloader", "sync_each_batch"}


#: Affects how the arguments are made, not the run: this key is not serialized.
OF_CONSTRUCTION = "use_configured_state"


@dataclass
class AcceleratorConfig:
    """The keys of `accelerator_config`, with their meaning in transformers.

    Scripts and libraries may change the attributes until the Trainer is made, which reads them then.

    Attributes:
        split_batches: split each batch of `per_device_train_batch_size` samples across the processes, instead of
            giving each process its own batches.
        dispatch_batches: only the main process reads the data and sends it to the others; None does so for streams.
        even_batches: fill the last round of batches with samples from the beginning of the epoch.
        use_seedable_sampler: random orders depend on the seed and the epoch only.
        non_blocking: batches move to the device while it computes; needs page-locked memory.
        gradient_accumulation_kwargs: 'num_steps' (micro-batches per optimizer step) and 'sync_each_batch' (average the
            gradients of the processes after each micro-batch); 'adjust_scheduler' and 'sync_with_dataloader' are for
            loops in which accelerate accumulates, and have no effect in a Trainer.
        use_configured_state: the script has set up accelerate's state, and the run uses its device.
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
        """Micro-batches per optimizer step, if the config sets it."""
        return (self.gradient_accumulation_kwargs or {}).get("num_steps")

    @property
    def sync_each_batch(self) -> bool:
        """Whether the processes average their gradients after each micro-batch."""
        return bool((self.gradient_accumulation_kwargs or {}).get("sync_each_batch"))

    def of_data(self) -> dict[str, Any]:
        """The keys that decide which samples a process gets, as plain values."""
        names = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler")
        return {name: getattr(self, name) for name in names}

    def to_dict(self) -> dict[str, Any]:
        """A copy of the keys and values; `use_configured_state` only if it is set, since it is used once."""
        return {name: copy.deepcopy(value) for name, value in vars(self).items() if name != OF_CONSTRUCTION or value}

    def pop(self, key: str, default: Any = None) -> Any:
        """Reset an attribute to its default; returns its value, or `default` if it was popped before."""
        return vars(self).pop(key, default)

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike[str]) -> AcceleratorConfig:
        """The config from a JSON file; raises as `read` does."""
        return cls.read(os.fspath(json_file))

    @classmethod
    def read(cls, given: Any) -> AcceleratorConfig:
        """A new config from None, a dict, the path of a JSON file, or an object of this or transformers' class.

        Raises:
            InvalidArgument: for unknown keys (the message suggests the nearest), for values of a wrong type, and for
                files that are missing or malformed.
        """
        keys = _keys(given)
        known = {field.name for field in dataclasses.fields(cls)}
        unknown, wrong = _check_keys(keys, known, ""), _check_values(keys)
        inner = keys.get("gradient_accumulation_kwargs")
        if isinstance(inner, Mapping):
            unknown += _check_keys(inner, _ACCUMULATION, "['gradient_accumulation_kwargs']")
            wrong += _check_inner(inner)
        if unknown or wrong:
            raise (UnknownKey if unknown else InvalidArgument)("\n".join([*unknown, *wrong]))
        return cls(**keys)


def as_object(given: Any) -> Any:
    """`accelerator_config` as an object with attributes; an object that was given is returned itself.

    Raises:
        InvalidArgument: as `AcceleratorConfig.read` does.
    """
    config = AcceleratorConfig.read(given)
    return given if callable(getattr(given, "to_dict", None)) else config


def _keys(given: Any) -> dict[str, Any]:
    if given is None or isinstance(given, Mapping):
        return dict(given or {})
    if isinstance(given, type):
        raise NotAnObject(
            f"Tried passing in a callable to `accelerator_config`, the class {given.__name__}: give an instance of it, "
            "or a dict."
        )
    if isinstance(given, AcceleratorConfig):
        return copy.deepcopy(vars(given))
    if callable(getattr(given, "to_dict", None)):
        return given.to_dict()
    if not isinstance(given, (str, os.PathLike)):
        raise InvalidArgument(f"accelerator_config={given!r}: give a dict, or the path of a JSON file.")
    try:
        return read_mapping(given, "JSON", "accelerator_config: ")
    except OSError as error:
        kind = MissingFile if isinstance(error, FileNotFoundError) else InvalidArgument
        raise kind(f"accelerator_config={str(given)!r} cannot be read: {error.strerror}.") from error


def _check_keys(keys: Mapping[str, Any], known: set[str], where: str) -> list[str]:
    all_known = f": it takes {', '.join(sorted(known))}."
    return [
        f"accelerator_config{where} has no key {name!r}{suggest(name, known, all_known)}"
        for name in keys
        if name not in known
    ]


def _check_values(keys: Mapping[str, Any]) -> list[str]:
    found = []
    for field in dataclasses.fields(AcceleratorConfig):
        value = keys.get(field.name, field.default)
        if field.name == "gradient_accumulation_kwargs":
            if not isinstance(value, (Mapping, type(None))):
                found.append(f"accelerator_config[{field.name!r}]={value!r}: give a dict.")
        elif not isinstance(value, bool) and not (value is None and field.default is None):
            found.append(f"accelerator_config[{field.name!r}]={value!r}: give True or False.")
    return found


def _check_inner(inner: Mapping[str, Any]) -> list[str]:
    found = []
    for name, value in inner.items():
        is_bool = isinstance(value, bool)
        fits = isinstance(value, int) and value >= 1 and not is_bool if name == "num_steps" else is_bool
        if name in _ACCUMULATION and not fits:
            wanted = "a number of micro-batches, at least 1" if name == "num_steps" else "True or False"
            found.append(f"accelerator_config['gradient_accumulation_kwargs'][{name!r}]={value!r}: give {wanted}.")
    return found


#: The config of a run without `accelerator_config`.
DEFAULT = AcceleratorConfig()
