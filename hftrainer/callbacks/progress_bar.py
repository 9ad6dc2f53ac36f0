"""The display of a run: a progress bar, or only the log lines."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Mapping
from typing import Any

from hftrainer.arguments.base import BaseArguments
from hftrainer.arguments.resolved import ResolvedArguments
from hftrainer.base.messages import is_terminal
from hftrainer.callbacks.handler import PROGRESS_BAR_CALLBACKS, is_instance_by_name
from hftrainer.callbacks.log_lines import format_log_line, values_to_show
from hftrainer.callbacks.state import TrainerCallback, TrainerState
from hftrainer.compat import transformers_names
from hftrainer.compat.libraries import has_length
from hftrainer.parallel.rank_errors import find_rank_that_prints

#: Columns of the bar for which losses beside it are left out, with its two edges.
MIN_BAR = 20
#: Erases the rest of a terminal's line.
ERASE = "\x1b[K"


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


class LinesAboveBar:
    """Takes the place of `sys.stdout` or `sys.stderr`, so that lines appear above the bars, as with RichProgressBar.

    Otherwise what a script prints or logs would go on in the line of the bar, which may be that of another rank.

    Args:
        name: the stream's name in `sys`. It must be a terminal; loggers that write to it write here too.
    """

    def __init__(self, name: str) -> None:
        self.terminal = getattr(sys, name)
        self._name, self._rest = name, ""
        setattr(sys, name, self)
        _replace_in_handlers(self.terminal, self)

    def restore(self) -> None:
        """Write an unfinished line too, and give the stream back, unless a script has replaced it since."""
        if self._rest:
            self._write_above_bar(self._rest)
        if getattr(sys, self._name) is self:
            setattr(sys, self._name, self.terminal)
        _replace_in_handlers(self, self.terminal)

    def write(self, text: str) -> int:
        """Write the complete lines; the rest of the text waits for the end of its line, or for `restore`."""
        # What draws a bar, and moves between bars: those of a script too write to this stream.
        if "\r" in text or "\x1b[A" in text or not (self._rest + text).strip("\n"):
            self.terminal.write(text)
            return len(text)
        lines, end, self._rest = (self._rest + text).rpartition("\n")
        if end:
            self._write_above_bar(lines + end)
        return len(text)

    def end_line(self) -> None:
        """Write an unfinished line, and end it, before a line that begins at the left."""
        if self._rest:
            self.write("\n")

    def _write_above_bar(self, text: str) -> None:
        from tqdm import tqdm

        with tqdm.external_write_mode(file=sys.stderr):
            # This process cannot redraw the bar of another one, which does that at its next step.
            self.terminal.write(f"\r{ERASE}{text}")
            self.terminal.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.terminal, name)


def _replace_in_handlers(stream: Any, new_stream: Any) -> None:
    """Let the handlers of loggers that write to a stream write to another one."""
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and handler.stream is stream:
                handler.setStream(new_stream)


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
        self._is_in_train = False
        self._outputs: list[LinesAboveBar] = []
        #: The last losses, which the bar shows.
        self._losses: dict[str, str] = {}

    def on_train_begin(self, args, state, control, **kwargs):
        """Open the bar at the step from which training resumes."""
        # A run without steps left shows no bar.
        hidden = {"disable": True} if 0 < state.max_steps <= state.global_step else {}
        self._is_in_train = True
        if not hidden:
            self._replace_outputs()
        if state.is_world_process_zero:
            self.training_bar = _make_bar(total=state.max_steps, initial=state.global_step, **hidden)
            # In the first step DDP writes warnings, which would be in the bar's line.
            if args.world_size > 1:
                self.training_bar.clear()
        self.current_step = state.global_step
        if warnings.showwarning != self._write_warning:
            self._show_warning = warnings.showwarning
            self._pid = os.getpid()
            warnings.showwarning = self._write_warning

    def _replace_outputs(self) -> None:
        """Replace the streams. A bar, which belongs to the stream that it is given, is made afterwards."""
        if not self._outputs and is_terminal(sys.stderr):
            terminals = [name for name in ("stdout", "stderr") if is_terminal(getattr(sys, name))]
            self._outputs = [LinesAboveBar(name) for name in terminals]

    def _write_warning(self, message, category, filename, lineno, file=None, line=None):
        """Show a warning of Python on one of the ranks that have it."""
        if find_rank_that_prints(warnings.formatwarning(message, category, filename, lineno), self._pid) is None:
            self._show_warning(message, category, filename, lineno, file, line)

    def on_step_end(self, args, state, control, **kwargs):
        """Advance the bar."""
        if self.training_bar is not None:
            self.training_bar.update(state.global_step - self.current_step)
            self.current_step = state.global_step

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        """Advance the evaluation bar, which opens at the first batch. Without a length, it only counts."""
        self._replace_outputs()
        if not state.is_world_process_zero:
            return
        if self.prediction_bar is None:
            total = len(eval_dataloader) if has_length(eval_dataloader) else None
            # Below the training's bar it has a name.
            named = {"desc": "eval", "leave": False} if self.training_bar is not None else {}
            self.prediction_bar = _make_bar(total=total, **named)
        self.prediction_bar.update(1)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        """Close the evaluation bar."""
        if self.prediction_bar is not None:
            self.prediction_bar.close()
            self.prediction_bar = None
        if not self._is_in_train:
            self.close()

    on_predict = on_evaluate

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Write the log line above the bar."""
        if self.training_bar is not None and not _is_empty(logs):
            values = {name: self._shorten(value) for name, value in (logs or {}).items()}
            shown = values_to_show(values, state)
            self._losses |= {name: f"{name} {shown[name]:.4g}" for name in ("loss", "eval_loss") if name in shown}
            # A narrow bar leaves out the last one.
            self.training_bar.set_postfix_str(", ".join(sorted(self._losses.values(), reverse=True)))
            for output in self._outputs:
                output.end_line()
            self.training_bar.write(_format_line(values, args, state, above_bar=True))

    def _shorten(self, value: Any) -> Any:
        if isinstance(value, str) and len(value) > self.max_str_len:
            return f"[{len(value)} characters, more than max_str_len={self.max_str_len}]"
        return value

    def on_train_end(self, args, state, control, **kwargs):
        """Close the bar."""
        self.close()

    def close(self) -> None:
        """Close the bars."""
        for bar in (self.prediction_bar, self.training_bar):
            if bar is not None:
                bar.close()
        self.prediction_bar = self.training_bar = None
        self._is_in_train = False
        while self._outputs:
            self._outputs.pop().restore()
        if warnings.showwarning == self._write_warning:
            warnings.showwarning = self._show_warning


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

            tqdm.write(_format_line(logs or {}, args, state))


def _is_empty(logs: Mapping[str, Any] | None) -> bool:
    """Whether this is the empty summary of a run that was already complete."""
    return [(logs or {}).get(name) for name in ("train_loss", "train_steps_per_second")] == [0, 0]


def _format_line(logs: Mapping[str, Any], args: BaseArguments, state: TrainerState, *, above_bar: bool = False) -> str:
    """A log line as printed: rounded and aligned in a terminal, else a dict for programs.

    Args:
        logs: the log line.
        args: the arguments.
        state: the state of the run.
        above_bar: whether it is printed above a progress bar.
    """
    if is_terminal(sys.stdout):
        return format_log_line(logs, state, shutil.get_terminal_size().columns)
    values = {name: value for name, value in logs.items() if name != "total_flos"}
    # As the followed release prints it.
    return str(ResolvedArguments.from_args(args).policy.printed(values, above_bar=above_bar))


def _make_bar(**kwargs: Any) -> Any:
    from tqdm.auto import tqdm

    class Bar(tqdm):
        """Leaves room at the end of the terminal's line for its "^C", so that a Ctrl-C can erase both.

        In a narrow terminal it leaves out losses, the last one first.
        """

        @property
        def format_dict(self) -> dict[str, Any]:
            values: dict[str, Any] = super().format_dict
            columns = values["ncols"] and max(values["ncols"] - 3, 1)
            # Without columns it is the text beside the bar.
            while columns and values["postfix"] and len(tqdm.format_meter(**values | {"ncols": 0})) > columns - MIN_BAR:
                values["postfix"] = values["postfix"].rpartition(", ")[0]
            return values | {"ncols": columns}

        def __str__(self) -> str:
            # A wider bar of the script may have been in this line.
            return super().__str__() + ERASE

    # With disable=None, tqdm shows no bar outside a terminal; a notebook can show it anyway.
    return Bar(**{"dynamic_ncols": True, "disable": False if is_in_notebook() else None} | kwargs)
