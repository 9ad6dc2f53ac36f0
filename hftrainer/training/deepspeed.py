"""DeepSpeed's engine in a run: made with the Trainer's optimizer and schedule, and loaded."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hftrainer.compat import peers
from hftrainer.errors import UnsupportedArgument

if TYPE_CHECKING:
    from hftrainer.parallel.deepspeed.run import DeepSpeedRun
    from hftrainer.trainer import Trainer

logger = logging.getLogger(__name__)


def check_given(run: DeepSpeedRun, optimizer: Any, scheduler: Any) -> None:
    """Refuse an optimizer or a schedule of the script's where the configuration brings its own.

    Raises:
        UnsupportedArgument: naming the section.
    """
    sections = [
        name for name, there in (("optimizer", run.brings_optimizer), ("scheduler", run.brings_scheduler)) if there
    ]
    if (optimizer is not None and run.brings_optimizer) or (scheduler is not None and sections):
        raise UnsupportedArgument(
            f"optimizers=(...) and the {' and '.join(sections)} of the deepspeed configuration choose the same: give "
            "one of them. A schedule of the script's needs the script's or the Trainer's optimizer."
        )


def initialize(trainer: Trainer, is_overridden: Callable[[str], bool], max_steps: int, folder: str | None) -> None:
    """Make DeepSpeed's engine with optimizer and schedule, each by the configuration or by the Trainer; then load it.

    Args:
        trainer: whose model, optimizer and schedule they become.
        is_overridden: tells whether a subclass or the script has replaced a method.
        max_steps: optimizer steps of the run.
        folder: the checkpoint to go on from, if any.

    Raises:
        UnsupportedArgument: when the script's own optimizer has been in the hands of an engine before.
    """
    run, args = trainer._hftrainer.engine.deepspeed, trainer.args
    run.complete(
        trainer._hftrainer.run.bare_model,
        max_steps,
        args.get_warmup_steps(max_steps),
        warmup_is_default=not args.warmup_steps,
    )
    if trainer.deepspeed is not None and run.is_training:
        if trainer._hftrainer.optimizers_given[0] is not None:
            raise UnsupportedArgument(
                "optimizers: DeepSpeed's engine has taken the parameters out of the optimizer in an earlier train(): "
                "pass optimizer_cls_and_kwargs, or make a new Trainer."
            )
        trainer.optimizer = None
    trainer._hftrainer.loaders.flos_per_token_of(
        trainer.model
    )  # of the whole model, before its parameters are partitioned
    if is_overridden("create_optimizer_and_scheduler") and not (run.brings_optimizer or run.brings_scheduler):
        trainer.create_optimizer_and_scheduler(num_training_steps=max_steps)
    elif not run.brings_optimizer:
        trainer.create_optimizer()
    trainer.optimizer, scheduler = run.initialize(
        trainer.model,
        None if run.brings_optimizer else trainer.optimizer,
        lambda optimizer: trainer.create_scheduler(num_training_steps=max_steps, optimizer=optimizer),
    )
    trainer.model_wrapped = trainer.deepspeed = run.engine
    if scheduler is not None:
        trainer.lr_scheduler = scheduler
    else:  # not before: DeepSpeed leaves out empty groups of parameters
        trainer.create_scheduler(num_training_steps=max_steps)
    logger.info("DeepSpeed trains with this configuration:\n%s", json.dumps(run.config.config, indent=2, default=str))
    if folder is not None:
        run.load(folder, strict=not peers.is_peft(trainer.model))


def prepare_for_evaluation(trainer: Trainer) -> None:
    """Before an evaluation outside training: an engine for partitioned parameters, else the model on its device."""
    run = trainer._hftrainer.engine.deepspeed
    if run.is_training:
        return
    if run.config.is_zero3():
        run.complete(trainer._hftrainer.run.bare_model, 0, 0, warmup_is_default=True)
        trainer.model_wrapped = trainer.deepspeed = run.initialize_inference(trainer.model)
    else:
        trainer._move_model_to_device(trainer.model, trainer.args.device)
