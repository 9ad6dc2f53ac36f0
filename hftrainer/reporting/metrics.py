"""Prints metrics as a table, and writes them to JSON files."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hftrainer.callbacks.flow import evaluation_key
from hftrainer.callbacks.state import as_json
from hftrainer.compat.overrides import is_measurement
from hftrainer.errors import MetricNotFound, WrongObject


def mean_loss(metrics: Mapping[str, Any], names: Iterable[str], prefix: str) -> dict[str, float]:
    """The mean loss of the sets as `{prefix}_loss`, for callbacks that monitor it; empty if a set has no loss."""
    keys = [f"{prefix}_{name}_loss" for name in names]
    if not keys or not all(key in metrics for key in keys):
        return {}
    return {f"{prefix}_loss": sum(metrics[key] for key in keys) / len(keys)}


def print_table(title: str, values: Mapping[str, Any]) -> None:
    """Print values under a title, sorted by name and aligned."""
    print(f"***** {title} *****")
    name_width = max((len(name) for name in values), default=0)
    value_width = max((len(str(value)) for value in values.values()), default=0)
    for name in sorted(values):
        print(f"  {name: <{name_width}} = {values[name]!s:>{value_width}}")


def write_metrics(folder: str, split: str, metrics: Mapping[str, Any], *, combined: bool) -> None:
    """Write `{split}_results.json`; with `combined`, also merge the metrics into `all_results.json`."""
    _write(os.path.join(folder, f"{split}_results.json"), metrics)
    if not combined:
        return
    path = os.path.join(folder, "all_results.json")
    old_metrics = {}
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            old_metrics = json.load(file)
    _write(path, {**old_metrics, **metrics})


def comparable_names(metrics: Mapping[str, Any]) -> list[str]:
    """The names of metrics that can compare models: all except run time, speed, memory and epoch."""
    return sorted(name for name in metrics if not name.endswith("epoch") and not is_measurement(name))


def write_file_atomically(path: str, write: Callable[[str], Any]) -> None:
    """Write a file atomically: write a temporary file, then rename it.

    Args:
        path: the file.
        write: writes the content to the path that it gets.
    """
    folder, name = os.path.split(path)
    # Uploads skip names with this prefix.
    temporary = os.path.join(folder, f"_{name}")
    write(temporary)
    os.replace(temporary, path)


def _write(path: str, values: Mapping[str, Any]) -> None:
    def write(temporary: str) -> None:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(as_json(values, "metrics"), file, indent=4, sort_keys=True)

    write_file_atomically(path, write)


def get_metric(metrics: Mapping[str, float], name: str) -> float:
    """The value of the metric in `metric_for_best_model`.

    Raises:
        MetricNotFound: if evaluation does not return the metric. The error lists the metrics that it returns.
        WrongObject: if it cannot be compared, such as a tensor with several elements.
    """
    key = evaluation_key(name)
    if key not in metrics:
        raise MetricNotFound(
            f"metric_for_best_model={name!r}: evaluation does not return {key!r}, only "
            f"{', '.join(comparable_names(metrics)) or 'times'}."
        )
    try:
        bool(metrics[key] < 0)
    except (TypeError, ValueError, RuntimeError) as error:
        raise WrongObject(
            f"metric_for_best_model={name!r}: {key!r} is {reprlib.repr(metrics[key])}, which cannot be compared "
            f"({error}); compute_metrics must return one number for it, such as the mean."
        ) from None
    return metrics[key]
