"""`RunMonitors`: the observer and the requests of a run, built from its arguments."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from hftrainer.arguments.choices import SaveStrategy, read_observe
from hftrainer.components.component import Component
from hftrainer.components.mixture_batches import make_source_log
from hftrainer.components.storage_sync import run_folder
from hftrainer.monitoring.flops import FlopCounter, peak_flops
from hftrainer.monitoring.journal import COMPLETE, JOURNAL_NAME, Journal, read_events
from hftrainer.monitoring.observer import Observer
from hftrainer.monitoring.requests import Requests
from hftrainer.trainer_pt_utils import find_batch_size

if TYPE_CHECKING:
    from hftrainer.assembly.components import Components
    from hftrainer.training.events import TrainingEvents


class RunMonitors(Component):
    """Reports the events of a run to its observers, and polls its requests.

    Args:
        components: the parts of the Trainer.
        events: the events of the run.
        loader: the loader of its training data.

    Attributes:
        sources: sums for each source of a mixture; None for other data.
        observer: a callback of the Trainer until the run ends; None without `observe`.
        requests: the requests to the run; None except on the main process.
    """

    def __init__(self, components: Components, events: TrainingEvents, loader: Any) -> None:
        super().__init__(components)
        self.events = events
        self.sources = make_source_log(components, loader)
        self.observer = _make_observer(components, events)
        self.requests = _make_requests(components, events)
        self._flops = None if self.observer is None else self.observer.flops

    def begin_micro_batch(self) -> None:
        """Note that the data of a micro-batch has been read."""
        self.run.heartbeat.beat()
        if self._flops is not None:
            self._flops.begin()

    def begin_backward(self) -> None:
        """Note that the loss has been computed, without `training_step`."""
        if self._flops is not None:
            self._flops.begin_backward()

    def end_micro_batch(self, loss: torch.Tensor, inputs: Any) -> None:
        """Count a micro-batch after its backward pass. `loss` is the result of `LossSum.add_loss`."""
        self.run.heartbeat.beat()
        if self.sources is None and self.observer is None:
            return
        samples, tokens = count_batch(self.trainer, inputs)
        if self.sources is not None:
            self.sources.add(self.events.epoch, self.events.micro_batches.window.index, loss, samples, tokens)
        if self.observer is not None:
            self.observer.end_micro_batch(samples, tokens)

    def grant_requests(self) -> None:
        """Set the control flags that requests ask for."""
        if self.requests is not None:
            self.requests.poll(self.trainer.control, self.trainer.state.global_step)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block, an 'evaluation' or 'saving', and report it."""
        block = contextlib.nullcontext() if self.observer is None else self.observer.phase(name)
        with block, self.run.heartbeat.in_phase(name), self.run.measure_time(name):
            yield
        if self.requests is not None:
            self.requests.record_phase_end(name)

    def log_values(self, steps: int) -> dict[str, float]:
        """The values for a log line over the last `steps` steps. A collective operation."""
        source_values = {} if self.sources is None else self.sources.pop(steps)
        return source_values if self.observer is None else source_values | self.observer.pop_values()

    def close(self, reason: str) -> None:
        """End the traces and the journal of the run."""
        if self.requests is not None:
            self.requests.close()
        if self.observer is not None:
            self.observer.close(reason)
            self.trainer.remove_callback(self.observer)


def _make_observer(components: Components, events: TrainingEvents) -> Observer | None:
    """The observer of a run, a callback of the Trainer until the run ends; None without `observe`."""
    trainer, args, plan = components.trainer, components.trainer.args, components.engine.plan
    folder = run_folder(trainer, events.trial)
    # All later runs in a folder write to its journal, so that it says which is the last.
    has_earlier = os.path.isfile(os.path.join(folder, JOURNAL_NAME))
    observations = read_observe(args.observe) | ({"journal"} if has_earlier else set())
    if not observations:
        return None
    events.micro_batches.reader.time_collator()
    peak = peak_flops(args.device, plan.precision) if "mfu" in observations else None
    # The resume of a run that has already ended would spoil its record.
    last_event = (read_events(folder) or [{}])[-1] if events.is_finished else {}
    is_recorded = last_event.get("reason") in COMPLETE
    has_journal = "journal" in observations and trainer.is_world_process_zero() and not is_recorded
    observer = Observer(
        observations,
        lambda: components.run.seconds,
        events.micro_batches.reader.waits,
        lambda count: int(components.steps.sum_over_data(torch.tensor([count]))),
        None if peak is None else FlopCounter(peak),
        Journal(folder if has_journal else None),
        {"world_size": args.world_size, "device": str(args.device), "resumed_from": events.resume_folder},
    )
    trainer.add_callback(observer)
    return observer


def count_batch(trainer: Any, inputs: Any) -> tuple[int, int]:
    """Numbers of samples and input tokens of a micro-batch.

    Only an input of integers of shape `(batch, sequence)` has tokens.
    """
    name = getattr(trainer.model, "main_input_name", "input_ids")
    main_input = inputs.get(name) if hasattr(inputs, "get") else None
    if isinstance(main_input, torch.Tensor) and main_input.ndim == 2 and not main_input.is_floating_point():
        # With flatten_batches, a row has several samples.
        if trainer.args.flatten_batches and "position_ids" in inputs:
            return int((inputs["position_ids"] == 0).sum()), main_input.numel()
        return len(main_input), main_input.numel()
    return find_batch_size(inputs) or 0, 0


def _make_requests(components: Components, events: TrainingEvents) -> Requests | None:
    """The requests to a run; None except on the main process."""
    trainer, args = components.trainer, components.trainer.args
    if not trainer.is_world_process_zero():
        return None
    return Requests(
        run_folder(trainer, events.trial),
        args.save_minutes,
        args.eval_minutes,
        0.0 if events.progress is None else events.progress.since_evaluation,
        can_evaluate=trainer.eval_dataset is not None,
        saves=args.save_strategy != SaveStrategy.NO,
    )
