"""A copy of a Trainer, by `copy.deepcopy` or by pickling: it makes its own of what belongs to a process or to a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hftrainer.reporting.memory import TrainerMemoryTracker

if TYPE_CHECKING:
    from hftrainer.training.trainer_api import TrainerApi

#: Attributes of a Trainer that belong to a process, or to a run in it; `Internals` leaves out its own.
_OF_THE_PROCESS = ("accelerator", "gather_function", "_memory_tracker", "deepspeed", "push_in_progress")


def state_of(trainer: TrainerApi) -> dict[str, Any]:
    """What a copy of a Trainer takes along."""
    return {**vars(trainer), **dict.fromkeys(_OF_THE_PROCESS), "_eval_dataloaders": {}}


def take(trainer: TrainerApi, state: dict[str, Any]) -> None:
    """Give a new Trainer what `state_of` returned."""
    vars(trainer).update(state)


def rebuild(trainer: TrainerApi) -> None:
    """Make what a copy has of its own: an engine, an accelerator, and uploads."""
    trainer._memory_tracker = TrainerMemoryTracker(trainer.args.skip_memory_metrics)
    trainer._hftrainer.setup.resolve_arguments()
    trainer.create_accelerator_and_postprocess()
    if trainer.args.push_to_hub:
        trainer.accelerator.processes.from_main(trainer.init_hf_repo)
