"""The display of a run: a progress bar, or only the log lines."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from hftrainer.arguments.base import BaseArguments
from hftrainer.arguments.choices import observed
from hftrainer.arguments.resolved import ResolvedArguments
from hftrainer.callbacks.handler import PROGRESS_BAR_CALLBACKS, is_instance_by_name
from hftrainer.callbacks.state import TrainerCallback, TrainerState
from hftrainer.compat import swap
from hftrainer.compat.messages import wrapped
from hftrainer.compat.overrides import has_length


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
    bar = swap.rebound("transformers.trainer", "DEFAULT_PROGRESS_CALLBACK", ProgressCallback)
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

    def __init__(self, max_str_len: int = 100) -> None:
        self.training_bar: Any = None
        self.prediction_bar: Any = None
        self.max_str_len = max_str_len
        self.current_step = 0

    def on_train_begin(self, args, state, control, **kwargs):
        """Open the bar at the step from which training resumes."""
        if state.is_world_process_zero:
            self.training_bar = _bar(total=state.max_steps)
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
        return wrapped(str(shown), sys.stdout)
    kept = re.sub(r"(?<=\S) (?=\S)", "\xa0", readable(logs, state))  # a name and its value stay together
    return wrapped(kept, sys.stdout).replace("\xa0", " ")


#: Value of an observed run → how a line for people shows it.
_READABLE: dict[str, Callable[[float], str]] = {
    "learning_rate": "lr {:.2e}".format,
    "tokens_per_second": "{:>9,.0f} tokens/s".format,
    "samples_per_second": "{:>8,.1f} samples/s".format,
    "step_seconds": "{:>8.4g} s/step".format,
    "peak_memory_mb": "{:>8,.0f} MB".format,
    "mfu": "{:>6.1%} MFU".format,
    "data_wait": "{:>4.0%} waiting".format,
    "eval_share": "{:>4.0%} evaluating".format,
    "save_share": "{:>4.0%} saving".format,
}


def readable(logs: Mapping[str, Any], state: TrainerState) -> str:
    """A log line for people: the step first, values rounded and in columns. `log_history` keeps the numbers."""
    width = len(f"{state.max_steps:,}")
    parts = [f"{state.global_step:>{width},}/{state.max_steps:,}"]
    if "epoch" in logs:
        parts.append(f"epoch {logs['epoch']:<6.4g}")
    known = [name for name in _READABLE if name in logs and (not name.endswith("_share") or logs[name] >= 0.005)]
    for name in [name for name in logs if name not in _READABLE and name not in ("epoch", "total_flos")]:
        value = logs[name]
        parts.append(f"{name} {value:<9.4g}" if isinstance(value, (int, float)) else f"{name} {value}")
    return "  ".join([*parts, *(_READABLE[name](logs[name]) for name in known)]).rstrip()


def _format_logs(logs: dict[str, Any] | None, args: BaseArguments, *, above_bar: bool = False) -> dict[str, Any]:
    """A log line as the followed release prints it, without `total_flos`."""
    shown = {name: value for name, value in (logs or {}).items() if name != "total_flos"}
    return ResolvedArguments.of(args).policy.printed(shown, above_bar=above_bar)


def _bar(**kwargs: Any) -> Any:
    from tqdm.auto import tqdm

    # With disable=None, tqdm shows no bar outside a terminal; a notebook can show it anyway.
    return tqdm(dynamic_ncols=True, disable=False if is_in_notebook() else None, **kwargs)
