"""One call of `Trainer.train()`: what is prepared before Lightning's loop runs, and the loss of a micro-batch."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hftrainer.arguments.choices import IntervalStrategy, spelled
from hftrainer.assembly.rooms import Room
from hftrainer.checkpointing import resume, staging
from hftrainer.compat import peers
from hftrainer.compat.functions import has_length
from hftrainer.compat.messages import log_facts
from hftrainer.compat.overrides import accepts, call_with_accepted, make_scheduler, positional_count
from hftrainer.data.schedule import TrainingSchedule, read_schedule
from hftrainer.errors import InvalidArgument, UnsupportedArgument
from hftrainer.hub.references import is_reference
from hftrainer.model import inspection as model_inspection
from hftrainer.optimizers.layer_wise import LayerWiseDummyOptimizer
from hftrainer.parallel import devices
from hftrainer.search.jobs import refuse_in_worker
from hftrainer.trainer_utils import TrainOutput
from hftrainer.training.deepspeed import initialize as initialize_deepspeed
from hftrainer.training.logged_metrics import split_losses
from hftrainer.training.loss import check_loss
from hftrainer.training.out_of_memory import StartingPoint, is_out_of_memory

if TYPE_CHECKING:
    from hftrainer.assembly.internals import Internals
    from hftrainer.checkpointing.progress import RunProgress
    from hftrainer.trainer import Trainer
    from hftrainer.training_args import TrainingArguments

logger = logging.getLogger(__name__)


class TrainingRun(Room):
    """Prepares a run, starts it again with smaller batches when memory runs out, and releases what it has made.

    Attributes:
        schedule: the lengths of the run.
        progress: what a checkpoint of ours tells of how far its run was, if the run goes on from one.
    """

    def __init__(self, trainer: Trainer, own: Internals) -> None:
        super().__init__(trainer, own)
        self.schedule: TrainingSchedule | None = None
        self.progress: RunProgress | None = None

    def remake_model(self, trial: Any) -> None:
        """Make the model of this `train()` with `model_init`, if there is one."""
        trainer, setup = self.trainer, self.own.setup
        if trainer.model_init is not None:
            setup.seed()
            setup.set_model(trainer.call_model_init(trial))
            trainer.optimizer = trainer.lr_scheduler = None

    def align_special_tokens(self) -> None:
        """Give the model's configs the special tokens of the processing class, as the followed release does."""
        trainer, follows = self.trainer, self.own.behaviours
        tokenizes = peers.is_tokenizing(trainer.processing_class) and hasattr(trainer.model, "config")
        if follows.aligns_special_tokens and tokenizes:
            model_inspection.align_special_tokens(
                self.bare_model, trainer.processing_class, all_tokens=not follows.aligns_tokens_that_are_set
            )

    def planned(self) -> tuple[TrainingSchedule, RunProgress | None]:
        """The schedule of the run, and the progress of the checkpoint that it goes on from.

        Raises:
            UnsupportedArgument: when a subclass has brought a training loop of its own.
        """
        if self.schedule is None:
            raise UnsupportedArgument(
                "_inner_training_loop: a copy of transformers' own loop cannot run, since Lightning's loop trains. "
                "Do what is to come before or after it around super()._inner_training_loop(...), and override "
                "training_step, get_batch_samples or _maybe_log_save_evaluate for the rest."
            )
        return self.schedule, self.progress

    def plan(self, args: TrainingArguments, dataloader: Any) -> TrainingSchedule:
        """How long the run is, by `set_initial_training_values` with the signature of any release."""
        trainer = self.trainer
        size = trainer.get_total_train_batch_size(args)
        count = positional_count(trainer.set_initial_training_values)
        takes_size = (
            not self.own.behaviours.returns_steps_in_epoch if count is None else count > len((args, dataloader))
        )
        values = trainer.set_initial_training_values(args, dataloader, *([size] if takes_size else []))
        return read_schedule(values, args, total_train_batch_size=size)

    def refuse_alone(self, resume_from_checkpoint: str | bool | None) -> None:
        """Refuse what only one process can do."""
        if self.own.search is None:
            refuse_in_worker()
        if self.trainer.args.world_size == 1:
            return
        asked = {
            f"resume_from_checkpoint={str(resume_from_checkpoint)!r} holds the random states of one process: give a "
            "checkpoint folder": str(resume_from_checkpoint).endswith(".ckpt"),
            "auto_find_batch_size=True would start again in the one process whose memory ran out: set "
            "per_device_train_batch_size": self.trainer.args.auto_find_batch_size,
        }
        if found := [sentence for sentence, given in asked.items() if given]:
            raise UnsupportedArgument("\n".join(f"{sentence}, or train in one process." for sentence in found))

    def find_folder(self, resume_from_checkpoint: str | bool | None) -> str | None:
        """The checkpoint that all processes go on from, once nothing half-written is left."""
        trainer = self.trainer
        output_dir, processes = str(trainer.args.output_dir), trainer.accelerator.processes
        if trainer.args.should_save:
            staging.clear_stale(output_dir)
        processes.barrier()
        if not is_reference(resume_from_checkpoint):
            return processes.from_main(lambda: resume.find_folder(resume_from_checkpoint, output_dir))
        from hftrainer.hub.download import download_checkpoint

        with processes.in_turn(first=trainer.is_local_process_zero()):  # the others of a node find it in the cache
            folder = download_checkpoint(
                str(resume_from_checkpoint),
                trainer.args.hub_token,
                hub_model_id=trainer.args.hub_model_id,
                hub_revision=trainer.args.hub_revision,
            )
        processes.from_main(lambda: resume.find_folder(folder, output_dir))
        return folder

    def train_with_fitting_batches(self, folder: str | None, trial: Any, ignore_keys: list[str] | None) -> TrainOutput:
        """Train; with `auto_find_batch_size`, from the start again with half the batch when memory runs out."""
        trainer = self.trainer
        keywords: dict[str, Any] = {
            "args": trainer.args,
            "resume_from_checkpoint": folder,
            "trial": trial,
            "ignore_keys_for_eval": ignore_keys,
        }
        if not trainer.args.auto_find_batch_size:
            return trainer._inner_training_loop(batch_size=trainer._train_batch_size, **keywords)
        if (optim := spelled(trainer.args.optim)) in ("lomo", "adalomo"):
            raise InvalidArgument(
                f"optim={optim!r} leaves hooks in the model that cannot be taken out to start again: "
                "set per_device_train_batch_size yourself instead of auto_find_batch_size."
            )
        given = trainer.optimizer, trainer.lr_scheduler
        start = StartingPoint(trainer.model, trainer.accelerator.scaler, *given)
        while True:
            try:
                return trainer._inner_training_loop(batch_size=trainer._train_batch_size, **keywords)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if trainer._train_batch_size == 1:
                    raise RuntimeError("auto_find_batch_size: one sample does not fit into memory.") from error
            trainer._train_batch_size //= 2
            logger.warning("Memory ran out: starting again with %d samples in a batch.", trainer._train_batch_size)
            self.forget_attempt()
            trainer.optimizer, trainer.lr_scheduler = given
            start.restore()
            gc.collect()
            devices.empty_cache()

    def forget_attempt(self) -> None:
        """Drop everything that a failed run has made: its optimizer, its hooks and its checkpoints."""
        self.release()
        for folder in filter(os.path.isdir, self.own.checkpoints_written):  # rotation may have taken some
            shutil.rmtree(folder)

    def release(self) -> None:
        """Release a run's optimizer and its hooks."""
        trainer, own = self.trainer, self.own
        if isinstance(trainer.optimizer, LayerWiseDummyOptimizer):
            trainer.optimizer.remove_hooks()
        own.engine.trainer = own.engine.module = None
        trainer.optimizer = trainer.lr_scheduler = trainer.callback_handler.optimizer = (
            trainer.callback_handler.lr_scheduler
        ) = None
        own.checkpoint_writer.settle()

    def finds_unused_parameters(self) -> bool:
        """Whether processes look for parameters that a step has not used, unless an argument says it."""
        model: Any = self.trainer.model
        if not peers.is_pretrained(model):
            return True
        renamed = hasattr(model, "is_activation_checkpointing")  # in v5.23
        checkpoints = model.is_activation_checkpointing if renamed else model.is_gradient_checkpointing
        return not (checkpoints or self.trainer.args.activation_checkpointing)

    def steps_between_logs(self, schedule: TrainingSchedule) -> int:
        """Optimizer steps after which Lightning's callbacks log: as often as the Trainer itself."""
        trainer = self.trainer
        if trainer.args.logging_strategy == IntervalStrategy.EPOCH:
            return schedule.num_update_steps_per_epoch
        if trainer.args.logging_strategy == IntervalStrategy.NO:
            return sys.maxsize
        return max(1, int(trainer.state.logging_steps))

    def prepare_model(self, resume_from_checkpoint: str | None = None) -> None:
        """Shard the model, if that is asked for, before there is an optimizer; and load it then."""
        trainer, own = self.trainer, self.own

        def shard() -> nn.Module:
            if not own.states.spread:
                return own.engine.prepare(trainer.model)
            per_token = own.loaders.flos_per_token_of(trainer.model)  # of the whole model
            trainer.model = trainer.model_wrapped = own.engine.prepare(trainer.model)
            own.flos_per_token = (trainer.model, per_token)
            return trainer.model

        def load() -> None:
            if resume_from_checkpoint is not None:
                trainer._load_from_checkpoint(resume_from_checkpoint)

        own.states.prepare(trainer.model, shard, load)

    @property
    def bare_model(self) -> Any:
        """The user's own model, without what shards it."""
        return self.trainer.accelerator.unwrap_model(self.trainer.model)

    def prepare(self, max_steps: int, resume_from_checkpoint: str | None) -> nn.Module:
        """Shard or wrap the model, and make optimizer and schedule for it; returns the model as it is trained."""
        trainer = self.trainer
        if trainer._created_lr_scheduler:  # its shape belongs to the previous call's number of steps
            trainer.lr_scheduler = None
            trainer._created_lr_scheduler = False
        if trainer.is_deepspeed_enabled:
            initialize_deepspeed(trainer, self.own.is_overridden, max_steps, resume_from_checkpoint)
            trainer.accelerator.prepare_model(trainer.model)
            return trainer.model
        self.prepare_model(resume_from_checkpoint)
        self._prepare_optimizer(max_steps)
        if resume_from_checkpoint is not None:
            trainer._load_scaler(resume_from_checkpoint)
        return trainer.model_wrapped

    def _prepare_optimizer(self, max_steps: int) -> None:
        """Make the optimizer, let the accelerator prepare it with the model, then make the schedule."""
        trainer = self.trainer
        freezes = self.own.engine.freeze_before_training(trainer.model)
        makes_both = self.own.is_overridden("create_optimizer_and_scheduler")
        if makes_both:  # as v4 called it
            trainer.create_optimizer_and_scheduler(num_training_steps=max_steps)
        else:
            trainer.create_optimizer()
        model = trainer._wrap_model(trainer.model_wrapped)
        if model is trainer.model:
            model, trainer.optimizer = trainer.accelerator.prepare(model, trainer.optimizer)
        else:  # an override has wrapped it
            trainer.optimizer = trainer.accelerator.prepare(trainer.optimizer)
        trainer.model_wrapped = model
        if freezes and not any(parameter.requires_grad for parameter in trainer.model.parameters()):
            raise UnsupportedArgument(
                "A callback that unfreezes by and by (BackboneFinetuning) has frozen all that is trained: with "
                "adapters, write a BaseFinetuning that freezes what you choose."
            )
        if freezes:  # groups of what is unfrozen later are given no weight_decay, and take torch's default
            self.made_optimizer().defaults["weight_decay"] = trainer.args.weight_decay
        if trainer.lr_scheduler is None or not makes_both:
            make_scheduler(trainer, max_steps)

    def log_plan(self, schedule: TrainingSchedule) -> None:
        """Log the sizes of the run."""
        trainer = self.trainer
        sizes = {
            "Number of examples": schedule.num_examples,
            "Epochs": schedule.num_train_epochs,
            "Optimizer steps per epoch": schedule.num_update_steps_per_epoch,
            "Batch size of a device": trainer._train_batch_size,
            "Batch size of an optimizer step, over all devices": schedule.total_train_batch_size,
            "Gradient accumulation steps": self.own.engine.accumulation_at(0),
            "Optimizer steps": schedule.max_steps,
            "Trainable parameters": trainer.get_num_trainable_parameters(),
        }
        log_facts(logger, "Training begins.", sizes)

    def log_place(self, epochs: int, micro_batches: int) -> None:
        """Log where a resumed run goes on.

        Args:
            epochs: that are done.
            micro_batches: of the next epoch that are done.
        """
        place = {"Optimizer steps done": self.trainer.state.global_step, "Epochs done": epochs}
        if not self.trainer.args.ignore_data_skip:
            place["Batches of the next epoch that are passed over"] = micro_batches
        log_facts(logger, f"Training resumes from {self.own.resumed_from}.", place)

    def warn_of_ragged_batches(self, schedule: TrainingSchedule) -> None:
        """On XLA devices each shape of a batch is compiled by itself, which takes minutes for a large model."""
        trainer = self.trainer
        if trainer.args.device.type != "xla" or trainer.args.dataloader_drop_last:
            return
        batch = trainer._train_batch_size * trainer.accelerator.processes.data_processes
        if has_length(trainer.train_dataset) and schedule.num_examples % batch:
            logger.warning(
                "%d samples leave a last batch that is smaller than %d: XLA compiles the step for it too. "
                "dataloader_drop_last=True leaves it out.",
                schedule.num_examples,
                batch,
            )

    def loss(self, model: nn.Module, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        """The loss of one micro-batch, divided for accumulation unless it already is."""
        trainer = self.trainer
        _set_training_mode(model)
        if callable(getattr(trainer.optimizer, "train", None)):  # schedule-free optimizers have modes too
            trainer.optimizer.train()  # type: ignore[union-attr]
        inputs = trainer._prepare_inputs(inputs)
        with trainer.compute_loss_context_manager():
            loss = call_with_accepted(trainer.compute_loss, model, inputs, num_items_in_batch=num_items_in_batch)
        every = trainer.args.torch_empty_cache_steps
        if every is not None and trainer.state.global_step % every == 0:
            devices.empty_cache()
        loss, parts = split_losses(loss)
        loss = check_loss(loss)
        accumulation = trainer.current_gradient_accumulation_steps
        if not self.own.behaviours.divides_by_window:
            accumulation = trainer.args.gradient_accumulation_steps
        divisor = accumulation if accumulation > 1 and not self.loss_is_scaled(num_items_in_batch) else 1
        for name, part in parts.items():
            if part is not None:
                self.own.logged_metrics.add(name, part / divisor, count=0)
        return loss / divisor if divisor > 1 else loss

    def loss_is_scaled(self, num_items_in_batch: Any) -> bool:
        """Whether the loss was divided by the items of the whole window, rather than being a micro-batch's mean."""
        trainer = self.trainer
        if trainer.loss_is_scaled_for_ga is not None:
            return trainer.loss_is_scaled_for_ga
        if not accepts(trainer.compute_loss, "num_items_in_batch"):
            return False  # an override from before v4.46 cannot know them
        counted = num_items_in_batch is not None or not self.own.behaviours.divides_uncounted_loss
        return (trainer.model_accepts_loss_kwargs and counted) or trainer.compute_loss_func is not None

    def agree(self) -> None:
        """Let all processes do next what one of them is asked to."""
        if self.own.loop is not None:
            self.own.loop.agree()

    def log_training_loss(
        self, tr_loss: torch.Tensor, grad_norm: Any, learning_rate: float | None, start_time: float | None
    ) -> None:
        """Log the mean loss since the last log line, and begin the next sum."""
        trainer = self.trainer
        steps = trainer.state.global_step - trainer._globalstep_last_logged
        of_all = trainer.accelerator.gather(tr_loss).mean() if trainer.args.world_size > 1 else tr_loss
        summed, further = self.own.logged_metrics.read(of_all, steps)
        tr_loss -= tr_loss  # not zero_(): a NaN that the filter let through stays, as in transformers
        self.own.engine.end_batch()
        mean = summed / steps
        logs: dict[str, float] = {"loss": mean if self.own.behaviours.logs_whole_loss else round(mean, 4)}
        if grad_norm is not None:
            logs["grad_norm"] = grad_norm.item() if isinstance(grad_norm, torch.Tensor) else grad_norm
        logs["learning_rate"] = learning_rate if learning_rate is not None else trainer._get_learning_rate()
        logs |= further
        trainer._total_loss_scalar += summed
        trainer._globalstep_last_logged = trainer.state.global_step
        trainer.store_flos()
        call_with_accepted(trainer.log, logs, start_time=start_time)

    def release_trial(self) -> None:
        """Release a trial's model and all that was made for it."""
        trainer, own = self.trainer, self.own
        self.release()
        own.engine.release()
        trainer.accelerator.free_memory()
        own.checkpoint_writer.close()
        handler = trainer.callback_handler
        trainer.model = trainer.model_wrapped = handler.model = None  # type: ignore[assignment]  # until the next trial
        handler.train_dataloader = None
        own.flos_per_token = None
        if trainer.args.torch_compile:
            torch.compiler.reset()  # what was compiled for this model is held until then
        gc.collect()
        devices.empty_cache()

    def print_xla_metrics(self) -> None:
        """Print what torch_xla has counted, with `debug="tpu_metrics_debug"`, on the main process."""
        trainer = self.trainer
        if (
            "tpu_metrics_debug" in trainer.args.debug
            and trainer.args.device.type == "xla"
            and trainer.is_world_process_zero()
        ):
            from hftrainer.parallel.xla.devices import print_metrics

            print_metrics()

    def made_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer; ValueError when there is none yet."""
        if self.trainer.optimizer is None:
            raise ValueError("There is no optimizer yet: call create_optimizer() or train() first.")
        return self.trainer.optimizer


def _set_training_mode(model: nn.Module) -> None:
    """Call `model.train()` as before every micro-batch; asking all modules first is cheaper than setting all."""
    if not _in_training_mode(model):
        model.train()


def _in_training_mode(module: nn.Module) -> bool:
    return module.training and all(_in_training_mode(child) for child in module.children())
