"""Every use of a private Lightning name, each with its reason. Checked against lightning 2.6.6.

There is one module for each part of Lightning; `tests/lightning/test_private_names.py` finds uses of Lightning's
private names anywhere else.
"""

from hftrainer_lightning.private_api.callbacks import (
    checks_on_train_epoch_end,
    end_when_found,
    first_layers,
    leaves_masks,
    name_of_batch_size,
    name_of_learning_rate,
    pruned_module,
    release_callbacks,
    reset_averages,
    starts_at_fraction,
    state_of,
    updates_learning_rate,
)
from hftrainer_lightning.private_api.evaluation import (
    SeenBatches,
    ValidationGroup,
    can_be_logged,
    end_group,
    install_bare_evaluation,
    release_data,
    validate_in_fit,
)
from hftrainer_lightning.private_api.strategies import LaunchedXLA, OwnPrecision, SharesMesh, announce_gradients
from hftrainer_lightning.private_api.trainer import (
    NoProfiler,
    Trainer,
    copy_profiler,
    is_watched,
    keyboard_interrupts_restored,
    quiet,
    start_script_again,
)
from hftrainer_lightning.private_api.training import (
    CURRENT_HOOK,
    KeepsBatches,
    in_previous_epoch,
    install_window_accumulation,
    restore_progress,
    switch_optimization,
)

__all__ = [
    "CURRENT_HOOK",
    "KeepsBatches",
    "LaunchedXLA",
    "NoProfiler",
    "OwnPrecision",
    "SeenBatches",
    "SharesMesh",
    "Trainer",
    "ValidationGroup",
    "announce_gradients",
    "can_be_logged",
    "checks_on_train_epoch_end",
    "copy_profiler",
    "end_group",
    "end_when_found",
    "first_layers",
    "in_previous_epoch",
    "install_bare_evaluation",
    "install_window_accumulation",
    "is_watched",
    "keyboard_interrupts_restored",
    "leaves_masks",
    "name_of_batch_size",
    "name_of_learning_rate",
    "pruned_module",
    "quiet",
    "release_callbacks",
    "release_data",
    "reset_averages",
    "restore_progress",
    "start_script_again",
    "starts_at_fraction",
    "state_of",
    "switch_optimization",
    "updates_learning_rate",
    "validate_in_fit",
]
