"""`TrainerModule`, the LightningModule around the user's model: it forwards Lightning's hooks to the training run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hftrainer.base.signatures import accepted_args
from hftrainer.errors import InvalidSetup
from hftrainer.training.checkpoints.progress_collection import make_ckpt_entry
from hftrainer_lightning import callbacks
from hftrainer_lightning.private_api.callback_hooks import NULL_CONTEXT
from hftrainer_lightning.private_api.epoch_loop import WithoutBatchTransfer
from hftrainer_lightning.private_api.evaluation import can_be_logged

if TYPE_CHECKING:
    from hftrainer.evaluation.evaluation_pass import EvaluationPass
    from hftrainer.training.steps.loop import TrainingLoop

#: Attributes of the run, not of the model, that a copy of the module lacks: callbacks copy it.
_NOT_COPIED = (
    "training_loop",
    "make_ckpt_entry",
    "evaluation_pass",
    "evaluation_loop",
    "_optimizer",
    "_scheduler",
    "_callback_states",
)


class TrainerModule(WithoutBatchTransfer):
    """Wraps a model for the Trainer. The table in `docs/packages/training.md` has its hooks in the order of a run.

    As in all of Lightning's classes, `trainer` is the `lightning.Trainer`; ours is `training_loop.trainer`.

    Args:
        model: the user's model.
    """

    #: Our loop of the training run, while one is attached; Lightning's hooks call its methods.
    training_loop: TrainingLoop

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        #: Whether the callbacks' hooks for an epoch's end, which come first, have run, and our `end_epoch` runs.
        self.callbacks_ended_epoch = False
        #: Whether callbacks have been notified of the start of validation, but not of its end.
        self.is_validating = False
        #: The evaluation pass in progress, and the Lightning loop that runs it.
        self.evaluation_pass: EvaluationPass | None = None
        self.evaluation_loop: Any = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._scheduler: Any = None
        self._callback_states: Mapping[str, Any] = {}
        #: Makes the Trainer's entry in a Lightning checkpoint, for the run that is or was attached.
        self.make_ckpt_entry: Callable[[], torch.Tensor] | None = None

    def attach(self, loop: TrainingLoop, callback_states: Mapping[str, Any]) -> None:
        """Attach the training run for `fit`, and the states that its callbacks resume from."""
        self.training_loop = loop
        self.make_ckpt_entry = functools.partial(make_ckpt_entry, loop)
        self._callback_states = callback_states
        self._optimizer = loop.parts.require_optimizer()
        self._scheduler = loop.trainer.lr_scheduler

    def detach(self) -> None:
        """Release the training run."""
        vars(self).pop("training_loop", None)
        self._optimizer = self._scheduler = None
        self._callback_states = {}
        self.evaluation_pass = self.evaluation_loop = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **dict.fromkeys(_NOT_COPIED)}

    @property
    def backbone(self) -> torch.nn.Module:
        """The pretrained part of the model, which `BackboneFinetuning` freezes: its `backbone` or `base_model`."""
        for name in ("backbone", "base_model"):
            part = getattr(self.model, name, None)
            if isinstance(part, torch.nn.Module) and part is not self.model:
                return part
        raise AttributeError("the model has neither a backbone nor a base_model")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward pass."""
        return self.model(*args, **kwargs)

    def setup(self, stage: str) -> None:
        """Restore the callbacks' states from the checkpoint, before `on_fit_start` loads the optimizer's."""
        if stage == "fit" and self.training_loop.run.resume_folder is not None:
            callbacks.restore_state(self.trainer, self, self._callback_states)

    def on_fit_start(self) -> None:
        """In a run that resumes, load the optimizer's state, after callbacks have restored its parameter groups."""
        assert self._optimizer is not None
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, EarlyStopping):
                # Otherwise the summary would name an earlier run's reason.
                callback.stopping_reason_message = None
        if self.training_loop.run.resume_folder is not None:
            callbacks.unfreeze_optimized_parameters(self.trainer.callbacks, self._optimizer)  # type: ignore[attr-defined]
            self.training_loop.load_optimizer()

    def teardown(self, stage: str) -> None:
        """Detach the loggers: Lightning would close them now, before the run's last log line."""
        self.trainer.loggers = []

    # ---- Optimizer ---------------------------------------------------------------------------------------------

    def configure_optimizers(self) -> Any:
        """The Trainer's optimizer and scheduler; None without an attached run, as in evaluation."""
        if self._optimizer is None:
            return None
        if (scheduler := self.scheduler_for_lightning) is None:
            return self._optimizer
        return {"optimizer": self._optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @property
    def scheduler_for_lightning(self) -> LRScheduler | None:
        """The run's scheduler, if Lightning's callbacks can use it. Lightning accepts fewer types than the Trainer."""
        is_supported = isinstance(self._scheduler, LRScheduler) and not isinstance(self._scheduler, ReduceLROnPlateau)
        # With DeepSpeed, a scheduler from the script acts on the optimizer inside the engine.
        return self._scheduler if is_supported and self._scheduler.optimizer is self._optimizer else None

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Step a scheduler by which a callback replaced the run's. The run steps its own scheduler."""
        if scheduler is not self._scheduler:
            super().lr_scheduler_step(scheduler, metric)

    def backward(self, loss: torch.Tensor, *args: Any, learning_rate: float | None = None, **kwargs: Any) -> None:
        """Run backward; for LOMO this includes the optimizer step.

        Args:
            loss: the loss.
            args: positional arguments of `loss.backward`.
            learning_rate: learning rate of that optimizer step; by default the scheduler's.
            kwargs: keyword arguments of `loss.backward`.
        """
        if not loss.requires_grad:
            raise InvalidSetup(
                "The loss depends on no trainable weight. If all parameters are frozen, call model.requires_grad_(True)"
                " or add adapters; otherwise compute the loss from the model's outputs, without detach() or no_grad()."
            )
        fused_backward = getattr(self._optimizer, "fused_backward", None)
        if fused_backward is None:
            loss.backward(*args, **kwargs)
        else:
            trainer = self.training_loop.trainer
            fused_backward(loss, trainer._get_learning_rate() if learning_rate is None else learning_rate)
            # Otherwise torch's schedulers would not notice this step().
            self._optimizer._opt_called = True  # type: ignore[union-attr]

    # ---- Training ----------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the Trainer's entry to a Lightning checkpoint."""
        if self.make_ckpt_entry is not None:
            checkpoint["hftrainer"] = self.make_ckpt_entry()

    def on_train_start(self) -> None:
        """Begin the run. Lightning does not announce an epoch that resumes in the middle, so announce it."""
        if not self._callback_states.get("epoch_ended", True):
            callbacks.run_missed_epoch_end(self.trainer, self)
        self.training_loop.begin_training()
        if self.trainer.fit_loop.restarted_mid_epoch:
            callbacks.run_missed_epoch_start(self.trainer, self)
            self.training_loop.begin_epoch(self.current_epoch)

    def on_train_epoch_start(self) -> None:
        """Begin the epoch, before its data iterator is created."""
        self.training_loop.begin_epoch(self.current_epoch)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Run the forward and backward passes by `Trainer.training_step`; returns the detached loss.

        Only the window's last micro-batch all-reduces gradients, unless `syncs_each_batch`. With DDP, this is the
        `forward` of its wrapper, which has synchronized buffers before `no_sync` begins.
        """
        loop = self.training_loop
        trainer, position = loop.trainer, loop.batches.position
        accepted = accepted_args(trainer.training_step, {"num_items_in_batch": position.num_items})
        syncs_now = position.is_last or loop.syncs_each_batch
        with NULL_CONTEXT if syncs_now else trainer.accelerator.no_sync(model=self.model):
            loss = trainer.training_step(self.model, batch, **accepted)
        if loss is None:
            raise InvalidSetup(f"{type(trainer).__name__}.training_step must return the loss.")
        return loss.detach() if loss.requires_grad else loss

    def on_train_epoch_end(self) -> None:
        """End an epoch."""
        self.callbacks_ended_epoch = True
        self.training_loop.end_epoch()
        self.callbacks_ended_epoch = False
        if self.training_loop.flag_sync.ends_training:
            self.trainer.should_stop = True

    def on_train_end(self) -> None:
        """Recompute batch-norm statistics, if a callback has averaged the weights."""
        callbacks.update_batch_norm(self.trainer, self, self.training_loop)

    # ---- Evaluation and prediction -----------------------------------------------------------------------------

    @property
    def evaluation(self) -> EvaluationPass:
        """The pass in progress."""
        assert self.evaluation_pass is not None, "no evaluation is attached"
        return self.evaluation_pass

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Evaluate one batch."""
        self.predict_step(batch, batch_idx)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Evaluate one batch, and return the predictions for Lightning's prediction writers.

        Gradients are enabled: overrides of `prediction_step` may need them.
        """
        with torch.enable_grad():
            return self.evaluation.predict_batch(batch, self.evaluation_loop.batch_progress.is_last_batch)

    def on_validation_epoch_start(self) -> None:
        """Record that callbacks have been notified of the start of validation."""
        self.is_validating = True

    def on_validation_epoch_end(self) -> None:
        """Compute the metrics, and log the numeric ones for Lightning's callbacks."""
        self.is_validating = False
        with torch.enable_grad():
            metrics = self.evaluation.compute_output()
        numbers = {name: float(value) for name, value in metrics.items() if can_be_logged(name, value)}
        if numbers:
            # Each rank already has the metrics of all ranks, so there is nothing to synchronize.
            self.log_dict(numbers, logger=False, batch_size=1)

    on_test_epoch_end = on_validation_epoch_end

    def on_predict_epoch_end(self) -> None:
        """Compute the metrics."""
        with torch.enable_grad():
            self.evaluation.compute_output()

    def on_validation_model_train(self) -> None:
        """Do nothing: the model stays in eval mode until the next training step, as the Trainer's users expect."""

    on_test_model_train = on_predict_model_train = on_validation_model_train

    def on_validation_model_zero_grad(self) -> None:
        """Do nothing: an evaluation within an accumulation window must not clear the gradients."""
