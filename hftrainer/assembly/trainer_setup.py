"""Sets up what depends on a Trainer's arguments: checks, engine, accelerator and callbacks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from hftrainer.arguments import old_names
from hftrainer.arguments.accelerate import copy_accelerator_settings
from hftrainer.arguments.changes import apply_to_engine
from hftrainer.arguments.checks.unsupported import check_supported, find_unused_settings
from hftrainer.arguments.checks.validation import (
    check_accelerator_config,
    check_types,
    check_values,
    set_accumulation_steps,
)
from hftrainer.arguments.choices import as_text
from hftrainer.arguments.fields.table import ARGUMENTS
from hftrainer.arguments.lightning_plan import make_plan
from hftrainer.arguments.resolved import ResolvedArguments, set_up_deepspeed
from hftrainer.assembly.object_checks import check_consistency, check_data, check_memmap, check_optimizer
from hftrainer.base.messages import log_once
from hftrainer.base.part import Part
from hftrainer.callbacks.handler import (
    EVENTS,
    HOOK_BY_EVENT,
    CallbackHandler,
    make_callback,
    remove_callback_like,
    warn_about_misspelt_events,
)
from hftrainer.callbacks.progress_bar import choose_progress_callback
from hftrainer.callbacks.state import TrainerControl, TrainerState
from hftrainer.checkpointing.writing.files import make_output_dir
from hftrainer.checkpointing.writing.writer import CheckpointWriter
from hftrainer.compat import libraries, transformers_names
from hftrainer.compat.overrides import check_lightning_methods, is_overridden, refuse_rewritten
from hftrainer.data.collators import DataCollatorWithPadding, default_data_collator
from hftrainer.errors import InvalidArgument, UnsupportedArgument, WrongObject
from hftrainer.evaluation.collecting import make_metrics_gather
from hftrainer.evaluation.metrics import as_metrics
from hftrainer.model.apply_arguments import set_tf32
from hftrainer.parallel.accelerator import EngineAccelerator
from hftrainer.plugins import lightning_engine_module
from hftrainer.releases.followed import describe_older_release
from hftrainer.strategies import make_strategy
from hftrainer.strategies.strategy import TRAINER_FLAGS, Strategy
from hftrainer.trackers.base_callbacks import ReportingCallback
from hftrainer.trainer_callback import DEFAULT_CALLBACKS
from hftrainer.training.steps.loss_division import divide_in_backward
from hftrainer.training_args import TrainingArguments

logger = logging.getLogger(__name__)


class TrainerSetup(Part):
    """Builds everything that depends on the arguments, for a new Trainer, each trial and each run.

    Args:
        parts: the parts of the Trainer; this class sets those that depend on the arguments.
    """

    def rebuild_from_arguments(self) -> None:
        """Rebuild everything that depends on the arguments, for a trial or after a search."""
        trainer = self.trainer
        self.parts.needs_rebuild = False
        self.resolve_arguments()
        trainer._validate_args()
        if isinstance(trainer.args, TrainingArguments):
            trainer.args.hf_deepspeed_config = set_up_deepspeed(trainer.args)
        set_tf32(trainer.args)
        self.copy_argument_values()
        trainer.create_accelerator_and_postprocess()
        # Until v5.2, a trial makes its model afterwards.
        if trainer.model is not None:
            self.parts.model_setup.set_model(trainer.model)

    def resolve_arguments(self) -> None:
        """Resolve the arguments, for a new Trainer or a new trial."""
        args = self.trainer.args
        resolved = self.parts.resolved = ResolvedArguments(args)
        if isinstance(args, TrainingArguments):
            args._resolved = resolved

    def choose_collator(self) -> Callable[[list[Any]], Any]:
        """The default collator, which pads if the processing class can."""
        if libraries.can_pad(self.trainer.processing_class):
            return DataCollatorWithPadding(self.trainer.processing_class)
        return default_data_collator

    def init_attributes(self) -> None:
        """Check the subclass's hooks, and set the documented attributes that a run, search or upload sets later."""
        trainer = self.trainer
        check_lightning_methods(type(trainer), {*EVENTS, *lightning_engine_module().HOOKS})
        trainer.is_in_train = False
        trainer.hp_name = trainer.hp_search_backend = trainer.objective = None
        trainer.hub_model_id = trainer.push_in_progress = None
        trainer._mixed_mesh_grads = None
        self.copy_argument_values()

    def finish_init(self) -> None:
        """Open the repository and the output folder, call `on_init_end`, and set `config.use_cache`."""
        args = self.trainer.args
        if args.push_to_hub:
            self.trainer.accelerator.processes.broadcast_from_main(self.trainer.init_hf_repo)
        self.parts.storage_sync.open_mirror()
        if args.should_save:
            make_output_dir(str(args.output_dir))
        self.parts.call_callbacks("on_init_end")
        config: Any = getattr(self.trainer.model, "config", None)
        if config is not None and (self.parts.policy.sets_use_cache or args.use_cache):
            config.use_cache = args.use_cache

    def init_callbacks(self, callbacks: list[Any], trackers: list[Any]) -> None:
        """Create the callback handler, the control and the initial state."""
        trainer = self.trainer
        defaults = transformers_names.current_value("transformers.trainer", "DEFAULT_CALLBACKS", DEFAULT_CALLBACKS)
        trainer.callback_handler = CallbackHandler(
            list(defaults), trainer.model, trainer.processing_class, trainer.optimizer, trainer.lr_scheduler
        )
        if trackers:
            self.add_callback(ReportingCallback(trackers))
        for callback in callbacks:
            self.add_callback(callback)
        if (progress := choose_progress_callback(trainer.args, trainer.callback_handler.callbacks)) is not None:
            trainer.add_callback(progress)
        trainer.control = TrainerControl()
        trainer.state = TrainerState(
            epoch=self.parts.policy.epoch_before_training,
            is_local_process_zero=trainer.is_local_process_zero(),
            is_world_process_zero=trainer.is_world_process_zero(),
            stateful_callbacks=self.parts.stateful_callbacks(),
        )

    def add_callback(self, callback: Any) -> None:
        """Add a Trainer or Lightning callback. A Lightning progress bar replaces the Trainer's."""
        handler = self.trainer.callback_handler
        lightning_callbacks = self.parts.lightning_callbacks
        if _is_lightning_callback(callback):
            lightning_callbacks.append(make_callback(callback))
            warn_about_misspelt_events(type(lightning_callbacks[-1]), lightning_engine_module().HOOKS, HOOK_BY_EVENT)
        else:
            handler.add_callback(callback)
            new_callback = handler.callbacks[-1]
            if isinstance(new_callback, ReportingCallback):
                new_callback.attach(self.trainer.save_model, self.run_folder, self.parts.log_folder)
        if lightning_engine_module().has_progress_bar(lightning_callbacks) and handler.remove_progress_bars():
            logger.warning(
                "Lightning's progress bar replaces the Trainer's. The log lines are in "
                "state.log_history; disable_tqdm=True also prints them."
            )

    def run_folder(self) -> str:
        """The folder of the current run's checkpoints, from `Trainer._get_output_dir` or its override."""
        return self.trainer._get_output_dir(self.run.trial)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback of either kind, and return it."""
        ours = self.trainer.callback_handler.callbacks
        theirs = self.parts.lightning_callbacks
        return remove_callback_like(theirs if _is_lightning_callback(callback) else ours, callback)

    def make_engine_and_accelerator(self) -> None:
        """Build the engine from the arguments, and the Trainer's `accelerator` over it.

        Raises:
            UnsupportedArgument: for unsupported arguments; one error lists them all.
        """
        trainer = self.trainer
        parts = self.parts
        refuse_rewritten(trainer)
        self._check_supported_arguments()
        parts.strategy = strategy = self._connect_processes()
        plan = strategy.initial_plan
        parts.checkpoint_writer = CheckpointWriter(
            is_async=plan.async_checkpoint, stop_on_error=plan.stop_on_save_error, to_cpu=strategy.to_cpu
        )
        parts.engine = lightning_engine_module().LightningEngine(
            strategy,
            parts.lightning_callbacks,
            get_loggers=parts.open_loggers,
            log_values=lambda values: parts.run.attempt.logged_metrics.set(values),
        )
        trainer.accelerator = EngineAccelerator(
            parts.engine,
            strategy.device,
            parts.loader_factory.prepare_loader,
            is_trainer_model=lambda model: model is trainer.model or model is trainer.model_wrapped,
            config=vars(parts.resolved.accelerator_config),
            gradient_divisor=parts.policy.gradient_divisor(trainer.args),
            divide_loss=divide_in_backward,
        )
        copy_accelerator_settings(self.parts.resolved, trainer.accelerator)
        trainer.gather_function = make_metrics_gather(trainer.accelerator, trainer.args)
        strategy.check_optimizers(*parts.script_optimizers)
        for name in TRAINER_FLAGS:
            setattr(trainer, name, name in strategy.flags)
        trainer.deepspeed = None

    # ---- Arguments ---------------------------------------------------------------------------------------------

    def set_log_level(self) -> None:
        """Set the log level of the arguments; 'passive' changes nothing."""
        args = self.trainer.args
        if (args.log_level if args.should_log else args.log_level_replica) != "passive":
            level = args.get_process_log_level()
            # Our logger then follows transformers' level, which a script may change.
            is_transformers_level_set = libraries.set_verbosity(level)
            our_logger = logging.getLogger("hftrainer")
            our_logger.setLevel(logging.NOTSET if is_transformers_level_set else level)
            if not args.should_log and args.log_level_replica == ARGUMENTS["log_level_replica"].default:
                # The main process logs the messages that all processes would log.
                our_logger.setLevel(logging.ERROR)

    def copy_argument_values(self) -> None:
        """Take the values that the parts read from the arguments; again for each trial."""
        self.run.current_gradient_accumulation_steps = self.trainer.args.gradient_accumulation_steps
        self.run.train_batch_size = self.trainer.args.train_batch_size
        self.trainer.neftune_noise_alpha = self.trainer.args.neftune_noise_alpha
        self.trainer._eval_dataloaders = {}
        self._copy_changeable_values()

    def _copy_changeable_values(self) -> None:
        """Set what depends on arguments that may change between two runs."""
        args = self.trainer.args
        self.parts.past_index = old_names.old_argument(args, "past_index")
        self.parts.averages_tokens = args.average_tokens_across_devices and args.world_size > 1

    def apply_arguments_to_engine(self, args: TrainingArguments) -> None:
        """Apply the values of `args`, which may be a different object from the Trainer's arguments."""
        parts = self.parts
        is_custom = is_overridden(self.trainer, "get_train_dataloader")
        apply_to_engine(parts.engine, args, parts.policy, has_custom_loader=is_custom)

    def apply_changed_arguments(self) -> None:
        """Take over the arguments that the script changed after it created the Trainer."""
        trainer = self.trainer
        refuse_rewritten(trainer)
        if not self.parts.policy.reads_batch_size_once:
            self.run.train_batch_size = trainer.args.train_batch_size
        self.apply_arguments_to_engine(trainer.args)
        # Another Trainer may have replaced accelerate's state.
        copy_accelerator_settings(self.parts.resolved, trainer.accelerator)
        self._copy_changeable_values()
        # The script may have set push_to_hub after it created the Trainer.
        if trainer.args.push_to_hub:
            trainer.accelerator.processes.broadcast_from_main(
                lambda: trainer.init_hf_repo() if self.parts.upload_queue is None else None
            )

    def _check_supported_arguments(self) -> None:
        """Raise for unsupported arguments, and warn about those that have no effect."""
        resolved = self.parts.resolved
        resolved.model = self.trainer.model
        if problems := check_supported(resolved, has_custom_optimizer=self.trainer.optimizer is not None):
            raise UnsupportedArgument("\n".join(problems))
        for message in find_unused_settings(resolved):
            logger.warning(message)
        if (notice := describe_older_release(resolved.config_or_empty)) is not None:
            log_once(logger, notice, logging.WARNING)
        if resolved.accelerator_config.non_blocking and not self.trainer.args.dataloader_pin_memory:
            logger.warning(
                "accelerator_config['non_blocking']=True has no effect with dataloader_pin_memory=False: only batches "
                "in page-locked memory are copied asynchronously."
            )

    def _connect_processes(self) -> Strategy:
        """Start the other processes unless a launcher did, join the process group, and select the strategy."""
        args = self.trainer.args
        resolved = self.parts.resolved
        lightning_engine_module().start_other_processes(resolved.rank_info, args.ddp_timeout)
        if not resolved.rank_info.started:
            resolved.forget_rank_info()
        plan = make_plan(resolved)
        strategy = make_strategy(plan)
        plan.processes.connect(
            resolved.device,
            plan.process_group_backend,
            args.ddp_timeout_delta,
            allow_single_process=strategy.needs_single_process_group,
        )
        check_consistency(args, plan.processes)
        return strategy

    def validate_args(self) -> None:
        """Raise for invalid arguments. The script may have changed them after their construction."""
        args = self.trainer.args
        resolved = self.parts.resolved
        # DeepSpeed's configuration needs the accumulation steps.
        set_accumulation_steps(resolved)
        is_ours = isinstance(args, TrainingArguments)
        if is_ours and (messages := list(check_types(args))):
            raise WrongObject("\n".join(messages))
        if problems := check_values(resolved) if is_ours else list(check_accelerator_config(resolved)):
            raise InvalidArgument("\n".join(problems))
        if args.eval_strategy != "no" and self.trainer.eval_dataset is None:
            raise InvalidArgument(
                f"eval_strategy={as_text(args.eval_strategy)!r} needs an eval_dataset: pass one, or set "
                "eval_strategy='no'."
            )
        check_optimizer(self.trainer)
        as_metrics(self.trainer.compute_metrics, is_batchwise=args.batch_eval_metrics)
        check_memmap(args)
        check_data(self.trainer)


def _is_lightning_callback(callback: Any) -> bool:
    """Whether a callback is Lightning's rather than the Trainer's.

    Raises:
        InvalidArgument: for a logger.
    """
    if lightning_engine_module().is_lightning_logger(callback):
        name = (callback if isinstance(callback, type) else type(callback)).__name__
        raise InvalidArgument(f"{name} is a Lightning logger, not a callback: pass it as Trainer(loggers=[...]).")
    return bool(lightning_engine_module().is_lightning_callback(callback))
