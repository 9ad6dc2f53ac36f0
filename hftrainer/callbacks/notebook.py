"""Progress in a notebook: a bar in optimizer steps, with a table of losses and metrics below it."""

from __future__ import annotations

import html
import importlib.util
import time
from typing import Any

from hftrainer.arguments.choices import IntervalStrategy
from hftrainer.callbacks.base import TrainerCallback
from hftrainer.compat.overrides import has_length, is_measured
from hftrainer.errors import MissingPackage

#: Seconds between two updates of a bar: each sends the whole output to the browser.
UPDATE_EVERY = 0.2


class _Bar:
    """A progress bar as HTML, with elapsed and remaining time.

    Args:
        total: the value at which the bar is full.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.start_time = time.monotonic()
        self.start: int | None = None
        self._html = ""

    def __str__(self) -> str:
        return self._html

    def draw(self, value: int, comment: str = "") -> None:
        """Draw the bar at `value`; the first value is where it starts, and is left out of the speed."""
        self.start = value if self.start is None else self.start
        elapsed = time.monotonic() - self.start_time
        parts = [_clock(elapsed)]
        done = value - self.start
        if done and elapsed and value < self.total:
            parts[0] += f" < {_clock(elapsed / done * (self.total - value))}"
            parts.append(f"{done / elapsed:.2f} it/s")
        label = ", ".join(part for part in [f"{value}/{self.total} {parts[0]}", *parts[1:], comment] if part)
        self._html = (
            f"<div><progress value='{value}' max='{self.total}' style='width:300px; height:20px; "
            f"vertical-align: middle;'></progress> [{label}]</div>"
        )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"


class _Table:
    """Rows of named values. A row with the same first column as the last row replaces it."""

    def __init__(self, columns: list[str]) -> None:
        self.columns = columns
        self.rows: list[dict[str, Any]] = []

    def write(self, values: dict[str, Any]) -> None:
        """Add a row; new names become columns."""
        self.columns += [name for name in values if name not in self.columns]
        first = self.columns[0]
        if self.rows and self.rows[-1][first] == values[first]:
            self.rows[-1] |= values
        else:
            self.rows.append(dict(values))

    def __str__(self) -> str:
        cells = [[_shown(row.get(name, "No log")) for name in self.columns] for row in self.rows]
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.columns)
        body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in cells)
        table = '<table border="1" class="dataframe"><thead><tr style="text-align: left;">'
        return f"{table}{head}</tr></thead><tbody>{body}</tbody></table>"


def _shown(value: Any) -> str:
    return f"{value:.6f}" if isinstance(value, float) else html.escape(str(value))


class _Display:
    """A notebook output that is displayed once and then updated."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, text: str) -> None:
        from IPython.display import HTML, display

        if self._handle is None:
            self._handle = display(HTML(text), display_id=True)
        else:
            self._handle.update(HTML(text))


class NotebookProgressCallback(TrainerCallback):
    """Shows a run in a notebook; the Trainer uses it there instead of `ProgressCallback`. Needs IPython.

    The table has the step or epoch, the training loss, and with evaluation the validation loss and the metrics. There
    is a row for each evaluation, or without evaluation for each log line with a loss.

    Raises:
        MissingPackage: without IPython, when it is made.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec("IPython") is None:
            raise MissingPackage("NotebookProgressCallback needs IPython: pip install ipython")
        self._training: _Bar | None = None
        self._evaluation: _Bar | None = None
        self._batches = 0
        self._table: _Table | None = None
        self._display: _Display | None = None
        self._next_update = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        """Show the bar, and the table's header."""
        if not state.is_world_process_zero:
            return
        columns = [_first_column(args), "Training Loss"]
        if args.eval_strategy != IntervalStrategy.NO:
            columns.append("Validation Loss")
        self._table = _Table(columns)
        self._training, self._evaluation = _Bar(state.max_steps), None
        self._display = _Display()
        self._draw_training(state)

    def on_step_end(self, args, state, control, **kwargs):
        """Advance the bar."""
        if self._training is not None and self._is_due(state.global_step >= state.max_steps):
            self._draw_training(state)

    def _draw_training(self, state: Any) -> None:
        assert self._training is not None
        done = state.epoch or 0
        epoch = int(done) if done == int(done) else f"{done:.2f}"
        self._training.draw(state.global_step, f"Epoch {epoch}/{state.num_train_epochs}")
        self._show()

    def _is_due(self, last: bool) -> bool:
        now = time.monotonic()
        if now < self._next_update and not last:
            return False
        self._next_update = now + UPDATE_EVERY
        return True

    def _show(self) -> None:
        if self._display is None:
            self._display = _Display()
        parts = (self._training, self._table, self._evaluation)
        self._display.show("".join(str(part) for part in parts if part is not None))

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        """Advance the evaluation bar, opening it at the first batch."""
        if not state.is_world_process_zero or not has_length(eval_dataloader):
            return
        if self._evaluation is None:
            self._evaluation, self._batches = _Bar(len(eval_dataloader)), 0
            self._evaluation.draw(0)
        self._batches += 1
        if self._is_due(self._batches >= self._evaluation.total):
            self._evaluation.draw(self._batches)
            self._show()

    def _close_evaluation(self) -> None:
        self._evaluation = None
        self._show()
        if self._training is None:
            self._display = None  # the next evaluation gets its own output below this one

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Add a row, if the run has no evaluations."""
        if self._table is not None and args.eval_strategy == IntervalStrategy.NO and "loss" in (logs or {}):
            self._table.write({"Step": state.global_step, "Training Loss": logs["loss"]})
            self._show()

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        """Add a row; outside training, show it alone."""
        if not state.is_world_process_zero:
            return
        first = _first_column(args)
        losses = [line["loss"] for line in state.log_history if "loss" in line]
        values = {
            first: int(state.epoch or 0) if first == "Epoch" else state.global_step,
            "Training Loss": losses[-1] if losses else "No log",
            "Validation Loss": "No log",
            **_named(metrics or {}),
        }
        if self._training is None:
            self._table = _Table([])
        assert self._table is not None
        self._table.write(values)
        self._close_evaluation()
        if self._training is None:
            self._table = None

    def on_predict(self, args, state, control, metrics=None, **kwargs):
        """Remove the prediction bar."""
        if self._evaluation is not None:
            self._close_evaluation()

    def on_train_end(self, args, state, control, **kwargs):
        """Show the final step."""
        if self._training is not None:
            self._draw_training(state)
        self._training = self._table = self._display = None


def _first_column(args: Any) -> str:
    return "Epoch" if args.eval_strategy == IntervalStrategy.EPOCH else "Step"


def _named(metrics: dict[str, Any]) -> dict[str, Any]:
    """Metrics by column name: 'eval_f1_macro' → 'F1 Macro', 'eval_loss' → 'Validation Loss'."""
    columns = {}
    for name, value in metrics.items():
        if name in ("epoch", "total_flos") or is_measured(name):
            continue
        column = " ".join(part.capitalize() for part in name.split("_")[1:])
        columns["Validation Loss" if column == "Loss" else column] = value
    return columns
