"""The loss of a batch, and the sums for the next log line."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from hftrainer.checkpointing.progress import RunProgress
from hftrainer.compat.messages import log_once
from hftrainer.errors import InvalidArgument

if TYPE_CHECKING:
    from hftrainer.trainer import Trainer
    from hftrainer.training.run import Run

logger = logging.getLogger(__name__)

REMEDY = "let the model return (loss, ...) or {'loss': loss, ...}, pass compute_loss_func, or override compute_loss."


def first_output(outputs: Any, inputs: Mapping[str, Any]) -> Any:
    """The loss: under 'loss' in a mapping, first in a tuple, and the first number of a tensor of shape `(n,)`.

    Such a tensor is rarely meant as a loss. `transformers` trains on it; so does this, with a warning.

    Raises:
        InvalidArgument: when there is none; the error names what the model returned.
    """
    if isinstance(outputs, Mapping):
        if "loss" in outputs:
            return outputs["loss"]
        returned = f"only {', '.join(map(str, outputs))}"
    elif isinstance(outputs, (tuple, list)) and outputs:
        return outputs[0]
    elif isinstance(outputs, torch.Tensor) and outputs.ndim == 1 and len(outputs):
        said = f"The model returned numbers without a loss; the first of them is the loss. If it is not: {REMEDY}"
        log_once(logger, said)
        return outputs[0]
    else:
        returned = f"a {type(outputs).__name__}"
    raise InvalidArgument(
        f"The model returned no loss, {returned}, from the inputs {', '.join(map(str, inputs))}. Check that the labels "
        f"reach it; {REMEDY}"
    )


def check_loss(loss: Any) -> torch.Tensor:
    """The loss, if it is a tensor of shape `()`.

    Raises:
        InvalidArgument: when it is anything else.
    """
    if isinstance(loss, torch.Tensor) and loss.ndim == 0:
        return loss
    shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
    raise InvalidArgument(f"The loss must be a tensor with one number, and is {shown}: {REMEDY}")


def split_losses(loss: Any) -> tuple[Any, Mapping[str, Any]]:
    """The loss for backward, and its parts: of a mapping its 'loss', or else the sum, and the other entries."""
    if not isinstance(loss, Mapping):
        return loss, {}
    parts = {name: value for name, value in loss.items() if name != "loss"}
    return loss["loss"] if "loss" in loss else sum(parts.values()), parts


class LoggedMetrics:
    """Sums on the device, read once per log line together with the loss."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._counts: dict[str, int] = {}
        self._last: dict[str, float] = {}

    def set(self, values: Mapping[str, float]) -> None:
        """Set numbers of which only the last value is logged."""
        self._last |= values

    def add(self, name: str, value: Any, count: int = 1) -> None:
        """Add a value, a number or a tensor of shape `()`, which counts as `count` values in the mean.

        Raises:
            InvalidArgument: for a tensor of another shape.
        """
        if isinstance(value, torch.Tensor) and value.ndim:
            raise InvalidArgument(
                f"{name!r} cannot be logged: it is a tensor of shape {tuple(value.shape)}, and a log line holds "
                "numbers. Every entry of a dict of losses is logged; return other outputs separately."
            )
        value = value.detach().float() if isinstance(value, torch.Tensor) else torch.tensor(float(value))
        before = self._sums.get(name)
        self._sums[name] = value.clone() if before is None else before + value.to(before.device)
        self._counts[name] = self._counts.get(name, 0) + count

    def state_dict(self) -> dict[str, tuple[torch.Tensor, int]]:
        """Sum and count of each, on the CPU."""
        return {name: (value.cpu(), self._counts[name]) for name, value in self._sums.items()}

    def load_state_dict(self, state: Mapping[str, tuple[torch.Tensor, int]], device: torch.device) -> None:
        """Restore what `state_dict` returned."""
        self._sums = {name: value.to(device) for name, (value, _) in state.items()}
        self._counts = {name: count for name, (_, count) in state.items()}

    def read(self, loss: torch.Tensor, steps: int) -> tuple[float, dict[str, float]]:
        """The loss, the means and the last values as numbers, in one transfer from the device; then reset.

        Args:
            loss: the loss summed so far, shape `()`.
            steps: optimizer steps since the last call; values without their own count are divided by it.
        """
        last, self._last = self._last, {}
        if not self._sums:
            return loss.item(), last
        numbers = torch.stack([loss.float(), *(value.to(loss.device) for value in self._sums.values())]).tolist()
        means = {
            name: number / (self._counts[name] or steps) for name, number in zip(self._sums, numbers[1:], strict=True)
        }
        self._sums.clear()
        self._counts.clear()
        return numbers[0], means | last


class LossSum:
    """Sums the losses on the device; reads each loss at once only where that does not wait for the device.

    Args:
        trainer: the Trainer.
        run: its run, which holds the sum.
    """

    def __init__(self, trainer: Trainer, run: Run) -> None:
        self.trainer = trainer
        self.run = run
        device = trainer.args.device
        run.loss = torch.tensor(0.0, device=device)
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
            # XLA would compile the number 1 in as a constant, and 2 would compile the step again.
            if loss.device.type == "xla":
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
