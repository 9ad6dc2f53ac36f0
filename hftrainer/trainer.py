"""`Trainer`: the documented API in one place. Each method is short; the work is in the modules it delegates to."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import logging
import math
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from hftrainer import devices, hyperparameter_search, integrations, model_inspection, peers, trainer_optimizer
from hftrainer.agreement import check_agreement
from hftrainer.arguments import legacy
from hftrainer.arguments.accelerator_config import AcceleratorConfig
from hftrainer.arguments.validation import problems, wrong_accelerator_config
from hftrainer.checkpointing import names, resume, staging, xla_parts
from hftrainer.checkpointing.folders import complete_rotation, keep_only, rotate_checkpoints
from hftrainer.checkpointing.lightning_file import unpack
from hftrainer.checkpointing.manifest import damage
from hftrainer.checkpointing.progress import RunProgress, as_dict, load_progress, position_settings, save_progress
from hftrainer.checkpointing.rng import load_rng_state, rng_state, save_rng_state
from hftrainer.checkpointing.sharded import ShardedStates
from hftrainer.checkpointing.weights import load_sharded_weights, load_weights, save_configs, save_weights
from hftrainer.checkpointing.writer import CheckpointWriter
from hftrainer.data import columns
from hftrainer.data.collators import DataCollatorWithPadding, default_data_collator
from hftrainer.data.dispatch import Messenger
from hftrainer.data.loaders import PreparedDataLoader, to_device
from hftrainer.data.samplers import LengthGroupedSampler
from hftrainer.data.sharding import Share
from hftrainer.data.tokens import count_tokens
from hftrainer.debug_utils import DebugUnderflowOverflow
from hftrainer.deepspeed import PartitionedStates, to_floating_type
from hftrainer.deepspeed import begin as begin_deepspeed
from hftrainer.deepspeed import check_given as check_deepspeed
from hftrainer.deepspeed import initialize as initialize_deepspeed
from hftrainer.deepspeed import prepare_for_evaluation as prepare_deepspeed_for_evaluation
from hftrainer.errors import HubError, InvalidArgument, MetricNotFound, UnsupportedArgument
from hftrainer.evaluation.evaluation_pass import EvaluationPass
from hftrainer.evaluation.metrics import TorchMetrics, as_metrics
from hftrainer.hub.references import card_parameters, is_reference
from hftrainer.interruption import Interruption
from hftrainer.layer_wise import LayerWiseDummyOptimizer
from hftrainer.logged_metrics import LoggedMetrics, split_losses
from hftrainer.loss import check_loss, first_output, outputs_without
from hftrainer.memory import TrainerMemoryTracker
from hftrainer.model_changes import changed_for_training, set_tf32
from hftrainer.modelcard import create_model_card
from hftrainer.optimization import follows_metric, get_scheduler
from hftrainer.out_of_memory import StartingPoint, is_out_of_memory
from hftrainer.overrides import accepts, call_with_accepted, is_overridden, with_accepted
from hftrainer.progress import own_progress
from hftrainer.reporting import comparable_names, mean_loss, print_table, write_metrics
from hftrainer.schedule import TrainingSchedule, place_of, plan_schedule
from hftrainer.search.backend import SearchBackend
from hftrainer.search.jobs import refuse_in_worker
from hftrainer.trainer_callback import (
    CallbackHandler,
    DefaultFlowCallback,
    TrainerControl,
    TrainerState,
    evaluation_key,
    export_states,
    is_exportable,
    make_callback,
    pop_from,
)
from hftrainer.trainer_pt_utils import LabelSmoother, metrics_format, nested_detach
from hftrainer.trainer_utils import (
    BestRun,
    EvalLoopOutput,
    HPSearchBackend,
    HubStrategy,
    IntervalStrategy,
    PredictionOutput,
    SaveStrategy,
    TrainOutput,
    enable_full_determinism,
    has_length,
    number_of_arguments,
    seed_worker,
    set_seed,
    speed_metrics,
)
from hftrainer.training_args import TrainingArguments, without_tokens
from hftrainer.training_loop import TrainingLoop
from hftrainer.tuning import find_batch_size, find_learning_rate

if TYPE_CHECKING:
    from hftrainer.hub.uploads import Uploads

logger = logging.getLogger(__name__)


class Trainer:
    """Trains, evaluates and predicts with a model, as `transformers.Trainer` does, on PyTorch Lightning.

    Args:
        model: a transformers model, a PEFT model, or any `nn.Module` whose `forward` takes the batch's keys as
            keywords and returns the loss first (a tuple) or under 'loss' (a mapping).
        args: the settings; by default those of `TrainingArguments("tmp_trainer")`.
        data_collator: makes a batch of a list of samples. Default: `DataCollatorWithPadding` with a tokenizer or
            sequence feature extractor as `processing_class`, else `default_data_collator`.
        train_dataset: map-style, iterable, or `datasets.Dataset`.
        eval_dataset: likewise, or a dict of them: each is then evaluated, its name in its metrics' names.
        processing_class: tokenizer or processor, saved with the model (named `tokenizer` before v4.46).
        model_init: makes the model, given a hyperparameter trial or nothing; called anew by each `train()`.
        compute_loss_func: `(outputs, labels, num_items_in_batch=...)` → loss; gets the labels instead of the model.
        compute_metrics: `EvalPrediction` → dict of metrics; or a torchmetrics `Metric`, a `MetricCollection`, a dict of
            these, or `TorchMetrics` around them, updated batch by batch on the device.
        callbacks: Trainer callbacks and Lightning callbacks, as classes or instances.
        optimizers: `(optimizer, scheduler)`, either None.
        optimizer_cls_and_kwargs: `(class, keywords)`; overrides `args.optim`.
        preprocess_logits_for_metrics: `(logits, labels)` → what to keep of the logits, batch by batch.
        loggers: Lightning loggers, besides those that `report_to` names; they get the hyperparameters once, and each
            log line under names such as `train/loss`, at the optimizer step.

    Attributes:
        model: the user's model.
        model_wrapped: the outermost module around it, if any wraps it.
        is_in_train: whether `train()` is running.
        counts_last_batch_by_size: whether evaluation weighs the loss of a ragged last batch by its true size.
        loss_is_scaled_for_ga: set it in a subclass to say whether its loss is already scaled for accumulation.
        hp_study: the study of the last hyperparameter search.
        hub_model_id: the repository that is uploaded to, once there is one; in the main process.

    Raises:
        InvalidArgument: for arguments that contradict each other.
        UnsupportedArgument: for settings that cannot be honoured, all in one error.
        MissingPackage: for a tracker whose package is not installed.
        HubError: with push_to_hub, when its repository cannot be written to.
    """

    loss_is_scaled_for_ga: bool | None = None
    model_preparation_time: float  # seconds; there once an evaluation without training has measured it
    counts_last_batch_by_size = True
    hp_space: Callable[[Any], dict[str, Any]]
    compute_objective: Callable[[dict[str, float]], Any]

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        compute_loss_func: Callable[..., torch.Tensor] | None = None,
        compute_metrics: Callable[[Any], Mapping[str, Any]] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        *,
        tokenizer: Any = None,
        loggers: list[Any] | None = None,
    ) -> None:
        self.args = args if args is not None else TrainingArguments("tmp_trainer")
        self._memory_tracker = TrainerMemoryTracker(self.args.skip_memory_metrics)
        self._memory_tracker.start()
        self._set_log_level()
        set_tf32(self.args.tf32)
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.processing_class = _processing_class(processing_class, tokenizer)
        self.model_init = model_init
        self.compute_loss_func = compute_loss_func
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer, self.lr_scheduler = optimizers
        self._optimizers_given = optimizers
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self.data_collator = data_collator if data_collator is not None else self._default_collator()
        if (model is None) == (model_init is None):
            given = "neither" if model is None else "both"
            raise InvalidArgument(f"Trainer needs either a model or a model_init, and got {given}.")
        self._validate_args()
        reports = integrations.chosen(self.args.report_to)
        trackers = integrations.make_trackers(reports, loggers, self.args)
        self._trackers: list[Any] = []
        self._lightning_callbacks: list[Any] = []
        self.model: nn.Module = model  # type: ignore[assignment]  # None until model_init is called
        self.create_accelerator_and_postprocess()
        self._seed_everything()  # not before: libraries of the engine draw random numbers when they are imported
        self._set_model(model if model is not None else self.call_model_init())
        self._init_bookkeeping()
        if not isinstance(callbacks, (list, tuple, type(None))):
            raise TypeError(f"callbacks={callbacks!r}: give a list of callbacks.")
        self._init_callbacks([*integrations.callbacks_of_transformers(reports), *(callbacks or [])], trackers)
        if self.args.push_to_hub:
            self.accelerator.processes.from_main(self.init_hf_repo)
        if self.args.should_save:
            os.makedirs(str(self.args.output_dir), exist_ok=True)
        self._announce("on_init_end")
        config: Any = getattr(self.model, "config", None)
        if config is not None:
            config.use_cache = self.args.use_cache
        self._memory_tracker.stop_and_update_metrics()

    # ---- Construction ------------------------------------------------------------------------------------------

    def _seed_everything(self) -> None:
        if self.args.full_determinism:
            enable_full_determinism(self.args.seed)
        else:
            set_seed(self.args.seed)
        self._engine.seed(self.args.seed)

    def _set_log_level(self) -> None:
        """Set the level that the arguments ask for; 'passive' leaves all as it is."""
        if (self.args.log_level if self.args.should_log else self.args.log_level_replica) != "passive":
            level = self.args.get_process_log_level()
            logging.getLogger("hftrainer").setLevel(level)
            peers.set_verbosity(level)

    def _default_collator(self) -> Callable[[list[Any]], Any]:
        if peers.pads(self.processing_class):
            return DataCollatorWithPadding(self.processing_class)
        return default_data_collator

    def _validate_args(self) -> None:
        """Refuse what cannot work before anything is built; arguments may have been changed since they were made."""
        args = self.args
        if found := problems(args) if isinstance(args, TrainingArguments) else list(wrong_accelerator_config(args)):
            raise InvalidArgument("\n".join(found))
        if args.eval_strategy != "no" and self.eval_dataset is None:
            raise InvalidArgument(
                f"eval_strategy={str(args.eval_strategy)!r} needs an eval_dataset: pass one, or set it to 'no'."
            )
        chosen = {"optimizers": self.optimizer, "optimizer_cls_and_kwargs": self.optimizer_cls_and_kwargs}
        default = TrainingArguments.__dataclass_fields__["optim"].default
        for name, given in chosen.items():
            if given is not None and str(args.optim) not in (default, "adamw_torch"):
                raise InvalidArgument(
                    f"optim={str(args.optim)!r} and {name} both choose the optimizer: give one of them."
                )
        if self.optimizer is not None and self.optimizer_cls_and_kwargs is not None:
            raise InvalidArgument("optimizers and optimizer_cls_and_kwargs both choose the optimizer: pass one.")
        if self.model_init is not None and (self.optimizer is not None or self.lr_scheduler is not None):
            raise InvalidArgument(
                "optimizers would hold the parameters of a model that model_init replaces: pass "
                "optimizer_cls_and_kwargs, or override create_optimizer_and_scheduler."
            )
        as_metrics(self.compute_metrics, by_batch=args.batch_eval_metrics)
        if (folder := getattr(args, "eval_memmap_dir", None)) is not None:
            if not os.path.isdir(folder):
                raise InvalidArgument(f"eval_memmap_dir={folder!r} is no folder: make it, or give another.")
            if not args.eval_do_concat_batches:
                raise InvalidArgument(
                    "eval_memmap_dir keeps one file for all batches, and eval_do_concat_batches=False wants one each: "
                    "give one of them."
                )
        if not callable(self.data_collator):
            raise InvalidArgument(f"data_collator must be callable, got {type(self.data_collator).__name__}.")
        if self.train_dataset is not None and not has_length(self.train_dataset) and args.max_steps <= 0:
            raise InvalidArgument(
                "max_steps must be set: train_dataset has no length, so the number of optimizer steps cannot be worked "
                "out from num_train_epochs."
            )

    def create_accelerator_and_postprocess(self) -> None:
        """Build the engine from the arguments, and `self.accelerator` over it."""
        from hftrainer_lightning.arguments import make_plan, overridden, place_of, unsupported

        found = unsupported(self.args, self.model, own_optimizer=self.optimizer is not None)
        if found:
            raise UnsupportedArgument("\n".join(found))
        for sentence in overridden(self.args):
            logger.warning(sentence)
        self._accelerator_config = AcceleratorConfig.read(self.args.accelerator_config)
        if self._accelerator_config.non_blocking and not self.args.dataloader_pin_memory:
            logger.warning(
                "accelerator_config['non_blocking']=True changes nothing with dataloader_pin_memory=False: only from "
                "page-locked memory do batches move beside the computation."
            )
        from hftrainer_lightning.accelerator import EngineAccelerator
        from hftrainer_lightning.engine import LightningEngine
        from hftrainer_lightning.launching import start_others

        start_others(place_of(self.args), self.args.ddp_timeout)
        plan = make_plan(self.args, self.model)
        self._checkpoint_writer = CheckpointWriter(
            in_background=plan.async_checkpoint,
            stop_on_error=plan.stop_on_save_error,
            on_host=lambda state: self._engine.on_host(state),
        )
        plan.processes.connect(
            self.args.device,
            plan.process_group_backend,
            self.args.ddp_timeout_delta,
            even_alone=plan.spreads_model and not plan.on_xla,
        )
        check_agreement(self.args, plan.processes)
        self._engine = LightningEngine(
            plan,
            self._lightning_callbacks,
            loggers=lambda: self.loggers,
            receive=lambda values: self._logged_metrics.set(values),
        )
        self.accelerator = EngineAccelerator(
            self._engine,
            self.args.device,
            plan,
            self._prepare_loader,
            is_own=lambda model: model is self.model or model is self.model_wrapped,
        )
        self.is_deepspeed_enabled = plan.deepspeed is not None
        self.is_fsdp_xla_enabled = plan.on_xla and plan.sharding is not None
        self.is_fsdp_xla_v2_enabled = plan.by_spmd
        self.is_fsdp_xla_v1_enabled = self.is_fsdp_xla_enabled and not plan.by_spmd
        self.is_fsdp_enabled = plan.sharding is not None and not plan.on_xla
        self._sharded_states = self._make_sharded_states(plan)
        self.deepspeed: Any = None

    def _make_sharded_states(self, plan: Any) -> Any:
        """What gathers the states of a sharded model for checkpoints; None when nothing needs to be gathered."""
        if not plan.spreads_model:
            return None
        if self._engine.deepspeed is not None:
            check_deepspeed(self._engine.deepspeed, *self._optimizers_given)
            return PartitionedStates(self._engine.deepspeed)
        if plan.on_xla:
            return xla_parts.XlaParts(plan.processes, self._engine.on_host, self._engine.whole_weights)
        return ShardedStates(self.accelerator.state.fsdp_plugin)

    def _set_model(self, model: nn.Module) -> None:
        self.place_model_on_device = self.args.place_model_on_device is not False and self._sharded_states is None
        if (misfit := self._engine.misfit(model)) is not None:
            raise InvalidArgument(misfit)
        self.is_model_parallel = len({d for d in getattr(model, "hf_device_map", {}).values() if d != "cpu"}) > 1
        self.model = self.model_wrapped = model
        if self.place_model_on_device:
            self._refuse_disconnected(model)
            self._move_model_to_device(model, self.args.device)
        self.model_accepts_loss_kwargs = model_inspection.accepts_loss_kwargs(model)
        self._loss_shifts_labels = model_inspection.shifts_labels(model)
        inspected = type(peers.without_adapters(model))
        found = model_inspection.find_labels(inspected)
        self.label_names = found if self.args.label_names is None else self.args.label_names
        self.can_return_loss = model_inspection.can_return_loss(inspected)
        self._signature_columns: list[str] | None = None
        self.label_smoother = self._make_label_smoother()

    def _refuse_disconnected(self, model: nn.Module) -> None:
        """Refuse an optimizer whose parameters the model would leave behind: on XLA devices it gets new ones."""
        if self.optimizer is None or self.args.device.type != "xla":
            return
        if any(
            parameter.device.type != "xla" for group in self.optimizer.param_groups for parameter in group["params"]
        ):
            raise InvalidArgument(
                "optimizers holds parameters on the CPU, and a model that moves to an XLA device gets new ones: move "
                "it with model.to(args.device) before the optimizer is made, or pass optimizer_cls_and_kwargs."
            )

    def _make_label_smoother(self) -> LabelSmoother | None:
        if self.args.label_smoothing_factor == 0:
            return None
        if getattr(getattr(self.model, "config", None), "problem_type", None) == "multi_label_classification":
            warnings.warn(
                "label_smoothing_factor is for one label a sample and is left out: this model has several.",
                stacklevel=4,
            )
            return None
        return LabelSmoother(epsilon=self.args.label_smoothing_factor)

    def _init_bookkeeping(self) -> None:
        self.is_in_train = False
        self.hp_name: Callable[[Any], str] | None = None
        self.hp_search_backend: HPSearchBackend | None = None
        self.hp_study: Any = None
        self.objective: Any = None
        self._search: SearchBackend | None = None
        self._searched_arguments: dict[str, Any] | None = None
        self._args_have_changed = False
        self._trial: Any = None
        self.current_flos = 0.0
        self._created_lr_scheduler = False
        self._total_loss_scalar = 0.0
        self._globalstep_last_logged = 0
        self._with_all_columns: tuple[Any, Any] = None, None
        self._preparation_measured = False
        self._logged_metrics = LoggedMetrics()
        self._past = None
        self._loop: TrainingLoop | None = None
        self._checkpoints_written: list[str] = []
        self._flos_per_token: tuple[Any, int] | None = None
        self._initial_num_input_tokens_seen = self._tokens_in_run = 0
        self._interruption = Interruption(saves=False)
        self._last_saved_step = 0
        self._resumed_from: str | None = None
        self._prepares_training_data = False
        self.hub_model_id: str | None = None
        self.push_in_progress: Any = None
        self._uploads: Uploads | None = None
        self._follow_arguments()

    def _follow_arguments(self) -> None:
        """Set what is kept of the arguments; a hyperparameter trial changes them."""
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
        self._train_batch_size = self.args.train_batch_size
        self._past_index = legacy.value(self.args, "past_index")
        self._averages_tokens = self.args.average_tokens_across_devices and self.args.world_size > 1
        self._eval_dataloaders: dict[Any, Any] = {}

    def _init_callbacks(self, callbacks: list[Any], trackers: list[Any]) -> None:
        self.callback_handler = CallbackHandler(
            [DefaultFlowCallback], self.model, self.processing_class, self.optimizer, self.lr_scheduler
        )
        self._report_to(trackers)
        for callback in callbacks:
            self.add_callback(callback)
        if (progress := own_progress(self.args, self.callback_handler.callbacks)) is not None:
            self.add_callback(progress)
        self.control = TrainerControl()
        self.state = TrainerState(
            is_local_process_zero=self.is_local_process_zero(),
            is_world_process_zero=self.is_world_process_zero(),
            stateful_callbacks=self._stateful_callbacks(),
        )

    def _report_to(self, trackers: list[Any]) -> None:
        """Write to trackers, beside those that are written to already."""
        callbacks, kind = self.callback_handler.callbacks, integrations.ReportingCallback
        if trackers and not any(isinstance(callback, kind) for callback in callbacks):
            self.add_callback(
                kind(self._trackers, lambda folder: self.save_model(folder), lambda: self._get_output_dir(self._trial))
            )
        self._trackers += trackers

    def _stateful_callbacks(self) -> list[Any]:
        return [callback for callback in [*self.callback_handler.callbacks, self.control] if is_exportable(callback)]

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Move the model, unless it is spread over devices already."""
        if getattr(model, "hf_device_map", None) is not None:
            return
        if device.type == "xla":
            from hftrainer_lightning.xla import move_model

            move_model(model, device)
        else:
            model.to(device)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """A new model from `model_init`, given the trial if it takes an argument."""
        assert self.model_init is not None
        count = number_of_arguments(self.model_init)
        if count > 1:
            raise InvalidArgument(f"model_init must take no argument or one, the trial; it takes {count}.")
        model = self.model_init(trial) if count else self.model_init()
        if model is None:
            raise InvalidArgument("model_init returned None: it must return the model.")
        return model

    @property
    def tokenizer(self) -> Any:
        """Old name of `processing_class` (before v4.46)."""
        warnings.warn("Trainer.tokenizer is now Trainer.processing_class", FutureWarning, stacklevel=2)
        return self.processing_class

    @property
    def lightning_trainer(self) -> Any:
        """The `lightning.Trainer` of the last training or evaluation; None before the first."""
        return self._engine.trainer

    @property
    def lightning_module(self) -> Any:
        """The `LightningModule` around the model in the last training or evaluation; None before the first."""
        return self._engine.module

    @property
    def loggers(self) -> list[Any]:
        """The Lightning loggers that this process writes to, of `report_to` and `loggers`; this opens their runs."""
        return [tracker.logger for tracker in self._trackers]

    # ---- Callbacks ---------------------------------------------------------------------------------------------

    def _callbacks_like(self, callback: Any) -> Any:
        """The list that `callback` belongs to: Lightning's, or the handler of the Trainer's own."""
        from hftrainer_lightning.callbacks import is_lightning_callback
        from hftrainer_lightning.loggers import is_lightning_logger

        if is_lightning_logger(callback):
            name = (callback if isinstance(callback, type) else type(callback)).__name__
            raise InvalidArgument(f"{name} is a Lightning logger, no callback: pass it as Trainer(loggers=[...]).")
        return self._lightning_callbacks if is_lightning_callback(callback) else self.callback_handler

    def add_callback(self, callback: Any) -> None:
        """Add a Trainer callback or a Lightning callback, given as a class or as an instance.

        A progress bar of Lightning takes the place of the Trainer's own, whichever came first.
        """
        from hftrainer_lightning.callbacks import has_progress_bar

        target = self._callbacks_like(callback)
        if target is self._lightning_callbacks:
            target.append(make_callback(callback))
        else:
            target.add_callback(callback)
        if has_progress_bar(self._lightning_callbacks) and self.callback_handler.drop_bars():
            logger.warning(
                "Lightning's progress bar takes the place of the Trainer's own. Its log lines are in "
                "state.log_history; disable_tqdm=True prints them too."
            )

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, by class or instance, and return it; None when there is none."""
        target = self._callbacks_like(callback)
        popped = pop_from(target if target is self._lightning_callbacks else target.callbacks, callback)
        return popped if popped is not None else integrations.pop_tracker(self._trackers, callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, by class or instance."""
        self.pop_callback(callback)

    def _announce(self, event: str, **kwargs: Any) -> None:
        self.control = self.callback_handler.call_event(event, self.args, self.state, self.control, **kwargs)

    # ---- Data --------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader:
        """The training loader: batches in the order of `_get_train_sampler`, on the device."""
        if self.train_dataset is None:
            raise InvalidArgument("Training needs a train_dataset: pass one to Trainer.")
        return self._get_dataloader(
            self.train_dataset, "training", self._train_batch_size, self._get_train_sampler, is_training=True
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """The evaluation loader.

        Args:
            eval_dataset: a dataset, or the name of one in the dict given to Trainer; None is Trainer's own.
        """
        if eval_dataset is None and self.eval_dataset is None:
            raise InvalidArgument("Evaluation needs an eval_dataset: pass one to Trainer or to evaluate().")
        key = eval_dataset if eval_dataset is None or isinstance(eval_dataset, str) else ...
        if key in self._eval_dataloaders:
            return self._eval_dataloaders[key]
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        dataset = eval_dataset if eval_dataset is not None else self.eval_dataset
        loader = self._get_dataloader(dataset, "evaluation", self.args.eval_batch_size, self._get_eval_sampler)
        if self.args.dataloader_persistent_workers and key is not ...:
            self._eval_dataloaders[key] = loader  # or each evaluation would start workers that stay
            progress = None if self._loop is None else self._loop.progress
            if progress is not None and key in progress.evaluation_workers and isinstance(loader, PreparedDataLoader):
                loader.spare_seed()
        return loader

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """The loader for `predict`: in the order of the dataset, unless a subclass has its own `_get_eval_sampler`."""
        own = is_overridden(self, "_get_eval_sampler", Trainer)
        sampler = self._get_eval_sampler if own else lambda data: SequentialSampler(data) if has_length(data) else None
        return self._get_dataloader(test_dataset, "test", self.args.eval_batch_size, sampler)

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[..., Sampler | None] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> DataLoader:
        collator, given = self.data_collator, dataset
        if peers.is_dataset(dataset):
            dataset = self._remove_unused_columns(dataset, description)
        else:
            collator = self._get_collator_with_removed_columns(collator, description)
        args = self.args
        settings: dict[str, Any] = {
            "batch_size": batch_size,
            "collate_fn": collator,
            "num_workers": args.dataloader_num_workers,
            "pin_memory": args.dataloader_pin_memory and args.device.type not in devices.UNPINNED,
            "persistent_workers": args.dataloader_persistent_workers,
            "multiprocessing_context": args.dataloader_multiprocessing_context,
            "prefetch_factor": args.dataloader_prefetch_factor,
            "in_order": args.dataloader_in_order,
        }
        if not isinstance(dataset, IterableDataset):
            self._with_all_columns = dataset, given  # samplers may need what the model does not
            settings["sampler"] = _call_sampler(sampler_fn, dataset)
            settings["drop_last"] = args.dataloader_drop_last
            if is_training:
                settings["worker_init_fn"] = functools.partial(
                    seed_worker,
                    num_workers=args.dataloader_num_workers,
                    rank=self.accelerator.processes.data_rank,
                )
        with self._preparing_training_data() if is_training else contextlib.nullcontext():
            return self.accelerator.prepare(DataLoader(dataset, **settings))

    @contextlib.contextmanager
    def _preparing_training_data(self) -> Iterator[None]:
        """Loaders that are prepared in the block are for training."""
        before, self._prepares_training_data = self._prepares_training_data, True
        try:
            yield
        finally:
            self._prepares_training_data = before

    def _prepare_loader(self, loader: DataLoader) -> PreparedDataLoader:
        if isinstance(loader, PreparedDataLoader):
            return loader
        processes, timeout = self.accelerator.processes, self.args.ddp_timeout_delta
        messenger = Messenger(
            processes.from_main,
            functools.partial(processes.scatter, timeout=timeout),
            functools.partial(processes.highest, timeout=timeout),
        )
        training = self._prepares_training_data
        dispatched = isinstance(loader.dataset, IterableDataset) or self._accelerator_config.dispatch_batches
        if training and dispatched and processes.tp_size > 1:
            raise UnsupportedArgument(
                "tp_size gives neighbouring processes the same batches, which streams and dispatch_batches do not: "
                "give a dataset with a length, without dispatch_batches."
            )
        return PreparedDataLoader.from_loader(
            loader,
            self.args.device,
            seed=self.args.data_seed,
            config=self._accelerator_config,
            share=Share(processes.data_rank, processes.data_processes),
            messenger=messenger if training else None,
        )

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler | None:
        """The order of the training samples; None leaves it to the dataset."""
        dataset = train_dataset if train_dataset is not None else self.train_dataset
        if dataset is None or not has_length(dataset):
            return None
        if self._groups_training_by_length():
            step = self._train_batch_size * self.args.gradient_accumulation_steps
            return self._length_grouped_sampler(dataset, step)
        return (
            SequentialSampler(dataset) if self.args.train_sampling_strategy == "sequential" else RandomSampler(dataset)
        )

    def _groups_training_by_length(self) -> bool:
        return self.args.train_sampling_strategy == "group_by_length"

    def _length_grouped_sampler(
        self, dataset: Any, batch_size: int, generator: torch.Generator | None = None
    ) -> LengthGroupedSampler:
        """Samples of similar length together; their lengths from `length_column_name`, or else counted once.

        Args:
            dataset: the samples.
            batch_size: samples that are used together.
            generator: draws the order.
        """
        column = self.args.length_column_name
        without_columns, source = self._with_all_columns
        source = source if without_columns is dataset else dataset
        known = peers.is_dataset(source) and column in source.column_names
        names = getattr(self.processing_class, "model_input_names", None)
        return LengthGroupedSampler(
            batch_size,
            dataset=dataset,
            lengths=source[column] if known else None,
            model_input_name=names[0] if names else None,
            generator=generator,
        )

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler | None:
        """The order of the evaluation samples, by length as in training if that is asked for; None: the dataset's."""
        if not has_length(eval_dataset):
            return None
        if self.args.train_sampling_strategy == "group_by_length":
            seed = self.args.data_seed if self.args.data_seed is not None else self.args.seed
            order = torch.Generator().manual_seed(seed)
            return self._length_grouped_sampler(eval_dataset, self.args.eval_batch_size, order)
        return SequentialSampler(eval_dataset)

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            self._signature_columns = columns.signature_columns(self._bare_model, self.label_names)

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """The dataset without the columns that the model does not take."""
        if not self.args.remove_unused_columns:
            return dataset
        self._set_signature_columns_if_needed()
        assert self._signature_columns is not None
        return columns.remove_unused_columns(dataset, self._signature_columns, description, type(self.model).__name__)

    def _get_collator_with_removed_columns(
        self, data_collator: Callable[[list[Any]], Any], description: str | None = None
    ) -> Callable[[list[Any]], Any]:
        """The collator, behind one that drops the keys that the model does not take."""
        if not self.args.remove_unused_columns:
            return data_collator
        self._set_signature_columns_if_needed()
        assert self._signature_columns is not None
        return columns.RemoveColumnsCollator(
            data_collator, self._signature_columns, type(self.model).__name__, description
        )

    def num_examples(self, dataloader: DataLoader) -> int:
        """Samples behind a loader; estimated from its batches when its dataset has no length."""
        dataset = (
            dataloader.source if isinstance(dataloader, PreparedDataLoader) else getattr(dataloader, "dataset", None)
        )
        if has_length(dataset):
            return len(dataset)  # type: ignore[arg-type]
        return len(dataloader) * self.args.per_device_train_batch_size

    @staticmethod
    def num_tokens(train_dl: DataLoader, max_steps: int | None = None) -> int:
        """Input tokens in a loader, or in its first batch times `max_steps`; reads the data."""
        tokens = 0
        for batch in train_dl:
            count = batch["input_ids"].numel()
            if max_steps is not None:
                return count * max_steps
            tokens += count
        return tokens

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The micro-batches of one optimizer step, and the number of items that its loss is averaged over."""
        samples = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        return samples, self._get_num_items_in_batch(samples, device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> torch.Tensor | None:
        """Labels that are not -100, over all micro-batches; None when nobody asks for it.

        Those of all processes with `average_tokens_across_devices`, but for an evaluation's, whose loss is a batch's.
        """
        counted = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        if not counted or not batch_samples or "labels" not in batch_samples[0]:
            return None
        labels = [self._counted_labels(batch) for batch in batch_samples]
        if not all(isinstance(each, torch.Tensor) for each in labels):
            return None  # detection models: labels are lists of dicts
        count = sum(each.ne(-100).sum() for each in labels).to(device)
        if self._averages_tokens:
            count = self._sum_over_data(count)
        return count / 1  # float32, as in transformers

    def _counted_labels(self, batch: Any) -> Any:
        if "shift_labels" in batch:
            return batch["shift_labels"]
        labels = batch["labels"]
        return labels[..., 1:] if self._loss_shifts_labels and isinstance(labels, torch.Tensor) else labels

    def _prepare_inputs(self, inputs: Any) -> Any:
        """The batch on the device."""
        if len(inputs) == 0:
            raise InvalidArgument(
                "The batch is empty: none of the samples' keys is an argument of the model's forward "
                f"({', '.join(self._signature_columns or [])})."
            )
        inputs = self._prepare_input(inputs)
        if self._past is not None:  # `past_index`, until v4.57
            inputs["mems"] = self._past
        return inputs

    def _prepare_input(self, data: Any) -> Any:
        moved = to_device(data, self.accelerator.device)
        return to_floating_type(moved, self.model) if self.is_deepspeed_enabled else moved

    # ---- Optimizer and scheduler -------------------------------------------------------------------------------

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Make both. Override this, or one of the two below, for your own.

        Args:
            num_training_steps: optimizer steps of the run.
        """
        self.create_optimizer()
        self.create_scheduler(num_training_steps=num_training_steps)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make the optimizer, unless there is one: weight decay on all but biases and normalization layers."""
        if self.optimizer is None:
            model = model if model is not None else self.model
            decayed = self.get_decay_parameter_names(model)
            groups = trainer_optimizer.parameter_groups(model, decayed, self.args.weight_decay)
            if self.optimizer_cls_and_kwargs is not None:
                kind, kwargs = self.optimizer_cls_and_kwargs[0], dict(self.optimizer_cls_and_kwargs[1])
            else:
                kind, kwargs = call_with_accepted(self.get_optimizer_cls_and_kwargs, self.args, model=model)
            if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):  # a factory, since v5.0
                self.optimizer = kind()(model, **kwargs)
                return self._made_optimizer()
            for name in ("params", "model", "optimizer_dict"):  # GaLore, LOMO and layer-wise ones bring their own
                groups = kwargs.pop(name, groups)
            self.optimizer = kind(groups, **kwargs)
            trainer_optimizer.keep_embeddings_precise(model, kind, kwargs)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Make the learning-rate scheduler, unless there is one.

        Args:
            num_training_steps: optimizer steps of the run.
            optimizer: whose learning rates to move; default the Trainer's.
        """
        if self.lr_scheduler is None:
            self.lr_scheduler = get_scheduler(
                self.args.lr_scheduler_type,
                optimizer if optimizer is not None else self.optimizer,  # type: ignore[arg-type]
                self.args.get_warmup_steps(num_training_steps),
                num_training_steps,
                self.args.lr_scheduler_kwargs,  # type: ignore[arg-type]
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: nn.Module | None = None) -> tuple[Any, Any]:
        """Class and keywords of the optimizer that the arguments name."""
        return trainer_optimizer.optimizer_cls_and_kwargs(args, model)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters that weight decay applies to."""
        if self.is_fsdp_xla_v1_enabled and xla_parts.is_sharded(model):
            return self._sharded_states.decay_parameter_names(model)
        return trainer_optimizer.decay_parameter_names(model)

    def get_num_trainable_parameters(self) -> int:
        """Numbers in the parameters that are trained."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def get_learning_rates(self) -> list[float]:
        """The learning rate of each parameter group."""
        return [group["lr"] for group in self._made_optimizer().param_groups]

    def get_optimizer_group(self, param: Any = None) -> Any:
        """The parameter group that holds `param`; without one, the parameters of each group."""
        groups = self._made_optimizer().param_groups
        if param is None:
            return [group["params"] for group in groups]
        return next((group for group in groups if any(param is held for held in group["params"])), None)

    def _made_optimizer(self) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise ValueError("There is no optimizer yet: call create_optimizer() or train() first.")
        return self.optimizer

    def _get_learning_rate(self) -> float:
        if follows_metric(self.lr_scheduler):
            rate = self._made_optimizer().param_groups[0]["lr"]
        else:
            rate = self.lr_scheduler.get_last_lr()[0]
        return rate.item() if isinstance(rate, torch.Tensor) else rate

    # ---- Training ----------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train.

        Args:
            resume_from_checkpoint: a checkpoint folder to go on from; True for the last whole one in `output_dir`; or a
                Lightning checkpoint of this Trainer, `x.ckpt`; or "hub:owner/name" or "hub:owner/name@revision" for the
                `last-checkpoint` of a repository on the Hub, or else its newest checkpoint-xxx.
            trial: a hyperparameter trial, or a dict of hyperparameters: given to `model_init`, and its values to the
                arguments.
            ignore_keys_for_eval: outputs of the model that evaluation leaves out.

        Returns:
            Optimizer steps done, mean training loss, and the final metrics.

        Raises:
            CheckpointNotFound: when there is nothing to resume from.
        """
        self._refuse_alone(resume_from_checkpoint)
        if str(resume_from_checkpoint).endswith(".ckpt"):
            with tempfile.TemporaryDirectory() as unpacked:
                return self.train(unpack(str(resume_from_checkpoint), unpacked), trial, ignore_keys_for_eval)
        self._memory_tracker.start()
        self._checkpoint_writer.settle()
        folder = self._find_folder(resume_from_checkpoint)
        if self.model_init is not None:
            self._seed_everything()
            self._set_model(self.call_model_init(trial))
            self.optimizer = self.lr_scheduler = None
        if peers.is_tokenizing(self.processing_class) and hasattr(self.model, "config"):
            model_inspection.align_special_tokens(self._bare_model, self.processing_class)
        self._hp_search_setup(trial)
        if refused := self._engine.refusals(
            finds_batch_size=self.args.auto_find_batch_size,
            evaluates=self.args.eval_strategy != "no",
            automatic_optimization=not is_overridden(self, "training_step", Trainer),
            knows_epochs=has_length(self.train_dataset),
        ):
            raise UnsupportedArgument("\n".join(refused))
        if folder is not None:
            if self._sharded_states is None:  # a sharded model loads its parts
                self._load_from_checkpoint(folder)
            if self.args.auto_find_batch_size or self._engine.finds_batch_size:
                state = TrainerState.load_from_json(os.path.join(folder, names.TRAINER_STATE_NAME))
                self._train_batch_size = state.train_batch_size or self._train_batch_size
        self._resumed_from = folder
        watcher = DebugUnderflowOverflow(self.model) if "underflow_overflow" in self.args.debug else None
        self.is_in_train = True
        self._interruption = Interruption(saves=self._saves_on_interrupt(), launched=self.args.world_size > 1)
        try:
            with changed_for_training(self._bare_model, self.args), self._interruption.listening():
                output = self._train_with_fitting_batches(folder, trial, ignore_keys_for_eval)
                if self._interruption.received is not None:  # after the last step: all is saved
                    self._interruption.leave()
                return output
        except BaseException as error:
            self._checkpoint_writer.settle()
            if self._uploads is not None and (self._search is None or not isinstance(error, Exception)):
                self._uploads.finish(hurried=lambda: True)  # in a search, the next trial goes on
            raise
        finally:
            self._past = self._loop = None
            self.is_in_train = False
            if watcher is not None:
                watcher.remove()

    def _refuse_alone(self, resume_from_checkpoint: str | bool | None) -> None:
        """Refuse what only one process can do."""
        if self._search is None:
            refuse_in_worker()
        if self.args.world_size == 1:
            return
        asked = {
            f"resume_from_checkpoint={str(resume_from_checkpoint)!r} holds the random states of one process: give a "
            "checkpoint folder": str(resume_from_checkpoint).endswith(".ckpt"),
            "auto_find_batch_size=True would start again in the one process whose memory ran out: set "
            "per_device_train_batch_size": self.args.auto_find_batch_size,
        }
        if found := [sentence for sentence, given in asked.items() if given]:
            raise UnsupportedArgument("\n".join(f"{sentence}, or train in one process." for sentence in found))

    def _find_folder(self, resume_from_checkpoint: str | bool | None) -> str | None:
        """The checkpoint that all processes go on from, once nothing half-written is left."""
        output_dir, processes = str(self.args.output_dir), self.accelerator.processes
        if self.args.should_save:
            staging.clear_stale(output_dir)
        processes.barrier()
        if not is_reference(resume_from_checkpoint):
            return processes.from_main(lambda: resume.find_folder(resume_from_checkpoint, output_dir))
        from hftrainer.hub.download import download_checkpoint

        with processes.in_turn(first=self.is_local_process_zero()):  # the others of a node find it in the cache
            folder = download_checkpoint(
                str(resume_from_checkpoint),
                self.args.hub_token,
                hub_model_id=self.args.hub_model_id,
                hub_revision=self.args.hub_revision,
            )
        processes.from_main(lambda: resume.find_folder(folder, output_dir))
        return folder

    def _train_with_fitting_batches(self, folder: str | None, trial: Any, ignore_keys: list[str] | None) -> TrainOutput:
        """Train; with `auto_find_batch_size`, from the start again with half the batch when memory runs out."""
        keywords: dict[str, Any] = {
            "resume_from_checkpoint": folder,
            "trial": trial,
            "ignore_keys_for_eval": ignore_keys,
        }
        if not self.args.auto_find_batch_size:
            return self._inner_training_loop(**keywords)
        if str(self.args.optim) in ("lomo", "adalomo"):
            raise InvalidArgument(
                f"optim={str(self.args.optim)!r} leaves hooks in the model that cannot be taken out to start again: "
                "set per_device_train_batch_size yourself instead of auto_find_batch_size."
            )
        given = self.optimizer, self.lr_scheduler
        start = StartingPoint(self.model, self.accelerator.scaler, *given)
        while True:
            try:
                return self._inner_training_loop(self._train_batch_size, **keywords)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if self._train_batch_size == 1:
                    raise RuntimeError("auto_find_batch_size: one sample does not fit into memory.") from error
            self._train_batch_size //= 2
            logger.warning("Memory ran out: starting again with %d samples in a batch.", self._train_batch_size)
            self._forget_attempt()
            self.optimizer, self.lr_scheduler = given
            start.restore()
            gc.collect()
            devices.empty_cache()

    def _forget_attempt(self) -> None:
        """Let go of everything that a failed run has made: its optimizer, its hooks and its checkpoints."""
        self._let_go()
        for folder in filter(os.path.isdir, self._checkpoints_written):  # rotation may have taken some
            shutil.rmtree(folder)

    def _let_go(self) -> None:
        """Let go of a run's optimizer and its hooks."""
        if isinstance(self.optimizer, LayerWiseDummyOptimizer):
            self.optimizer.remove_hooks()
        self._engine.trainer = self._engine.module = None
        self.optimizer = self.lr_scheduler = self.callback_handler.optimizer = self.callback_handler.lr_scheduler = None
        self._checkpoint_writer.settle()

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: TrainingArguments | None = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        self._logged_metrics = LoggedMetrics()
        self._checkpoints_written = []
        self.current_flos = 0.0
        if resume_from_checkpoint is None:
            find_batch_size(self)
        with self._preparing_training_data():  # overrides prepare loaders of their own
            train_dataloader = self.get_train_dataloader()
        schedule = self.set_initial_training_values(self.args, train_dataloader)
        progress = self._load_progress(resume_from_checkpoint, schedule)
        first_epoch, position = self._init_training_state(schedule, resume_from_checkpoint, trial, progress)
        self._prepare_optimizer(schedule.max_steps, resume_from_checkpoint)
        if resume_from_checkpoint is None:
            find_learning_rate(self, schedule.max_steps)
        handler = self.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = self.model, self.optimizer, self.lr_scheduler
        handler.train_dataloader = train_dataloader
        self._log_plan(schedule)
        self._warn_of_ragged_batches(schedule)
        self._loop = loop = TrainingLoop(
            self,
            schedule,
            train_dataloader,
            trial=trial,
            ignore_keys=ignore_keys_for_eval,
            resume_folder=resume_from_checkpoint,
            first_epoch=first_epoch,
            position=position,
            progress=progress,
        )
        if self.state.is_hyper_param_search:
            for tracker in self._trackers:
                tracker.start_trial(self.state.trial_name)
        self._total_loss_scalar = 0.0
        self._last_saved_step = self.state.global_step
        self._tokens_in_run = 0
        self._initial_num_input_tokens_seen = self.state.num_input_tokens_seen
        self._initial_global_step = self._globalstep_last_logged = self.state.global_step
        loop.resume_log()
        complete = resume_from_checkpoint is not None and self.state.global_step >= schedule.max_steps
        if first_epoch < schedule.num_train_epochs and not complete:
            with loop.details.watching(self.model), devices.hinted():
                self._engine.fit(
                    loop,
                    self.model,
                    self._made_optimizer(),
                    self.lr_scheduler,
                    max_epochs=schedule.num_train_epochs,
                    global_step=self.state.global_step,
                    log_every_n_steps=self._steps_between_logs(schedule),
                    resumed_from=resume.load_lightning_callbacks(resume_from_checkpoint),
                    automatic_optimization=not is_overridden(self, "training_step", Trainer),
                    find_unused_parameters=self._finds_unused_parameters(),
                    sync_each_batch=self._accelerator_config.sync_each_batch,
                )
        else:  # the checkpoint's run was complete
            loop.load_optimizer()
            loop.begin()
            if self.args.should_save:
                limit, best = self.args.save_total_limit, self.state.best_model_checkpoint
                complete_rotation(str(resume_from_checkpoint), self._get_output_dir(trial), limit, best)
        return self._finalize_training(loop)

    def _finds_unused_parameters(self) -> bool:
        """Whether processes look for parameters that a step has not used, unless an argument says it."""
        model: Any = self.model
        if not peers.is_pretrained(model):
            return True
        renamed = hasattr(model, "is_activation_checkpointing")  # in v5.23
        checkpoints = model.is_activation_checkpointing if renamed else model.is_gradient_checkpointing
        return not (checkpoints or self.args.activation_checkpointing)

    def _steps_between_logs(self, schedule: TrainingSchedule) -> int:
        """Optimizer steps after which Lightning's callbacks log: as often as the Trainer itself."""
        if self.args.logging_strategy == IntervalStrategy.EPOCH:
            return schedule.num_update_steps_per_epoch
        if self.args.logging_strategy == IntervalStrategy.NO:
            return sys.maxsize
        return max(1, int(self.state.logging_steps))

    def set_initial_training_values(self, args: TrainingArguments, dataloader: Any) -> TrainingSchedule:
        """How long the run is, from the arguments and the loader's length."""
        sized = has_length(dataloader)
        return plan_schedule(
            args,
            len(dataloader) if sized else None,
            self.num_examples(dataloader) if sized else None,
            self._train_batch_size,
            self._engine.accumulation_at,
            self.accelerator.processes.data_processes,
        )

    def _init_training_state(
        self,
        schedule: TrainingSchedule,
        resume_from_checkpoint: str | None,
        trial: Any,
        progress: RunProgress | None = None,
    ) -> tuple[int, int]:
        """A fresh state, or the checkpoint's. Returns epochs done, and micro-batches done in the next."""
        self.state = TrainerState(stateful_callbacks=self._stateful_callbacks())
        self.state.is_hyper_param_search = trial is not None
        self.state.train_batch_size = self._train_batch_size
        self.state.compute_steps(self.args, schedule.max_steps)
        first_epoch = position = 0
        if resume_from_checkpoint is not None:
            self.state = resume.load_state(resume_from_checkpoint, self.args)
            self._load_callback_state()
            known = None if progress is None else progress.place(schedule.steps_in_epoch)
            first_epoch, position = known or place_of(
                self.state.global_step, schedule.steps_in_epoch, self._engine.accumulation_at
            )
            position = 0 if self.args.ignore_data_skip else position
        if self.args.auto_find_batch_size:
            self.state.train_batch_size = self._train_batch_size
        self.state.max_steps = schedule.max_steps
        self.state.num_train_epochs = schedule.num_train_epochs
        self.state.is_local_process_zero = self.is_local_process_zero()
        self.state.is_world_process_zero = self.is_world_process_zero()
        self.state.trial_params = None if trial is None else dict(hyperparameter_search.hyperparameters(trial))
        if trial is not None and self.hp_name is not None:
            self.state.trial_name = self.hp_name(trial)
        return first_epoch, position

    def _load_progress(self, folder: str | None, schedule: TrainingSchedule) -> RunProgress | None:
        """What a checkpoint of ours tells besides the state; changed arguments are warned about."""
        if folder is None:
            return None
        progress = load_progress(folder, self.args.process_index, self.args.world_size)
        if progress is not None:
            processes = self.accelerator.processes.data_processes
            now = position_settings(self.args, schedule, self._train_batch_size, processes)
            progress.adapt(now, skips_data=not self.args.ignore_data_skip)
        return progress

    def _prepare_model(self, resume_from_checkpoint: str | None = None) -> None:
        """Shard the model, if that is asked for, before there is an optimizer; and load it then."""
        if self._sharded_states is None:
            self._engine.prepare(self.model)
            return
        per_token = self._count_flos_per_token(self.model)  # of the whole model
        if self.is_fsdp_xla_v1_enabled and not xla_parts.is_sharded(self.model):
            self._sharded_states.note_decay(self.get_decay_parameter_names(self.model))
        if resume_from_checkpoint is not None and self.is_fsdp_xla_v1_enabled:
            self._load_from_checkpoint(resume_from_checkpoint)
        self.model = self.model_wrapped = self._engine.prepare(self.model)
        self._flos_per_token = (self.model, per_token)
        if resume_from_checkpoint is not None and not self.is_fsdp_xla_v1_enabled:
            self._load_from_checkpoint(resume_from_checkpoint)

    @property
    def _bare_model(self) -> Any:
        """The user's own model, without what shards it."""
        return self.accelerator.unwrap_model(self.model)

    def _prepare_optimizer(self, max_steps: int, resume_from_checkpoint: str | None) -> None:
        if self._created_lr_scheduler:  # its shape belongs to the previous call's number of steps
            self.lr_scheduler = None
            self._created_lr_scheduler = False
        if self.is_deepspeed_enabled:
            initialize_deepspeed(self, Trainer, max_steps, resume_from_checkpoint)
            return
        self._prepare_model(resume_from_checkpoint)
        freezes = self._engine.freeze_before_training(self.model)
        self.create_optimizer_and_scheduler(num_training_steps=max_steps)
        if freezes and not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise UnsupportedArgument(
                "A callback that unfreezes by and by (BackboneFinetuning) has frozen all that is trained: with "
                "adapters, write a BaseFinetuning that freezes what you choose."
            )
        if freezes:  # groups of what is unfrozen later are given no weight_decay, and take torch's default
            self._made_optimizer().defaults["weight_decay"] = self.args.weight_decay
        self._load_scaler(resume_from_checkpoint)

    def _log_plan(self, schedule: TrainingSchedule) -> None:
        logger.info(
            "Training %d parameters on %d samples: %d optimizer steps of %d samples, in up to %d epochs of %d steps.",
            self.get_num_trainable_parameters(),
            schedule.num_examples,
            schedule.max_steps,
            schedule.total_train_batch_size,
            schedule.num_train_epochs,
            schedule.num_update_steps_per_epoch,
        )

    def _warn_of_ragged_batches(self, schedule: TrainingSchedule) -> None:
        """On XLA devices each shape of a batch is compiled by itself, which takes minutes for a large model."""
        if self.args.device.type != "xla" or self.args.dataloader_drop_last:
            return
        batch = self._train_batch_size * self.accelerator.processes.data_processes
        if has_length(self.train_dataset) and schedule.num_examples % batch:
            logger.warning(
                "%d samples leave a last batch that is smaller than %d: XLA compiles the step for it too. "
                "dataloader_drop_last=True leaves it out.",
                schedule.num_examples,
                batch,
            )

    def _finalize_training(self, loop: TrainingLoop) -> TrainOutput:
        """The last log line, the best model, and the end of the run."""
        steps = self.state.global_step - self._initial_global_step
        train_loss = (self._total_loss_scalar + loop.tr_loss.item()) / max(steps, 0.001)
        samples = loop.schedule.num_train_samples * steps / max(self.state.max_steps, 1)
        tokens = self._tokens_in_run if legacy.value(self.args, "include_tokens_per_second") else None
        metrics = speed_metrics("train", loop.start_time, num_samples=samples, num_steps=steps, num_tokens=tokens)
        self.store_flos()
        metrics["total_flos"] = self.state.total_flos
        metrics["train_loss"] = train_loss
        self._memory_tracker.stop_and_update_metrics(metrics)
        self.log(metrics)
        self._wait_for_checkpoint()
        self._checkpoint_writer.close()
        best = self.state.best_model_checkpoint
        if self.args.load_best_model_at_end and best is not None:
            reason = self.accelerator.processes.from_main(lambda: damage(best, only_weights=True))
            if reason is None:
                self._load_best_model()
            else:
                logger.error("The best model cannot be loaded, and the last one is kept: %s.", reason)
        if self.args.should_save and best is not None and self.args.save_total_limit == 1:
            keep_only(best, self._get_output_dir(loop.trial))
        self._announce("on_train_end")
        if self.args.push_to_hub:
            self.accelerator.processes.while_main_works(self._finish_current_push)
        return TrainOutput(self.state.global_step, train_loss, metrics)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Forward and backward of one micro-batch; returns the detached loss.

        Override it to run your own; it must run backward itself, by `self.accelerator.backward(loss)`. Training then
        uses Lightning's manual optimization.

        Args:
            model: the model to train.
            inputs: the batch.
            num_items_in_batch: items in all micro-batches of the optimizer step.
        """
        loss = self._training_loss(model, inputs, num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()

    def _training_loss(self, model: nn.Module, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        """The loss of one micro-batch, divided for accumulation unless it already is."""
        _set_training_mode(model)
        if callable(getattr(self.optimizer, "train", None)):  # schedule-free optimizers have modes too
            self.optimizer.train()  # type: ignore[union-attr]
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = call_with_accepted(self.compute_loss, model, inputs, num_items_in_batch=num_items_in_batch)
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            devices.empty_cache()
        loss, parts = split_losses(loss)
        loss = check_loss(loss)
        accumulation = self.current_gradient_accumulation_steps
        divisor = accumulation if accumulation > 1 and not self._loss_is_scaled(num_items_in_batch) else 1
        for name, part in parts.items():
            if part is not None:
                self._logged_metrics.add(name, part / divisor, count=0)
        return loss / divisor if divisor > 1 else loss

    def log_metric(self, name: str, value: Any) -> None:
        """Log the mean of a value over the training steps until the next log line; call it from anywhere in a step.

        What is given during an evaluation is left out: `compute_loss` runs there too.

        Args:
            name: its name in the log line.
            value: a number, or a tensor of shape `()`, which stays on its device until then.

        Raises:
            InvalidArgument: for a tensor of another shape.
        """
        self._logged_metrics.add(name, value)

    def _loss_is_scaled(self, num_items_in_batch: Any) -> bool:
        """Whether the loss was divided by the items of the whole window, rather than being a micro-batch's mean."""
        if self.loss_is_scaled_for_ga is not None:
            return self.loss_is_scaled_for_ga
        if not accepts(self.compute_loss, "num_items_in_batch"):
            return False  # an override from before v4.46 cannot know them
        return (self.model_accepts_loss_kwargs and num_items_in_batch is not None) or self.compute_loss_func is not None

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        """The loss of a batch: `compute_loss_func`'s, or the first of the model's outputs. Override it for your own.

        Args:
            model: the model.
            inputs: the batch; without its labels when `compute_loss_func` gets them.
            return_outputs: whether to return the model's outputs too.
            num_items_in_batch: items that the loss is to be averaged over, given to models that take it.

        Returns:
            The loss, or `(loss, outputs)`.
        """
        takes_labels = self.compute_loss_func is not None or self.label_smoother is not None
        labels = inputs.pop("labels", None) if takes_labels else None
        if self.model_accepts_loss_kwargs and num_items_in_batch is not None:
            inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        outputs = model(**inputs)
        if self._past_index >= 0:
            self._past = outputs[self._past_index]
        if self.compute_loss_func is not None:
            loss = self.compute_loss_func(outputs, labels, num_items_in_batch=num_items_in_batch)
        elif self.label_smoother is not None and labels is not None:
            shift = peers.is_causal_lm(peers.without_adapters(self.accelerator.unwrap_model(model)))
            loss = self.label_smoother(outputs, labels, shift_labels=shift, num_items_in_batch=num_items_in_batch)
        else:
            loss = first_output(outputs, inputs)
        takes_items = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        if self._averages_tokens and takes_items and num_items_in_batch is not None:
            loss = loss * self.accelerator.processes.data_processes  # what the mean of the gradients divides by
        return (loss, outputs) if return_outputs else loss

    def compute_loss_context_manager(self) -> contextlib.AbstractContextManager:
        """Context of `compute_loss`; autocast is around the model's forward already."""
        return contextlib.nullcontext()

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> contextlib.AbstractContextManager:
        """Context for your own computations beside the model's; nothing, as in v4.30 and later."""
        return contextlib.nullcontext()

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Clip the gradients to `max_grad_norm`, or only measure them when it is 0; returns the norm before."""
        if self.args.max_grad_norm > 0:
            return self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)
        if self._sharded_states is not None:  # each process has a part of the gradients
            return self.accelerator.clip_grad_norm_(model.parameters(), math.inf)
        return torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Floating-point operations of forward and backward on a batch: 6 per token and parameter; 0 if unknown."""
        model = self.model
        main_input = getattr(model, "main_input_name", "input_ids")
        return inputs[main_input].numel() * self._count_flos_per_token(model) if main_input in inputs else 0

    def _count_flos_per_token(self, model: Any) -> int:
        """Floating-point operations of forward and backward on a token; counted once for each model."""
        if self._flos_per_token is None or self._flos_per_token[0] is not model:
            count = model.num_parameters(exclude_embeddings=True) if hasattr(model, "num_parameters") else 0
            self._flos_per_token = (model, 6 * count)
        return self._flos_per_token[1]

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """Count the input tokens of a micro-batch, of all processes, for the arguments that ask for it."""
        if legacy.value(self.args, "include_tokens_per_second") and "input_ids" in inputs:
            self._tokens_in_run += inputs["input_ids"].numel() * self.accelerator.processes.data_processes
        how = str(self.args.include_num_input_tokens_seen)
        if how == "no":
            return
        main_input = getattr(self.model, "main_input_name", "input_ids")
        count = count_tokens(inputs, main_input, how, getattr(self.processing_class, "pad_token_id", None))
        if count is not None:
            self.state.num_input_tokens_seen += int(self._sum_over_data(count))

    def _sum_over_data(self, count: torch.Tensor) -> torch.Tensor:
        """The sum over all processes of what each has counted in its batches."""
        return self.accelerator.processes.gather(count.to(self.args.device), distinct=True).sum()

    def store_flos(self) -> None:
        """Add the operations counted since the last call to `state.total_flos`."""
        flos = self.current_flos
        if self.args.world_size > 1:  # in float32, as transformers adds them
            flos = self._sum_over_data(torch.tensor([flos])).item()
        self.state.total_flos += flos
        self.current_flos = 0.0

    def _maybe_log_save_evaluate(
        self,
        tr_loss: torch.Tensor,
        grad_norm: Any,
        model: nn.Module,
        trial: Any,
        epoch: float,
        ignore_keys_for_eval: list[str] | None,
        start_time: float | None = None,
        learning_rate: float | None = None,
    ) -> None:
        """Do what the callbacks have asked for at this point."""
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            self._log_training_loss(tr_loss, grad_norm, learning_rate, start_time)
            self._agree()
        if self.control.should_evaluate:
            metrics = self._evaluate(trial, ignore_keys_for_eval)
            is_new_best = self._determine_best_metric(metrics=metrics, trial=trial)
            if self.args.save_strategy == SaveStrategy.BEST:
                self.control.should_save = is_new_best
            self._agree()
        if self.control.should_save:
            self._save_checkpoint(model, trial)
            self._last_saved_step = self.state.global_step
            self._announce_save()
            self._agree()

    def _agree(self) -> None:
        """Let all processes do next what one of them is asked to."""
        if self._loop is not None:
            self._loop.agree()

    def _log_training_loss(
        self, tr_loss: torch.Tensor, grad_norm: Any, learning_rate: float | None, start_time: float | None
    ) -> None:
        steps = self.state.global_step - self._globalstep_last_logged
        of_all = self.accelerator.gather(tr_loss).mean() if self.args.world_size > 1 else tr_loss
        summed, further = self._logged_metrics.read(of_all, steps)
        tr_loss -= tr_loss  # not zero_(): a NaN that the filter let through stays, as in transformers
        self._engine.end_batch()
        logs: dict[str, float] = {"loss": summed / steps}
        if grad_norm is not None:
            logs["grad_norm"] = grad_norm.item() if isinstance(grad_norm, torch.Tensor) else grad_norm
        logs["learning_rate"] = learning_rate if learning_rate is not None else self._get_learning_rate()
        logs |= further
        self._total_loss_scalar += summed
        self._globalstep_last_logged = self.state.global_step
        self.store_flos()
        call_with_accepted(self.log, logs, start_time=start_time)

    # ---- Evaluation and prediction -----------------------------------------------------------------------------

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        """Evaluate within training; a scheduler that follows the metric steps on it."""
        if self._loop is not None:
            self._loop.owes_evaluation = True
        try:
            with self._engine.evaluation_group() as for_lightning:
                metrics = self.evaluate(ignore_keys=ignore_keys_for_eval)
                if isinstance(self.eval_dataset, Mapping):
                    metrics = mean_loss(metrics, self.eval_dataset, "eval") | metrics
                for_lightning |= metrics
        except Exception as error:
            if not (self.args.auto_find_batch_size and is_out_of_memory(error)):
                raise
            raise InvalidArgument(
                "The evaluation did not fit into memory, and auto_find_batch_size is about training batches: reduce "
                f"per_device_eval_batch_size={self.args.per_device_eval_batch_size}."
            ) from error
        if self._loop is not None:
            self._loop.owes_evaluation = False
        self._report_to_hp_search(trial, self.state.global_step, metrics)
        if follows_metric(self.lr_scheduler) and not skip_scheduler:
            self.lr_scheduler.step(self._metric(metrics, self.args.metric_for_best_model or "loss"))
        return metrics

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate, log the metrics and return them.

        Args:
            eval_dataset: a dataset, the name of one in Trainer's dict, or a dict of them; default Trainer's own.
            ignore_keys: outputs of the model that are left out of the predictions.
            metric_key_prefix: put before each metric's name, with an underscore. Outside training, one that begins
                with 'test' runs Lightning's test loop instead of its validation loop.

        Returns:
            The loss, the metrics of `compute_metrics`, and run time in seconds with samples and batches per second.
        """
        own = eval_dataset is None
        datasets = self.eval_dataset if own else eval_dataset
        if isinstance(datasets, Mapping):
            metrics: dict[str, float] = {}
            with self._engine.evaluation_group() as of_all:
                for name, dataset in datasets.items():
                    prefix = f"{metric_key_prefix}_{name}"
                    dataset = name if own else dataset
                    metrics |= self.evaluate(dataset, ignore_keys=ignore_keys, metric_key_prefix=prefix)
                of_all |= mean_loss(metrics, datasets, metric_key_prefix)
            return metrics
        self._memory_tracker.start()
        dataloader = self.get_eval_dataloader(eval_dataset)
        start_time = time.time()
        output = self._run_loop(
            dataloader,
            "Evaluation",
            prediction_loss_only=True if self.compute_metrics is None else None,
            ignore_keys=ignore_keys,
            metric_key_prefix=metric_key_prefix,
        )
        measured = self._with_speed(output, metric_key_prefix, start_time)
        self.log(measured)
        self._print_xla_metrics()
        self._announce("on_evaluate", metrics=measured)
        self._memory_tracker.stop_and_update_metrics(measured)
        return measured

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predict, and compute the metrics when there are labels.

        Args:
            test_dataset: the dataset.
            ignore_keys: outputs of the model that are left out.
            metric_key_prefix: put before each metric's name, with an underscore.

        Returns:
            Predictions and labels of shape `(samples, ...)`, padded on the right with -100, and the metrics.
        """
        self._memory_tracker.start()
        dataloader = self.get_test_dataloader(test_dataset)
        start_time = time.time()
        output = self._run_loop(dataloader, "Prediction", ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix)
        metrics = self._with_speed(output, metric_key_prefix, start_time)
        self._announce("on_predict", metrics=metrics)
        self._memory_tracker.stop_and_update_metrics(metrics)
        return PredictionOutput(output.predictions, output.label_ids, metrics)

    def _run_loop(self, dataloader: DataLoader, description: str, **settings: Any) -> EvalLoopOutput:
        """`evaluation_loop`, or `prediction_loop` where the arguments or a subclass of v4.4 and before ask for it."""
        loop: Callable[..., Any] = self.evaluation_loop
        own_old_loop = is_overridden(self, "prediction_loop", Trainer)
        if legacy.value(self.args, "use_legacy_prediction_loop") or (
            own_old_loop and not is_overridden(self, "evaluation_loop", Trainer)
        ):
            loop = self.prediction_loop
        output: Any = call_with_accepted(loop, dataloader, description, **settings)
        if isinstance(output, tuple) and len(output) == len(PredictionOutput._fields):  # as overrides of v4.4 return
            predictions, label_ids, metrics = output
            return EvalLoopOutput(predictions, label_ids, metrics, self.num_examples(dataloader))
        return cast("EvalLoopOutput", output)

    def _with_speed(self, output: EvalLoopOutput, prefix: str, start_time: float) -> dict[str, float]:
        metrics, samples = output.metrics or {}, output.num_samples or 0
        if self._preparation_measured:  # by this pass; later ones only report it
            start_time += metrics.get(f"{prefix}_model_preparation_time", 0)
            self._preparation_measured = False
        steps = math.ceil(samples / (self.args.eval_batch_size * self.accelerator.processes.data_processes))
        return metrics | speed_metrics(prefix, start_time, num_samples=samples, num_steps=steps)

    def prediction_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """The name of `evaluation_loop` until v4.4, asked for by `use_legacy_prediction_loop` until v4.57."""
        return self.evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """One pass over a loader, with or without labels, by one of Lightning's loops.

        Args:
            dataloader: the batches.
            description: 'Evaluation' or 'Prediction'; the latter runs Lightning's prediction loop, and returns the
                predictions even when the metrics are computed batch by batch.
            prediction_loss_only: keep no predictions; None asks the arguments.
            ignore_keys: outputs of the model that are left out.
            metric_key_prefix: put before each metric's name, with an underscore.
        """
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        self._prepare_for_evaluation(dataloader)
        predicting = description == "Prediction"
        step = with_accepted(self.prediction_step, "ignore_keys")

        def predict(inputs: Any) -> Any:
            return step(self.model, inputs, loss_only, ignore_keys=ignore_keys)

        evaluation = self._evaluation_pass(dataloader, predict, metric_key_prefix, predicting)
        stage = "predict" if predicting else "test" if metric_key_prefix.startswith("test") else "validate"
        kept = self._past, self._logged_metrics  # of training, where evaluation has no say
        self._past, self._logged_metrics = None, LoggedMetrics()
        try:
            with devices.hinted():
                self._engine.evaluate(evaluation, self.model, stage)  # type: ignore[arg-type]
        finally:
            self._past, self._logged_metrics = kept
            self._engine.end_batch()  # Lightning keeps the numbers that it is told on the device
        output, evaluation.output = evaluation.output, None
        if output is None or not evaluation.seen_batches:
            raise InvalidArgument(
                f"{description} found not one batch: the dataset is empty, or smaller than a batch with "
                "dataloader_drop_last, or lightning_config limits it to none."
            )
        if evaluation.preparation_time is not None:
            self._preparation_measured |= math.isnan(self.model_preparation_time)
            self.model_preparation_time = evaluation.preparation_time
        self._draw(evaluation.metrics, metric_key_prefix)
        return output

    def _prepare_for_evaluation(self, dataloader: DataLoader) -> None:
        """Model and optimizer in evaluation mode; the weights in half precision where the arguments ask for it."""
        if self.is_deepspeed_enabled:
            prepare_deepspeed_for_evaluation(self)
        else:
            self._prepare_model()
            if self._sharded_states is not None:
                self._sharded_states.share_buffers(self.model)
        if self._engine.trainer is None and not self.is_in_train:
            self.model_preparation_time = math.nan  # this evaluation measures it, and all later ones report it
        casts = self.args.fp16_full_eval or self.args.bf16_full_eval
        if casts and not self.is_in_train and self.deepspeed is None:  # whose weights are of that type already
            dtype = torch.float16 if self.args.fp16_full_eval else torch.bfloat16
            self.model.to(dtype=dtype, device=self.args.device)
        self.callback_handler.eval_dataloader = dataloader
        if callable(getattr(self.optimizer, "eval", None)):
            self.optimizer.eval()  # type: ignore[union-attr]
        self.model.eval()

    def _evaluation_pass(
        self, dataloader: DataLoader, predict: Callable[..., Any], prefix: str, predicting: bool
    ) -> EvaluationPass:
        """What Lightning's loop is to drive."""
        processes = self.accelerator.processes
        metrics = as_metrics(self.compute_metrics, by_batch=self.args.batch_eval_metrics)
        if isinstance(metrics, TorchMetrics) and processes.tp_size > 1:
            metrics.gather_by(processes.distinct_parts)
        return EvaluationPass(
            args=self.args,
            dataloader=dataloader,
            predict=predict,
            prepare_input=self._prepare_input,
            announce_batch=self._announce_prediction_step,
            num_examples=self.num_examples,
            main_input=getattr(self.model, "main_input_name", "input_ids"),
            metrics=metrics,
            preprocess_logits=self.preprocess_logits_for_metrics,
            end_batch=self._engine.end_batch,
            gather=functools.partial(processes.gather, objects=self.args.eval_use_gather_object, distinct=True),
            prefix=prefix,
            returns_predictions=predicting,
            counts_last_batch_by_size=self.counts_last_batch_by_size,
            preparation_time=getattr(self, "model_preparation_time", None),
        )

    def _announce_prediction_step(self) -> None:
        self._announce("on_prediction_step")
        self._interruption.check()

    def _draw(self, metrics: Any, prefix: str) -> None:
        if isinstance(metrics, TorchMetrics) and metrics.plot and self.is_world_process_zero():
            metrics.draw(os.path.join(str(self.args.output_dir), f"plots-{self.state.global_step}"), prefix)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Loss, logits and labels of one batch, each None where there is none. Override it for your own.

        Args:
            model: the model.
            inputs: the batch.
            prediction_loss_only: return the loss only.
            ignore_keys: outputs of the model that are left out; default those that its config names.
        """
        inputs = self._prepare_inputs(inputs)
        if ignore_keys is None:
            config = getattr(self.model, "config", None)
            default = ["past_key_values"] if config is not None else []
            ignore_keys = getattr(config, "keys_to_ignore_at_inference", default)
        has_labels = bool(self.label_names) and all(inputs.get(name) is not None for name in self.label_names)
        returns_loss = inputs.get("return_loss")
        returns_loss = self.can_return_loss if returns_loss is None else returns_loss
        labels = loss = None
        with torch.no_grad():
            if has_labels or (not self.label_names and returns_loss):
                labels = nested_detach(tuple(inputs.get(name) for name in self.label_names))
                labels = labels[0] if len(labels) == 1 else labels
                loss, outputs = self._loss_and_outputs(model, inputs, prediction_loss_only)
                logits = outputs_without(outputs, [*ignore_keys, "loss"], skip_first=True)
            else:
                with self.compute_loss_context_manager():
                    outputs = model(**inputs)
                logits = outputs_without(outputs, ignore_keys, skip_first=False)
                if self._past_index >= 0:
                    self._past = outputs[self._past_index - 1]
        if prediction_loss_only:
            return loss, None, None
        logits = nested_detach(logits)
        return loss, logits[0] if isinstance(logits, (tuple, list)) and len(logits) == 1 else logits, labels

    def _loss_and_outputs(self, model: nn.Module, inputs: Any, loss_only: bool) -> tuple[torch.Tensor, Any]:
        averages, self._averages_tokens = self._averages_tokens, False
        try:
            return self._own_loss_and_outputs(model, inputs, loss_only)
        finally:
            self._averages_tokens = averages

    def _own_loss_and_outputs(self, model: nn.Module, inputs: Any, loss_only: bool) -> tuple[torch.Tensor, Any]:
        num_items = self._get_num_items_in_batch([inputs], self.args.device)
        with self.compute_loss_context_manager():
            if accepts(self.compute_loss, "return_outputs"):
                loss, outputs = call_with_accepted(
                    self.compute_loss, model, inputs, return_outputs=True, num_items_in_batch=num_items
                )
            else:  # an override of v4.1: its loss, and the outputs by a pass of their own
                outputs = () if loss_only else model(**inputs)
                loss = call_with_accepted(self.compute_loss, model, inputs, num_items_in_batch=num_items)
        return split_losses(loss)[0].detach().mean(), outputs

    # ---- Saving and loading ------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write weights, config, processing class and arguments, so that `from_pretrained` can load them.

        With `push_to_hub`, upload the model too; if that fails, it is said.

        Args:
            output_dir: the folder; default `args.output_dir`.
        """
        folder = output_dir if output_dir is not None else str(self.args.output_dir)
        if self._sharded_states is not None:
            if _internal_call and self._sharded_states.only_parts:
                return  # checkpoints hold a part from each process
            gathered = self._sharded_states.whole_weights(self.model)
            if self.args.should_save:
                self._save(folder, state_dict=gathered)
            if not _internal_call:
                self._sharded_states.save_beside(folder, self.accelerator.processes)
        elif self.args.should_save:
            with self._engine.saving(self.model) as (weights, _):
                if weights is None:
                    self._save(folder)
                else:  # as ModelPruning has them, under other names
                    self._save(folder, state_dict=weights)
        if self.args.push_to_hub and not _internal_call:
            try:
                self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
            except HubError as error:
                logger.error("%s", error)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        output_dir = output_dir if output_dir is not None else str(self.args.output_dir)
        os.makedirs(output_dir, exist_ok=True)
        model = self._bare_model
        write = functools.partial(save_weights, model, output_dir, safe=legacy.value(self.args, "save_safetensors"))
        if state_dict == {}:  # DeepSpeed's weights stay in parts
            save_configs(model, output_dir)
        elif peers.is_peft(model):  # adapters are small: at once
            write(self._engine.on_host(self.model.state_dict()) if self.args.device.type == "xla" else state_dict)
        else:
            if (self._checkpoint_writer.collects or self.args.device.type == "xla") and state_dict is None:
                state_dict = self.model.state_dict()  # training changes the model's own while it is written
            self._checkpoint_writer.call(write, state_dict)
        processing_class = self.processing_class
        if processing_class is None:
            processing_class = getattr(self.data_collator, "tokenizer", None)
        if processing_class is not None:
            processing_class.save_pretrained(output_dir)
        torch.save(without_tokens(self.args), os.path.join(output_dir, names.TRAINING_ARGS_NAME))

    def save_lightning_checkpoint(self, path: str) -> None:
        """Write a checkpoint as Lightning does, in one file, during or after `train()`.

        Args:
            path: the file, ending in '.ckpt'; `train(resume_from_checkpoint=path)` goes on from it.

        Raises:
            InvalidArgument: for another ending, or before the first `train()`.
        """
        if not str(path).endswith(".ckpt"):
            raise InvalidArgument(f"save_lightning_checkpoint({str(path)!r}): give a file that ends in .ckpt.")
        if not self._engine.save_lightning_checkpoint(str(path)):
            raise InvalidArgument("save_lightning_checkpoint() needs a run: call train() first, or it from a callback.")

    def save_state(self) -> None:
        """Write `trainer_state.json` to the output folder."""
        if self.is_world_process_zero():
            self.state.save_to_json(os.path.join(str(self.args.output_dir), names.TRAINER_STATE_NAME))

    def _get_output_dir(self, trial: Any) -> str:
        """Where checkpoints are: in `output_dir`, or in a folder there for each trial of a search."""
        if self._search is None or trial is None:
            return str(self.args.output_dir)
        name = self.hp_name(trial) if self.hp_name is not None else f"run-{self._search.run_id(trial)}"
        return os.path.join(str(self.args.output_dir), name)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write `checkpoint-{step}`, whole or not at all, and delete what `save_total_limit` no longer allows.

        A storage that fails (full, read-only) costs the checkpoint and not the run, which is said.
        """
        self.store_flos()
        self._wait_for_checkpoint()
        run_dir, earlier_best = self._get_output_dir(trial), self.state.best_model_checkpoint
        best = os.path.join(run_dir, f"{names.PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}")
        there = self.accelerator.processes.from_main(lambda: os.path.isdir(best))
        if self.state.best_global_step == self.state.global_step or there:
            self.state.best_model_checkpoint = best
        path = os.path.join(run_dir, f"{names.PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        limit, best_now = self.args.save_total_limit, self.state.best_model_checkpoint
        keep = [path, *([self._resumed_from] if self._resumed_from and self.args.auto_find_batch_size else [])]
        of_others = self._states_of_others()
        if self._sharded_states is not None:
            self._sharded_states.gather(self.model, None if self.args.save_only_model else self._made_optimizer())

        def then() -> None:
            self._checkpoints_written.append(path)
            rotate_checkpoints(run_dir, limit, best_now, keep)

        def if_failed() -> None:
            self.state.best_model_checkpoint = earlier_best

        if self.args.should_save:
            fill = functools.partial(self._fill_checkpoint, of_others)
            with self._writing_together():
                self._checkpoint_writer.checkpoint(path, fill, then=then, if_failed=if_failed)
        else:
            self.save_model(str(staging.staging_folder(path)), _internal_call=True)  # overrides may gather weights
            with self._writing_together(), self._checkpoint_writer.taking_part(path):
                self._write_parts(str(staging.staging_folder(path)))
        self._checkpoint_writer.failed = any(
            self.accelerator.processes.gather_objects([self._checkpoint_writer.failed])
        )
        if self._checkpoint_writer.failed:
            if_failed()
        if self.args.push_to_hub:
            self._checkpoint_writer.when_done(functools.partial(self._push_from_checkpoint, path))

    @contextlib.contextmanager
    def _writing_together(self) -> Iterator[None]:
        """Write a checkpoint that all processes have gathered for, and let go of what they have gathered."""
        try:
            yield
        finally:
            if self._sharded_states is not None:
                self._sharded_states.finish(self.accelerator.processes)

    def _write_parts(self, folder: str) -> None:
        """Write this process's part of a sharded model, if checkpoints hold parts, once the folder is there."""
        if self._sharded_states is not None:
            self._sharded_states.write_parts(folder, self.accelerator.processes)

    def _states_of_others(self) -> dict[str, Any]:
        """File name → contents, of what the other processes have to say to a checkpoint."""
        rank, size = self.args.process_index, self.args.world_size
        if size == 1 or self.args.save_only_model:
            return {}
        own = {names.rng_name(rank, size): rng_state()}
        if self._loop is not None:
            own[names.progress_name(rank, size)] = as_dict(self._loop.current_progress())
        of_all = self.accelerator.processes.gather_objects([own])
        return {name: state for other, states in enumerate(of_all) if other != rank for name, state in states.items()}

    def _fill_checkpoint(self, of_others: Mapping[str, Any], folder: str) -> None:
        """Write everything that a run needs to go on into `folder`."""
        self._write_parts(folder)
        with self._engine.saving(self.model) as (_, kept):
            self.save_model(folder, _internal_call=True)
        if not self.args.save_only_model:
            self._save_optimizer_and_scheduler(folder)
            self._save_scaler(folder)
            self._save_rng_state(folder)
            self._save_progress(folder)
            for name, state in of_others.items():
                torch.save(state, os.path.join(folder, name))
            if kept:
                self._checkpoint_writer.save(kept, os.path.join(folder, names.LIGHTNING_CALLBACKS_NAME))
        elif self._sharded_states is not None and peers.is_peft(self._bare_model):  # which can load no adapters
            self._save_whole_states(folder)
        self.state.stateful_callbacks = export_states(self._stateful_callbacks())
        self.state.save_to_json(os.path.join(folder, names.TRAINER_STATE_NAME))

    def _wait_for_checkpoint(self) -> None:
        """Wait for a checkpoint in the background; all processes know then alike whether it is there."""
        writer, from_main = self._checkpoint_writer, self.accelerator.processes.from_main
        if not writer.in_background:
            return
        from_main(writer.wait)
        best = self.state.best_model_checkpoint
        writer.failed, self.state.best_model_checkpoint = from_main(lambda: (writer.failed, best))

    def _save_if_needed(self, trial: Any) -> None:
        """Write a checkpoint of this step unless there is one, and wait until it is on the disk."""
        self._wait_for_checkpoint()
        if self._last_saved_step != self.state.global_step or self._checkpoint_writer.failed:
            self._save_checkpoint(self.model_wrapped, trial)
            self._last_saved_step = self.state.global_step
            self._announce_save()
        self._wait_for_checkpoint()

    def _saves_on_interrupt(self) -> bool:
        asked = getattr(self.args, "save_on_interrupt", True) or self.args.enable_jit_checkpoint
        return asked and (self.args.save_strategy != SaveStrategy.NO or self.args.enable_jit_checkpoint)

    def _announce_save(self) -> None:
        """Announce the checkpoint once it is there, with the state that it holds."""
        state = dataclasses.replace(self.state) if self._checkpoint_writer.in_background else self.state

        def announce() -> None:
            due = self.control.should_save  # the next one, if this one was written in the background
            self.control = self.callback_handler.call_event("on_save", self.args, state, self.control)
            self.control.should_save |= due

        self.control.should_save = False
        self._checkpoint_writer.when_done(announce)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        write = self._checkpoint_writer.save
        if self._sharded_states is None:
            write(self._made_optimizer().state_dict(), os.path.join(output_dir, names.OPTIMIZER_NAME))
        else:
            self._save_whole_states(output_dir)
        if not (self.is_deepspeed_enabled and self._engine.deepspeed.keeps_scheduler):  # which it keeps itself
            write(self.lr_scheduler.state_dict(), os.path.join(output_dir, names.SCHEDULER_NAME))

    def _save_whole_states(self, output_dir: str) -> None:
        assert self._sharded_states is not None
        for name, state in self._sharded_states.whole_files():
            self._checkpoint_writer.save(state, os.path.join(output_dir, name))

    def _save_scaler(self, output_dir: str) -> None:
        """Write the scale of the loss, with fp16."""
        if self.accelerator.scaler is not None:
            torch.save(self.accelerator.scaler.state_dict(), os.path.join(output_dir, names.SCALER_NAME))

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Load the scale of the loss, if the checkpoint has it."""
        if checkpoint is not None and self.accelerator.scaler is not None:
            resume.load_scaler(checkpoint, self.accelerator.scaler)

    def _save_rng_state(self, output_dir: str) -> None:
        save_rng_state(os.path.join(output_dir, names.rng_name(self.args.process_index, self.args.world_size)))

    def _save_progress(self, output_dir: str) -> None:
        """Write what `trainer_state.json` does not tell of how far training is."""
        if self._loop is not None and self._loop.between_steps:  # else the place follows from the steps alone
            name = names.progress_name(self.args.process_index, self.args.world_size)
            save_progress(self._loop.current_progress(), os.path.join(output_dir, name))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the weights of a checkpoint."""
        self._load_weights(model if model is not None else self.model, resume_from_checkpoint)

    def _load_weights(self, model: nn.Module, folder: str) -> None:
        if self.is_fsdp_xla_v1_enabled:
            self._sharded_states.load_weights(model, folder)
        elif self._sharded_states is not None:
            load_sharded_weights(model, folder, only_trained=peers.is_peft(self._bare_model))
        else:
            load_weights(model, folder)

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint."""
        best = self.state.best_model_checkpoint
        logger.info("Loading the best model, %s (metric %s).", best, self.state.best_metric)
        if self.is_deepspeed_enabled:  # weights and the copies that its optimizer has of them
            self._engine.deepspeed.load(str(best), strict=not peers.is_peft(self.model))
        else:
            self._load_weights(self.model, str(best))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the optimizer's and the scheduler's state, if the checkpoint has them."""
        if checkpoint is not None and self.is_deepspeed_enabled:
            if not self._engine.deepspeed.keeps_scheduler:
                resume.load_scheduler(checkpoint, self.lr_scheduler)
        elif checkpoint is not None and self.is_fsdp_xla_v1_enabled:
            self._sharded_states.load_optimizer_and_scheduler(checkpoint, self._made_optimizer(), self.lr_scheduler)
        elif checkpoint is not None:
            resume.load_optimizer_and_scheduler(
                checkpoint,
                self.model,
                self._made_optimizer(),
                self.lr_scheduler,
                sharded=self._sharded_states is not None,
            )

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore the random states of a checkpoint."""
        if checkpoint is not None:
            name = names.rng_name(self.args.process_index, self.args.world_size)
            load_rng_state(os.path.join(checkpoint, name))

    def _load_callback_state(self) -> None:
        """Restore the callbacks' states from `self.state`, with `restore_callback_states_from_checkpoint`."""
        if self.args.restore_callback_states_from_checkpoint:
            self.control = resume.restore_callbacks(self.callback_handler, self.control, self.state.stateful_callbacks)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Remember the metric if it is the best so far; returns whether it is.

        Raises:
            MetricNotFound: when evaluation returns no such metric, naming those that it does.
        """
        if self.args.metric_for_best_model is None:
            return False
        value, best = self._metric(metrics, self.args.metric_for_best_model), self.state.best_metric
        if best is None:
            best = -math.inf if self.args.greater_is_better else math.inf
            self.state.best_metric = best
        if not (value > best if self.args.greater_is_better else value < best):
            return False
        self.state.best_metric = value
        if self.args.save_strategy != SaveStrategy.NO:
            self.state.best_global_step = self.state.global_step
        return True

    @staticmethod
    def _metric(metrics: dict[str, float], name: str) -> float:
        key = evaluation_key(name)
        if key not in metrics:
            raise MetricNotFound(
                f"metric_for_best_model={name!r}: evaluation returns no {key!r}, only "
                f"{', '.join(comparable_names(metrics))}."
            )
        return metrics[key]

    # ---- The Hub and the model card ----------------------------------------------------------------------------

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Make the repository `hub_model_id`, unless it is there, and see that it can be written to.

        Args:
            token: with the right to write; default `hub_token`.
            private: whether a new repository is; default `hub_private_repo`.

        Raises:
            InvalidArgument: for a name that no repository can have.
            HubError: when it cannot be written to, and why.
        """
        if not self.is_world_process_zero():
            return
        from hftrainer.hub.pictures import Pictures
        from hftrainer.hub.repository import open_repository, repository_name
        from hftrainer.hub.uploads import Uploads

        self._finish_current_push()
        args = self.args
        repository = open_repository(
            repository_name(args.hub_model_id, str(args.output_dir)),
            token=args.hub_token if token is None else token,
            private=args.hub_private_repo if private is None else private,
            revision=args.hub_revision,
        )
        self._uploads = Uploads(repository, Pictures(str(args.output_dir), self.processing_class))
        self.hub_model_id, self.push_in_progress = repository.id, None

    def init_git_repo(self, at_init: bool = False) -> None:
        """Old name of `init_hf_repo` (before v4.34)."""
        warnings.warn("Trainer.init_git_repo is now Trainer.init_hf_repo", FutureWarning, stacklevel=2)
        self.init_hf_repo()

    def create_model_card(
        self,
        language: str | list[str] | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: Any = None,
    ) -> None:
        """Write `README.md` and `training.png` to the output folder, on the main process.

        The card tells where the model and its data come from, the results, the hyperparameters and the versions. It can
        be written at any time, during training too. The picture needs `hftrainer[plot]`.

        Args:
            language: of the data, as ISO codes; the Hub checks them, and the licence, when the card is uploaded.
            license: such as 'apache-2.0'; default that of the model that training began with, if the Hub says it.
            tags: besides those of the model, of a card that is there already, and `generated_from_trainer`.
            model_name: the heading; default the name of the output folder.
            finetuned_from: the repository of the model that training began with; default what its config says.
            tasks: such as 'text-classification'; default by the model's class.
            dataset_tags: identifiers of datasets on the Hub; default those of the evaluation or training data.
            dataset: their names; default the tags.
            dataset_args: for each tag the arguments that it was loaded with.

        Raises:
            InvalidArgument: for values of another type, naming them.
        """
        create_model_card(
            self,
            language=language,
            license=license,
            tags=tags,
            model_name=model_name,
            finetuned_from=finetuned_from,
            tasks=tasks,
            dataset_tags=dataset_tags,
            dataset=dataset,
            dataset_args=dataset_args,
        )

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save the model in `output_dir`, write its card, and upload all there but the checkpoints.

        Args:
            commit_message: of the commit.
            blocking: wait for it; otherwise return a future.
            token: with the right to write; default `hub_token`.
            revision: the branch; default `hub_revision`, or main.
            private: whether a new repository is; default `hub_private_repo`.
            **kwargs: for `create_model_card`.

        Returns:
            A `CommitInfo`, or a `Future` of it; None in all processes but the main one.

        Raises:
            HubError: when it could not be uploaded; the model is in `output_dir`.
        """
        self._announce("on_push_begin")
        self.save_model(_internal_call=True)
        if self._uploads is None:
            self.init_hf_repo(token=token, private=private)
        if self._uploads is None:  # not the main process
            return None
        self.create_model_card(**card_parameters(kwargs, self.args, getattr(self.model, "model_tags", None)))
        return self._uploads.push_folder(
            str(self.args.output_dir), commit_message, blocking=blocking, token=token, revision=revision
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Begin to upload what `hub_strategy` wants of a checkpoint."""
        if self._uploads is None or self.args.hub_strategy == HubStrategy.END:
            return
        from hftrainer.hub.uploads import PushInProgress

        by_steps = self.args.save_strategy == SaveStrategy.STEPS
        parcels = self._uploads.parcels(checkpoint_folder, self.args.hub_strategy, by_steps=by_steps)
        if not parcels:
            return
        done = self.push_in_progress is None or self.push_in_progress.is_done()
        if not done and not self.args.hub_always_push:
            self._uploads.skip(parcels)
            return
        self._announce("on_push_begin")
        jobs = self._uploads.push(parcels)
        self.push_in_progress = PushInProgress(jobs if done else [*self.push_in_progress.jobs, *jobs])

    def _finish_current_push(self) -> None:
        """Wait for the uploads, try again what has failed, and say what is up and what is missing."""
        if self._uploads is not None:
            self._uploads.finish(hurried=lambda: self._interruption.received is not None)

    # ---- Hyperparameter search ---------------------------------------------------------------------------------

    def hyperparameter_search(
        self,
        hp_space: Callable[[Any], dict[str, Any]] | None = None,
        compute_objective: Callable[[dict[str, float]], Any] | None = None,
        n_trials: int | None = 20,
        direction: str | list[str] = "minimize",
        backend: str | HPSearchBackend | None = None,
        hp_name: Callable[[Any], str] | None = None,
        **kwargs: Any,
    ) -> BestRun | list[BestRun]:
        """Train with many choices of arguments, each with a new model, and return the best choice.

        Optuna's study stays in `hp_study`, in the main process. With `storage`, `study_name` and `load_if_exists=True`
        a search that was ended goes on where it was, and several processes or machines share one.

        Ray trains each trial in a process of its own, in the working directory of this one, with a copy of this
        Trainer. A search that was ended goes on by `name` and `resume="AUTO"`; its trials and those of population based
        training go on from the last evaluation whose step was saved too.

        Args:
            hp_space: trial → the arguments of the trial, as a dict; with Ray None → a dict of Ray's distributions, and
                with W&B None → the configuration of the sweep. Default: `default_hp_space_optuna`, `_ray`, `_wandb`.
            compute_objective: metrics of an evaluation → a number, or one for each direction; default
                `default_compute_objective`.
            n_trials: trials that the study holds at the end, those that it held before included; None with a `timeout`.
                For 'wandb' the runs that this process trains.
            direction: 'minimize' or 'maximize'; a list of these for several objectives.
            backend: 'optuna', which is the default, 'ray' or 'wandb'.
            hp_name: trial → the name of its folder and of its runs in trackers; default `run-{number}`, and none.
                With Ray the trial is the dict that was chosen, and the default is `run-{trial_id}` in both.
            kwargs: keywords of `optuna.create_study` (sampler, pruner, storage, study_name, load_if_exists) and of
                `Study.optimize` (timeout in seconds, n_jobs, catch, callbacks, gc_after_trial, show_progress_bar).
                `n_jobs` processes train trials: the script is started again for all but the first, so it should
                search before it trains. With Ray those of `ray.tune.run`, of which resources_per_trial is one CPU by
                default, and a GPU where there is one; with W&B those of `search.wandb_search.WandbSearch.run`.

        Returns:
            The best trial, for 'wandb' of those trained here; with several objectives a list of those that no other is
            better than in all.

        Raises:
            InvalidArgument: without a `model_init`, and for values that cannot be.
            UnknownArgument: for a name in the space that is no argument.
            UnsupportedArgument: for a backend that cannot be had.
            MissingPackage: for a backend that is not installed.
            SearchFailed: when no trial was completed.
        """
        try:
            return hyperparameter_search.search(
                self, hp_space, compute_objective, n_trials, direction, backend, hp_name, **kwargs
            )
        finally:
            self._finish_current_push()

    def _hp_search_setup(self, trial: Any) -> None:
        """Take over the arguments of a trial, and build anew what follows from arguments."""
        self._trial = trial
        if trial is not None:
            hyperparameter_search.set_trial_arguments(self, trial)
        elif not self._args_have_changed:
            return
        self._args_have_changed = False
        self._validate_args()
        if isinstance(self.args, TrainingArguments):
            self.args.hf_deepspeed_config = begin_deepspeed(self.args)
        set_tf32(self.args.tf32)
        self._follow_arguments()
        self.create_accelerator_and_postprocess()
        self._set_model(self.model)

    def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        """Tell the search about an evaluation within a trial, which may end it."""
        if self._search is not None and trial is not None:
            self.objective = self._search.checked(self.compute_objective(dict(metrics)))
            self._search.report(self, trial, step, self.objective, metrics)

    def _release_trial(self) -> None:
        """Let go of a trial's model and of all that was made for it."""
        self._let_go()
        self._engine.release()
        self._checkpoint_writer.close()
        handler = self.callback_handler
        self.model = self.model_wrapped = handler.model = None  # type: ignore[assignment]  # until the next trial
        handler.train_dataloader = None
        self._flos_per_token = None
        if self.args.torch_compile:
            torch.compiler.reset()  # what was compiled for this model is held until then
        gc.collect()
        devices.empty_cache()

    # ---- Logs and metrics --------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add a line to `state.log_history` and announce it. Override it to do more.

        Args:
            logs: the values; gets the epoch added.
            start_time: when training began, in seconds.
        """
        logs["epoch"] = self.state.epoch
        if self.args.include_num_input_tokens_seen != "no":
            logs["num_input_tokens_seen"] = seen = self.state.num_input_tokens_seen
            if start_time is not None:
                logs |= speed_metrics("train", start_time, num_tokens=seen - self._initial_num_input_tokens_seen)
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._announce("on_log", logs=logs)

    @staticmethod
    def metrics_format(metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Metrics as people read them."""
        return metrics_format(metrics)

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Print metrics as a table, on the main process.

        Args:
            split: 'train', 'eval' or 'test', for the title.
            metrics: the metrics.
        """
        if self.is_world_process_zero():
            print_table(f"{split} metrics", self.metrics_format(metrics))

    def _print_xla_metrics(self) -> None:
        """Print what torch_xla has counted, with `debug="tpu_metrics_debug"`, on the main process."""
        if "tpu_metrics_debug" in self.args.debug and self.args.device.type == "xla" and self.is_world_process_zero():
            from hftrainer_lightning.xla import print_metrics

            print_metrics()

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Write metrics to `{split}_results.json`, on the main process.

        Args:
            split: 'train', 'eval', 'test' or 'all'.
            metrics: the metrics.
            combined: also merge them into `all_results.json`.
        """
        if self.is_world_process_zero():
            write_metrics(str(self.args.output_dir), split, metrics, combined=combined)

    # ---- Processes ---------------------------------------------------------------------------------------------

    def is_local_process_zero(self) -> bool:
        """Whether this is the main process of its node."""
        return self.args.local_process_index == 0

    def is_world_process_zero(self) -> bool:
        """Whether this is the main process of all."""
        return self.args.process_index == 0


def _set_training_mode(model: nn.Module) -> None:
    """Call `model.train()` as before every micro-batch; asking all modules first is cheaper than setting all."""
    if not _in_training_mode(model):
        model.train()


def _in_training_mode(module: nn.Module) -> bool:
    return module.training and all(_in_training_mode(child) for child in module.children())


def _processing_class(processing_class: Any, tokenizer: Any) -> Any:
    if tokenizer is None:
        return processing_class
    if processing_class is not None and processing_class is not tokenizer:
        raise InvalidArgument("tokenizer is the old name of processing_class: pass one of them.")
    warnings.warn("Trainer(tokenizer=...) is now Trainer(processing_class=...)", FutureWarning, stacklevel=3)
    return tokenizer


def _call_sampler(sampler_fn: Callable[..., Sampler | None] | None, dataset: Any) -> Sampler | None:
    """Overrides of v4.54 and before take no dataset."""
    if sampler_fn is None:
        return None
    return sampler_fn(dataset) if number_of_arguments(sampler_fn) else sampler_fn()
