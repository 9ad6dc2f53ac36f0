"""Reads a configuration that an argument gives as a dict or as the path of a file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hftrainer.errors import WrongConfig


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
