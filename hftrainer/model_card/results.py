"""The results of a run, from its log history: a row for each evaluation, and the final metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hftrainer.compat.overrides import is_measured

Line = Mapping[str, Any]

#: Entries of log lines that are not metrics.
_NOT_METRICS = ("step", "epoch", "total_flos")
#: Metrics that the Hub knows as tags of a model. 'rouge1' counts as 'rouge'.
METRIC_TAGS = "accuracy bleu f1 matthews_correlation pearsonr precision recall rouge sacrebleu spearmanr wer".split()


def evaluation_rows(log_history: Sequence[Line]) -> list[dict[str, Any]] | None:
    """A row for each evaluation during training, as column → value; None without an evaluation."""
    end = _end_of_training(log_history)
    lines = log_history[:end]
    if not any("loss" in line for line in lines) and end is None:  # not a training run
        return None
    rows = []
    training_loss: Any = "No log"
    for line in _merge_evaluations(lines):
        training_loss = line.get("loss", training_loss)
        if _is_evaluation(line):
            row = {"Training Loss": training_loss, "Epoch": line.get("epoch"), "Step": line.get("step")}
            metrics = _metrics(line).items()
            rows.append(
                row | {"Validation Loss" if key == "eval_loss" else _title(key): value for key, value in metrics}
            )
    return rows or None


def final_results(log_history: Sequence[Line], best_step: int | None) -> dict[str, Any] | None:
    """Title → value for the metrics of the final model; None without an evaluation.

    Args:
        log_history: the log lines of the run.
        best_step: the optimizer step whose weights were loaded at the end of training; None if none were loaded.
    """
    lines, end = log_history, _end_of_training(log_history)
    if best_step is not None and end is not None and not any(map(_is_evaluation, lines[end:])):
        lines = [line for line in lines if line.get("step") == best_step] or lines
    found = [line for line in _merge_evaluations(lines) if _is_evaluation(line)]
    return {_title(name): value for name, value in _metrics(found[-1]).items()} if found else None


def metric_tags(results: Mapping[str, Any]) -> dict[str, str]:
    """Tag → title, for the results that the Hub knows."""
    tags = {title.lower().replace(" ", "_").replace("rouge1", "rouge"): title for title in results}
    return {tag: title for tag, title in tags.items() if tag in METRIC_TAGS}


def format_value(value: Any) -> str:
    """Format a value for the card: numbers with four decimals, very small and very large ones with four digits."""
    text = str(value)
    if not isinstance(value, float) or "." not in text:
        return text
    if "e" in text:
        return f"{value:.4g}"
    return f"{value:.4f}" if len(text.partition(".")[2]) > 4 else text


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows as a table. A cell is empty if its row does not have the column."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [columns, *([format_value(row.get(name, "")) for name in columns] for row in rows)]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in cells]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    lines.insert(1, " | ".join(f":{'-' * (width - 2)}:" for width in widths))
    return "\n".join(f"| {line} |" for line in lines)


def _end_of_training(lines: Sequence[Line]) -> int | None:
    """The index of the last line that summarizes training, or None."""
    found = (i for i, line in enumerate(lines) if "train_runtime" in line and "train_loss" in line)
    return max(found, default=None)


def _is_evaluation(line: Line) -> bool:
    return any(name.startswith("eval_") for name in line)


def _merge_evaluations(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """The lines, with the evaluations of several datasets at one step merged into one line."""
    merged: list[dict[str, Any]] = []
    for line in lines:
        names, last = {name for name in line if name.startswith("eval_")}, merged[-1] if merged else {}
        if names and _is_evaluation(last) and last.get("step") == line.get("step") and not names & last.keys():
            last.update(line)
        else:
            merged.append(dict(line))
    return merged


def _metrics(line: Line) -> dict[str, Any]:
    """The metrics in a line, with numbers of NumPy and torch converted to Python's."""
    values = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in line.items()}
    return {
        name: value
        for name, value in values.items()
        if name not in _NOT_METRICS and not is_measured(name) and isinstance(value, (int, float, str))
    }


def _title(name: str) -> str:
    words = name.removeprefix("eval_").removeprefix("num_").split("_")
    return " ".join(word.capitalize() for word in words)
