"""Messages at the beginning and end of a run: where it resumes, where the time went, the best model."""

from __future__ import annotations

import datetime
import math
import numbers
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hftrainer.callbacks.flow import evaluation_key
from hftrainer.callbacks.state import TrainerState
from hftrainer.parallel import devices


def resumed(folder: str, state: TrainerState, epochs: float) -> str:
    """A message that says where a run of some epochs resumes, or that it has no steps left."""
    where = f"Resuming from {folder}: step {state.global_step:,} of {state.max_steps:,}, epoch {state.epoch or 0:.4g}."
    if state.global_step < state.max_steps:
        return where
    if (state.epoch or 0) < epochs - 0.01:
        left = f"No step is left, though {epochs - (state.epoch or 0):.3g} epochs are: a step has more samples now."
        return f"{where} {left} elastic=True keeps the samples of a step; a larger max_steps trains on."
    return f"{where} That run is complete, so nothing is trained: a larger max_steps or num_train_epochs trains on."


def finished(
    state: TrainerState,
    metric: str | None,
    metrics: Mapping[str, Any],
    seconds: Mapping[str, float],
    steps: int,
    share: float,
) -> Iterator[str]:
    """Sentences about a run that has ended.

    Args:
        state: the state of the run.
        metric: the name of the metric that compares models.
        metrics: its last log line.
        seconds: activity besides training → the time that it took.
        steps: optimizer steps of this call of `train()`.
        share: `steps` divided by the steps that the speeds in `metrics` count.
    """
    runtime = float(metrics["train_runtime"])
    speeds = {"samples": "train_samples_per_second", "tokens": "train_tokens_per_second"}
    speed = [f"{_number(float(metrics[key]) * share)} {name}/s" for name, key in speeds.items() if metrics.get(key)]
    parts = {"training": runtime - sum(seconds.values()), **seconds}
    spent = [f"{_time(each)} {name}" for name, each in parts.items() if each >= 0.01 * runtime]
    yield f"Trained {steps:,} {'steps' if steps > 1 else 'step'} in {_time(runtime)}: {', '.join(spent)}."
    yield f"{', '.join([*speed, f'peak memory {_memory()}'])}."
    if state.global_step < state.max_steps:
        at = f"step {state.global_step:,} of {state.max_steps:,}"
        yield f"Stopped at {at}, by a callback, a request or a limit of time."
    best: Any = state.best_metric  # an override of `evaluate` may return an array of one element
    if metric is not None and isinstance(best, numbers.Real) and math.isfinite(best):
        at = f" at step {state.best_global_step:,}" if state.best_global_step else ""
        kept = f", in {state.best_model_checkpoint}" if state.best_model_checkpoint else ""
        yield f"Best {evaluation_key(metric)}: {best:.6g}{at}{kept}."


def time_table(runtime: float, seconds: Mapping[str, float], share: float | None) -> Iterator[str]:
    """Lines that say where the time of a run went.

    Args:
        runtime: seconds of the run.
        seconds: activity besides steps → seconds.
        share: the share of the time since the first start that went into steps that count; None if unknown.
    """
    parts = {"forward, backward, optimizer": runtime - sum(seconds.values()), **seconds}
    yield "Where the time went:"
    for name, spent in parts.items():
        yield f"  {name:30}{_time(spent):>12}{spent / runtime:>7.1%}"
    if share is not None:
        yield f"  {'goodput (of all time)':30}{'':12}{share:>7.1%}"


def make_resume_hint(folders: Sequence[str], *, is_complete: bool) -> str:
    """A message with the newest remaining checkpoint of a run, and how to resume from it; empty if none remains."""
    left = [folder for folder in folders if os.path.isdir(folder)]
    if not left:
        return ""
    how = "" if is_complete else "; trainer.train(resume_from_checkpoint=True) goes on from it"
    return f"Last checkpoint: {left[-1]}{how}."


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _time(seconds: float) -> str:
    return f"{_number(seconds)} s" if seconds < 100 else str(datetime.timedelta(seconds=round(seconds)))


def _memory() -> str:
    """The peak of this process's memory, and of its tensors on an accelerator."""
    peaks = {"": peak_process_memory(), " of tensors on the accelerator": devices.memory_peak()}
    return ", ".join(f"{peak / 1e9:.3g} GB{what}" for what, peak in peaks.items() if peak) or "unknown"


def peak_process_memory() -> int:
    """The highest memory of this process so far, in bytes; 0 on Windows."""
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
