"""Prints metrics as a table, writes them to JSON files, and reads the curves of a log."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hftrainer.callbacks.state import TrainerState, as_json, evaluation_key, is_measurement
from hftrainer.errors import MetricNotFound, WrongObject

#: Panel → the log entries that it shows. 'metrics' shows all others; a plot has a panel for each.
PANELS = {"loss": ("loss",), "metrics": (), "learning rate": ("learning_rate",), "gradient norm": ("grad_norm",)}
#: The panels of the values that `observe=True` adds to log lines. Plots have milliseconds in place of short seconds.
SHARES = "share of time so far"
SPEEDS = {
    **{"tokens per second": ("tokens_per_second",), "samples per second": ("samples_per_second",)},
    **{"seconds per step": ("step_seconds",), "milliseconds per step": ("step_milliseconds",)},
    **{SHARES: ("data_wait", "eval_share", "save_share", "step_share")},
    **{"model FLOPS utilization": ("mfu",), "peak memory (MB)": ("peak_memory_mb",)},
}
PANELS |= SPEEDS
#: The panel of evaluation losses, if they have one of their own.
EVALUATION_LOSS = "evaluation loss"
LOSSES = ("loss", EVALUATION_LOSS)
#: Smoothing → the number of parts of a curve, over one of which its mean goes, and over how many values at least.
SMOOTHING = {"light": (30, 5), "strong": (8, 9)}
#: Names of metrics whose lowest value is the best.
_LESS_IS_BETTER = re.compile("(.*_)?(loss|wer|cer|ter|ppl|perplexity|mae|mse|rmse|error|ece|latency)")
#: Names of metrics whose highest value is the best.
_GREATER_IS_BETTER = re.compile("eval_(.*_)?(accuracy|f1|precision|recall|(roc_)?auc|mcc|bleu|rouge[12L]?|(mean_)?iou)")
PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names}

Losses = Mapping[str, tuple[Sequence[float], Sequence[float]]]
Curves = dict[str, dict[str, tuple[list[float], list[float]]]]


class NanSpan(NamedTuple):
    """When the loss became NaN for good: `first` to `last`, which are equal if the step is known.

    Attributes:
        first: the first step at which it may have.
        last: the last one.
        usable: the last step whose weights are surely finite.
    """

    first: int
    last: int
    usable: int


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
    old_metrics = json.loads(Path(path).read_text(encoding="utf-8")) if os.path.exists(path) else {}
    _write(path, {**old_metrics, **metrics})


def natural_key(name: str) -> str:
    """A key for sorting, by which run-2 is before run-10, and lr-0.01 before lr-0.1."""
    return re.sub(r"(?<![\d.])\d+", lambda number: number[0].zfill(20), name)


def sort_names(names: Sequence[str]) -> list[str]:
    """The names of curves: the losses first, others as logged, and those that differ in numbers alone by these."""
    first = {"loss": 0, "eval_loss": 1}
    patterns = [re.sub(r"\d+", "", name) for name in names]
    by_number = sorted({*names}, key=natural_key)
    return sorted(by_number, key=lambda name: (first.get(name, 2), patterns.index(re.sub(r"\d+", "", name))))


def sort_pattern(folders: list[str]) -> list[str]:
    """The folders in natural order, if they are in the order of a shell's pattern; any other order is the user's."""
    return sorted(folders, key=natural_key) if folders == sorted(folders) else folders


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
    text = json.dumps(as_json(values, "metrics"), indent=4, sort_keys=True)
    write_file_atomically(path, lambda temporary: Path(temporary).write_text(text, encoding="utf-8"))


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


def choose_best(name: str, arguments: Mapping[str, Any]) -> Callable[..., Any] | None:
    """`min` or `max`, which finds the best value of a metric, by the run's arguments or else by its name; else None."""
    if name == evaluation_key(arguments.get("metric_for_best_model") or ""):
        return max if arguments.get("greater_is_better") else min
    if _LESS_IS_BETTER.fullmatch(name):
        return min
    return max if _GREATER_IS_BETTER.fullmatch(name) else None


def best_index(name: str, values: list[float], state: TrainerState, arguments: Mapping[str, Any]) -> int | None:
    """The index of the best value of `metric_for_best_model`, or without it of losses and known metrics; else None."""
    finite = [value for value in values if math.isfinite(value)]
    if name in PANEL_OF or not finite:
        return None
    choose = choose_best(name, arguments)
    if metric := arguments.get("metric_for_best_model"):
        return values.index(choose(finite)) if choose and name == evaluation_key(metric) else None
    best = choose(finite) if choose else None
    if not arguments and state.best_metric is not None:
        # Of such a run only the best value is known, and not the name of the metric.
        best = state.best_metric
    return values.index(best) if best in finite else None


def is_jump(values: Sequence[float], place: int) -> bool:
    """Whether the change to the value at `place` is far from 0 and the changes before and after it."""
    before, change, after = (np.diff(values[max(0, n - 1) : n + 1]).tolist() for n in (place - 1, place, place + 1))
    others = [0.0, *before, *after]
    margin = max(map(abs, others)) / 4 if before or after else math.inf
    return bool(change) and not min(others) - margin <= change[0] <= max(others) + margin


def replace_spikes(values: list[float]) -> list[float]:
    """The values, with the running median in place of one or two that are far from the others.

    Far is four times the range of the middle values of eleven.
    """
    finite = np.array([value for value in values if math.isfinite(value)])
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(finite, 5, mode="reflect"), 11)
    low, median, high = np.percentile(windows, (20, 50, 80), axis=1)
    usual = iter(np.where(abs(finite - median) > 4 * (high - low), median, finite).tolist())
    return [next(usual) if math.isfinite(value) else math.nan for value in values]


def smooth(values: list[float], weights: np.ndarray, level: str, *, has_many: bool, power: int) -> list[float]:
    """The centred mean of the finite values, or of a power of them; NaN for the others.

    As losses fall steeply at first, it takes there as few values after a point as there are before it.

    Args:
        values: the values; some may be NaN.
        weights: their weights.
        level: a key of `SMOOTHING`.
        has_many: whether it is over as many values as that says, and not over three.
        power: 1, or -1 for the harmonic mean.
    """
    is_finite = np.isfinite(values)
    finite = np.array(values, dtype=float)[is_finite]
    parts, least = SMOOTHING[level]
    half = max(least if has_many else 3, len(finite) // parts) // 2
    means = np.full(len(values), math.nan)
    means[is_finite] = _centred_means(finite**power, weights[is_finite], half) ** power
    return means.tolist()


def _centred_means(values: np.ndarray, weights: np.ndarray, half: int) -> np.ndarray:
    """The weighted mean of each value and its neighbours: up to `half` before it, and as many after it at most."""
    sums, counts = (np.append(0.0, np.cumsum(each)) for each in (weights * values, weights))
    places = np.arange(len(values))
    first = np.maximum(0, places - half)
    end = np.minimum(len(values), places + np.minimum(places, half) + 1)
    return (sums[end] - sums[first]) / (counts[end] - counts[first])


def seconds_of_steps(log: Iterable[Mapping[str, Any]]) -> dict[Any, float]:
    """Step of a log line → its seconds per step, with evaluations and saving, which `step_seconds` leaves out."""
    return {
        line.get("step"): line["step_seconds"] / max(1e-3, 1 - line.get("eval_share", 0) - line.get("save_share", 0))
        for line in log
        if is_number(line.get("step_seconds"))
    }


def logged_curves(state: TrainerState) -> Curves:
    """The curves of a log: panel → label → optimizer steps and values."""
    panels: Curves = {panel: {} for panel in PANELS}
    for panel, name, step, value in logged_values(state.log_history):
        steps, values = panels[panel].setdefault(name, ([], []))
        steps.append(step)
        values.append(value)
    shares = list(panels[SHARES].values())
    if shares and all(steps == shares[0][0] for steps, _ in shares):
        # What is left is training.
        rest = [1 - sum(parts) for parts in zip(*(values for _, values in shares), strict=True)]
        panels[SHARES]["step_share"] = shares[0][0], rest
    return panels


def count_equal(one: tuple[list[float], list[float]], other: tuple[list[float], list[float]]) -> int:
    """The number of points that two curves, of steps and values, have in common before they part."""
    pairs = zip(zip(*one, strict=True), zip(*other, strict=True), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def hides_rise(evaluations: Sequence[list[float]], losses: Sequence[list[float]]) -> bool:
    """Whether a panel of all losses would be so high that an evaluation loss that rose again looks flat."""
    highest = max(map(max, losses), default=0)
    lowest = min(map(min, losses), default=0)
    # About where the panel gets a logarithmic scale.
    scale = math.log if 0 < 50 * lowest < highest else float
    height = scale(highest) - scale(lowest)
    return any(scale(best + rise) - scale(best) < 0.15 * height for best, rise in _find_rises(evaluations))


def _find_rises(evaluations: Sequence[list[float]]) -> list[tuple[float, float]]:
    """The best value of each evaluation loss that rose again by more than 5 %, and how much it rose."""
    rises = ((min(values), values[-1] - min(values)) for values in evaluations)
    return [(best, rise) for best, rise in rises if rise > 0.05 * abs(best)]


def nan_span(losses: Losses, since: int | None) -> NanSpan | None:
    """When the logged loss became NaN: at the step `since` if that is known and logged. None if its last value is not.

    Args:
        losses: name → optimizer steps and values, of evaluations too.
        since: the step, if known.
    """
    steps, values = losses.get("loss", ((), ()))
    count = sum(1 for _ in itertools.takewhile(math.isnan, reversed(values)))
    if not count:
        return None
    before, last = [0, *map(int, steps)][-count - 1 :][:2]
    if since and since <= last:
        return NanSpan(since, since, last_usable_step(losses, since))
    return NanSpan(before + 1, last, last_usable_step(losses, before + 1))


def last_usable_step(losses: Losses, first: int) -> int:
    """The last step whose weights are surely finite, if the loss of step `first` is the first that is NaN.

    The weights before that step may be its cause, unless an evaluation of them has a finite loss.
    """
    evaluations = [pairs for name, pairs in losses.items() if name.startswith("eval_") and name.endswith("_loss")]
    evaluated = (int(step) for pairs in evaluations for step, loss in zip(*pairs, strict=True) if math.isfinite(loss))
    return max([first - 2, *evaluated])


def logged_values(lines: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str, float, float]]:
    """Panel, label, optimizer step and value of each number in log lines.

    A non-finite number is NaN, a gap in its curve. So is a loss in a log line with a non-finite gradient norm, since
    `logging_nan_inf_filter` logs 0 instead.
    """
    diverged_steps = {step for step, name, value in logged(lines) if name == "grad_norm" and not is_finite(value)}
    for step, name, value in logged(lines, with_speeds=True):
        if name != "epoch" and is_number(value):
            is_gap = not is_finite(value) or (name == "loss" and step in diverged_steps)
            panel = PANEL_OF.get(name, "loss" if name.endswith("_loss") else "metrics")
            yield panel, name, step, math.nan if is_gap else value


def logged(lines: Iterable[dict[str, Any]], *, with_speeds: bool = False) -> Iterator[tuple[float, str, Any]]:
    """Optimizer step, name and value of each log entry, except the final summary and measurements."""
    step: float = 0
    for line in lines:
        # Lines that a script added may have no step.
        if is_number(line.get("step")):
            step = line["step"]
        if not ("train_runtime" in line and "train_loss" in line):
            # A script may log under numbers, too.
            for name in (name for name in line if isinstance(name, str)):
                is_shown = with_speeds if PANEL_OF.get(name) in SPEEDS else not is_measurement(name)
                if name != "step" and is_shown:
                    yield step, name, line[name]


def is_number(value: Any) -> bool:
    """Whether a value of a log line is a number but not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Whether a value is a number other than NaN and infinity."""
    return is_number(value) and abs(value) <= sys.float_info.max
