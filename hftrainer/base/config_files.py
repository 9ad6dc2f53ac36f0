"""Reads configuration files, and booleans in environment variables."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hftrainer.errors import InvalidArgument, InvalidConfig

TRUE, FALSE = ("1", "on", "t", "true", "y", "yes"), ("0", "f", "false", "n", "no", "off")
#: Keys of every file that `accelerate config` writes.
_ACCELERATE_KEYS = {"compute_environment", "distributed_type"}


def read_config(source: Any, argument: str = "lightning_config") -> dict[str, Any]:
    """Read the keyword arguments in a dict, or in a JSON or YAML file.

    Raises:
        InvalidConfig: if the file is missing or malformed; the message has its path and the position.
    """
    if source is None or isinstance(source, dict):
        return dict(source or {})
    path = Path(os.fspath(source))
    if not path.is_file():
        raise InvalidConfig(f"{argument}={str(source)!r}: the file does not exist; use a JSON or YAML file, or a dict.")
    values = read_mapping(path, "JSON" if path.suffix == ".json" else "YAML", f"{argument}: ", InvalidConfig)
    if values.keys() >= _ACCELERATE_KEYS:
        raise InvalidConfig(
            f"{argument}: {path} is a file of accelerate's: start the script with accelerate launch --config_file "
            f"{path}, and remove {argument}."
        )
    return values


def read_mapping(
    path: str | os.PathLike[str], form: str, prefix: str = "", error_class: type[ValueError] = InvalidArgument
) -> dict[str, Any]:
    """Read the keys and values in a JSON or YAML file.

    Args:
        path: the file.
        form: 'JSON' or 'YAML'.
        prefix: the beginning of error messages.
        error_class: the class of the errors to raise.

    Raises:
        OSError: if the file cannot be read; `error_class` if the file is malformed.
    """
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
        values = json.loads(text) if form == "JSON" else yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise error_class(f"{prefix}{path} is not valid {form}: {error}") from error
    if not isinstance(values, dict):
        raise error_class(f"{prefix}{path} must hold keys and values, but is of type {type(values).__name__}.")
    return values


def parse_bool(value: Any) -> bool | None:
    """The boolean that a value means, in upper or lower case; None for any other value."""
    word = str(value).lower()
    return True if word in TRUE else False if word in FALSE else None


def env_flag(name: str, default: bool = False, environment: Mapping[str, str] = os.environ) -> bool:
    """The boolean in an environment variable; the default if it is not set or not a boolean."""
    flag = parse_bool(environment.get(name))
    return default if flag is None else flag


def describe_text(value: Any) -> str | None:
    """The end of an error message about a number in text form; None for any other value."""
    try:
        is_number = isinstance(value, str) and math.isfinite(float(value))
    except ValueError:
        return None
    example = "; YAML reads 1e-5 as text, but 1.0e-5 as a number" if is_number and "e" in value.lower() else ""
    return f"is text: write the number without quotes{example}" if is_number else None
