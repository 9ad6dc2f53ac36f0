"""Sums over the micro-batches of a step, and over the steps of a log line."""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hftrainer.checkpointing.layout import step_of
from hftrainer.checkpointing.run_progress import RunProgress
from hftrainer.errors import InvalidArgument

if TYPE_CHECKING:
    from hftrainer.trainer import Trainer
    from hftrainer.training.run import Run

logger = logging.getLogger(__name__)


class LoggedMetrics:
    """Sums of values to log, kept on the device and read once per log line, together with the loss."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._counts: dict[str, int] = {}
        self._last_values: dict[str, float] = {}

    def set(self, values: Mapping[str, float]) -> None:
        """Set values that are logged without averaging."""
        self._last_values |= values

    def add(self, name: str, value: Any, count: int = 1) -> None:
        """Add a number or a tensor of shape `()`, which counts as `count` values in the mean.

        Raises:
            InvalidArgument: for a tensor of another shape.
        """
        if isinstance(value, torch.Tensor) and value.ndim:
            raise InvalidArgument(
                f"{name!r} cannot be logged: it is a tensor of shape {tuple(value.shape)}, but a log line holds "
                "numbers. Every entry of a dict of losses is logged; return other outputs separately."
            )
        value = value.detach().float() if isinstance(value, torch.Tensor) else torch.tensor(float(value))
        previous_sum = self._sums.get(name)
        self._sums[name] = value.clone() if previous_sum is None else previous_sum + value.to(previous_sum.device)
        self._counts[name] = self._counts.get(name, 0) + count

    def state_dict(self) -> dict[str, tuple[torch.Tensor, int]]:
        """The sum and the count of each value, on the CPU."""
        return {name: (value.cpu(), self._counts[name]) for name, value in self._sums.items()}

    def load_state_dict(self, state: Mapping[str, tuple[torch.Tensor, int]], device: torch.device) -> None:
        """Restore the sums and counts that `state_dict` returned."""
        self._sums = {name: value.to(device) for name, (value, _) in state.items()}
        self._counts = {name: count for name, (_, count) in state.items()}

    def pop(self, loss: torch.Tensor, steps: int) -> tuple[float, dict[str, float]]:
        """Read the loss, the means and the last values in one device transfer, and reset the metrics.

        Args:
            loss: the loss summed so far, shape `()`.
            steps: optimizer steps since the last call; values without their own count are divided by it.
        """
        last_values = self._last_values
        self._last_values = {}
        if not self._sums:
            return loss.item(), last_values
        numbers = torch.stack([loss.float(), *(value.to(loss.device) for value in self._sums.values())]).tolist()
        sums = zip(self._sums, numbers[1:], strict=True)
        means = {name: value / (self._counts[name] or steps) for name, value in sums}
        self._sums.clear()
        self._counts.clear()
        return numbers[0], means | last_values


class LossAccumulator:
    """Sums the losses on the device. Reads single losses only on the CPU, where reading does not block.

    Args:
        trainer: the Trainer.
        run: its run, which holds the sum.

    Attributes:
        has_warned: whether a warning has said that losses are not finite.
        non_finite_since: on the CPU, the optimizer step since which no loss was finite; 0 if the last one was.
    """

    def __init__(self, trainer: Trainer, run: Run) -> None:
        self.trainer = trainer
        self.run = run
        device = trainer.args.device
        self._is_on_cpu = device.type == "cpu"
        #: Whether a loss since the last log line was not finite; kept on the device.
        self._has_non_finite = torch.zeros((), dtype=torch.bool, device=device)
        self.has_warned = False
        self.non_finite_since = self._non_finite_step = 0

    def add_loss(self, loss: torch.Tensor, inputs: Any) -> torch.Tensor:
        """Add the loss of the micro-batch `inputs`.

        With `logging_nan_inf_filter`, add the mean so far in place of a loss that is not finite.

        Returns:
            The added number, shape `()`.
        """
        attempt = self.run.attempt
        if loss.device != (device := attempt.loss_since_log.device):
            raise ValueError(f"The loss is on {loss.device}, but training runs on {device}: move the loss to {device}.")
        steps = 1 + self.trainer.state.global_step - attempt.last_logged_step
        summand = self._summand_on_cpu(loss, steps, inputs) if self._is_on_cpu else self._summand_on_device(loss, steps)
        attempt.loss_since_log += summand
        return summand

    def _summand_on_device(self, loss: torch.Tensor, steps: int) -> torch.Tensor:
        """The number to add, found without reading the loss, which would wait for the device."""
        if not self.trainer.args.logging_nan_inf_filter:
            # `check_before_log` looks at the sum.
            self.trainer.state.non_finite_step = 0
            return loss
        is_finite = loss.isfinite()
        self._has_non_finite = self._has_non_finite | ~is_finite
        # XLA would compile the number into the step as a constant, and recompile the step for each new number.
        divisor = torch.tensor([float(steps)], device=loss.device).reshape(()) if loss.device.type == "xla" else steps
        return torch.where(is_finite, loss, self.run.attempt.loss_since_log / divisor)

    def _summand_on_cpu(self, loss: torch.Tensor, steps: int, inputs: Any) -> torch.Tensor:
        """The number to add. Records the step of a loss that is not finite, and warns about the first."""
        state = self.trainer.state
        bad_step = 0 if math.isfinite(loss) else state.global_step + 1
        self.non_finite_since = (self.non_finite_since or bad_step) if bad_step else 0
        if self._non_finite_step <= self.run.attempt.last_logged_step:
            self._non_finite_step = state.non_finite_step = bad_step
        if not bad_step:
            return loss
        self._warn_about_non_finite_loss("is NaN" if math.isnan(loss) else "is infinite", bad_step, inputs)
        return self.run.attempt.loss_since_log / steps if self.trainer.args.logging_nan_inf_filter else loss

    def check_before_log(self) -> None:
        """Warn about non-finite losses since the last log line; logging reads from the device anyway."""
        if self._is_on_cpu or not self.trainer.control.should_log:
            return
        state = self.trainer.state
        is_found = bool(self._has_non_finite | ~self.run.attempt.loss_since_log.isfinite())
        # The step itself is not known.
        state.non_finite_step = state.global_step if is_found else 0
        if is_found:
            self._warn_about_non_finite_loss("was not finite before or", state.global_step)
        self._has_non_finite = torch.zeros_like(self._has_non_finite)

    def _warn_about_non_finite_loss(self, problem: str, step: int, inputs: Any = None) -> None:
        """Warn once of such losses, which the logged mean may hide, unless `on_divergence` reports them."""
        if not self.has_warned and self.trainer.args.on_divergence is None:
            args = self.trainer.args
            effect = ": log_history leaves it out of its means" if args.logging_nan_inf_filter else ""
            advice = self._blame_checkpoint(step) or _advice_on_nan(inputs)
            if args.save_total_limit and self.run.attempt.checkpoints_written:
                limit = f"save_total_limit={args.save_total_limit} will delete the checkpoints from before"
                advice += f" {limit}: on_divergence='stop' ends a run in time."
            # Without inputs, the step is that of the log line.
            values = None if inputs is None else {"non_finite_step": step}
            logger.warning("The loss %s at step %s%s. %s", problem, f"{step:,}", effect, advice, extra=values)
            self.has_warned = True

    def _blame_checkpoint(self, step: int) -> str:
        """What to do if this is the first step after a resume, and its weights are not finite; else an empty text."""
        folder = self.run.resume_folder
        # Sharded weights could only be read by all ranks together.
        if folder is None or step_of(folder) != step - 1 or self.trainer.args.world_size > 1:
            return ""
        are_finite = all(parameter.isfinite().all() for parameter in self.trainer.model.parameters())
        return "" if are_finite else f"The weights of {folder} are not finite: resume from an older checkpoint."

    def restore(self, progress: RunProgress) -> None:
        """Restore the sums for the next log line, whose mean over the ranks will include the restored losses."""
        attempt = self.run.attempt
        attempt.loss_since_log = progress.loss.to(attempt.loss_since_log.device, copy=True)
        attempt.loss_up_to_log = -float(self.trainer.accelerator.processes.reduce(attempt.loss_since_log, "mean"))
        attempt.last_logged_step = progress.last_logged
        attempt.logged_metrics.load_state_dict(progress.metrics, attempt.loss_since_log.device)

    def sum_of_call(self) -> float:
        """The sum of the losses of this call of `train()`, without those that `restore` restored."""
        attempt, progress = self.run.attempt, self.run.resumed_progress
        if progress is not None and attempt.last_logged_step == progress.last_logged:
            # No log line has gathered the restored losses: the sum since then holds those of this rank.
            return attempt.loss_since_log.item() - float(progress.loss)
        return attempt.loss_up_to_log + attempt.loss_since_log.item()


def _advice_on_nan(inputs: Any) -> str:
    """What to do about a loss that is not finite; names the first tensor of the batch that contains NaN."""
    for name, value in inputs.items() if isinstance(inputs, Mapping) else ():
        if isinstance(value, torch.Tensor) and value.layout == torch.strided and (count := int(value.isnan().sum())):
            return f"The batch's {name!r} contains NaN ({count:,} of {value.numel():,} values): clean the data."
    return "Lower learning_rate, or find it with debug='underflow_overflow'."


class StepEndValues:
    """Keeps a step's loss, inputs and outputs for callbacks whose `on_step_end` has these parameters.

    Args:
        callbacks: the callbacks at the start of the run; callbacks that are added later are ignored.

    Attributes:
        requested_names: the names of these parameters that any callback has.
    """

    def __init__(self, callbacks: Sequence[Any]) -> None:
        handlers = [callback.on_step_end for callback in callbacks if callable(getattr(callback, "on_step_end", None))]
        parameters = {name for handler in handlers for name in inspect.signature(handler).parameters}
        self.requested_names = parameters & {"loss", "inputs", "outputs"}
        self._values: dict[str, Any] = {}

    @contextlib.contextmanager
    def record_outputs(self, model: nn.Module) -> Iterator[None]:
        """Keep the model's training outputs in the block, if a callback requests them."""
        if "outputs" not in self.requested_names:
            yield
            return

        def keep_outputs(module: nn.Module, _: Any, outputs: Any) -> None:
            if module.training:
                self._values["outputs"] = outputs

        hook = model.register_forward_hook(keep_outputs)
        try:
            yield
        finally:
            hook.remove()
            self._values.clear()

    def add_micro_batch(self, loss: torch.Tensor, inputs: Any) -> None:
        """Add a micro-batch: sum the step's scaled losses, and keep the last inputs."""
        if "loss" in self.requested_names:
            self._values["loss"] = self._values["loss"] + loss if "loss" in self._values else loss
        if "inputs" in self.requested_names:
            self._values["inputs"] = inputs

    def pop(self) -> dict[str, Any]:
        """Return the requested values of the step that ends, and reset them."""
        values = self._values
        self._values = {}
        return values
