"""The display of a run: a progress bar, or only the log lines."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO, cast

from hftrainer.arguments.base import BaseArguments
from hftrainer.arguments.choices import observed
from hftrainer.arguments.resolved import ResolvedArguments
from hftrainer.callbacks.handler import PROGRESS_BAR_CALLBACKS, is_instance_by_name
from hftrainer.callbacks.state import TrainerCallback, TrainerState
from hftrainer.compat import swap
from hftrainer.compat.messages import wrap_text
from hftrainer.compat.overrides import has_length, is_measurement


def is_in_notebook() -> bool:
    """Whether this runs in the kernel of a notebook: Jupyter, Colab, VS Code, Databricks since 11.0, marimo."""
    if "marimo" in sys.modules:
        return importlib.util.find_spec("IPython") is not None
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = get_ipython() if get_ipython is not None else None
    if shell is None or "IPKernelApp" not in shell.config:
        return False
    release = os.environ.get("DATABRICKS_RUNTIME_VERSION")  # before 11.0 its notebooks did not run IPython
    return release is None or float(release.split(".")[0]) >= 11


def choose_progress_callback(args: BaseArguments, callbacks: list[Any]) -> type[TrainerCallback] | None:
    """The progress callback for a Trainer; None if `callbacks` has one."""
    names = ("PrinterCallback",) if args.disable_tqdm else PROGRESS_BAR_CALLBACKS
    if any(is_instance_by_name(callback, *names) for callback in callbacks):
        return None
    if args.disable_tqdm:
        return PrinterCallback
    bar = swap.current_value("transformers.trainer", "DEFAULT_PROGRESS_CALLBACK", ProgressCallback)
    if bar is not ProgressCallback:
        return bar
    if is_in_notebook():
        from hftrainer.callbacks.notebook import NotebookProgressCallback

        return NotebookProgressCallback
    return ProgressCallback


class ProgressCallback(TrainerCallback):
    """A progress bar in optimizer steps, one in evaluation batches below it, and the log lines above both.

    Args:
        max_str_len: length of the longest string shown in a log line, in characters.
    """

    #: What shows the script's lines above the bar.
    _stdout: _AboveBars | None = None

    def __init__(self, max_str_len: int = 100) -> None:
        self.training_bar: Any = None
        self.prediction_bar: Any = None
        self.max_str_len = max_str_len
        self.current_step = 0

    def on_train_begin(self, args, state, control, **kwargs):
        """Open the bar at the step from which training resumes."""
        if state.is_world_process_zero:
            self.training_bar = _bar(total=state.max_steps)
            if not self.training_bar.disable and _is_terminal(sys.stdout):
                self._stdout = _AboveBars.install() or self._stdout
        self.current_step = 0

    def on_step_end(self, args, state, control, **kwargs):
        """Advance the bar."""
        if self.training_bar is not None:
            self.training_bar.update(state.global_step - self.current_step)
            self.current_step = state.global_step

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        """Advance the evaluation bar, opening it at the first batch; without a length it only counts."""
        if not state.is_world_process_zero:
            return
        if self.prediction_bar is None:
            total = len(eval_dataloader) if has_length(eval_dataloader) else None
            self.prediction_bar = _bar(total=total, leave=self.training_bar is None)
        self.prediction_bar.update(1)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        """Close the evaluation bar."""
        if self.prediction_bar is not None:
            self.prediction_bar.close()
            self.prediction_bar = None

    on_predict = on_evaluate

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Write the log line above the bar."""
        if self.training_bar is not None:
            shown = _format_logs(logs, args, above_bar=True)
            shown = {name: self._shortened(value) for name, value in shown.items()}
            if "loss" in (logs or {}) and observed(getattr(args, "observe", False)):
                self.training_bar.set_postfix_str(f"loss {logs['loss']:.4g}")
            self.training_bar.write(_text(shown, logs or {}, args, state))

    def _shortened(self, value: Any) -> Any:
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
        if self._stdout is not None:
            self._stdout.end()
            self._stdout = None


def close_bars(callbacks: list[Any]) -> None:
    """Close the bar of a run that ends early; otherwise Python redraws it at exit, below the last message."""
    for callback in callbacks:
        if isinstance(callback, ProgressCallback):
            callback.close()


class _AboveBars:
    """`sys.stdout` while a terminal shows a bar: lines that a script prints are above it."""

    def __init__(self, stream: TextIO) -> None:
        from tqdm import tqdm

        self.stream = stream
        self._tqdm = tqdm
        self._pid = os.getpid()
        self._begun = ""
        self._is_ended = False

    @classmethod
    def install(cls) -> _AboveBars | None:
        """Take the place of `sys.stdout`; None if one does it already, as for a training around this one."""
        before: Any = sys.stdout
        if isinstance(before, cls):
            if not before._is_ended:
                return None
            before = before.stream  # a script has put it back after a training
        made = cls(before)
        sys.stdout = cast("TextIO", made)
        return made

    def end(self) -> None:
        """Give `sys.stdout` back. What still holds this object, such as a script's own stream, writes through it."""
        self.flush()
        self._is_ended = True
        if cast("Any", sys.stdout) is self:
            sys.stdout = self.stream

    @property
    def _passes(self) -> bool:
        """Also in a worker of a loader, which has copies of the bars and of their lock."""
        return self._is_ended or os.getpid() != self._pid

    def __getattr__(self, name: str) -> Any:
        if name == "stream":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write whole lines, and keep the beginning of another."""
        if self._passes:
            return self.stream.write(text)
        with self._tqdm.get_lock():
            lines, newline, self._begun = (self._begun + text).rpartition("\n")
            self._show(lines + newline)
        return len(text)

    def flush(self) -> None:
        """Write the beginning of a line too."""
        if not self._passes:
            with self._tqdm.get_lock():
                begun, self._begun = self._begun, ""
                self._show(begun)
        self.stream.flush()

    def _show(self, text: str) -> None:
        if text:
            with self._tqdm.external_write_mode():
                self.stream.write(text)
                self.stream.flush()


class PrinterCallback(TrainerCallback):
    """Prints the log lines; the Trainer uses it instead of the progress bar with `disable_tqdm`."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Print the line, above Lightning's progress bar if it shows one."""
        if state.is_local_process_zero:
            from tqdm import tqdm

            tqdm.write(_text(_format_logs(logs, args), logs or {}, args, state))


def _text(shown: dict[str, Any], logs: Mapping[str, Any], args: BaseArguments, state: TrainerState) -> str:
    """A log line as it is printed: `shown`, as the followed release does; of an observed run, for people."""
    if not observed(getattr(args, "observe", False)):
        return wrap_text(str(shown), sys.stdout)
    width = shutil.get_terminal_size().columns if _is_terminal(sys.stdout) else None
    kept = re.sub(r"(?<=\S) (?=\S)", "\xa0", readable(logs, state, width))  # a name and its value stay together
    return wrap_text(kept, sys.stdout).replace("\xa0", " ")


def _is_terminal(stream: Any) -> bool:
    return hasattr(stream, "isatty") and stream.isatty()


def _rate(unit: str) -> Callable[[float], str]:
    return lambda value: (f"{value:>6,.0f}" if value >= 100 else f"{value:>6.3g}") + f" {unit}"


#: Value of an observed run → how a line for people shows it.
_READABLE: dict[str, Callable[[float], str]] = {
    "grad_norm": "grad {:<5.3g}".format,
    "learning_rate": "lr {:.1e}".format,
}
#: Measurements likewise, which may have a prefix like `eval_`. A narrow terminal leaves out the last of them.
_MEASURED: dict[str, Callable[[float], str]] = {
    "runtime": "{:.3g} s".format,
    "tokens_per_second": _rate("tokens/s"),
    "samples_per_second": _rate("samples/s"),
    "data_wait": "wait {:>3.0%}".format,
    "mfu": "{:.1%} MFU".format,
    "eval_share": "eval {:.0%}".format,
    "save_share": "save {:.0%}".format,
    "peak_memory_mb": "{:,.0f} MB".format,
    "step_seconds": "{:.3g} s/step".format,
    "steps_per_second": _rate("steps/s"),
    "model_preparation_time": "prepare {:.2g} s".format,
}


def readable(logs: Mapping[str, Any], state: TrainerState, width: int | None = None) -> str:
    """A human-readable log line: the step first, values rounded and aligned. `log_history` keeps the numbers.

    Args:
        logs: the log line.
        state: the state of the run.
        width: terminal columns; measurements that do not fit are left out. None shows all.
    """
    digits = len(f"{state.max_steps:,}")
    parts = [f"{state.global_step:>{digits},}/{state.max_steps:,}"]
    if "epoch" in logs:
        parts.append(f"ep {logs['epoch']:<5.2f}")
    measured = {_measurement(name): value for name, value in logs.items()}
    special = (*_READABLE, "epoch", "total_flos")
    for name in [name for name in logs if _measurement(name) is None and name not in special]:
        value = logs[name]
        parts.append(f"{name} {value:<6.4g}" if isinstance(value, (int, float)) else f"{name} {value}")
    parts += [show(logs[name]) for name, show in _READABLE.items() if name in logs]
    shown = [name for name in _MEASURED if name in measured]
    shown = [name for name in shown if not name.endswith("_share") or measured[name] >= 0.005]
    ends = [_MEASURED[name](measured[name]) for name in shown]
    while ends and width is not None and len("  ".join([*parts, *ends])) > width:
        ends.pop()
    return "  ".join([*parts, *ends]).rstrip()


def _measurement(name: str) -> str | None:
    """The key of `_MEASURED` for an entry of a log line; None if it is no measurement."""
    if name in _MEASURED:
        return name
    if not is_measurement(name):
        return None
    return next((key for key in _MEASURED if name.endswith(f"_{key}")), None)


def _format_logs(logs: dict[str, Any] | None, args: BaseArguments, *, above_bar: bool = False) -> dict[str, Any]:
    """A log line as the followed release prints it, without `total_flos`."""
    shown = {name: value for name, value in (logs or {}).items() if name != "total_flos"}
    return ResolvedArguments.of(args).policy.printed(shown, above_bar=above_bar)


def _bar(**kwargs: Any) -> Any:
    from tqdm.auto import tqdm

    # With disable=None, tqdm shows no bar outside a terminal; a notebook can show it anyway.
    return tqdm(dynamic_ncols=True, disable=False if is_in_notebook() else None, **kwargs)
