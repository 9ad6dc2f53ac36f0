"""Builds a Trainer from its arguments: checks, engine, accelerator, callbacks; applies changes of the arguments."""

from __future__ import annotations

import dataclasses
import enum
import functools
import logging
import os
import re
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.data import IterableDataset

from hftrainer.arguments import legacy
from hftrainer.arguments.accelerate import copy_accelerator_settings
from hftrainer.arguments.choices import as_text
from hftrainer.arguments.field import changed_arguments
from hftrainer.arguments.old_fields import ARGUMENTS
from hftrainer.arguments.resolved import ResolvedArguments, set_up_deepspeed
from hftrainer.arguments.support import apply_argument_changes, check_supported, find_unused_settings, make_plan
from hftrainer.arguments.validation import (
    check_accelerator_config,
    check_types,
    check_values,
    set_accumulation_steps,
)
from hftrainer.callbacks.handler import (
    EVENTS,
    HOOK_BY_EVENT,
    CallbackHandler,
    make_callback,
    pop_matching,
    warn_of_misspelt_events,
)
from hftrainer.callbacks.progress import choose_progress_callback
from hftrainer.callbacks.state import TrainerControl, TrainerState
from hftrainer.checkpointing.writer import CheckpointWriter
from hftrainer.compat import peers, swap
from hftrainer.compat.messages import log_once
from hftrainer.compat.overrides import check_lightning_methods, has_length, is_overridden, recorded, refuse_rewritten
from hftrainer.data.collators import DataCollatorWithPadding, default_data_collator
from hftrainer.data.mixture import MixtureDataset, MixtureStream
from hftrainer.errors import InvalidArgument, InvalidSetup, NotAFolder, UnsupportedArgument, WrongObject
from hftrainer.evaluation.collected import make_metrics_gather
from hftrainer.evaluation.metrics import as_metrics
from hftrainer.model.changes import set_tf32
from hftrainer.parallel.processes import Processes
from hftrainer.plugins import adapter
from hftrainer.releases.followed import describe_older_release
from hftrainer.reporting.tracking import ReportingCallback
from hftrainer.strategies import make_strategy
from hftrainer.strategies.strategy import FLAGS, Strategy
from hftrainer.trainer_callback import DEFAULT_CALLBACKS
from hftrainer.training.accelerator import EngineAccelerator
from hftrainer.training.component import Component
from hftrainer.training.loader_factory import check_dataset
from hftrainer.training_args import TrainingArguments
from hftrainer.training_args_seq2seq import Seq2SeqTrainingArguments

if TYPE_CHECKING:
    from hftrainer.trainer import Trainer
    from hftrainer.training.run import Run

logger = logging.getLogger(__name__)

#: Arguments that may differ between ranks. All others must be equal, or ranks would train different models.
PER_RANK = frozenset(
    [
        "local_rank",
        # Nodes may use different folders.
        *("output_dir", "logging_dir", "eval_memmap_dir"),
        # Logs and reports of a process do not affect training.
        *("log_level", "log_level_replica", "log_on_each_node", "disable_tqdm", "skip_memory_metrics"),
        # How a process loads its samples does not affect training.
        *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor"),
        *("dataloader_multiprocessing_context", "torch_empty_cache_steps"),
        # Only the script reads these.
        *("do_train", "do_eval", "do_predict", "resume_from_checkpoint", "overwrite_output_dir"),
        # Only the main process reads these.
        *("report_to", "run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
        *("save_on_each_node", "hub_token", "push_to_hub_token"),
    ]
)


class TrainerSetup(Component):
    """Builds everything that depends on the arguments, for a new Trainer, each trial and each run.

    Args:
        components: the parts of the Trainer; this class sets those that depend on the arguments.
    """

    def rebuild_from_arguments(self) -> None:
        """Rebuild everything that depends on the arguments, for a trial or after a search."""
        trainer = self.trainer
        self.components.needs_rebuild = False
        self.resolve_arguments()
        trainer._validate_args()
        if isinstance(trainer.args, TrainingArguments):
            trainer.args.hf_deepspeed_config = set_up_deepspeed(trainer.args)
        set_tf32(trainer.args)
        self.apply_arguments()
        trainer.create_accelerator_and_postprocess()
        if trainer.model is not None:  # None if the trial makes its model afterwards, as until v5.2
            self.components.model_setup.set_model(trainer.model)

    def resolve_arguments(self) -> None:
        """Parse the arguments again, for a new Trainer or a new trial."""
        args = self.trainer.args
        resolved = self.components.resolved = ResolvedArguments(args)
        if isinstance(args, TrainingArguments):
            args._resolved = resolved

    def default_collator(self) -> Callable[[list[Any]], Any]:
        """The default collator."""
        if peers.can_pad(self.trainer.processing_class):
            return DataCollatorWithPadding(self.trainer.processing_class)
        return default_data_collator

    def init_attributes(self) -> None:
        """Initialize the documented attributes that a run, a search or an upload sets later."""
        trainer = self.trainer
        check_lightning_methods(type(trainer), {*EVENTS, *adapter().HOOKS})
        trainer.is_in_train = False
        trainer.hp_name = trainer.hp_search_backend = trainer.objective = trainer._mixed_mesh_grads = None
        trainer.hub_model_id = trainer.push_in_progress = None
        self.apply_arguments()

    def end_init(self) -> None:
        """Open the repository, create the output folder, and call `on_init_end`."""
        args = self.trainer.args
        if args.push_to_hub:
            self.trainer.accelerator.processes.from_main(self.trainer.init_hf_repo)
        self.components.storage.open()
        if args.should_save:
            try:
                os.makedirs(str(args.output_dir), exist_ok=True)
            except (FileExistsError, NotADirectoryError):
                raise NotAFolder(
                    f"output_dir={args.output_dir!r}: a file has this name, or that of a folder above: give the name "
                    "of a folder, which may be new."
                ) from None
        self.components.announce("on_init_end")
        config: Any = getattr(self.trainer.model, "config", None)
        if config is not None and (self.components.policy.sets_use_cache or args.use_cache):
            config.use_cache = args.use_cache

    def init_callbacks(self, callbacks: list[Any], trackers: list[Any]) -> None:
        """Make the handler with all callbacks, and the initial state."""
        trainer = self.trainer
        defaults = swap.current_value("transformers.trainer", "DEFAULT_CALLBACKS", DEFAULT_CALLBACKS)
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
            epoch=self.components.policy.epoch_before_training,
            is_local_process_zero=trainer.is_local_process_zero(),
            is_world_process_zero=trainer.is_world_process_zero(),
            stateful_callbacks=self.components.stateful_callbacks(),
        )

    def add_callback(self, callback: Any) -> None:
        """Add a Trainer or Lightning callback. A Lightning progress bar replaces the Trainer's own."""
        handler = self.trainer.callback_handler
        of_lightning = self.components.lightning_callbacks
        if _is_of_lightning(callback):
            of_lightning.append(make_callback(callback))
            warn_of_misspelt_events(type(of_lightning[-1]), adapter().HOOKS, HOOK_BY_EVENT)
        else:
            handler.add_callback(callback)
            added = handler.callbacks[-1]
            if isinstance(added, ReportingCallback):
                run_folder = functools.partial(_run_dir, self.trainer, self.run)
                added.attach(self.trainer.save_model, run_folder, self.components.log_folder())
        if adapter().has_progress_bar(of_lightning) and handler.remove_progress_bars():
            logger.warning(
                "Lightning's progress bar replaces the Trainer's own. Its log lines are in "
                "state.log_history; disable_tqdm=True prints them too."
            )

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback of either kind, and return it."""
        known = self.trainer.callback_handler.callbacks
        return pop_matching(self.components.lightning_callbacks if _is_of_lightning(callback) else known, callback)

    def build_engine(self) -> None:
        """Build the engine from the arguments, and the Trainer's `accelerator` over it.

        Raises:
            UnsupportedArgument: for unsupported arguments, all in one error.
        """
        trainer = self.trainer
        components = self.components
        refuse_rewritten(trainer)
        self._check_supported()
        components.strategy = strategy = self._connect()
        plan = strategy.plan
        components.checkpoint_writer = CheckpointWriter(
            in_background=plan.async_checkpoint, stop_on_error=plan.stop_on_save_error, to_cpu=strategy.to_cpu
        )
        components.engine = adapter().LightningEngine(
            strategy,
            components.lightning_callbacks,
            loggers=components.loggers,
            receive=lambda values: components.run.logged_metrics.set(values),
        )
        recorded(EngineAccelerator)
        trainer.accelerator = EngineAccelerator(
            components.engine,
            strategy.device,
            components.loaders.prepare,
            is_trainer_model=lambda model: model is trainer.model or model is trainer.model_wrapped,
            config=vars(components.resolved.accelerator_config),
            num_steps=components.policy.gradient_divisor(trainer.args),
        )
        copy_accelerator_settings(self.components.resolved, trainer.accelerator)
        trainer.gather_function = make_metrics_gather(trainer.accelerator, trainer.args)
        strategy.check_optimizers(*components.script_optimizers)
        for name in FLAGS:
            setattr(trainer, name, name in strategy.flags)
        trainer.deepspeed = None

    # ---- Arguments ---------------------------------------------------------------------------------------------

    def set_log_level(self) -> None:
        """Set the log level of the arguments; 'passive' changes nothing."""
        args = self.trainer.args
        if (args.log_level if args.should_log else args.log_level_replica) != "passive":
            level = args.get_process_log_level()
            # Our logger then follows transformers' level, which a script may change.
            followed = peers.set_verbosity(level)
            ours = logging.getLogger("hftrainer")
            ours.setLevel(logging.NOTSET if followed else level)
            if not args.should_log and args.log_level_replica == ARGUMENTS["log_level_replica"].default:
                ours.setLevel(logging.ERROR)  # the main process logs what all processes would log

    def apply_arguments(self) -> None:
        """Set everything that depends on the arguments; called again for each trial."""
        self.run.accumulation = self.trainer.args.gradient_accumulation_steps
        self.run.train_batch_size = self.trainer.args.train_batch_size
        self.trainer.neftune_noise_alpha = self.trainer.args.neftune_noise_alpha
        self.trainer._eval_dataloaders = {}
        self._apply_changeable_arguments()

    def _apply_changeable_arguments(self) -> None:
        """Set what depends on arguments that may change between two runs."""
        args = self.trainer.args
        self.components.past_index = legacy.value(args, "past_index")
        self.components.averages_tokens = args.average_tokens_across_devices and args.world_size > 1

    def apply_changes_from(self, args: TrainingArguments) -> None:
        """Use the values of `args`, which may be another object than the Trainer's arguments."""
        components, is_custom = self.components, is_overridden(self.trainer, "get_train_dataloader")
        apply_argument_changes(components.engine, args, components.policy, has_custom_loader=is_custom)

    def apply_changes(self) -> None:
        """Apply to the next run the arguments that the script has changed since the Trainer was made."""
        trainer = self.trainer
        refuse_rewritten(trainer)
        if not self.components.policy.reads_batch_size_once:
            self.run.train_batch_size = trainer.args.train_batch_size
        self.apply_changes_from(trainer.args)
        # Another Trainer may have been made since.
        copy_accelerator_settings(self.components.resolved, trainer.accelerator)
        self._apply_changeable_arguments()
        if trainer.args.push_to_hub:  # the script may have set it since
            trainer.accelerator.processes.from_main(
                lambda: trainer.init_hf_repo() if self.components.uploads is None else None
            )

    def _check_supported(self) -> None:
        """Raise for unsupported arguments; warn about overridden ones and those without effect."""
        resolved = self.components.resolved
        resolved.model = self.trainer.model
        if found := check_supported(resolved, has_custom_optimizer=self.trainer.optimizer is not None):
            raise UnsupportedArgument("\n".join(found))
        for sentence in find_unused_settings(resolved):
            logger.warning(sentence)
        if (older := describe_older_release(resolved.readable_config)) is not None:
            log_once(logger, older, logging.WARNING)
        if resolved.accelerator_config.non_blocking and not self.trainer.args.dataloader_pin_memory:
            logger.warning(
                "accelerator_config['non_blocking']=True has no effect with dataloader_pin_memory=False: only batches "
                "in page-locked memory are copied during computation."
            )

    def _connect(self) -> Strategy:
        """Start the other processes unless a launcher did, join the process group, and select the strategy."""
        args = self.trainer.args
        resolved = self.components.resolved
        adapter().start_other_processes(resolved.rank_info, args.ddp_timeout)
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
        """Raise for invalid arguments. The script may have changed them since their construction."""
        args = self.trainer.args
        resolved = self.components.resolved
        set_accumulation_steps(resolved)  # DeepSpeed's configuration needs the accumulation steps
        is_ours = isinstance(args, TrainingArguments)
        if is_ours and (texts := list(check_types(args))):
            raise WrongObject("\n".join(texts))
        if found := check_values(resolved) if is_ours else list(check_accelerator_config(resolved)):
            raise InvalidArgument("\n".join(found))
        if args.eval_strategy != "no" and self.trainer.eval_dataset is None:
            raise InvalidArgument(
                f"eval_strategy={as_text(args.eval_strategy)!r} needs an eval_dataset: pass one, or set it to 'no'."
            )
        self._check_optimizer()
        as_metrics(self.trainer.compute_metrics, by_batch=args.batch_eval_metrics)
        self._check_memmap()
        self._check_data()

    def _check_optimizer(self) -> None:
        """Check that only one of several arguments sets the optimizer."""
        trainer = self.trainer
        args = trainer.args
        chosen = {"optimizers": trainer.optimizer, "optimizer_cls_and_kwargs": trainer.optimizer_cls_and_kwargs}
        default = TrainingArguments.__dataclass_fields__["optim"].default
        for name, given in chosen.items():
            if given is not None and as_text(args.optim) not in (default, "adamw_torch"):
                raise InvalidArgument(
                    f"optim={as_text(args.optim)!r} and {name} both set the optimizer: use only one of them."
                )
        if trainer.optimizer is not None:
            _warn_of_ignored(args, trainer.optimizer)
        if trainer.optimizer is not None and trainer.optimizer_cls_and_kwargs is not None:
            raise InvalidSetup("optimizers and optimizer_cls_and_kwargs both set the optimizer: pass only one.")
        if trainer.model_init is not None and (trainer.optimizer is not None or trainer.lr_scheduler is not None):
            raise InvalidSetup(
                "optimizers would hold the parameters of a model that model_init replaces: pass "
                "optimizer_cls_and_kwargs, or override create_optimizer_and_scheduler."
            )

    def _check_memmap(self) -> None:
        """Check `eval_memmap_dir`, the folder for memory-mapped predictions."""
        folder = getattr(self.trainer.args, "eval_memmap_dir", None)
        if folder is None:
            return
        if not os.path.isdir(folder):
            raise InvalidArgument(f"eval_memmap_dir={folder!r} is not a folder: create it, or use another.")
        if not self.trainer.args.eval_do_concat_batches:
            raise InvalidArgument(
                "eval_memmap_dir writes one file for all batches, and eval_do_concat_batches=False needs one each: "
                "use only one of them."
            )

    def _check_data(self) -> None:
        """Check that the length of the run can be computed, and log which arguments have no effect."""
        trainer = self.trainer
        args = trainer.args
        if args.max_steps > 0 and args.num_train_epochs > 0:
            logger.info("max_steps=%d is given and overrides num_train_epochs.", args.max_steps)
        is_mixture = isinstance(trainer.train_dataset, (MixtureDataset, MixtureStream))
        weighs = args.mixture_weights is not None or args.mixture_temperature != 1
        if weighs and trainer.train_dataset is not None and not is_mixture and args.mixture_column is None:
            raise InvalidArgument(
                "mixture_weights and mixture_temperature need several sources: pass train_dataset={'code': ..., "
                "'chat': ...}, or set mixture_column to the column that names the source of each sample."
            )
        if isinstance(trainer.train_dataset, IterableDataset):
            logger.log(
                logging.INFO if args.train_sampling_strategy == "random" else logging.WARNING,
                "train_sampling_strategy=%r has no effect: train_dataset is iterable and has its own order.",
                str(args.train_sampling_strategy),
            )
        if not callable(trainer.data_collator):
            raise InvalidArgument(
                f"data_collator must be callable, got {type(trainer.data_collator).__name__}. It is Trainer's third "
                "argument: pass datasets by name, as train_dataset=... and eval_dataset=..."
            )
        if isinstance(trainer.data_collator, type) and "__call__" in dir(trainer.data_collator):
            name = trainer.data_collator.__name__
            raise InvalidArgument(f"data_collator is the class {name}: pass an object, {name}(...).")
        if trainer.train_dataset is not None and not has_length(trainer.train_dataset) and args.max_steps <= 0:
            check_dataset(trainer.train_dataset, "training")
            raise InvalidArgument(
                "max_steps must be set: train_dataset has no length, so the number of optimizer steps cannot be "
                "computed from num_train_epochs."
            )


def _is_of_lightning(callback: Any) -> bool:
    """Whether a callback is one of Lightning's, rather than one of the Trainer's own.

    Raises:
        InvalidArgument: for a logger.
    """
    if adapter().is_lightning_logger(callback):
        name = (callback if isinstance(callback, type) else type(callback)).__name__
        raise InvalidArgument(f"{name} is a Lightning logger, not a callback: pass it as Trainer(loggers=[...]).")
    return bool(adapter().is_lightning_callback(callback))


def one_processing_class(processing_class: Any, tokenizer: Any) -> Any:
    """The processing class, which may be given by its old name `tokenizer` (until v5.0)."""
    if tokenizer is None:
        return processing_class
    if processing_class is not None and processing_class is not tokenizer:
        raise InvalidArgument(
            "tokenizer and processing_class differ, but mean the same argument: pass only processing_class."
        )
    warnings.warn("Trainer(tokenizer=...) is now Trainer(processing_class=...)", FutureWarning, stacklevel=3)
    return tokenizer


def check_objects(args: Any, model: Any, processing_class: Any) -> None:
    """Refuse objects that scripts often pass by mistake as training arguments, model or tokenizer.

    Raises:
        WrongObject: for a class, a string or a dict in place of one of them.
    """
    if isinstance(args, type):
        raise WrongObject(f"args is the class {args.__name__}: pass an object, {args.__name__}('folder', ...).")
    if isinstance(args, (str, os.PathLike, Mapping)):
        how = "**args" if isinstance(args, Mapping) else repr(str(args))
        raise WrongObject(f"args is a {type(args).__name__}: pass TrainingArguments({how}).")
    if isinstance(args, nn.Module):
        raise WrongObject(f"args is a model, {type(args).__name__}: pass the model first, as Trainer(model, args).")
    if not isinstance(args, (TrainingArguments, type(None))) and not hasattr(args, "should_log"):
        raise WrongObject(f"args is a {_full_name(args)}: pass TrainingArguments('folder', ...).")
    if isinstance(model, type):
        raise WrongObject(f"model is the class {model.__name__}: pass a model, or the class as model_init.")
    if isinstance(model, str):
        raise WrongObject(f"model={model!r}: load it first, as with AutoModel.from_pretrained({model!r}).")
    if model is not None and not hasattr(model, "children"):
        raise WrongObject(f"model is a {_full_name(model)}: pass a torch.nn.Module.")
    if isinstance(processing_class, str):
        how = f"AutoTokenizer.from_pretrained({processing_class!r})"
        raise WrongObject(f"processing_class={processing_class!r}: load it first, as with {how}.")


def _full_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _warn_of_ignored(args: TrainingArguments, optimizer: Any) -> None:
    """Log a warning about optimizer arguments that differ from the settings of the script's own optimizer."""
    for name, key in (("learning_rate", "lr"), ("weight_decay", "weight_decay")):
        value = changed_arguments(args, [name]).get(name)
        groups = [group for group in getattr(optimizer, "param_groups", ()) if key in group]
        held = {float(group.get(f"initial_{key}", group[key])) for group in groups}
        if value is not None and value not in held:
            logger.warning(
                "%s=%s has no effect: optimizers passes an optimizer, which has %s.", name, value, sorted(held)
            )


def _run_dir(trainer: Trainer, run: Run) -> str:
    """The folder of the current run's checkpoints."""
    return trainer._get_output_dir(run.trial)


def check_consistency(args: Any, processes: Processes) -> None:
    """Compare the arguments of all ranks (a collective call). Fields of a subclass may differ.

    Raises:
        InvalidArgument: on every rank, with each argument that differs and the ranks that have each value.
    """
    if not processes.several:
        return
    compared = Seq2SeqTrainingArguments.__dataclass_fields__.keys() - PER_RANK
    texts = {}
    for name in [field.name for field in dataclasses.fields(args) if field.name in compared]:
        value = getattr(args, name)
        text = repr(value.value if isinstance(value, enum.Enum) else value)
        texts[name] = re.sub(r" at 0x[0-9a-f]+", "", text)  # processes have objects at different addresses
    of_all: list[dict[str, str]] = processes.gather_objects([texts])
    found = []
    for name in texts:
        ranks: dict[str, list[str]] = {}
        for rank, values in enumerate(of_all):
            ranks.setdefault(values.get(name, "nothing"), []).append(str(rank))
        if len(ranks) > 1:
            differing = "; ".join(f"{value} in rank {', '.join(having)}" for value, having in ranks.items())
            found.append(f"{name} is {differing}.")
    if found:
        raise InvalidArgument("\n".join(["The arguments differ between ranks; they must be the same on all:", *found]))
