"""Collects from a running loop what `RunProgress` (`checkpointing/run_progress.py`) defines, for a checkpoint."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from hftrainer.base.safe_loading import as_bytes
from hftrainer.callbacks.state import export_states
from hftrainer.checkpointing.run_progress import POSITION_SETTINGS, RunProgress
from hftrainer.data import mixture_batches
from hftrainer.data.randomness import rng_state
from hftrainer.trackers.base_callbacks import ids_of_open_runs
from hftrainer.training.run_lengths import RunLengths
from hftrainer.training.steps.micro_batches import StepPhase

if TYPE_CHECKING:
    from hftrainer.assembly.trainer_parts import TrainerParts
    from hftrainer.training.steps.loop import TrainingLoop


def position_settings(parts: TrainerParts, lengths: RunLengths) -> dict[str, Any]:
    """The settings that determine which samples a position in the data refers to."""
    args = parts.trainer.args
    return {name: getattr(args, name) for name in POSITION_SETTINGS if hasattr(args, name)} | {
        "per_device_train_batch_size": 1 if args.tokens_per_batch is not None else parts.run.train_batch_size,
        "world_size": parts.trainer.accelerator.processes.data_world_size,
        "samples in the data": lengths.num_examples,
        "max_steps": lengths.max_steps,
        "train_sampling_strategy": str(args.train_sampling_strategy),
        "accelerator_config": parts.resolved.accelerator_config.data_settings(),
        "mixture": mixture_batches.collect_settings(parts),
    }


def collect_progress(loop: TrainingLoop) -> RunProgress:
    """The current progress for a checkpoint, in addition to `TrainerState`."""
    parts = loop.parts
    position = loop.batches.position
    return RunProgress(
        settings=position_settings(parts, loop.attempt.lengths),
        epoch=None if position.is_before_first else loop.batches.epoch,
        position=loop.attempt.finished_micro_batches if position.is_before_first else position.index + 1,
        epoch_ended=loop.epoch_ended,
        epoch_left=loop.epoch_ended and parts.trainer.control.should_epoch_stop,
        owes_evaluation=parts.run.attempt.has_unfinished_evaluation,
        loss=parts.run.attempt.loss_since_log.cpu().clone(),
        last_logged=parts.run.attempt.last_logged_step,
        metrics=parts.run.attempt.logged_metrics.state_dict(),
        sources={} if loop.monitors.source_log is None else loop.monitors.source_log.state_dict(),
        grad_norm=loop.grad_norm.cpu() if isinstance(loop.grad_norm, torch.Tensor) else loop.grad_norm,
        learning_rate=loop.learning_rate,
        evaluation_workers=list(parts.trainer._eval_dataloaders),
        data=None if position.is_before_first else loop.batches.reader.state_dict(),
        since_evaluation=0.0 if loop.monitors.user_requests is None else loop.monitors.user_requests.since_evaluation,
        recent_losses=list(loop.divergence.recent_losses),
        tracker_runs=ids_of_open_runs(
            parts.trainer.callback_handler.callbacks, parts.storage_sync.checkpoint_place(parts.run.trial)
        ),
    )


def make_ckpt_entry(loop: TrainingLoop) -> torch.Tensor:
    """The Trainer's entry in a Lightning checkpoint, packed so that any program can load the file."""
    trainer = loop.trainer
    trainer.store_flos()
    trainer.state.stateful_callbacks = export_states(loop.parts.stateful_callbacks())
    state = dataclasses.asdict(trainer.state)
    scaler = trainer.accelerator.scaler
    # Lightning's callbacks may save before the run counts the step.
    if loop.batches.step_phase == StepPhase.UNCOUNTED:
        state |= {"global_step": state["global_step"] + 1, "epoch": loop.epoch_after_step()}
    return as_bytes(
        {
            "trainer_state": state,
            "scheduler": trainer.lr_scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "rng": rng_state(),
            "progress": vars(collect_progress(loop)),
        }
    )
