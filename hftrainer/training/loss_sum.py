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
    """Sums the losses on the device; reads each loss at once only where that does not wait for the device."""

    def __init__(self, context: TrainerContext) -> None:
        super().__init__(context)
        device = self.trainer.args.device
        self.run.loss = torch.tensor(0.0, device=device)
        self._readable_at_once = device.type == "cpu"
        #: Whether a loss since the last log line was not finite; kept on the device.
        self._infinite = torch.zeros((), dtype=torch.bool, device=device)
        self._warned = False

    def add(self, loss: torch.Tensor) -> None:
        """Add the loss of a micro-batch; one that is not finite is replaced by the mean of those before."""
        run = self.run
        if loss.device != run.loss.device:
            raise ValueError(f"The loss is on {loss.device}, training runs on {run.loss.device}: move the loss there.")
        if not self.trainer.args.logging_nan_inf_filter:
            run.loss += loss
            return
        state = self.trainer.state
        steps = 1 + state.global_step - run.last_logged
        if not self._readable_at_once:  # keep it on the device: reading it would wait for the device
            finite = loss.isfinite()
            self._infinite = self._infinite | ~finite
            divisor: Any = steps
            if (
                loss.device.type == "xla"
            ):  # the number 1 would be compiled in as a constant, and 2 would recompile the step
                divisor = torch.tensor([float(steps)], device=loss.device).reshape(())
            run.loss = torch.where(finite, run.loss + loss, run.loss + run.loss / divisor)
        elif math.isfinite(loss):
            run.loss += loss
        else:
            self._warn_of_infinite_loss(f"is {loss.item()}", state.global_step + 1)
            run.loss += run.loss / steps

    def check_before_log(self) -> None:
        """Warn of losses that were not finite since the last log line, which reads from the device anyway."""
        if self._readable_at_once or not self.trainer.control.should_log:
            return
        if bool(self._infinite):
            self._warn_of_infinite_loss("was not finite before or", self.trainer.state.global_step)
        self._infinite = torch.zeros_like(self._infinite)

    def _warn_of_infinite_loss(self, what: str, step: int) -> None:
        """Warn once: the logged mean leaves such losses out, so the log does not show them."""
        if not self._warned:
            logger.warning(
                "The loss %s at optimizer step %d; logging_nan_inf_filter leaves it out of the logged mean. "
                "Find its origin with debug='underflow_overflow'; a lower learning_rate, a smaller "
                "max_grad_norm or bf16 instead of fp16 often help.",
                what,
                step,
            )
            self._warned = True

    def resume(self, progress: RunProgress) -> None:
        """Resume the sums for the next log line; the final mean loss covers only the steps of this call."""
        run = self.run
        run.loss = progress.loss.to(run.loss.device)
        run.total_loss = -float(self.trainer.accelerator.processes.reduce(run.loss, "mean"))
        run.last_logged = progress.last_logged
        run.logged_metrics.load_state_dict(progress.metrics, run.loss.device)
