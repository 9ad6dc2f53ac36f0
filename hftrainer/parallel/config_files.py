"""Reads a configuration that an argument gives as a dict or as the path of a file."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from hftrainer.errors import WrongConfig

#: Keys of every file that `accelerate config` writes.
_OF_ACCELERATE = {"compute_environment", "distributed_type"}


def read_config(given: Any, argument: str = "lightning_config") -> dict[str, Any]:
    """The keywords in an argument: a dict, or the path of a JSON or YAML file.

    Raises:
        WrongConfig: if the file is missing or malformed; the message has its path and the position.
    """
    if given is None or isinstance(given, dict):
        return dict(given or {})
    path = Path(os.fspath(given))
    if not path.is_file():
        raise WrongConfig(f"{argument}={str(given)!r}: there is no such file.")
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else read_yaml(text)
    except (ValueError, RecursionError) as error:
        raise WrongConfig(f"{argument}: {path} is malformed: {error}") from error
    if not isinstance(values, dict):
        raise WrongConfig(f"{argument}: {path} must hold keywords and values, but holds a {type(values).__name__}.")
    if values.keys() >= _OF_ACCELERATE:
        raise WrongConfig(
            f"{argument}: {path} is a file of accelerate's: start the script with accelerate launch --config_file "
            f"{path}, and leave {argument} out."
        )
    return values


def read_yaml(text: str) -> Any:
    """Plain values in YAML.

    Raises:
        ValueError: if it is malformed.
    """
    import yaml  # installed with lightning

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def why_text(value: Any) -> str | None:
    """What is wrong with a value that is the text of a number, to be appended to it; None for any other value."""
    try:
        is_number = isinstance(value, str) and math.isfinite(float(value))
    except ValueError:
        return None
    example = "YAML reads 1e-5 as text, and 1.0e-5 as a number"
    return f"is text: give the number, without quotes; {example}" if is_number else None
