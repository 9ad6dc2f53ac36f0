"""What is written to `output_dir`, and how a run resumes from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hftrainer.arguments._field import arg
from hftrainer.arguments.choices import SaveStrategy


@dataclass
class OutputArguments:
    """The folder, and the order of the other arguments that may be given by position; other bases declare these.

    It is the order of v4, as far as v4.15 to v4.57 agree. A separate base keeps these the first fields of subclasses.
    """

    output_dir: str | None = arg(None, "Folder for checkpoints and the final model; default 'trainer_output'.")
    overwrite_output_dir: Any = None
    do_train: Any = None
    do_eval: Any = None
    do_predict: Any = None
    eval_strategy: Any = None
    prediction_loss_only: Any = None
    per_device_train_batch_size: Any = None
    per_device_eval_batch_size: Any = None
    per_gpu_train_batch_size: Any = None
    per_gpu_eval_batch_size: Any = None
    gradient_accumulation_steps: Any = None
    eval_accumulation_steps: Any = None


@dataclass(kw_only=True)
class SavingArguments:
    """The `checkpoint-xxx` folders."""

    save_strategy: SaveStrategy | str = arg("steps", "When to save: 'no', 'steps', 'epoch' or 'best'.")
    save_steps: float = arg(500, "Optimizer steps between checkpoints; below 1 a fraction of all steps.")
    save_total_limit: int | None = arg(
        None, "Maximum number of checkpoints; the newest and the best are never deleted. None keeps all."
    )
    save_only_model: bool = arg(
        False, "Save without optimizer, scheduler and random states: smaller, but not resumable."
    )
    save_on_each_node: bool = arg(False, "With several nodes, write on the disk of each node.")
    save_on_interrupt: bool = arg(
        True,
        "On SIGTERM, SIGUSR1, Ctrl-C or an error, save the last complete optimizer step before the run ends. Nothing "
        "is saved with save_strategy='no'.",
    )
    enable_jit_checkpoint: bool = arg(False, "On SIGTERM, save once and return from train().")
    load_best_model_at_end: bool = arg(False, "Load the best checkpoint's weights when training ends.")
    resume_from_checkpoint: str | None = arg(
        None, "For your script to pass to `train()`; the Trainer does not read it."
    )
    ignore_data_skip: bool = arg(
        False, "On resume, start the epoch's data from the beginning instead of skipping the batches already used."
    )
    restore_callback_states_from_checkpoint: bool = arg(
        False, "On resume, restore the callbacks that export their state."
    )
