"""The `Trainer` behind a `TFTrainer`, which calls the TFTrainer's documented methods."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from hftrainer.errors import UnsupportedArgument
from hftrainer.trainer import Trainer
from hftrainer_tensorflow import optimizers
from hftrainer_tensorflow.models import parameter_names
from hftrainer_tensorflow.pipelines import Batches, BatchLoader, select_rank_rows

if TYPE_CHECKING:
    from hftrainer_tensorflow.trainer import TFTrainer

#: In a checkpoint: the sum of the losses since the epoch began.
_EPOCH_LOSS = "epoch_loss.json"


class TorchTrainer(Trainer):
    """Trains the model of a TFTrainer, with the TFTrainer's data, optimizer, steps and log lines.

    Args:
        host: the TFTrainer.
        model: the torch model.
        args: the training arguments.
    """

    loss_is_scaled_for_ga = True

    def __init__(self, host: TFTrainer, model: torch.nn.Module, args: Any) -> None:
        self.host = host
        self.epoch_loss = torch.zeros(())
        self._is_within_epoch = False
        super().__init__(model, args, data_collator=_return_rows, eval_dataset=host.eval_dataset)
        # With transformers 5.2 to 5.5 a Trainer divides gradients by the micro-batches; a TFTrainer never did.
        self.accelerator.gradient_accumulation_steps = 1

    # ---- Data --------------------------------------------------------------------------------------------------

    def batches(self, pipeline: Any, count: int, **settings: Any) -> BatchLoader:
        """A loader of this rank's rows of a pipeline."""
        processes = self.accelerator.processes
        rank, size = processes.data_rank, processes.data_world_size
        return BatchLoader(Batches(pipeline, count, rank=rank, processes=size, **settings))

    def get_train_dataloader(self) -> Any:
        """The batches of the TFTrainer's `get_train_tfdataset`."""
        return self.host._train_loader

    def get_total_train_batch_size(self, args: Any) -> int:
        """Samples of an optimizer step, over all processes."""
        return self.host.total_train_batch_size

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Number of samples in a pass over the loader."""
        return self.host.num_train_examples if dataloader is self.host._train_loader else self.host._num_predicted

    # ---- Training ----------------------------------------------------------------------------------------------

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Convert the TFTrainer's optimizer and schedule to torch."""
        self.host.create_optimizer_and_scheduler(num_training_steps)
        self.optimizer, self.lr_scheduler = optimizers.to_torch(
            self.host.optimizer, self.host.lr_scheduler, self.model, parameter_names(self.model)
        )

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        if resume_from_checkpoint is not None:
            self._resume_within_epoch(resume_from_checkpoint)
        return super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )

    def _resume_within_epoch(self, folder: str) -> None:
        """Restore the epoch's sum of losses from a checkpoint, unless an epoch ends there."""
        path = os.path.join(folder, _EPOCH_LOSS)
        if not os.path.isfile(path):
            return
        with open(path, encoding="utf-8") as file:
            state = json.load(file)
        self._is_within_epoch = state["step"] % self.host.steps_per_epoch != 0
        total = state["total"] if self.is_world_process_zero() else 0.0
        self.epoch_loss = torch.tensor(total, device=self.args.device)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if not self._is_within_epoch:
            self.epoch_loss = torch.zeros((), device=self.args.device)
        self._is_within_epoch = False
        self.host._past = None
        super()._run_epoch(*args, **kwargs)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of the TFTrainer's `training_step`."""
        loss: Any = self.host.training_step(inputs["features"], inputs["labels"], inputs["instances"])
        if not isinstance(loss, torch.Tensor) or loss.ndim:
            raise UnsupportedArgument(
                f"training_step returns {type(loss).__name__}: return the loss, a torch tensor of shape (). Lightning "
                "computes the gradients, which TFTrainer returned. Callbacks see them before the optimizer steps."
            )
        self.epoch_loss = self.epoch_loss + loss.detach()
        # Each rank has a part of the loss, but ranks average gradients: multiply by the number of ranks.
        return loss * self.accelerator.processes.data_world_size

    def _clip_grad_norm(self, model: Any) -> torch.Tensor:
        """Clip each gradient value, but only with accumulation, as TFTrainer did."""
        if self.args.gradient_accumulation_steps > 1:
            torch.nn.utils.clip_grad_value_(model.parameters(), self.args.max_grad_norm)
        return torch.zeros(())

    # ---- Evaluation --------------------------------------------------------------------------------------------

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """The logits of the TFTrainer's `prediction_step`, for the rows of this rank."""
        inputs = self._prepare_inputs(inputs)
        processes = self.accelerator.processes
        is_shared = inputs["is_undivided"] and processes.data_world_size > 1
        # All ranks compute the same rows, and their losses are summed: divide by the number of ranks.
        instances = inputs["instances"] * (processes.data_world_size if is_shared else 1)
        with torch.no_grad():
            logits = self.host.prediction_step(inputs["features"], inputs["labels"], instances)
        if prediction_loss_only:
            return None, None, None
        rows = (logits[0] if isinstance(logits, tuple) else logits, inputs["labels"])
        return (None, *(select_rank_rows(rows, processes.data_rank, processes.data_world_size) if is_shared else rows))

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """The TFTrainer's `evaluate`, within training."""
        self._note_step()
        metrics = self.host.evaluate()
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics=metrics)
        return metrics

    # ---- Logs and files ----------------------------------------------------------------------------------------

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Evaluate before logging, as TFTrainer did."""
        control = self.control
        if control.should_evaluate and control.should_log:
            saves, control.should_log, control.should_save = control.should_save, False, False
            super()._maybe_log_save_evaluate(*args, **kwargs)
            control.should_evaluate, control.should_log, control.should_save = False, True, saves or control.should_save
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _note_step(self) -> None:
        self.host.global_step = self.state.global_step
        self.host.epoch_logging = self.state.global_step / self.host.steps_per_epoch

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the mean loss of the epoch so far and the next learning rate, through the TFTrainer's `log`."""
        if "loss" not in logs:
            return
        self._note_step()
        epoch_steps = (self.state.global_step - 1) % self.host.steps_per_epoch + 1
        loss = self.accelerator.reduce(self.epoch_loss, "sum").item() / epoch_steps
        assert self.lr_scheduler is not None
        self.host.log({"loss": loss, "learning_rate": self.lr_scheduler.get_last_lr()[0]})

    def log_line(self, logs: dict[str, float]) -> None:
        """Add a line to the log, and pass it to the trackers."""
        super().log(logs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the torch model. A checkpoint also gets the sum of the epoch's losses."""
        super().save_model(output_dir, _internal_call)
        if not _internal_call or output_dir is None:
            return
        total = self.accelerator.reduce(self.epoch_loss, "sum").item()
        if self.is_world_process_zero():
            with open(os.path.join(output_dir, _EPOCH_LOSS), "w", encoding="utf-8") as file:
                json.dump({"step": self.state.global_step, "total": total}, file)


def _return_rows(rows: Any) -> Any:
    return rows
