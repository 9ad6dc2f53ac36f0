"""What the arguments and the model decide before anything runs: checks, the engine, callbacks, the model's place."""

from __future__ import annotations

import functools
import logging
import os
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.data import IterableDataset

from hftrainer.arguments import accelerate_state, legacy
from hftrainer.arguments.changes import take_changes
from hftrainer.arguments.choices import spelled
from hftrainer.arguments.resolved import ResolvedArguments
from hftrainer.arguments.validation import problems, take_accumulation, wrong_accelerator_config
from hftrainer.assembly.argument_consistency import check_agreement
from hftrainer.assembly.rooms import Room
from hftrainer.callbacks.base import make_callback, pop_from
from hftrainer.callbacks.handler import CallbackHandler
from hftrainer.callbacks.progress import own_progress
from hftrainer.callbacks.state import TrainerControl, TrainerState, is_exportable
from hftrainer.checkpointing.states import ModelStates
from hftrainer.checkpointing.states.deepspeed import DeepSpeedStates
from hftrainer.checkpointing.states.fsdp import ShardedStates
from hftrainer.checkpointing.states.whole import WholeStates
from hftrainer.checkpointing.states.xla import XlaStates
from hftrainer.checkpointing.writer import CheckpointWriter
from hftrainer.compat import peers, swap
from hftrainer.compat.functions import has_length
from hftrainer.compat.overrides import is_overridden, recorded, refuse_rewritten, refuse_uncalled
from hftrainer.data.collators import DataCollatorWithPadding, default_data_collator
from hftrainer.engine import adapter
from hftrainer.errors import InvalidArgument, InvalidSetup, UnsupportedArgument
from hftrainer.evaluation import gathering
from hftrainer.evaluation.metrics import as_metrics
from hftrainer.model import inspection as model_inspection
from hftrainer.parallel.seeds import enable_full_determinism, set_seed
from hftrainer.reporting.tracker_callbacks import ReportingCallback
from hftrainer.trainer_callback import DEFAULT_CALLBACKS
from hftrainer.trainer_pt_utils import LabelSmoother
from hftrainer.training.deepspeed import check_given as check_deepspeed
from hftrainer.training_args import TrainingArguments

if TYPE_CHECKING:
    from hftrainer.trainer import Trainer

logger = logging.getLogger(__name__)


class TrainerSetup(Room):
    """Builds what a Trainer consists of."""

    def resolve_arguments(self) -> None:
        """Parse the arguments anew, for a Trainer or a trial that begins with them."""
        args = self.trainer.args
        resolved = self.own.resolved = ResolvedArguments(args)
        if isinstance(args, TrainingArguments):
            args._resolved = resolved

    def seed(self) -> None:
        """Seed every generator, as the arguments say."""
        trainer = self.trainer
        if trainer.args.full_determinism:
            enable_full_determinism(trainer.args.seed)
        else:
            set_seed(trainer.args.seed)
        self.own.engine.seed(trainer.args.seed)

    def set_log_level(self) -> None:
        """Set the level that the arguments ask for; 'passive' leaves all as it is."""
        trainer = self.trainer
        if (trainer.args.log_level if trainer.args.should_log else trainer.args.log_level_replica) != "passive":
            level = trainer.args.get_process_log_level()
            followed = peers.set_verbosity(level)  # our level is then that of transformers, which a script may change
            logging.getLogger("hftrainer").setLevel(logging.NOTSET if followed else level)

    def default_collator(self) -> Callable[[list[Any]], Any]:
        """The collator of a Trainer that is given none."""
        if peers.pads(self.trainer.processing_class):
            return DataCollatorWithPadding(self.trainer.processing_class)
        return default_data_collator

    def make_states(self, plan: Any) -> ModelStates:
        """How the strategy keeps the states of model and optimizer."""
        own = self.own
        if not plan.spreads_model:
            return WholeStates(own.engine.saving)
        if own.engine.deepspeed is not None:
            check_deepspeed(own.engine.deepspeed, *own.optimizers_given)
            return DeepSpeedStates(own.engine.deepspeed)
        if plan.on_xla:
            decayed = self.trainer.get_decay_parameter_names
            return XlaStates(plan.processes, own.engine.on_host, own.engine.whole_weights, decayed)
        return ShardedStates(self.trainer.accelerator.state.fsdp_plugin)

    def set_model(self, model: nn.Module) -> None:
        """Take a model: place it, and find out what it accepts and returns."""
        trainer, own = self.trainer, self.own
        for reason in (own.engine.misfit(model), model_inspection.wrong_quantization(model)):
            if reason is not None:
                raise InvalidArgument(reason)
        trainer.model = trainer.model_wrapped = model
        for name, value in self.inspect(model).items():
            self.set_found(name, value)
        sharded = trainer.is_distributed_loading_by_transformers
        further = ("_defer_fsdp_gradient_reduction", "_sync_replicated_trainable_parameters") if sharded else ()
        refuse_uncalled(type(trainer), "_build_accelerator_args", *further)
        if trainer.place_model_on_device:
            self.refuse_disconnected(model)
            trainer._move_model_to_device(model, trainer.args.device)

    def inspect(self, model: nn.Module) -> dict[str, Any]:
        """The attributes of a Trainer that follow from its model, by their names."""
        trainer = self.trainer
        inspected = type(peers.without_adapters(model))
        names = trainer.args.label_names
        return {
            "place_model_on_device": trainer.args.place_model_on_device is not False and not self.own.states.spread,
            "is_model_parallel": len({d for d in getattr(model, "hf_device_map", {}).values() if d != "cpu"}) > 1,
            "is_distributed_loading_by_transformers": getattr(model, "is_distributed_loading_by_transformers", False),
            "model_accepts_loss_kwargs": model_inspection.accepts_loss_kwargs(model),
            "_loss_shifts_labels": model_inspection.shifts_labels(model),
            "label_names": model_inspection.find_labels(inspected) if names is None else names,
            "can_return_loss": model_inspection.can_return_loss(inspected),
            "_signature_columns": None,
            "label_smoother": self.make_label_smoother(),
        }

    def set_found(self, name: str, value: Any) -> None:
        """Set an attribute, unless a subclass or the script has set another value than was found before."""
        known = vars(self.trainer)
        if name not in self.own.found or (name in known and _is_same(known[name], self.own.found[name])):
            setattr(self.trainer, name, value)
        self.own.found[name] = list(value) if isinstance(value, list) else value  # scripts extend lists in place

    def refuse_disconnected(self, model: nn.Module) -> None:
        """Refuse an optimizer whose parameters the model would leave behind: on XLA devices it gets new ones."""
        trainer = self.trainer
        if trainer.optimizer is None or trainer.args.device.type != "xla":
            return
        if any(
            parameter.device.type != "xla" for group in trainer.optimizer.param_groups for parameter in group["params"]
        ):
            raise InvalidArgument(
                "optimizers holds parameters on the CPU, and a model that moves to an XLA device gets new ones: move "
                "it with model.to(args.device) before the optimizer is made, or pass optimizer_cls_and_kwargs."
            )

    def make_label_smoother(self) -> LabelSmoother | None:
        """What smooths the labels, if the arguments ask for it."""
        trainer = self.trainer
        if trainer.args.label_smoothing_factor == 0:
            return None
        if getattr(getattr(trainer.model, "config", None), "problem_type", None) == "multi_label_classification":
            warnings.warn(
                "label_smoothing_factor is for one label a sample and is left out: this model has several.",
                stacklevel=4,
            )
            return None
        return LabelSmoother(epsilon=trainer.args.label_smoothing_factor)

    def init_attributes(self) -> None:
        """Set the attributes that transformers documents and that a run, a search or an upload fills."""
        trainer = self.trainer
        trainer.is_in_train = False
        trainer.hp_name = trainer.hp_search_backend = trainer.objective = trainer._trial = None
        trainer.current_flos = trainer._total_loss_scalar = 0.0
        trainer._created_lr_scheduler = False
        trainer._globalstep_last_logged = trainer._initial_num_input_tokens_seen = 0
        trainer._past = trainer._mixed_mesh_grads = None
        trainer.hub_model_id = trainer.push_in_progress = None
        self.follow_arguments()

    def follow_arguments(self) -> None:
        """Set what is kept of the arguments; a hyperparameter trial changes them."""
        trainer = self.trainer
        trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
        trainer._train_batch_size = trainer.args.train_batch_size
        trainer.neftune_noise_alpha = trainer.args.neftune_noise_alpha
        trainer._eval_dataloaders = {}
        self.follow_changes()

    def follow_changes(self) -> None:
        """Set what is kept of the arguments and may be changed between two runs."""
        args, own = self.trainer.args, self.own
        own.past_index = legacy.value(args, "past_index")
        own.averages_tokens = args.average_tokens_across_devices and args.world_size > 1

    def take_changes_in(self, args: TrainingArguments) -> None:
        """Let what follows go by `args`, which may not be those of the Trainer."""
        own_loader = is_overridden(self.trainer, "get_train_dataloader")
        take_changes(self.own.engine, args, self.own.behaviours, own_loader=own_loader)

    def take_changes(self) -> None:
        """Let the run that begins go by what the script has changed in the arguments since the Trainer was made."""
        trainer, own = self.trainer, self.own
        refuse_rewritten(trainer)
        if not own.behaviours.keeps_batch_size:
            trainer._train_batch_size = trainer.args.train_batch_size
        self.take_changes_in(trainer.args)
        accelerate_state.follow(trainer.args, trainer.accelerator)  # another Trainer may have been made since
        self.follow_changes()
        if trainer.args.push_to_hub:  # it may have been set since
            trainer.accelerator.processes.from_main(lambda: trainer.init_hf_repo() if own.uploads is None else None)

    def init_callbacks(self, callbacks: list[Any], trackers: list[Any]) -> None:
        """Make the handler with all callbacks, and the first state."""
        trainer = self.trainer
        defaults = swap.rebound("transformers.trainer", "DEFAULT_CALLBACKS", DEFAULT_CALLBACKS)
        trainer.callback_handler = CallbackHandler(
            list(defaults), trainer.model, trainer.processing_class, trainer.optimizer, trainer.lr_scheduler
        )
        if trackers:
            self.add_callback(ReportingCallback(trackers))
        for callback in callbacks:
            self.add_callback(callback)
        if (progress := own_progress(trainer.args, trainer.callback_handler.callbacks)) is not None:
            trainer.add_callback(progress)
        trainer.control = TrainerControl()
        trainer.state = TrainerState(
            epoch=0 if self.own.behaviours.begins_at_epoch_zero else None,
            is_local_process_zero=trainer.is_local_process_zero(),
            is_world_process_zero=trainer.is_world_process_zero(),
            stateful_callbacks=self.stateful_callbacks(),
        )

    def add_callback(self, callback: Any) -> None:
        """Add a callback of either kind; a progress bar of Lightning takes the place of the Trainer's own."""
        target = self.callbacks_like(callback)
        if target is self.own.lightning_callbacks:
            target.append(make_callback(callback))
        else:
            target.add_callback(callback)
            self.attach(target.callbacks[-1])
        if adapter().has_progress_bar(self.own.lightning_callbacks) and self.trainer.callback_handler.drop_bars():
            logger.warning(
                "Lightning's progress bar takes the place of the Trainer's own. Its log lines are in "
                "state.log_history; disable_tqdm=True prints them too."
            )

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback of either kind, and return it."""
        target = self.callbacks_like(callback)
        return pop_from(target if target is self.own.lightning_callbacks else target.callbacks, callback)

    def attach(self, callback: Any) -> None:
        """Connect a callback that writes to trackers."""
        trainer = self.trainer
        if isinstance(callback, ReportingCallback):
            callback.attach(trainer.save_model, functools.partial(_run_folder, trainer), self.own.log_folder())

    def stateful_callbacks(self) -> list[Any]:
        """The callbacks, and the control, whose states checkpoints hold."""
        return [
            callback
            for callback in [*self.trainer.callback_handler.callbacks, self.trainer.control]
            if is_exportable(callback)
        ]

    def callbacks_like(self, callback: Any) -> Any:
        """The list that `callback` belongs to: Lightning's, or the handler of the Trainer's own."""
        if adapter().is_lightning_logger(callback):
            name = (callback if isinstance(callback, type) else type(callback)).__name__
            raise InvalidArgument(f"{name} is a Lightning logger, no callback: pass it as Trainer(loggers=[...]).")
        return (
            self.own.lightning_callbacks if adapter().is_lightning_callback(callback) else self.trainer.callback_handler
        )

    def build_engine(self) -> None:
        """Build the engine from the arguments, and the Trainer's `accelerator` over it."""
        trainer, own = self.trainer, self.own
        refuse_rewritten(trainer)
        from hftrainer.arguments.table import make_plan, overridden, unsupported

        resolved = own.resolved
        resolved.model = trainer.model
        found = unsupported(resolved, own_optimizer=trainer.optimizer is not None)
        if found:
            raise UnsupportedArgument("\n".join(found))
        for sentence in overridden(resolved):
            logger.warning(sentence)
        if resolved.accelerator_config.non_blocking and not trainer.args.dataloader_pin_memory:
            logger.warning(
                "accelerator_config['non_blocking']=True changes nothing with dataloader_pin_memory=False: only from "
                "page-locked memory do batches move beside the computation."
            )
        from hftrainer.training.accelerator import EngineAccelerator

        recorded(EngineAccelerator)
        adapter().start_others(resolved.place, trainer.args.ddp_timeout)
        if not resolved.place.started:
            resolved.look_again_where_we_stand()
        plan = make_plan(resolved)
        own.checkpoint_writer = CheckpointWriter(
            in_background=plan.async_checkpoint,
            stop_on_error=plan.stop_on_save_error,
            on_host=lambda state: own.engine.on_host(state),
        )
        plan.processes.connect(
            trainer.args.device,
            plan.process_group_backend,
            trainer.args.ddp_timeout_delta,
            even_alone=plan.spreads_model and not plan.on_xla,
        )
        check_agreement(trainer.args, plan.processes)
        own.engine = adapter().LightningEngine(
            plan,
            own.lightning_callbacks,
            loggers=own.loggers,
            receive=lambda values: own.logged_metrics.set(values),
        )
        trainer.accelerator = EngineAccelerator(
            own.engine,
            trainer.args.device,
            plan,
            own.loaders.prepare,
            is_own=lambda model: model is trainer.model or model is trainer.model_wrapped,
            config=vars(resolved.accelerator_config),
        )
        accelerate_state.follow(trainer.args, trainer.accelerator)
        trainer.gather_function = gathering.for_metrics(trainer.accelerator, trainer.args)
        trainer.is_deepspeed_enabled = plan.deepspeed is not None
        trainer.is_fsdp_xla_enabled = plan.on_xla and plan.sharding is not None
        trainer.is_fsdp_xla_v2_enabled = plan.by_spmd
        trainer.is_fsdp_xla_v1_enabled = trainer.is_fsdp_xla_enabled and not plan.by_spmd
        trainer.is_fsdp_enabled = plan.sharding is not None and not plan.on_xla
        own.states = self.make_states(plan)
        trainer.deepspeed = None

    def validate_args(self) -> None:
        """Refuse what cannot work before anything is built; arguments may have been changed since they were made."""
        trainer = self.trainer
        args = trainer.args
        resolved = self.own.resolved
        if not (found := list(wrong_accelerator_config(resolved))):
            take_accumulation(resolved)  # before DeepSpeed's configuration is completed with it
            found = problems(resolved) if isinstance(args, TrainingArguments) else []
        if found:
            raise InvalidArgument("\n".join(found))
        if args.eval_strategy != "no" and trainer.eval_dataset is None:
            raise InvalidArgument(
                f"eval_strategy={spelled(args.eval_strategy)!r} needs an eval_dataset: pass one, or set it to 'no'."
            )
        chosen = {"optimizers": trainer.optimizer, "optimizer_cls_and_kwargs": trainer.optimizer_cls_and_kwargs}
        default = TrainingArguments.__dataclass_fields__["optim"].default
        for name, given in chosen.items():
            if given is not None and spelled(args.optim) not in (default, "adamw_torch"):
                raise InvalidArgument(
                    f"optim={spelled(args.optim)!r} and {name} both choose the optimizer: give one of them."
                )
        if trainer.optimizer is not None and trainer.optimizer_cls_and_kwargs is not None:
            raise InvalidSetup("optimizers and optimizer_cls_and_kwargs both choose the optimizer: pass one.")
        if trainer.model_init is not None and (trainer.optimizer is not None or trainer.lr_scheduler is not None):
            raise InvalidSetup(
                "optimizers would hold the parameters of a model that model_init replaces: pass "
                "optimizer_cls_and_kwargs, or override create_optimizer_and_scheduler."
            )
        as_metrics(trainer.compute_metrics, by_batch=args.batch_eval_metrics)
        if (folder := getattr(args, "eval_memmap_dir", None)) is not None:
            if not os.path.isdir(folder):
                raise InvalidArgument(f"eval_memmap_dir={folder!r} is no folder: make it, or give another.")
            if not args.eval_do_concat_batches:
                raise InvalidArgument(
                    "eval_memmap_dir keeps one file for all batches, and eval_do_concat_batches=False wants one each: "
                    "give one of them."
                )
        if args.max_steps > 0 and args.num_train_epochs > 0:
            logger.info("max_steps=%d is given, and takes the place of num_train_epochs.", args.max_steps)
        if isinstance(trainer.train_dataset, IterableDataset):
            logger.info(
                "train_sampling_strategy=%r changes nothing: train_dataset is a stream, in its own order.",
                str(args.train_sampling_strategy),
            )
        if not callable(trainer.data_collator):
            raise InvalidArgument(f"data_collator must be callable, got {type(trainer.data_collator).__name__}.")
        if trainer.train_dataset is not None and not has_length(trainer.train_dataset) and args.max_steps <= 0:
            raise InvalidArgument(
                "max_steps must be set: train_dataset has no length, so the number of optimizer steps cannot be worked "
                "out from num_train_epochs."
            )


def _run_folder(trainer: Trainer) -> str:
    """Where the checkpoints of the run in progress are."""
    return trainer._get_output_dir(trainer._trial)


def _is_same(value: Any, before: Any) -> bool:
    """Whether two values are equal; arrays and tensors, which compare element by element, only if they are one."""
    return value is before or (type(value) is type(before) and (value == before) is True)
