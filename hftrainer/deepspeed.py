"""DeepSpeed, as the Trainer sees it: what begins with the arguments, and its part of checkpoints."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from hftrainer import peers
from hftrainer.checkpointing.distributed import to_be_written
from hftrainer.errors import UnsupportedArgument
from hftrainer.trainer_pt_utils import nested_apply

if TYPE_CHECKING:
    from torch import nn

    from hftrainer.trainer import Trainer
    from hftrainer.training_args import TrainingArguments
    from hftrainer_lightning.deepspeed_run import DeepSpeedRun

logger = logging.getLogger(__name__)


def begin(args: TrainingArguments) -> Any:
    """The completed configuration, for models that are made before there is a Trainer; None without DeepSpeed.

    With ZeRO-3 the processes meet now, and `from_pretrained` partitions a model while it is loaded, as long as these
    arguments live.
    """
    from hftrainer_lightning.deepspeed_settings import configure

    config = configure(args)
    if config is None:
        return None
    from hftrainer_lightning.deepspeed_start import connect
    from hftrainer_lightning.launching import start_others
    from hftrainer_lightning.processes import Processes

    peers.announce_deepspeed(config)
    if config.is_zero3():
        start_others(args._place, args.ddp_timeout)
        processes = Processes.at(args._place)
        processes.connect(args.device, args.ddp_backend, args.ddp_timeout_delta, even_alone=True)
        connect(processes, args.device, args.ddp_timeout_delta, config)
    return config


def plugin(config: Any) -> Any:
    """The configuration as `args.deepspeed_plugin`, under accelerate's names; None without DeepSpeed."""
    if config is None:
        return None
    from hftrainer_lightning.deepspeed_plugin import DeepSpeedPlugin, Planned

    return DeepSpeedPlugin(Planned(config))


def to_floating_type(batch: Any, model: nn.Module) -> Any:
    """The batch with its floating-point tensors in the type of the weights, which is DeepSpeed's once it has them."""
    dtype = next((weight.dtype for weight in model.parameters() if weight.is_floating_point()), torch.float32)

    def converted(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return nested_apply(converted, batch)


class PartitionedStates:
    """What DeepSpeed writes into a checkpoint, a part from each process, and the weights beside it.

    Args:
        run: with DeepSpeed's engine.
    """

    #: Configuration and tokenizer stand beside the parts, so there is always something to save.
    only_parts = False

    def __init__(self, run: DeepSpeedRun) -> None:
        self._run = run
        self._weights: dict[str, Any] | None = None
        self._saves_states = self._opened = False

    def gather(self, model: nn.Module, optimizer: Any) -> None:
        """Gather partitioned weights; all processes must call it. Without an optimizer no states are written."""
        self._saves_states = optimizer is not None
        if self._run.config.is_zero3():
            self._weights = self.whole_weights(model)

    def whole_weights(self, model: nn.Module) -> dict[str, Any]:
        """The whole weights, those that were gathered or else gathered now; empty where they are to stay in parts."""
        if self._weights is not None:
            return dict(self._weights)
        adapters = peers.is_peft(model)
        if not (self._run.gathers or adapters):
            return {}
        return to_be_written(self._run.whole_weights(model, only_trained=adapters), model)

    def whole_files(self) -> Iterator[tuple[str, Any]]:
        """Nothing: the optimizer's state is in the parts."""
        return iter(())

    def write_parts(self, folder: str, processes: Any) -> None:
        """Write this process's part once the first process has made the folder."""
        self._opened = True
        if processes.from_main(lambda: True) and self._saves_states:
            self._run.save(folder, processes)

    def finish(self, processes: Any) -> None:
        """Let go of what was gathered; others that wait for a folder which could not be made are told."""
        if not self._opened:
            processes.from_main(lambda: False)
        self._opened = False
        self._weights = None

    def save_beside(self, folder: str, processes: Any) -> None:
        """After `save_model()`: write the parts too where the weights are to stay in parts; all must call it."""
        if self._run.gathers or not self._run.is_training:
            return
        self._run.save(folder, processes)
        logger.warning(
            "stage3_gather_16bit_weights_on_model_save is not set, so %s holds the weights in parts: python "
            "zero_to_fp32.py . in that folder makes one file of them.",
            folder,
        )


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
