"""Messages at the start and end of a run: the point of resumption, the time by activity, the best model."""

from __future__ import annotations

import logging
import math
import numbers
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hftrainer.arguments.choices import as_text
from hftrainer.base.messages import command_name, count_of, format_bytes, format_duration, format_number, format_span
from hftrainer.callbacks.log_lines import unfilter
from hftrainer.callbacks.state import TrainerState, evaluation_key
from hftrainer.checkpointing.layout import checkpoints_newest_first, step_of
from hftrainer.monitoring.journal import CHOSEN, goodput, select_last_run
from hftrainer.parallel import devices
from hftrainer.reporting.memory import peak_process_memory
from hftrainer.reporting.metrics import NanSpan, last_usable_step, logged_curves, nan_span


def make_resume_message(folder: str, state: TrainerState, epochs: float) -> str:
    """A message about where a run resumes, or that it has no steps left; and whether its loss had become NaN."""
    place = f"step {state.global_step:,} of {state.max_steps:,}"
    text = f"Resuming from {folder}: {place}, epoch {state.epoch or 0:.4g}."
    if (nan := find_nan(state)) and (problem := _explain_nan(folder, checkpoints_beside(folder), nan)):
        text += f" It was {problem}"
    if state.global_step < state.max_steps:
        return text
    if (state.epoch or 0) < epochs - 0.01:
        reason = f"No steps are left, but {epochs - (state.epoch or 0):.3g} epochs are: a step has more samples now."
        return f"{text} {reason} elastic=True keeps the samples of a step; a larger max_steps continues training."
    how = "complete" if state.global_step == state.max_steps else "already past the end"
    return f"{folder} is {how} ({place}): nothing to train. Increase max_steps or num_train_epochs to continue."


@dataclass
class FinishedRun:
    """What the summary of a run tells.

    Attributes:
        state: the state of the run.
        args: the arguments.
        metrics: its last log line.
        seconds: activity other than training → its seconds.
        steps: optimizer steps of this call of `train()`.
        share: the ratio of `steps` to the steps that the speeds in `metrics` count.
        stopper: the callback that stopped the run before its end, on purpose; empty if unknown.
        was_asked_to_stop: whether a request, `ask stop`, stopped it.
        non_finite_since: the step since which no loss was finite; 0 if only some were not, None if all were finite.
        checkpoints: the checkpoint folders that it wrote, in order.
        earlier: the checkpoints of the run that it resumed, if any.
        has_failed_save: whether the last checkpoint could not be written.
        has_journal: whether it wrote a journal.
        events: the events of the journal; None without `observe`.
    """

    state: TrainerState
    args: Any
    metrics: Mapping[str, Any]
    seconds: Mapping[str, float]
    steps: int
    share: float
    stopper: str = ""
    was_asked_to_stop: bool = False
    non_finite_since: int | None = None
    checkpoints: Sequence[str] = ()
    earlier: Sequence[str] = ()
    has_failed_save: bool = False
    has_journal: bool = False
    events: list[dict[str, Any]] | None = None


def make_summary(run: FinishedRun) -> Iterator[tuple[str, int]]:
    """Lines that summarize a finished run, with their levels for `logging`."""
    yield from _describe_training(run)
    if text := make_goodput_message(run.events or []):
        yield text, logging.INFO
    yield from _describe_checkpoints(run)


def _describe_training(run: FinishedRun) -> Iterator[tuple[str, int]]:
    """The time and speed, where and why the run stopped, its best value, and whether losses were not finite."""
    state, args, metrics = run.state, run.args, run.metrics
    runtime = float(metrics["train_runtime"])
    speeds = {"samples": "train_samples_per_second", "tokens": "train_tokens_per_second"}
    speed = [f"{format_number(metrics[key] * run.share)} {name}/s" for name, key in speeds.items() if metrics.get(key)]
    # As in transformers, the speeds are over the whole time.
    facts = f"{' and '.join(speed)} overall, " * bool(speed) + f"peak memory {_memory()}"
    yield f"Trained {count_of(run.steps, 'steps')} in {describe_times(runtime, run.seconds)}: {facts}.", logging.INFO
    if state.global_step < state.max_steps:
        place = f"step {state.global_step:,} of {state.max_steps:,}"
        request = "`ask stop`" if run.was_asked_to_stop else ""
        yield f"Stopped at {place}, by {run.stopper or request or 'a signal or the script'}.", logging.INFO
    nan = None if run.non_finite_since is None else find_nan(state, run.non_finite_since)
    # An override of `evaluate` may return an array of one element.
    best: Any = state.best_metric
    if args.metric_for_best_model is not None and isinstance(best, numbers.Real) and math.isfinite(best):
        place = f" at step {state.best_global_step:,}" if state.best_global_step else ""
        # The weights that the step before the first NaN has left may be its cause.
        place += ", after the loss became NaN" * bool(nan and (state.best_global_step or 0) > nan.usable)
        place += _place_of_best(state, args)
        yield f"Best {evaluation_key(args.metric_for_best_model)}: {best:.6g}{place}.", logging.INFO
    if run.non_finite_since is not None:
        place = f"since step {format_span(nan.first, nan.last)} of {state.max_steps:,}" if nan else ""
        lasting = f"is not finite {place}: the last weights may be unusable"
        means = ". In log_history, loss and train_loss leave such steps out, so are too low"
        hidden = means if args.logging_nan_inf_filter else ""
        yield f"The loss {lasting if nan else 'was not finite in some steps'}{hidden}.", logging.WARNING


def describe_times(runtime: float, seconds: Mapping[str, float]) -> str:
    """The time of a run, and the shares of training and of the other activities in `seconds`; their sum is 100%."""
    parts = {"training": runtime - sum(seconds.values()), **seconds}
    total = sum(time for time in parts.values() if time > 0)
    percents = {name: 100 * time / total for name, time in parts.items() if time > 0}
    # The largest remainders are rounded up.
    ranked = sorted(percents, key=lambda name: int(percents[name]) - percents[name])
    rounded_up = ranked[: 100 - sum(map(int, percents.values()))]
    shares = [f"{whole}% {name}" for name, part in percents.items() if (whole := int(part) + (name in rounded_up))]
    return format_duration(runtime) + (f" ({', '.join(shares)})" if shares else "")


def _describe_checkpoints(run: FinishedRun) -> Iterator[tuple[str, int]]:
    """The last checkpoint and how to resume from it, or that none was saved; and how to draw the curves."""
    state, folder = run.state, str(run.args.output_dir)
    is_complete, nan = state.global_step >= state.max_steps or bool(run.stopper), find_nan(state, run.non_finite_since)
    hint = make_resume_hint(run.checkpoints, is_complete=is_complete, nan=nan, earlier=run.earlier)
    if hint:
        yield hint, logging.INFO
    elif run.has_failed_save:
        yield f"No checkpoint was saved in {folder}.", logging.WARNING
    if sys.stderr.isatty() and (hint or run.has_journal) and len(state.log_history) > 1:
        yield f"Curves: {command_name()} plot {shlex.quote(folder)}", logging.INFO


def _place_of_best(state: TrainerState, args: Any) -> str:
    """The checkpoint of the best value, as a part of a sentence; or that it has none, and which one was loaded."""
    folder, step = state.best_model_checkpoint, state.best_global_step
    # Earlier releases know no step.
    if not folder or not step or folder.endswith(f"-{step}"):
        return f", in {folder}" if folder else ""
    by = "steps" if args.save_strategy == "steps" else "strategy"
    loaded = f". Loaded: {folder}" if args.load_best_model_at_end else ""
    return f", of which there is no checkpoint (save_{by}={as_text(getattr(args, f'save_{by}'))}){loaded}"


def make_stop_message(state: TrainerState, runtime: float, seconds: Mapping[str, float]) -> str:
    """The step, time and last loss of a run that a signal has stopped."""
    loss = _last_loss_line(state).get("loss")
    last = describe_times(runtime, seconds) + ("" if loss is None else f"; last loss {format_number(loss)}")
    return f"Stopped at step {state.global_step:,} of {state.max_steps:,}, after {last}."


def make_goodput_message(events: list[dict[str, Any]]) -> str:
    """The share of steps in the time since a resumed run's start from scratch; empty without a resume."""
    share, last_run = goodput(events), select_last_run(events)
    starts = sum(event["event"] == "begin" for event in last_run)
    if share is None or starts < 2:
        return ""
    pairs = pairwise(last_run)
    has_failed = any(now["event"] == "begin" and before.get("reason") not in CHOSEN for before, now in pairs)
    time = f"{share:.0%} of the time{', with pauses after failures,' * has_failed}"
    return f"Goodput: {time} went into steps that were kept ({starts} starts)."


def find_nan(state: TrainerState, since: int | None = None) -> NanSpan | None:
    """When the loss became NaN for good; None if it is finite.

    Args:
        state: the state of the run, with its log.
        since: that step in this call of `train()`, if known.
    """
    line = _last_loss_line(state)
    # An infinite gradient alone may be one that `fp16` skips, and with a finite one the weights are finite.
    is_logged = not (math.isfinite(line.get("loss", 0.0)) or math.isfinite(line.get("grad_norm", math.nan)))
    losses = logged_curves(state)["loss"]
    span = nan_span(losses, since) if is_logged else None
    return span or (NanSpan(since, since, last_usable_step(losses, since)) if since else None)


def _last_loss_line(state: TrainerState) -> Mapping[str, Any]:
    return next((unfilter(line, state) for line in reversed(state.log_history) if "loss" in line), {})


def _explain_nan(last: str, folders: Sequence[str], nan: NanSpan | None) -> str:
    """When a checkpoint was saved, if its weights may be NaN, and which one was saved before; else empty."""
    if nan is None or (step := step_of(last)) is None or step <= nan.usable:
        return ""
    earlier = next((path for path in folders[::-1] if (step_of(path) or 0) <= nan.usable and os.path.isdir(path)), None)
    since = format_span(nan.first, nan.last)
    place = f"{'after' if step >= nan.last else 'when'} the loss became NaN (since step {since})"
    advice = f"The last one before it is {earlier}: resume_from_checkpoint={earlier!r}"
    return f"saved {place}. {advice if earlier else 'There is none before it'}."


def checkpoints_beside(folder: str | None) -> list[str]:
    """The checkpoints in the folder of a checkpoint, that with the most steps last."""
    return [*checkpoints_newest_first(os.path.dirname(folder.rstrip("/")) or ".")][::-1] if folder else []


def make_resume_hint(
    folders: Sequence[str],
    *,
    is_complete: bool,
    label: str = "Last checkpoint",
    nan: NanSpan | None = None,
    earlier: Sequence[str] = (),
) -> str:
    """A message with a run's newest remaining checkpoint, and how to resume from it; empty if none remains.

    Args:
        folders: the checkpoints.
        is_complete: whether the run has ended on purpose, so that there is nothing to resume.
        label: what the newest checkpoint is.
        nan: when the loss became NaN, from `find_nan`.
        earlier: the checkpoints of the run that this one resumed.
    """
    last = next(filter(os.path.isdir, reversed(folders)), None)
    if last is not None and (problem := _explain_nan(last, [*earlier, *folders], nan)):
        return f"{label}: {last}, {problem}"
    if last is None or is_complete:
        return f"{label}: {last}." if last else ""
    newest = next(checkpoints_newest_first(os.path.dirname(last)), last)
    if os.path.basename(newest) == os.path.basename(last):
        # A script that was started with this option passes it to `train()`.
        named = "--resume_from_checkpoint" in " ".join(sys.argv).replace("-from-", "_from_")
        by = "the command with --resume_from_checkpoint true" if named else "trainer.train(resume_from_checkpoint=True)"
        return f"{label}: {last}; {by} resumes from it."
    advice = f"Resume with trainer.train(resume_from_checkpoint={last!r})"
    return f"{label}: {last}. {advice}: True would take {newest}, of an earlier run."


def _memory() -> str:
    """The peak memory of this process, and of its tensors on an accelerator."""
    peaks = {"": peak_process_memory(), " of tensors on the accelerator": devices.memory_peak()}
    return ", ".join(f"{format_bytes(peak)}{label}" for label, peak in peaks.items() if peak) or "unknown"
