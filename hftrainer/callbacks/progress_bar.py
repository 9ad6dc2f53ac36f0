"""The display of a run: a progress bar, or only the log lines."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from typing import Any

from hftrainer.arguments.base import BaseArguments
from hftrainer.arguments.choices import read_observe
from hftrainer.arguments.resolved import ResolvedArguments
from hftrainer.base.messages import format_bytes, wrap_text
from hftrainer.callbacks.handler import PROGRESS_BAR_CALLBACKS, is_instance_by_name
from hftrainer.callbacks.state import TrainerCallback, TrainerState
from hftrainer.compat import transformers_names
from hftrainer.compat.overrides import has_length, is_measurement


def is_in_notebook() -> bool:
    """Whether this process is a notebook kernel: Jupyter, Colab, VS Code, Databricks, marimo."""
    if "marimo" in sys.modules:
        return importlib.util.find_spec("IPython") is not None
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = get_ipython() if get_ipython is not None else None
    return shell is not None and "IPKernelApp" in shell.config


def show_in_notebook(path: str) -> None:
    """Show a PNG below the cell."""
    from IPython.display import Image, display

    display(Image(filename=path))


def choose_progress_callback(args: BaseArguments, callbacks: list[Any]) -> type[TrainerCallback] | None:
    """The progress callback for a Trainer, or None if `callbacks` has one."""
    names = ("PrinterCallback",) if args.disable_tqdm else PROGRESS_BAR_CALLBACKS
    if any(is_instance_by_name(callback, *names) for callback in callbacks):
        return None
    if args.disable_tqdm:
        return PrinterCallback
    bar = transformers_names.current_value("transformers.trainer", "DEFAULT_PROGRESS_CALLBACK", ProgressCallback)
    if bar is not ProgressCallback:
        return bar
    if is_in_notebook():
        from hftrainer.callbacks.notebook import NotebookProgressCallback

        return NotebookProgressCallback
    return ProgressCallback


class ProgressCallback(TrainerCallback):
    """A progress bar of optimizer steps, an evaluation bar below, and log lines above.

    Args:
        max_str_len: length of the longest string shown in a log line, in characters.
    """

    def __init__(self, max_str_len: int = 100) -> None:
        self.training_bar: Any = None
        self.prediction_bar: Any = None
        self.max_str_len = max_str_len
        self.current_step = 0

    def on_train_begin(self, args, state, control, **kwargs):
        """Open the bar at the step from which training resumes."""
        if state.is_world_process_zero:
            # A run without steps left shows no bar.
            hidden = {"disable": True} if 0 < state.max_steps <= state.global_step else {}
            self.training_bar = _make_bar(total=state.max_steps, initial=state.global_step, **hidden)
        self.current_step = state.global_step

    def on_step_end(self, args, state, control, **kwargs):
        """Advance the bar."""
        if self.training_bar is not None:
            self.training_bar.update(state.global_step - self.current_step)
            self.current_step = state.global_step

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        """Advance the evaluation bar, which opens at the first batch. Without a length, it only counts."""
        if not state.is_world_process_zero:
            return
        if self.prediction_bar is None:
            total = len(eval_dataloader) if has_length(eval_dataloader) else None
            self.prediction_bar = _make_bar(total=total, leave=self.training_bar is None)
        self.prediction_bar.update(1)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        """Close the evaluation bar."""
        if self.prediction_bar is not None:
            self.prediction_bar.close()
            self.prediction_bar = None

    on_predict = on_evaluate

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Write the log line above the bar."""
        if self.training_bar is not None and not _is_empty(logs):
            values = _format_logs(logs, args, above_bar=True)
            values = {name: self._shorten(value) for name, value in values.items()}
            if "loss" in (logs or {}) and read_observe(getattr(args, "observe", False)):
                self.training_bar.set_postfix_str(f"loss {logs['loss']:.4g}")
            self.training_bar.write(_format_line(values, logs or {}, args, state))

    def _shorten(self, value: Any) -> Any:
        if isinstance(value, str) and len(value) > self.max_str_len:
            return f"[{len(value)} characters, more than max_str_len={self.max_str_len}]"
        return value

    def on_train_end(self, args, state, control, **kwargs):
        """Close the bar."""
        self.close()

    def close(self) -> None:
        """Close the bar of the run."""
        if self.training_bar is not None:
            self.training_bar.close()
            self.training_bar = None


def close_bars(callbacks: list[Any]) -> None:
    """Close the bar of a run that ends early. Otherwise Python redraws it at exit, below the last message."""
    for callback in callbacks:
        if isinstance(callback, ProgressCallback):
            callback.close()


class PrinterCallback(TrainerCallback):
    """Prints the log lines. With `disable_tqdm`, the Trainer uses it instead of the progress bar."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Print the line, above Lightning's progress bar if it shows one."""
        if state.is_local_process_zero and not _is_empty(logs):
            from tqdm import tqdm

            tqdm.write(_format_line(_format_logs(logs, args), logs or {}, args, state))


def _is_empty(logs: Mapping[str, Any] | None) -> bool:
    """Whether this is the empty summary of a run that was already complete."""
    return [(logs or {}).get(name) for name in ("train_loss", "train_steps_per_second")] == [0, 0]


def _format_line(values: dict[str, Any], logs: Mapping[str, Any], args: BaseArguments, state: TrainerState) -> str:
    """A log line as printed: `values` as text, or a human-readable line for an observed run."""
    if not read_observe(getattr(args, "observe", False)):
        return wrap_text(str(values), sys.stdout)
    width = shutil.get_terminal_size().columns if hasattr(sys.stdout, "isatty") and sys.stdout.isatty() else None
    # Keep a name and its value together.
    line = re.sub(r"(?<=\S) (?=\S)", "\xa0", format_log_line(logs, state, width))
    return wrap_text(line, sys.stdout).replace("\xa0", " ")


def _rate(unit: str) -> Callable[[float], str]:
    return lambda value: (f"{value:>6,.0f}" if value >= 100 else f"{value:>6.3g}") + f" {unit}"


#: Value of an observed run → its format in a human-readable line.
_VALUE_FORMATS: dict[str, Callable[[float], str]] = {
    "grad_norm": "grad {:<5.3g}".format,
    "learning_rate": "lr {:.2e}".format,
}
#: Measurement, which may have a prefix like `eval_` → its format. A narrow terminal leaves out the last ones.
_MEASUREMENT_FORMATS: dict[str, Callable[[float], str]] = {
    "runtime": "time {:.3g} s".format,
    "tokens_per_second": _rate("tokens/s"),
    "samples_per_second": _rate("samples/s"),
    "data_wait": "data {:>3.0%}".format,
    "mfu": "{:>5.1%} MFU".format,
    "peak_memory_mb": lambda value: f"mem {format_bytes(value * 1e6):>7}",
    "step_seconds": "{:>7.3g} s/step".format,
    "steps_per_second": _rate("steps/s"),
    # Last, since many lines are without them.
    "eval_share": "eval {:>3.0%}".format,
    "save_share": "save {:>3.0%}".format,
    "model_preparation_time": "prepare {:.2g} s".format,
}


def format_log_line(logs: Mapping[str, Any], state: TrainerState, width: int | None = None) -> str:
    """A human-readable log line: the step first, values rounded and aligned. `log_history` keeps the numbers.

    Args:
        logs: the log line.
        state: the state of the run.
        width: terminal columns; measurements that do not fit are left out. None shows all.
    """
    digits = len(f"{state.max_steps:,}")
    values, measurements = format_values(logs)
    parts = [f"{state.global_step:>{digits},}/{state.max_steps:,}", *values]
    while measurements and width is not None and len("  ".join([*parts, *measurements])) > width:
        measurements.pop()
    return "  ".join([*parts, *measurements]).rstrip()


def format_values(logs: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The values and the measurements of a log line, with short names or units, and without its step."""
    parts = [f"ep {logs['epoch']:<5.2f}"] if "epoch" in logs else []
    measurements = {_measurement(name): value for name, value in logs.items()}
    special_names = (*_VALUE_FORMATS, "epoch", "total_flos")
    for name in [name for name in logs if _measurement(name) is None and name not in special_names]:
        value = logs[name]
        parts.append(f"{name} {value:<6.4g}" if isinstance(value, (int, float)) else f"{name} {value}")
    parts += [format_value(logs[name]) for name, format_value in _VALUE_FORMATS.items() if name in logs]
    names = [name for name in _MEASUREMENT_FORMATS if name in measurements]
    names = [name for name in names if not name.endswith("_share") or measurements[name] >= 0.005]
    return parts, [_MEASUREMENT_FORMATS[name](measurements[name]) for name in names]


def _measurement(name: str) -> str | None:
    """The key in `_MEASUREMENT_FORMATS` of a log entry, or None if it is not a measurement."""
    if name in _MEASUREMENT_FORMATS:
        return name
    if not is_measurement(name):
        return None
    return next((key for key in _MEASUREMENT_FORMATS if name.endswith(f"_{key}")), None)


def _format_logs(logs: dict[str, Any] | None, args: BaseArguments, *, above_bar: bool = False) -> dict[str, Any]:
    """A log line as the followed release prints it, without `total_flos`."""
    values = {name: value for name, value in (logs or {}).items() if name != "total_flos"}
    return ResolvedArguments.from_args(args).policy.printed(values, above_bar=above_bar)


def _make_bar(**kwargs: Any) -> Any:
    from tqdm.auto import tqdm

    # With disable=None, tqdm shows no bar outside a terminal; a notebook can show it anyway.
    return tqdm(**{"dynamic_ncols": True, "disable": False if is_in_notebook() else None} | kwargs)
