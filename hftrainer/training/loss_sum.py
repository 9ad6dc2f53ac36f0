"""The sum of the losses for the next log line."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch

from hftrainer.checkpointing.progress import RunProgress
from hftrainer.training.context import Room, TrainerContext

logger = logging.getLogger(__name__)


class LossSum(Room):
    """Sums the losses on the device; reads them one by one only where that costs nothing."""

    def __init__(self, context: TrainerContext) -> None:
        super().__init__(context)
        device = self.trainer.args.device
        self.run.loss = torch.tensor(0.0, device=device)
        self._readable_at_once = device.type == "cpu"
        #: Whether a loss since the last log line was infinite; kept on the device.
        self._infinite = torch.zeros((), dtype=torch.bool, device=device)
        self._warned = False

    def add(self, loss: torch.Tensor) -> None:
        """Add the loss of a micro-batch; in the place of one that is not finite, the mean of those before."""
        run = self.run
        if loss.device != run.loss.device:
            raise ValueError(f"The loss is on {loss.device}, training runs on {run.loss.device}: move the loss there.")
        if not self.trainer.args.logging_nan_inf_filter:
            run.loss += loss
            return
        state = self.trainer.state
        steps = 1 + state.global_step - run.last_logged
        if not self._readable_at_once:  # stay on the device: reading the loss would wait for it
            finite = loss.isfinite()
            self._infinite = self._infinite | ~finite
            divisor: Any = steps
            if loss.device.type == "xla":  # 1 as a number would be compiled in, and the step once more for 2
                divisor = torch.tensor([float(steps)], device=loss.device).reshape(())
            run.loss = torch.where(finite, run.loss + loss, run.loss + run.loss / divisor)
        elif math.isfinite(loss):
            run.loss += loss
        else:
            self._warn_of_infinite_loss(f"is {loss.item()}", state.global_step + 1)
            run.loss += run.loss / steps

    def check_before_log(self) -> None:
        """Warn of infinite losses since the last log line; a log line reads from the device anyway."""
        if self._readable_at_once or not self.trainer.control.should_log:
            return
        if bool(self._infinite):
            self._warn_of_infinite_loss("was not finite before or", self.trainer.state.global_step)
        self._infinite = torch.zeros_like(self._infinite)

    def _warn_of_infinite_loss(self, what: str, step: int) -> None:
        """Warn once: the mean in the log leaves such losses out, so nobody would see them."""
        if not self._warned:
            logger.warning(
                "The loss %s at optimizer step %d; logging_nan_inf_filter leaves it out of the mean that is logged. "
                "Find where it comes from with debug='underflow_overflow'; a lower learning_rate, a smaller "
                "max_grad_norm or bf16 instead of fp16 often help.",
                what,
                step,
            )
            self._warned = True

    def resume(self, progress: RunProgress) -> None:
        """Resume the sums for the next log line; the mean loss at the end is of this call's steps alone."""
        run = self.run
        run.loss = progress.loss.to(run.loss.device)
        run.total_loss = -float(self.trainer.accelerator.processes.reduce(run.loss, "mean"))
        run.last_logged = progress.last_logged
        run.logged_metrics.load_state_dict(progress.metrics, run.loss.device)
