"""transformers' `trainer_jit_checkpoint`: a callback that saves when SIGTERM announces the end of a job.

`Trainer` does this itself with `enable_jit_checkpoint=True`. These names are for scripts that use the callback, or a
subclass of it, on their own.
"""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType
from typing import Any

from hftrainer.callbacks.state import TrainerCallback

logger = logging.getLogger(__name__)


class CheckpointManager:
    """Records SIGTERM, and saves a checkpoint.

    Args:
        trainer: the Trainer whose run is saved.
        kill_wait: seconds after SIGTERM until a checkpoint is requested; a job that is killed earlier saves nothing.

    Attributes:
        is_checkpoint_requested: whether the run is to save and stop.
    """

    def __init__(self, trainer: Any, kill_wait: float = 3) -> None:
        self.trainer = trainer
        self.kill_wait = kill_wait
        self.is_checkpoint_requested = False
        self._original_sigterm_handler: Any = None

    def setup_signal_handler(self) -> None:
        """Install the SIGTERM handler; Python allows this in the main thread only."""
        self._original_sigterm_handler = signal.signal(signal.SIGTERM, self._sigterm_handler)

    def _sigterm_handler(self, signum: int, frame: FrameType | None) -> None:
        if not self.is_checkpoint_requested:
            logger.warning("SIGTERM: saving in %s seconds, then stopping.", self.kill_wait)
            timer = threading.Timer(self.kill_wait, self._enable_checkpoint)
            timer.daemon = True
            timer.start()

    def _enable_checkpoint(self) -> None:
        self.is_checkpoint_requested = True

    def execute_jit_checkpoint(self) -> None:
        """Save a checkpoint of the current step."""
        self.is_checkpoint_requested = False
        self.trainer._save_checkpoint(self.trainer.model, trial=None)


class JITCheckpointCallback(TrainerCallback):
    """Saves a checkpoint and ends `train()` some seconds after SIGTERM.

    Call `set_trainer` with a Trainer whose arguments have `enable_jit_checkpoint=True`; with others it does nothing.
    """

    def __init__(self) -> None:
        self.trainer: Any = None
        self.jit_manager: CheckpointManager | None = None

    def set_trainer(self, trainer: Any) -> None:
        """Install the SIGTERM handler, if the Trainer's arguments enable it."""
        self.trainer = trainer
        if trainer.args.enable_jit_checkpoint:
            self.jit_manager = CheckpointManager(trainer)
            self.jit_manager.setup_signal_handler()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the completed step or epoch, and stop, if a checkpoint has been requested."""
        if self.jit_manager is not None and self.jit_manager.is_checkpoint_requested:
            control.should_save = False
            control.should_training_stop = True
            self.jit_manager.execute_jit_checkpoint()

    on_epoch_end = on_step_end

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the original SIGTERM handler."""
        if self.jit_manager is not None and self.jit_manager._original_sigterm_handler is not None:
            signal.signal(signal.SIGTERM, self.jit_manager._original_sigterm_handler)
