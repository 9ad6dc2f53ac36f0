"""DeepSpeed's engine in a run: makes it with the Trainer's optimizer and schedule, and loads its checkpoint."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from torch import nn

from hftrainer.compat import peers
from hftrainer.errors import UnsupportedArgument
from hftrainer.parallel.deepspeed.parallelism import DeepSpeedParallelism
from hftrainer.training.preparation import Preparation

if TYPE_CHECKING:
    from hftrainer.parallel.deepspeed.run import DeepSpeedRun

logger = logging.getLogger(__name__)


def check_given(run: DeepSpeedRun, optimizer: Any, scheduler: Any) -> None:
    """Refuse the script's optimizer or schedule if the DeepSpeed configuration has its own.

    Raises:
        UnsupportedArgument: the error names the section.
    """
    sections = [
        name for name, there in (("optimizer", run.brings_optimizer), ("scheduler", run.brings_scheduler)) if there
    ]
    if (optimizer is not None and run.brings_optimizer) or (scheduler is not None and sections):
        raise UnsupportedArgument(
            f"optimizers=(...) and the {' and '.join(sections)} of the deepspeed configuration set the same: use "
            "only one. A schedule from the script needs the script's or the Trainer's optimizer."
        )


class DeepSpeedPreparation(Preparation):
    """Makes DeepSpeed's engine around the model, the optimizer and the schedule."""

    @property
    def _deepspeed(self) -> DeepSpeedRun:
        parallelism = self.components.engine.parallelism
        assert isinstance(parallelism, DeepSpeedParallelism)
        return parallelism.run

    def _prepare(self, max_steps: int, folder: str | None) -> nn.Module:
        """Make the engine, with optimizer and schedule from the configuration or the Trainer; then load its checkpoint.

        Raises:
            UnsupportedArgument: when an earlier engine has used the script's own optimizer.
        """
        trainer, engine = self.trainer, self._deepspeed
        self._complete(max_steps)
        if trainer.deepspeed is not None and engine.is_training:
            if self.components.optimizers_given[0] is not None:
                raise UnsupportedArgument(
                    "optimizers: DeepSpeed's engine has removed the parameters from the optimizer in an earlier "
                    "train(): pass optimizer_cls_and_kwargs, or make a new Trainer."
                )
            trainer.optimizer = None
        self.loaders.flos_per_token_of(trainer.model)  # counted before the parameters are partitioned
        self._make_optimizer(max_steps)
        logger.info(
            "DeepSpeed trains with this configuration:\n%s", json.dumps(engine.config.config, indent=2, default=str)
        )
        if folder is not None:
            engine.load(folder, strict=not peers.is_peft(trainer.model))
        trainer.accelerator.prepare_model(trainer.model)
        return trainer.model

    def _complete(self, max_steps: int) -> None:
        """Fill in the configuration's values that depend on the length of the run."""
        args = self.trainer.args
        self._deepspeed.complete(
            self.components.bare_model,
            max_steps,
            args.get_warmup_steps(max_steps) if max_steps else 0,
            warmup_is_default=not (max_steps and args.get_warmup_steps(max_steps)),
        )

    def _make_optimizer(self, max_steps: int) -> None:
        trainer, engine = self.trainer, self._deepspeed
        if self._makes_both and not (engine.brings_optimizer or engine.brings_scheduler):
            trainer.create_optimizer_and_scheduler(num_training_steps=max_steps)
        elif not engine.brings_optimizer:
            trainer.create_optimizer()
        trainer.optimizer, scheduler = engine.initialize(
            trainer.model,
            None if engine.brings_optimizer else trainer.optimizer,
            lambda optimizer: trainer.create_scheduler(num_training_steps=max_steps, optimizer=optimizer),
        )
        trainer.model_wrapped = trainer.deepspeed = engine.engine
        if scheduler is not None:
            trainer.lr_scheduler = scheduler
        else:  # not before: DeepSpeed drops empty parameter groups
            trainer.create_scheduler(num_training_steps=max_steps)

    def for_evaluation(self) -> None:
        """Prepare for evaluation: an engine for partitioned parameters, else move the model to its device."""
        trainer, engine = self.trainer, self._deepspeed
        if engine.is_training:
            return
        if engine.config.is_zero3():
            self._complete(0)
            trainer.model_wrapped = trainer.deepspeed = engine.initialize_inference(trainer.model)
        else:
            trainer._move_model_to_device(trainer.model, trainer.args.device)
