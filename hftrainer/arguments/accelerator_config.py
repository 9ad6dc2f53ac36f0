"""`accelerator_config`: accelerate's settings for data and accumulation, as one object."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hftrainer.base.config_files import read_mapping
from hftrainer.errors import InvalidArgument, MissingFile, NotAnObject, UnknownKey, suggest

#: Key of `gradient_accumulation_kwargs` → its type.
_ACCUMULATION = {
    "num_steps": "int",
    "adjust_scheduler": "bool",
    "sync_with_dataloader": "bool",
    "sync_each_batch": "bool",
}
#: Type of a key → the classes of its values, and the expected values as text.
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "bool": ((bool,), "True or False"),
    "bool | None": ((bool, type(None)), "True or False"),
    "int": ((int,), "a number of micro-batches, at least 1"),
    "dict[str, Any] | None": ((Mapping, type(None)), "a dict"),
}
#: Key for scripts that set up accelerate's state themselves. Arguments are serialized without it.
CONSTRUCTION_KEY = "use_configured_state"


@dataclass
class AcceleratorConfig:
    """The keys of `accelerator_config`, with their meaning in transformers.

    The Trainer reads the attributes when it is made; scripts and libraries may change them until then.

    Attributes:
        split_batches: split each batch of `per_device_train_batch_size` samples across the processes, instead of
            giving each process its own batches.
        dispatch_batches: only the main process reads the data and sends it to the others; None: for streams only.
        even_batches: fill the last round of batches with samples from the beginning of the epoch.
        use_seedable_sampler: random orders depend on the seed and the epoch only.
        non_blocking: copy batches to the device while it computes; needs pinned memory.
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

    def data_settings(self) -> dict[str, Any]:
        """The keys that decide which samples a process gets, as plain values."""
        names = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler")
        return {name: getattr(self, name) for name in names}

    def to_dict(self) -> dict[str, Any]:
        """A copy of the keys and values. `use_configured_state` is included only if set, since it is used once."""
        return {name: copy.deepcopy(value) for name, value in vars(self).items() if name != CONSTRUCTION_KEY or value}

    def pop(self, key: str, default: Any = None) -> Any:
        """Reset an attribute and return its value, or `default` if it was popped before."""
        return vars(self).pop(key, default)

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike[str]) -> AcceleratorConfig:
        """The config from a JSON file. Raises the same errors as `read`."""
        return cls.read(os.fspath(json_file))

    @classmethod
    def read(cls, value: Any) -> AcceleratorConfig:
        """A new config from None, a dict, a JSON file's path, or a config object.

        The object may be of this class or of transformers'.

        Raises:
            InvalidArgument: for unknown keys (the message suggests the nearest), for values of a wrong type, and for
                files that are missing or malformed.
        """
        keys = _keys(value)
        errors = _check("accelerator_config", keys, {field.name: str(field.type) for field in dataclasses.fields(cls)})
        accumulation_kwargs = keys.get("gradient_accumulation_kwargs")
        if isinstance(accumulation_kwargs, Mapping):
            errors += _check("accelerator_config['gradient_accumulation_kwargs']", accumulation_kwargs, _ACCUMULATION)
        if errors:
            is_unknown = any(isinstance(error, UnknownKey) for error in errors)
            raise (UnknownKey if is_unknown else InvalidArgument)("\n".join(map(str, errors)))
        return cls(**keys)


def as_accelerator_config(value: Any) -> Any:
    """`accelerator_config` as an object with attributes. An object that already has them is returned unchanged.

    Raises:
        InvalidArgument: in the same cases as `AcceleratorConfig.read`.
    """
    config = AcceleratorConfig.read(value)
    return value if callable(getattr(value, "to_dict", None)) else config


def _keys(value: Any) -> dict[str, Any]:
    if value is None or isinstance(value, Mapping):
        return dict(value or {})
    if isinstance(value, type):
        raise NotAnObject(
            f"Tried passing in a callable to `accelerator_config`, the class {value.__name__}: pass an instance, or "
            "a dict."
        )
    if isinstance(value, AcceleratorConfig):
        return copy.deepcopy(vars(value))
    if callable(getattr(value, "to_dict", None)):
        return value.to_dict()
    if not isinstance(value, (str, os.PathLike)):
        raise InvalidArgument(f"accelerator_config={value!r}: pass a dict or the path of a JSON file.")
    try:
        return read_mapping(value, "JSON", "accelerator_config: ")
    except OSError as error:
        error_class = MissingFile if isinstance(error, FileNotFoundError) else InvalidArgument
        raise error_class(f"accelerator_config={str(value)!r} cannot be read: {error.strerror}.") from None


def _check(location: str, keys: Mapping[str, Any], key_types: Mapping[str, str]) -> list[InvalidArgument]:
    """An error for each unknown key and each value of a wrong type."""
    errors: list[InvalidArgument] = []
    for name, value in keys.items():
        if name not in key_types:
            hint = suggest(name, key_types, f": the keys are {', '.join(sorted(key_types))}.")
            errors.append(UnknownKey(f"{location} has no key {name!r}{hint}"))
            continue
        classes, expected_values = _KINDS[key_types[name]]
        if not isinstance(value, classes) or (key_types[name] == "int" and (type(value) is not int or value < 1)):
            errors.append(InvalidArgument(f"{location}[{name!r}]={value!r}: use {expected_values}."))
    return errors


#: The config of a run without `accelerator_config`.
DEFAULT = AcceleratorConfig()
