"""Formats log lines for people."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from hftrainer.base.messages import format_bytes, format_duration
from hftrainer.callbacks.state import TrainerState, is_measurement


def _fit(value: float, digits: int, width: int) -> str:
    """A number in at most `width` characters, with `digits` significant digits where these fit, also if they are 0."""
    zeros = "#" if abs(value) >= 1e-4 and not isinstance(value, int) else ""
    forms = [",.0f", ".0f", *(f"{zeros}.{count}g" for count in range(digits, 0, -1))]
    # As it is rounded: 999.6 in three digits is 1,000.
    forms = forms[2 * (abs(float(f"{value:.{digits}g}")) < 1000) :]
    # Each character of the exponent takes the place of a digit.
    texts = (f"{value:{form}}".rstrip(".").replace("e+0", "e").replace("e+", "e") for form in forms)
    return next((text for text in texts if len(text) <= width), f"{value:.0e}")


def _duration(seconds: float) -> str:
    return f"{_fit(1000 * seconds, 3, 6):>6} ms" if 0 < seconds < 0.1 else f"{_fit(seconds, 3, 7):>7} s"


def format_place(state: TrainerState) -> str:
    """The step, in a constant width."""
    total = f"{state.max_steps:,}"
    return f"{state.global_step:>{len(total)},}/{total}"


def _rate(unit: str) -> Callable[[float], str]:
    return lambda value: f"{f'{value / 1e6:.2f}M' if value >= 999_999.5 else _fit(value, 3, 7):>7} {unit}"


#: Part of a line → its format, of a constant width. `_key` finds it.
_FORMATS: dict[str, Callable[[float], str]] = {
    "grad_norm": lambda value: f"grad {_fit(value, 3, 6):<6}",
    "learning_rate": "lr {:.2e}".format,
    "epoch": "ep {:<6.2f}".format,
    "runtime": lambda value: f"time{_duration(value)}",
    "tokens_per_second": _rate("tokens/s"),
    "samples_per_second": _rate("samples/s"),
    "mfu": "{:>5.1%} MFU".format,
    "peak_memory_mb": lambda value: f"mem {format_bytes(value * 1e6):>7}",
    "step_seconds": lambda value: f"{_duration(value)}/step",
    "steps_per_second": _rate("steps/s"),
    "model_preparation_time": lambda value: f"prepare {format_duration(value)}",
    "data_wait": "data {:>4.0%}".format,
}
#: Not in lines. The summary of the run has the time of evaluations and saves.
_HIDDEN = ("total_flos", "eval_share", "save_share")
#: What the summary of a run repeats, with more digits.
_IN_SUMMARY = ("runtime", "samples_per_second", "tokens_per_second", "steps_per_second")
#: What a narrow terminal leaves out, in this order: first what follows from other parts, the speeds last.
_LEFT_OUT = (
    "model_preparation_time of_time steps_per_second step_seconds runtime peak_memory_mb mfu data_wait learning_rate "
    "epoch grad_norm samples_per_second tokens_per_second"
).split()


def format_log_line(logs: Mapping[str, Any], state: TrainerState, width: int) -> str:
    """A human-readable log line: the step first, values rounded and aligned. `log_history` keeps the numbers.

    Args:
        logs: the log line.
        state: the state of the run.
        width: terminal columns; parts that do not fit are left out, but metrics continue below.
    """
    values = values_to_show(logs, state)
    parts = {"": format_place(state)} if state.max_steps > 0 else {}
    parts |= format_values(values)
    if "data_wait" in parts:
        parts["of_time"] = "of time"
    # Trials have no summary.
    repeated = _IN_SUMMARY if "train_runtime" in logs and not state.is_hyper_param_search else ()
    # Where several metrics need more lines, there is room for all.
    metrics = {name: part for name, part in parts.items() if name not in (*_LEFT_OUT, "train_loss")}
    has_room = len(metrics) > 2 and _width(metrics) > width
    for name in (*repeated, *_LEFT_OUT):
        if name in repeated or (not has_room and _width(parts) > width):
            parts.pop(name, None)
    # A note takes the place of the last column or a line, so that the other columns stay.
    note = _note_nan(logs, state)
    for name in ("of_time", "data_wait"):
        if note and _width(parts | {" note": note}) > width:
            parts.pop(name, None)
    if note and _width(parts | {" note": note}) <= width:
        parts[" note"], note = note, ""
    text = _join(parts) if _width(parts) <= width else _wrap(parts, metrics if has_room else {}, width)
    return f"{text}\n{'':{len(parts.get('', '')) + 2}}{note}" if note else text


def _wrap(parts: dict[str, str], metrics: Mapping[str, str], width: int) -> str:
    """A log line in several rows.

    Args:
        parts: the parts.
        metrics: those that are metrics; what their names share is said once.
        width: terminal columns.
    """
    place = parts.get("", "")
    names = list(filter(None, metrics))
    label = os.path.commonprefix(names).rpartition("_")[0]  # noqa: RUF071 - of characters
    # The speeds follow from the time.
    hidden = [name for name in parts if metrics and "runtime" in parts and name.endswith("_per_second")]
    cells = [part.removeprefix(f"{label}_") for name, part in parts.items() if name and name not in hidden]
    place += "  " * bool(place)
    label += ":  " * bool(label)
    if label and len(place + label) > width // 5:
        # A long label has its own row.
        label = f"{label.strip()}\n{'':{len(place)}}"
    return place + label + _align(cells, width, len((place + label).rpartition("\n")[2]))


def _align(parts: list[str], width: int, indent: int) -> str:
    """Rows of as many columns as fit. None ends between a name and its value, unless these are longer than a row.

    Args:
        parts: parts of a log line.
        width: terminal columns.
        indent: columns before the rows; the first row has none, as it follows a title.
    """
    room = max(20, width - indent)
    cells = [word.lstrip("\xa0") for part in parts for word in textwrap.wrap(part.replace(" ", "\xa0"), room)]
    for columns in range(len(cells), 0, -1):
        widths = [max(map(len, cells[column::columns])) for column in range(columns)]
        # The padding of the last column is not written.
        widths[-1] = max(len(cell.rstrip("\xa0")) for cell in cells[columns - 1 :: columns])
        if sum(widths) + 2 * (columns - 1) <= room:
            break
    rows = [zip(cells[row : row + columns], widths, strict=False) for row in range(0, len(cells), columns)]
    lines = ["  ".join(cell.ljust(size) for cell, size in row).replace("\xa0", " ").rstrip() for row in rows]
    return f"\n{'':{indent}}".join(lines)


def _width(parts: Mapping[str, str]) -> int:
    """The width of a line with its padding, so that lines of the same parts leave out the same ones."""
    return len("  ".join(parts.values()))


def _join(parts: Mapping[str, str]) -> str:
    return "  ".join(parts.values()).rstrip().replace("%  of time", "% of time")


def _note_nan(logs: Mapping[str, Any], state: TrainerState) -> str:
    """Which earlier step had a loss that the mean in this line leaves out; empty if none, or if it leaves out all."""
    step = getattr(state, "non_finite_step", 0)
    is_partial = 0 < step < state.global_step and math.isfinite(unfilter(logs, state).get("loss", math.nan))
    return f"NaN at step {step:,}" if is_partial else ""


def values_to_show(logs: Mapping[str, Any], state: TrainerState) -> Mapping[str, Any]:
    """The log line, with NaN for a loss in which `logging_nan_inf_filter` left out some that are not finite."""
    means = [name for name in ("loss", "train_loss") if name in logs] if getattr(state, "non_finite_step", 0) else []
    return {**logs, **dict.fromkeys(means, math.nan)} if means else unfilter(logs, state)


def unfilter(logs: Mapping[str, Any], state: TrainerState) -> Mapping[str, Any]:
    """The log line, with NaN for a loss of 0 that `logging_nan_inf_filter` made of losses that are not finite."""
    name, lines = ("train_loss", state.log_history) if "train_loss" in logs else ("loss", [logs])
    # With such a loss, the gradient norm is not finite either.
    norms = [line.get("grad_norm") for line in lines if line.get("loss") == 0]
    is_filtered = any(isinstance(norm, float) and not math.isfinite(norm) for norm in norms)
    return {**logs, name: math.nan} if is_filtered else logs


def format_values(logs: Mapping[str, Any]) -> dict[str, str]:
    """Part of a log line → its text, with short names or units, and without the step."""
    values = {key: value for name, value in logs.items() if (key := _printed_key(name, value)) is not None}
    texts = {key: form(values[key]) for key, form in _FORMATS.items() if key in values}
    others = {
        name: f"{name} {_fit(value, 4, 7):<7}" if isinstance(value, (int, float)) else f"{name} {value}"
        for name, value in logs.items()
        if _printed_key(name, value) is None and name not in _HIDDEN
    }
    return others | texts


def _printed_key(name: str, value: Any) -> str | None:
    """The key in `_FORMATS` of a log entry, or None if it has none."""
    if not isinstance(value, (int, float)):
        return None
    if name in _FORMATS:
        return name
    return next((key for key in _FORMATS if is_measurement(name) and name.endswith(f"_{key}")), None)
