"""`Trainer`: the documented API in one place. Each method is short; the work is in the modules it delegates to."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from hftrainer import hyperparameter_search, integrations, trainer_optimizer
from hftrainer.arguments import behaviours, legacy
from hftrainer.arguments.choices import HPSearchBackend, HubStrategy, SaveStrategy
from hftrainer.arguments.logging import which_tokens
from hftrainer.arguments.older import complete
from hftrainer.assembly import copying
from hftrainer.assembly.internals import Internals
from hftrainer.callbacks.progress import ProgressCallback
from hftrainer.callbacks.state import TrainerState
from hftrainer.checkpointing import names, resume, staging
from hftrainer.checkpointing.folders import by_step, complete_rotation, keep_only, rotate_checkpoints, sort_checkpoints
from hftrainer.checkpointing.lightning_file import unpack
from hftrainer.checkpointing.weights import save_configs, save_weights
from hftrainer.compat import peers
from hftrainer.compat.functions import has_length, number_of_arguments
from hftrainer.compat.overrides import (
    call_with_accepted,
    make_scheduler,
    recorded,
    runs_backward,
    shadowable,
    with_accepted,
)
from hftrainer.data import columns
from hftrainer.data.loaders import PreparedDataLoader, to_device
from hftrainer.data.random_states import load_rng_state, save_rng_state
from hftrainer.data.schedule import EarlierSchedule, TrainingSchedule, place_of, plan_schedule
from hftrainer.data.tokens import count_tokens
from hftrainer.debug_utils import DebugUnderflowOverflow
from hftrainer.engine.deepspeed import begin_deepspeed
from hftrainer.errors import HubError, InvalidArgument, InvalidSetup, UnsupportedArgument
from hftrainer.evaluation import gathering
from hftrainer.hub.references import card_parameters
from hftrainer.model.changes import changed_for_training, set_tf32
from hftrainer.modelcard import create_model_card
from hftrainer.optimization import follows_metric, get_scheduler
from hftrainer.parallel import devices
from hftrainer.parallel.seeds import seed_worker
from hftrainer.reporting.memory import TrainerMemoryTracker
from hftrainer.reporting.metrics import mean_loss, metric_named, print_table, write_metrics
from hftrainer.trainer_callback import (
    DEFAULT_CALLBACKS as DEFAULT_CALLBACKS,
)
from hftrainer.trainer_pt_utils import metrics_format, nested_detach, nested_numpify, rebuilt
from hftrainer.trainer_utils import BestRun, EvalLoopOutput, PredictionOutput, TrainOutput, speed_metrics
from hftrainer.training.finders import find_batch_size, find_learning_rate
from hftrainer.training.interruption import Interruption
from hftrainer.training.logged_metrics import LoggedMetrics
from hftrainer.training.loop import TrainingLoop
from hftrainer.training.loss import first_output, outputs_without
from hftrainer.training.out_of_memory import is_out_of_memory
from hftrainer.training_args import TrainingArguments, without_tokens

if TYPE_CHECKING:
    from hftrainer.callbacks.handler import CallbackHandler
    from hftrainer.callbacks.state import TrainerControl
    from hftrainer.trainer_pt_utils import LabelSmoother

logger = logging.getLogger(__name__)

#: The class of the bar, by its name in transformers; in a notebook another one takes its place.
DEFAULT_PROGRESS_CALLBACK = ProgressCallback


@recorded
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
        gather_function: gathers what an evaluation keeps from all processes; `accelerator.gather_for_metrics` again
            after each. With `accelerator.gather` a last batch that is not full counts as a full one in the loss.
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
    # Set while a Trainer is constructed, by `construction.TrainerSetup`.
    model: nn.Module
    model_wrapped: nn.Module
    accelerator: Any
    gather_function: Callable[[Any], Any]
    deepspeed: Any
    callback_handler: CallbackHandler
    state: TrainerState
    control: TrainerControl
    label_smoother: LabelSmoother | None
    label_names: list[str]
    can_return_loss: bool
    model_accepts_loss_kwargs: bool
    place_model_on_device: bool
    is_model_parallel: bool
    is_distributed_loading_by_transformers: bool
    is_in_train: bool
    is_deepspeed_enabled: bool
    is_fsdp_enabled: bool
    is_fsdp_xla_enabled: bool
    is_fsdp_xla_v1_enabled: bool
    is_fsdp_xla_v2_enabled: bool
    current_flos: float
    current_gradient_accumulation_steps: int
    neftune_noise_alpha: float | None
    neftune_hook_handle: Any  # of the noise in a run; it stays when the noise is taken off
    hp_name: Callable[[Any], str] | None
    hp_search_backend: HPSearchBackend | None
    hp_space: Callable[[Any], dict[str, Any]]
    compute_objective: Callable[[dict[str, float]], Any]
    objective: Any
    hub_model_id: str | None
    push_in_progress: Any
    _train_batch_size: int
    _eval_dataloaders: dict[Any, Any]
    _signature_columns: list[str] | None
    _past: Any
    _trial: Any
    _created_lr_scheduler: bool
    _tr_loss: torch.Tensor  # of shape (), on the device: the loss since the last log line; during and after a run
    _total_loss_scalar: float
    _globalstep_last_logged: int
    _initial_global_step: int
    _initial_num_input_tokens_seen: int
    _loss_shifts_labels: bool
    _mixed_mesh_grads: bool | None

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
        self._hftrainer = own = Internals(self, optimizers)
        if args is None:
            args = TrainingArguments("tmp_trainer")
            logger.info("Trainer was given no args: output_dir is %s.", args.output_dir)
        complete(args, TrainingArguments)
        self.args = args
        own.setup.resolve_arguments()
        own.behaviours = behaviours.chosen(own.resolved.readable_config)
        self._memory_tracker = TrainerMemoryTracker(self.args.skip_memory_metrics)
        self._memory_tracker.start()
        own.setup.set_log_level()
        set_tf32(self.args.tf32)
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.processing_class = _processing_class(processing_class, tokenizer)
        self.model_init = model_init
        self.compute_loss_func = compute_loss_func
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer, self.lr_scheduler = optimizers
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self.data_collator = data_collator if data_collator is not None else own.setup.default_collator()
        if (model is None) == (model_init is None):
            given = "neither" if model is None else "both"
            raise InvalidSetup(f"Trainer needs either a model or a model_init, and got {given}.")
        self._validate_args()
        reports = integrations.chosen(self.args.report_to)
        trackers = integrations.further_trackers(reports, loggers, self.args, own.log_folder)
        self.model = model  # type: ignore[assignment]  # None until model_init is called
        self.create_accelerator_and_postprocess()
        own.setup.seed()  # not before: libraries of the engine draw random numbers when they are imported
        own.setup.set_model(model if model is not None else self.call_model_init())
        own.setup.init_attributes()
        if not isinstance(callbacks, (list, tuple, type(None))):
            raise TypeError(f"callbacks={callbacks!r}: give a list of callbacks.")
        own.setup.init_callbacks([*integrations.callback_classes(reports), *(callbacks or [])], trackers)
        if self.args.push_to_hub:
            self.accelerator.processes.from_main(self.init_hf_repo)
        if self.args.should_save:
            os.makedirs(str(self.args.output_dir), exist_ok=True)
        own.announce("on_init_end")
        config: Any = getattr(self.model, "config", None)
        if config is not None and (own.behaviours.sets_use_cache or self.args.use_cache):
            config.use_cache = self.args.use_cache
        self._memory_tracker.stop_and_update_metrics()

    def __getstate__(self) -> dict[str, Any]:
        return copying.state_of(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        copying.take(self, state)
        copying.rebuild(self)

    # ---- Construction ------------------------------------------------------------------------------------------

    def _validate_args(self) -> None:
        """Refuse what cannot work before anything is built; arguments may have been changed since they were made."""
        self._hftrainer.setup.validate_args()

    def create_accelerator_and_postprocess(self) -> None:
        """Build the engine from the arguments, and `self.accelerator` over it."""
        self._hftrainer.setup.build_engine()

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Move the model, unless it is spread over devices already."""
        if getattr(model, "hf_device_map", None) is not None:
            return
        if device.type == "xla":
            from hftrainer.parallel.xla.devices import move_model

            move_model(model, device)
        else:
            model.to(device)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """A new model from `model_init`, given the trial if it takes an argument."""
        assert self.model_init is not None
        count = number_of_arguments(self.model_init)
        if count > 1:
            raise InvalidSetup(f"model_init must take no argument or one, the trial; it takes {count}.")
        model = self.model_init(trial) if count else self.model_init()
        if model is None:
            raise InvalidSetup("model_init returned None: it must return the model.")
        return model

    @property
    def tokenizer(self) -> Any:
        """Old name of `processing_class` (before v4.46), or what was assigned to it."""
        if "tokenizer" in vars(self):
            return vars(self)["tokenizer"]
        warnings.warn("Trainer.tokenizer is now Trainer.processing_class", FutureWarning, stacklevel=2)
        return self.processing_class

    @tokenizer.setter
    def tokenizer(self, value: Any) -> None:
        # An attribute like any other, as in v5: subclasses set it, some of them before they call __init__.
        vars(self)["tokenizer"] = value

    @shadowable
    def lightning_trainer(self) -> Any:
        """The `lightning.Trainer` of the last training or evaluation; None before the first."""
        return self._hftrainer.engine.trainer

    @shadowable
    def lightning_module(self) -> Any:
        """The `LightningModule` around the model in the last training or evaluation; None before the first."""
        return self._hftrainer.engine.module

    @shadowable
    def loggers(self) -> list[Any]:
        """The Lightning loggers that this process writes to, of `report_to` and `loggers`; this opens their runs."""
        return self._hftrainer.loggers()

    @shadowable
    def hp_study(self) -> Any:
        """The study of the last hyperparameter search with Optuna, in the main process; None before."""
        return self._hftrainer.hp_study

    # ---- Callbacks ---------------------------------------------------------------------------------------------

    def add_callback(self, callback: Any) -> None:
        """Add a Trainer callback or a Lightning callback, given as a class or as an instance.

        A progress bar of Lightning takes the place of the Trainer's own, whichever came first.
        """
        self._hftrainer.setup.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, by class or instance, and return it; None when there is none."""
        return self._hftrainer.setup.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, by class or instance."""
        self._hftrainer.setup.pop_callback(callback)

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
        key = "eval" if eval_dataset is None else eval_dataset if isinstance(eval_dataset, str) else ...
        if key in self._eval_dataloaders:
            return self._eval_dataloaders[key]
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        dataset = eval_dataset if eval_dataset is not None else self.eval_dataset
        loader = self._get_dataloader(dataset, "evaluation", self.args.eval_batch_size, self._get_eval_sampler)
        if self.args.dataloader_persistent_workers and key is not ...:
            self._eval_dataloaders[key] = loader  # or each evaluation would start workers that stay
            progress = None if self._hftrainer.loop is None else self._hftrainer.loop.progress
            if progress is not None and key in progress.evaluation_workers and isinstance(loader, PreparedDataLoader):
                loader.spare_seed()
        return loader

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """The loader for `predict`: in the order of the dataset, unless a subclass has its own `_get_eval_sampler`."""
        own = self._hftrainer.is_overridden("_get_eval_sampler")
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
        args, follows = self.args, self._hftrainer.behaviours
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
            self._hftrainer.with_all_columns = dataset, given  # samplers may need what the model does not
            settings["sampler"] = _call_sampler(sampler_fn, dataset)
            settings["drop_last"] = args.dataloader_drop_last
            if is_training:
                settings["worker_init_fn"] = functools.partial(
                    seed_worker,
                    num_workers=args.dataloader_num_workers,
                    rank=self.accelerator.processes.data_rank if follows.seeds_workers_by_rank else 0,
                )
        with self._hftrainer.loaders.preparing_training_data() if is_training else contextlib.nullcontext():
            return self.accelerator.prepare(DataLoader(dataset, **settings))

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler | None:
        """The order of the training samples; None leaves it to the dataset."""
        dataset = train_dataset if train_dataset is not None else self.train_dataset
        if dataset is None or not has_length(dataset):
            return None
        if self._hftrainer.loaders.groups_training_by_length():
            step = self._train_batch_size * self.args.gradient_accumulation_steps
            return self._hftrainer.loaders.length_grouped_sampler(dataset, step)
        return (
            SequentialSampler(dataset) if self.args.train_sampling_strategy == "sequential" else RandomSampler(dataset)
        )

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler | None:
        """The order of the evaluation samples, by length as in training if that is asked for; None: the dataset's."""
        if not has_length(eval_dataset):
            return None
        if self.args.train_sampling_strategy == "group_by_length":
            seed = self.args.data_seed if self.args.data_seed is not None else self.args.seed
            follows = self._hftrainer.behaviours
            order = torch.Generator().manual_seed(seed) if follows.seeds_order_of_evaluation else None
            return self._hftrainer.loaders.length_grouped_sampler(eval_dataset, self.args.eval_batch_size, order)
        return SequentialSampler(eval_dataset)

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            found = columns.signature_columns(self._hftrainer.run.bare_model, self.label_names)
            self._hftrainer.setup.set_found("_signature_columns", found)

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

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> torch.Tensor | int | None:
        """Labels that are not -100, over all micro-batches; None when nobody asks for it.

        Those of all processes with `average_tokens_across_devices`, but for an evaluation's, whose loss is a batch's.
        """
        follows = self._hftrainer.behaviours
        asked = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        counted = asked or not follows.counts_only_for_those_who_ask
        if not counted or not batch_samples or "labels" not in batch_samples[0]:
            return None
        labels = [self._hftrainer.loaders.counted_labels(batch) for batch in batch_samples]
        if not all(isinstance(each, torch.Tensor) for each in labels):
            return None  # detection models: labels are lists of dicts
        count = sum(each.ne(-100).sum() for each in labels).to(device)
        if self._hftrainer.averages_tokens:
            count = self._hftrainer.loaders.sum_over_data(count)
        if not follows.counts_items_on_device:
            return count.item()
        return count / 1 if follows.counts_items_as_float else count

    def _prepare_inputs(self, inputs: Any) -> Any:
        """The batch on the device."""
        if len(inputs) == 0:
            raise InvalidArgument(
                "The batch is empty: none of the samples' keys is an argument of the model's forward "
                f"({', '.join(self._signature_columns or [])})."
            )
        inputs = self._prepare_input(inputs)
        if getattr(self, "_past", None) is not None:  # `past_index`; evaluation loops of v4 delete it
            inputs["mems"] = self._past
        return inputs

    def _prepare_input(self, data: Any) -> Any:
        """A part of the batch on the device; each part of a container is prepared by this method too."""
        if isinstance(data, (Mapping, list, tuple)):
            return rebuilt(data, self._prepare_input)
        moved = to_device(data, self.accelerator.device)
        return self._hftrainer.states.cast(moved, self.model)

    # ---- Optimizer and scheduler -------------------------------------------------------------------------------

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Make both. Override this, or one of the two below, for your own.

        Args:
            num_training_steps: optimizer steps of the run.
        """
        self.create_optimizer()
        make_scheduler(self, num_training_steps)

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
                return self._hftrainer.run.made_optimizer()
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
        known = self._hftrainer.states.decay_parameter_names(model)
        if known is not None:
            return known
        return trainer_optimizer.decay_parameter_names(model, self._hftrainer.behaviours)

    def get_num_trainable_parameters(self) -> int:
        """Numbers in the parameters that are trained."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def get_learning_rates(self) -> list[float]:
        """The learning rate of each parameter group."""
        return [group["lr"] for group in self._hftrainer.run.made_optimizer().param_groups]

    def get_optimizer_group(self, param: Any = None) -> Any:
        """The parameter group that holds `param`; without one, the parameters of each group."""
        groups = self._hftrainer.run.made_optimizer().param_groups
        if param is None:
            return [group["params"] for group in groups]
        return next((group for group in groups if any(param is held for held in group["params"])), None)

    def _get_learning_rate(self) -> float:
        if follows_metric(self.lr_scheduler):
            rate = self._hftrainer.run.made_optimizer().param_groups[0]["lr"]
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
        self._hftrainer.run.refuse_alone(resume_from_checkpoint)
        if str(resume_from_checkpoint).endswith(".ckpt"):
            with tempfile.TemporaryDirectory() as unpacked:
                return self.train(unpack(str(resume_from_checkpoint), unpacked), trial, ignore_keys_for_eval)
        self._memory_tracker.start()
        self._hftrainer.checkpoint_writer.settle()
        folder = self._hftrainer.run.find_folder(resume_from_checkpoint)
        follows = self._hftrainer.behaviours
        if follows.makes_model_before_trial:
            self._hftrainer.run.remake_model(trial)
            self._hftrainer.run.align_special_tokens()
        self._hp_search_setup(trial)
        if not follows.makes_model_before_trial:
            if self.model_init is None:
                self._hftrainer.run.align_special_tokens()
            self._hftrainer.run.remake_model(trial)
        self._hftrainer.setup.take_changes()
        if refused := self._hftrainer.engine.refusals(
            finds_batch_size=self.args.auto_find_batch_size,
            evaluates=self.args.eval_strategy != "no",
            automatic_optimization=not runs_backward(self),
            knows_epochs=has_length(self.train_dataset),
        ):
            raise UnsupportedArgument("\n".join(refused))
        if folder is not None:
            if not self._hftrainer.states.spread:  # a sharded model loads its parts later
                self._load_from_checkpoint(folder)
            finds = self.args.auto_find_batch_size or self._hftrainer.engine.finds_batch_size
            if finds or not follows.takes_given_batch_size:
                state = TrainerState.load_from_json(os.path.join(folder, names.TRAINER_STATE_NAME))
                self._train_batch_size = state.train_batch_size or self._train_batch_size
        self._hftrainer.resumed_from = folder
        watcher = DebugUnderflowOverflow(self.model) if "underflow_overflow" in self.args.debug else None
        self.is_in_train = True
        self._hftrainer.interruption = Interruption(
            saves=self._hftrainer.saver.saves_on_interrupt(), launched=self.args.world_size > 1
        )
        try:
            with (
                changed_for_training(
                    self._hftrainer.run.bare_model,
                    self.args,
                    self._hftrainer.engine.plan.read_once,
                    noisy=self,
                ),
                self._hftrainer.interruption.listening(),
            ):
                output = self._hftrainer.run.train_with_fitting_batches(folder, trial, ignore_keys_for_eval)
                if self._hftrainer.interruption.received is not None:  # after the last step: all is saved
                    self._hftrainer.interruption.leave()
                return output
        except BaseException as error:
            self._hftrainer.checkpoint_writer.settle()
            if self._hftrainer.uploads is not None and (
                self._hftrainer.search is None or not isinstance(error, Exception)
            ):
                self._hftrainer.uploads.finish(is_urgent=lambda: True)  # in a search, the next trial goes on
            raise
        finally:
            if self._hftrainer.loop is not None:
                self._hftrainer.loop.reader.close()
            self._past = self._hftrainer.loop = None
            self.is_in_train = False
            if watcher is not None:
                watcher.remove()

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: TrainingArguments | None = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        args = self.args if args is None else args
        self._hftrainer.setup.take_changes_in(args)  # of an override too
        self.accelerator.free_memory()
        if args.auto_find_batch_size and batch_size is not None:
            self._update_auto_batch_size(batch_size)
        self._hftrainer.logged_metrics = LoggedMetrics()
        self._hftrainer.checkpoints_written = []
        self.current_flos = 0.0
        if resume_from_checkpoint is None:
            find_batch_size(self)
        with self._hftrainer.loaders.preparing_training_data():  # overrides prepare loaders of their own
            train_dataloader = self.get_train_dataloader()
        schedule = self._hftrainer.run.plan(args, train_dataloader)
        progress = self._hftrainer.saver.load_progress(resume_from_checkpoint, schedule)
        self._hftrainer.run.schedule, self._hftrainer.run.progress = schedule, progress
        first_epoch, position = self._init_training_state(
            schedule.max_steps,
            schedule.num_update_steps_per_epoch,
            schedule.num_train_epochs,
            resume_from_checkpoint,
            trial,
        )
        model, train_dataloader = self._prepare_for_training(
            schedule.max_steps, train_dataloader, resume_from_checkpoint
        )
        if resume_from_checkpoint is None:
            find_learning_rate(self, schedule.max_steps)
            self.callback_handler.lr_scheduler = self.lr_scheduler
        self._hftrainer.run.log_plan(schedule)
        if resume_from_checkpoint is not None:
            self._hftrainer.run.log_place(first_epoch, position)
        self._hftrainer.run.warn_of_ragged_batches(schedule)
        self._hftrainer.loop = loop = TrainingLoop(
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
        if self.state.is_hyper_param_search and self.is_world_process_zero():
            for callback in self._hftrainer.reporting():
                callback.start_trial(self.args, self.state.trial_name)
        self._total_loss_scalar = 0.0
        if args.should_save:
            asks_later = self._hftrainer.is_overridden("_get_output_dir")
            run_dir = None if asks_later else self._get_output_dir(trial)
            self._hftrainer.checkpoint_writer.added.begin_run(run_dir, self.state.global_step)
        self._hftrainer.last_saved_step = self.state.global_step
        self._hftrainer.tokens_in_run = 0
        self._initial_num_input_tokens_seen = self.state.num_input_tokens_seen
        self._initial_global_step = self._globalstep_last_logged = self.state.global_step
        loop.resume_log()
        complete = resume_from_checkpoint is not None and self.state.global_step >= schedule.max_steps
        if first_epoch < schedule.num_train_epochs and not complete:
            with loop.details.watching(self.model), devices.hinted():
                self._hftrainer.engine.fit(
                    loop,
                    model,
                    self._hftrainer.run.made_optimizer(),
                    self.lr_scheduler,
                    max_epochs=schedule.num_train_epochs,
                    global_step=self.state.global_step,
                    log_every_n_steps=self._hftrainer.run.steps_between_logs(schedule),
                    resumed_from=resume.load_lightning_callbacks(resume_from_checkpoint),
                    automatic_optimization=not runs_backward(self),
                    find_unused_parameters=self._hftrainer.run.finds_unused_parameters(),
                    sync_each_batch=self._hftrainer.resolved.accelerator_config.sync_each_batch,
                )
        else:  # the checkpoint's run was complete
            loop.load_optimizer()
            loop.begin()
            if self.args.should_save:
                limit, best = self.args.save_total_limit, self.state.best_model_checkpoint
                complete_rotation(str(resume_from_checkpoint), self._get_output_dir(trial), limit, best)
        return self._finalize_training(trial, schedule.num_train_samples, loop.start_time)

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: Any, total_train_batch_size: int | None = None
    ) -> TrainingSchedule | EarlierSchedule:
        """How long the run is, from the arguments and the loader's length.

        Args:
            args: the training arguments.
            dataloader: the batches.
            total_train_batch_size: samples per optimizer step over all processes; given until v5.2.

        Returns:
            Seven values, of which the fifth and sixth are others when a release before v5.3 is followed.
        """
        sized, follows, size = has_length(dataloader), self._hftrainer.behaviours, total_train_batch_size
        schedule = plan_schedule(
            args,
            len(dataloader) * self.get_sp_size() if sized else None,
            self.num_examples(dataloader) if sized else None,
            self.get_total_train_batch_size(args) if size is None else size,
            self._hftrainer.engine.accumulation_at,
            counts_last_window=follows.counts_last_window,
        )
        if follows.returns_steps_in_epoch:
            return schedule
        return EarlierSchedule.of(schedule, epoch_based=args.max_steps < 0, sized=sized)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Samples of an optimizer step, over all processes that have batches of their own."""
        processes = args.world_size // self.get_tp_size() // self.get_cp_size() // self.get_sp_size()
        return self._train_batch_size * self._hftrainer.engine.accumulation_at(0) * processes

    def get_tp_size(self) -> int:
        """How many processes split each layer (tensor parallelism)."""
        return self.accelerator.processes.tp_size

    def get_cp_size(self) -> int:
        """How many processes split each sequence: one, since context parallelism is not supported."""
        return 1

    def get_sp_size(self) -> int:
        """How many processes split each sequence for DeepSpeed: one, since it is not supported."""
        return 1

    def _update_auto_batch_size(self, batch_size: int) -> None:
        """Take over the batch size of an attempt with `auto_find_batch_size`."""
        self._train_batch_size = batch_size
        self.model_wrapped = self.model

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, Any]:
        """Make what the model is trained with; returns the model as it is trained, and the loader."""
        model = self._hftrainer.run.prepare(max_steps, resume_from_checkpoint)
        handler = self.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = self.model, self.optimizer, self.lr_scheduler
        handler.train_dataloader = train_dataloader
        return model, train_dataloader

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """The model as it is: Lightning's strategies spread it over devices. Override it to wrap the model yourself.

        Args:
            model: the model.
            training: whether it is to be trained, or evaluated.
            dataloader: the batches of an evaluation.
        """
        return model

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        """A fresh state, or the checkpoint's. Returns epochs done, and micro-batches done in the next."""
        schedule, progress = self._hftrainer.run.planned()
        self.state = TrainerState(stateful_callbacks=self._hftrainer.setup.stateful_callbacks())
        self.state.is_hyper_param_search = trial is not None
        self.state.train_batch_size = self._train_batch_size
        self.state.compute_steps(self.args, max_steps)
        first_epoch = position = 0
        if resume_from_checkpoint is not None:
            self.state = resume.load_state(resume_from_checkpoint, self.args)
            self._load_callback_state()
            known = None if progress is None else progress.place(schedule.steps_in_epoch)
            first_epoch, position = known or place_of(
                self.state.global_step, schedule.steps_in_epoch, self._hftrainer.engine.accumulation_at
            )
            position = 0 if self.args.ignore_data_skip else position
        if self.args.auto_find_batch_size:
            self.state.train_batch_size = self._train_batch_size
        self.state.init_training_references(self, max_steps, num_train_epochs, trial)
        return first_epoch, position

    def _run_epoch(
        self,
        model: nn.Module,
        epoch: int,
        train_dataloader: Any,
        steps_in_epoch: int,
        num_update_steps_per_epoch: int,
        trial: Any,
        ignore_keys_for_eval: list[str] | None,
        start_time: float,
        resume_from_checkpoint: str | None,
        epochs_trained: int,
        steps_trained_in_current_epoch: int,
    ) -> None:
        """One pass over the data, by Lightning's loop. Overrides may do something before and after it.

        Raises:
            UnsupportedArgument: for other arguments than those of this epoch: the run is planned by then.
        """
        given = locals()
        assert self._hftrainer.loop is not None
        self._hftrainer.loop.run_epoch({name: value for name, value in given.items() if name != "self"})

    def _finalize_training(self, trial: Any, num_train_samples: float, start_time: float) -> TrainOutput:
        """The last log line, the best model, and the end of the run."""
        loop = self._hftrainer.loop
        assert loop is not None
        follows, before = self._hftrainer.behaviours, self._initial_global_step
        if not follows.loads_best_after_logging:
            self._hftrainer.saver.wait()
            self._hftrainer.saver.load_best_at_end()
        steps = self.state.global_step - (before if follows.averages_over_own_steps else 0)
        self._total_loss_scalar += self._tr_loss.item()
        train_loss = self._total_loss_scalar / max(steps, 0.001)
        samples = num_train_samples * steps / max(self.state.max_steps, 1)
        tokens = self._hftrainer.tokens_in_run if legacy.value(self.args, "include_tokens_per_second") else None
        metrics = speed_metrics("train", start_time, num_samples=samples, num_steps=steps, num_tokens=tokens)
        logger.info("Training is complete.")
        self.store_flos()
        metrics["total_flos"] = self.state.total_flos
        metrics["train_loss"] = train_loss
        self._memory_tracker.stop_and_update_metrics(metrics)
        self.log(metrics)
        self._hftrainer.saver.wait()
        self._hftrainer.checkpoint_writer.close()
        if follows.loads_best_after_logging:
            self._hftrainer.saver.load_best_at_end()
        best = self.state.best_model_checkpoint
        run_dir = self._get_output_dir(trial)
        if self.args.should_save and best is not None and self.args.save_total_limit == 1:
            keep_only(best, run_dir)
        self._hftrainer.announce("on_train_end")
        if self.args.push_to_hub:
            self.accelerator.processes.while_main_works(self._finish_current_push)
        else:
            self._finish_current_push()
        if getattr(self, "neftune_hook_handle", None) is not None:
            self.neftune_hook_handle.remove()  # a `train` that was copied leaves both of these to this method
        self.is_in_train = False
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
        context, inputs = self._prepare_context_parallel_inputs(model, inputs)
        with context():
            loss = self._hftrainer.run.loss(model, inputs, num_items_in_batch)
            fused = self.args.optim in ("lomo", "adalomo")
            self.accelerator.backward(loss, **({"learning_rate": self._get_learning_rate()} if fused else {}))
        return loss.detach()

    def _prepare_context_parallel_inputs(
        self, model: nn.Module, inputs: dict[str, Any]
    ) -> tuple[Callable[[], contextlib.AbstractContextManager], dict[str, Any]]:
        """A context for the step on a batch, and the batch: nothing, since each process has whole sequences."""
        return contextlib.nullcontext, inputs

    def log_metric(self, name: str, value: Any) -> None:
        """Log the mean of a value over the training steps until the next log line; call it from anywhere in a step.

        What is given during an evaluation is left out: `compute_loss` runs there too.

        Args:
            name: its name in the log line.
            value: a number, or a tensor of shape `()`, which stays on its device until then.

        Raises:
            InvalidArgument: for a tensor of another shape.
        """
        self._hftrainer.logged_metrics.add(name, value)

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
        if self._hftrainer.past_index >= 0:
            self._past = outputs[self._hftrainer.past_index]
        if self.compute_loss_func is not None:
            loss = self.compute_loss_func(outputs, labels, num_items_in_batch=num_items_in_batch)
        elif self.label_smoother is not None and labels is not None:
            shift = peers.is_causal_lm(peers.without_adapters(self.accelerator.unwrap_model(model)))
            items = num_items_in_batch if self._hftrainer.behaviours.smooths_over_items else None
            loss = self.label_smoother(outputs, labels, shift_labels=shift, num_items_in_batch=items)
        else:
            loss = first_output(outputs, inputs)
        takes_items = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        if self._hftrainer.averages_tokens and takes_items and num_items_in_batch is not None:
            loss = loss * self.accelerator.processes.data_processes  # what the mean of the gradients divides by
        return (loss, outputs) if return_outputs else loss

    def compute_loss_context_manager(self) -> contextlib.ExitStack:
        """Context of `compute_loss`: that of `autocast_smart_context_manager`. Override it for one of your own."""
        stack = contextlib.ExitStack()
        context = self.autocast_smart_context_manager()
        if not isinstance(context, contextlib.nullcontext):
            stack.enter_context(context)
        return stack

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> contextlib.AbstractContextManager:
        """Context of the loss; nothing, as in v4.30 and later, since the model's forward pass brings its autocast."""
        return contextlib.nullcontext()

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Clip the gradients to `max_grad_norm`; returns their norm before."""
        if self._has_mixed_mesh_grads(model):
            return self._mixed_mesh_grad_norm(model, self.args.max_grad_norm)
        return self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The norm of the gradients, for the log line; measured unless clipping has returned it."""
        if grad_norm is not None:
            return grad_norm
        if self._has_mixed_mesh_grads(model):
            return self._mixed_mesh_grad_norm(model, math.inf)
        return self.accelerator.clip_grad_norm_(model.parameters(), math.inf)

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        """Whether gradients are spread over several meshes that cannot be clipped together: the strategy can."""
        if self._mixed_mesh_grads is None:  # a subclass may have set it
            self._mixed_mesh_grads = False
        return self._mixed_mesh_grads

    def _mixed_mesh_grad_norm(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        """Clip the gradients of several meshes; returns their norm before. Only called by an override of the above."""
        return self.accelerator.clip_grad_norm_(model.parameters(), max_norm)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Floating-point operations of forward and backward on a batch: 6 per token and parameter; 0 if unknown."""
        model: Any = self.model
        if hasattr(model, "floating_point_ops") and not self._hftrainer.behaviours.counts_operations_itself:
            return model.floating_point_ops(inputs)
        main_input = getattr(model, "main_input_name", "input_ids")
        return (
            inputs[main_input].numel() * self._hftrainer.loaders.flos_per_token_of(model) if main_input in inputs else 0
        )

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """Count the input tokens of a micro-batch, of all processes, for the arguments that ask for it."""
        if legacy.value(self.args, "include_tokens_per_second") and "input_ids" in inputs:
            self._hftrainer.tokens_in_run += inputs["input_ids"].numel() * self.accelerator.processes.data_processes
        how = which_tokens(self.args.include_num_input_tokens_seen)
        if how == "no":
            return
        main_input = getattr(self.model, "main_input_name", "input_ids")
        count = count_tokens(inputs, main_input, how, getattr(self.processing_class, "pad_token_id", None))
        if count is not None:
            self.state.num_input_tokens_seen += int(self._hftrainer.loaders.sum_over_data(count))

    def store_flos(self) -> None:
        """Add the operations counted since the last call to `state.total_flos`."""
        flos = self.current_flos
        if self.args.world_size > 1:  # in float32, as transformers adds them
            flos = self._hftrainer.loaders.sum_over_data(torch.tensor([flos])).item()
        self.state.total_flos += flos
        self.current_flos = 0.0

    def _maybe_log_save_evaluate(
        self,
        tr_loss: torch.Tensor,
        grad_norm: Any,
        model: Any,
        trial: Any,
        epoch: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
        start_time: float | None = None,
        learning_rate: float | None = None,
    ) -> None:
        """Do what the callbacks have asked for at this point.

        Overrides of v4.37 and before, which know no `grad_norm`, pass the others on by position.
        """
        if isinstance(grad_norm, nn.Module):
            grad_norm, model, trial, epoch, ignore_keys_for_eval = None, grad_norm, model, trial, epoch
        if (loop := self._hftrainer.loop) is not None:
            grad_norm = loop.grad_norm if grad_norm is None else grad_norm
            learning_rate = loop.learning_rate if learning_rate is None else learning_rate
            start_time = loop.start_time if start_time is None else start_time
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            self._hftrainer.run.log_training_loss(tr_loss, grad_norm, learning_rate, start_time)
            self._hftrainer.run.agree()
        metrics = None
        if self.control.should_evaluate:
            metrics = self._evaluate(trial, ignore_keys_for_eval)
            if loop is not None:
                loop.evaluated = metrics
            is_new_best = self._determine_best_metric(metrics=metrics, trial=trial)
            if self.args.save_strategy == SaveStrategy.BEST:
                self.control.should_save = is_new_best
            self._hftrainer.run.agree()
        if self.control.should_save:
            told = {"metrics": metrics} if self._hftrainer.is_overridden("_save_checkpoint") else {}
            call_with_accepted(self._save_checkpoint, model, trial, **told)
            self._hftrainer.saver.announce()
            self._hftrainer.run.agree()

    # ---- Evaluation and prediction -----------------------------------------------------------------------------

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        """Evaluate within training; a scheduler that follows the metric steps on it."""
        if self._hftrainer.loop is not None:
            self._hftrainer.loop.owes_evaluation = True
        try:
            with self._hftrainer.engine.evaluation_group() as for_lightning:
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
        if self._hftrainer.loop is not None:
            self._hftrainer.loop.owes_evaluation = False
        self._report_to_hp_search(trial, self.state.global_step, metrics)
        if follows_metric(self.lr_scheduler) and not skip_scheduler:
            self.lr_scheduler.step(metric_named(metrics, self.args.metric_for_best_model or "loss"))
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
            with self._hftrainer.engine.evaluation_group() as of_all:
                for name, dataset in datasets.items():
                    prefix = f"{metric_key_prefix}_{name}"
                    dataset = name if own else dataset
                    metrics |= self.evaluate(dataset, ignore_keys=ignore_keys, metric_key_prefix=prefix)
                of_all |= mean_loss(metrics, datasets, metric_key_prefix)
            return metrics
        self._memory_tracker.start()
        dataloader = self.get_eval_dataloader(eval_dataset)
        start_time = time.time()
        output = self._hftrainer.evaluation.run(
            dataloader,
            "Evaluation",
            prediction_loss_only=True if self.compute_metrics is None else None,
            ignore_keys=ignore_keys,
            metric_key_prefix=metric_key_prefix,
        )
        measured = self._hftrainer.evaluation.with_speed(output, metric_key_prefix, start_time)
        self.log(measured)
        self._hftrainer.run.print_xla_metrics()
        self._hftrainer.announce("on_evaluate", measured)
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
        output = self._hftrainer.evaluation.run(
            dataloader, "Prediction", ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix
        )
        metrics = self._hftrainer.evaluation.with_speed(output, metric_key_prefix, start_time)
        self._hftrainer.announce("on_predict", metrics)
        self._memory_tracker.stop_and_update_metrics(metrics)
        return PredictionOutput(output.predictions, output.label_ids, metrics)

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
        if not self.is_in_train:
            self._hftrainer.setup.take_changes_in(self.args)
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        self._hftrainer.evaluation.log_plan(description, dataloader)
        model = self._hftrainer.evaluation.prepare(dataloader)
        predicting = description == "Prediction"
        step = with_accepted(self.prediction_step, "ignore_keys")

        def predict(inputs: Any) -> Any:
            return step(model, inputs, loss_only, ignore_keys=ignore_keys)

        evaluation = self._hftrainer.evaluation.make_pass(dataloader, predict, metric_key_prefix, predicting)
        stage = "predict" if predicting else "test" if metric_key_prefix.startswith("test") else "validate"
        kept = getattr(self, "_past", None), self._hftrainer.logged_metrics  # of training, where evaluation has no say
        self._past, self._hftrainer.logged_metrics = None, LoggedMetrics()
        try:
            with devices.hinted(), self.accelerator.gradient_state.only(dataloader):
                self._hftrainer.engine.evaluate(evaluation, self.model, stage)
        finally:
            # What a subclass's `evaluate` has set was for this pass.
            self.gather_function = gathering.for_metrics(self.accelerator, self.args)
            self._past, self._hftrainer.logged_metrics = kept
            self._hftrainer.engine.end_batch()  # Lightning keeps the numbers that it is told on the device
        output, evaluation.output = evaluation.output, None
        if output is None or not evaluation.seen_batches:
            raise InvalidArgument(
                f"{description} found not one batch: the dataset is empty, or smaller than a batch with "
                "dataloader_drop_last, or lightning_config limits it to none."
            )
        if evaluation.preparation_time is not None:
            self._hftrainer.preparation_measured |= math.isnan(self.model_preparation_time)
            self.model_preparation_time = evaluation.preparation_time
        self._hftrainer.evaluation.draw(evaluation.metrics, metric_key_prefix)
        return output

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
            leaves_out = config is not None and self._hftrainer.behaviours.leaves_out_past
            default = ["past_key_values"] if leaves_out else []
            ignore_keys = getattr(config, "keys_to_ignore_at_inference", default)
        has_labels = bool(self.label_names) and all(inputs.get(name) is not None for name in self.label_names)
        returns_loss = inputs.get("return_loss")
        returns_loss = self.can_return_loss if returns_loss is None else returns_loss
        labels = loss = None
        with torch.no_grad():
            if has_labels or (not self.label_names and returns_loss):
                labels = nested_detach(tuple(inputs.get(name) for name in self.label_names))
                labels = labels[0] if len(labels) == 1 else labels
                loss, outputs = self._hftrainer.evaluation.loss_and_outputs(model, inputs, prediction_loss_only)
                logits = outputs_without(outputs, [*ignore_keys, "loss"], skip_first=True)
            else:
                with self.compute_loss_context_manager():
                    outputs = model(**inputs)
                logits = outputs_without(outputs, ignore_keys, skip_first=False)
                if self._hftrainer.past_index >= 0:
                    self._past = outputs[self._hftrainer.past_index - 1]
        if prediction_loss_only:
            return loss, None, None
        logits = nested_detach(logits)
        return loss, logits[0] if isinstance(logits, (tuple, list)) and len(logits) == 1 else logits, labels

    def _nested_gather(self, tensors: Any, name: str | None = None) -> Any:
        """Rows of all processes (until v5.0); None for None.

        Args:
            tensors: in nested containers.
            name: what they are, for messages.
        """
        return None if tensors is None else self.accelerator.gather(tensors)

    def _gather_and_numpify(self, tensors: Any, name: str | None = None) -> Any:
        """Rows of all processes as arrays (until v4.57); the arguments are those of `_nested_gather`."""
        return nested_numpify(self._nested_gather(tensors, name))

    def _pad_across_processes(self, tensor: Any, pad_index: int = -100) -> Any:
        """Rows as long as the longest of all processes (until v4.30), padded with `pad_index`."""
        return self.accelerator.pad_across_processes(tensor, dim=1, pad_index=pad_index)

    # ---- Saving and loading ------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write weights, config, processing class and arguments, so that `from_pretrained` can load them.

        With `push_to_hub`, upload the model too; if that fails, it is said.

        Args:
            output_dir: the folder; default `args.output_dir`.
        """
        folder = output_dir if output_dir is not None else str(self.args.output_dir)
        states, saves = self._hftrainer.states, self.args.should_save
        if _internal_call and states.only_parts:
            return  # checkpoints hold a part from each process
        with states.weights_to_save(self.model, saves=saves) as weights:
            if saves and weights is None:
                self._save(folder)
            elif saves:
                self._save(folder, state_dict=weights)
        if not _internal_call:
            states.save_beside(folder, self.accelerator.processes)
        if self.args.push_to_hub and not _internal_call:
            try:
                self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
            except HubError as error:
                logger.error("%s", error)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        output_dir = output_dir if output_dir is not None else str(self.args.output_dir)
        os.makedirs(output_dir, exist_ok=True)
        model = self._hftrainer.run.bare_model
        logger.info("Saving the model to %s.", staging.final_folder(output_dir))
        write = functools.partial(save_weights, model, output_dir, safe=legacy.value(self.args, "save_safetensors"))
        if state_dict == {}:  # DeepSpeed's weights stay in parts
            save_configs(model, output_dir)
        elif peers.is_peft(model):  # adapters are small: at once
            write(
                self._hftrainer.engine.on_host(self.model.state_dict())
                if self.args.device.type == "xla"
                else state_dict
            )
        else:
            if (self._hftrainer.checkpoint_writer.collects or self.args.device.type == "xla") and state_dict is None:
                state_dict = self.model.state_dict()  # training changes the model's own while it is written
            self._hftrainer.checkpoint_writer.call(write, state_dict)
        processing_class = self.processing_class
        if processing_class is None and self._hftrainer.behaviours.saves_tokenizer_of_collator:
            processing_class = getattr(self.data_collator, "tokenizer", None)
            if processing_class is not None:
                logger.info("There is no processing_class: the tokenizer of data_collator is saved.")
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
        if not self._hftrainer.engine.save_lightning_checkpoint(str(path)):
            raise InvalidArgument("save_lightning_checkpoint() needs a run: call train() first, or it from a callback.")

    def save_state(self) -> None:
        """Write `trainer_state.json` to the output folder."""
        if self.is_world_process_zero():
            self._hftrainer.saver.write_state(str(self.args.output_dir))

    def _get_output_dir(self, trial: Any) -> str:
        """Where checkpoints are: in `output_dir`, or in a folder there for each trial of a search."""
        if self._hftrainer.search is None or trial is None:
            return str(self.args.output_dir)
        name = self.hp_name(trial) if self.hp_name is not None else f"run-{self._hftrainer.search.run_id(trial)}"
        return os.path.join(str(self.args.output_dir), name)

    def _save_checkpoint(self, model: nn.Module, trial: Any, metrics: dict[str, float] | None = None) -> None:
        """Write `checkpoint-{step}`, whole or not at all, and delete what `save_total_limit` no longer allows.

        If the storage fails (full, read-only), the checkpoint is skipped, an error is logged, and training continues.
        What an override has put into that folder before is part of the checkpoint.

        Args:
            model: the model as it is trained.
            trial: the hyperparameter trial, if any.
            metrics: of an evaluation, of which the best is remembered; until v4.46.
        """
        loop = self._hftrainer.loop
        if metrics is not None and (loop is None or metrics is not loop.evaluated):
            self._determine_best_metric(metrics, trial)
        self.store_flos()
        self._hftrainer.saver.wait()
        self._hftrainer.last_saved_step = self.state.global_step
        run_dir, earlier_best = self._get_output_dir(trial), self.state.best_model_checkpoint
        best = os.path.join(run_dir, f"{names.PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}")
        there = self.accelerator.processes.from_main(lambda: os.path.isdir(best))
        if self.state.best_global_step == self.state.global_step or there:
            self.state.best_model_checkpoint = best
        path = os.path.join(run_dir, f"{names.PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        limit, best_now = self.args.save_total_limit, self.state.best_model_checkpoint
        keep = [
            path,
            *(
                [self._hftrainer.resumed_from]
                if self._hftrainer.resumed_from and self.args.auto_find_batch_size
                else []
            ),
        ]
        of_others = self._hftrainer.saver.states_of_others()
        optimizer = None if self.args.save_only_model else self._hftrainer.run.made_optimizer
        self._hftrainer.states.gather(self.model, optimizer)

        def then() -> None:
            self._hftrainer.checkpoints_written.append(path)
            if self._hftrainer.is_overridden("_rotate_checkpoints", "_sorted_checkpoints"):
                self._rotate_checkpoints(use_mtime=True, output_dir=run_dir)
            else:
                rotate_checkpoints(run_dir, limit, best_now, keep)

        def if_failed() -> None:
            self.state.best_model_checkpoint = earlier_best

        if self.args.should_save:
            fill = functools.partial(self._hftrainer.saver.fill, of_others)
            with self._hftrainer.saver.writing_together():
                self._hftrainer.checkpoint_writer.checkpoint(path, fill, then=then, if_failed=if_failed)
        else:
            call_with_accepted(
                self.save_model, str(staging.staging_folder(path)), _internal_call=True
            )  # overrides may gather weights
            with self._hftrainer.saver.writing_together(), self._hftrainer.checkpoint_writer.taking_part(path):
                self._hftrainer.saver.write_parts(str(staging.staging_folder(path)))
        self._hftrainer.checkpoint_writer.failed = any(
            self.accelerator.processes.gather_objects([self._hftrainer.checkpoint_writer.failed])
        )
        if self._hftrainer.checkpoint_writer.failed:
            if_failed()
        if self.args.push_to_hub:
            self._hftrainer.checkpoint_writer.when_done(functools.partial(self._push_from_checkpoint, path))
        if self._hftrainer.is_overridden("_save_checkpoint"):  # which may write into the folder when this returns
            self._hftrainer.saver.wait()

    def _rotate_checkpoints(self, use_mtime: bool = False, output_dir: str | None = None) -> None:
        """Delete what `save_total_limit` no longer allows (until v5.0). Called where it is overridden.

        Args:
            use_mtime: whether the oldest is the one that was written first, rather than that of the fewest steps.
            output_dir: where they are; default `args.output_dir`.
        """
        folder = output_dir if output_dir is not None else str(self.args.output_dir)
        rotate_checkpoints(
            folder,
            self.args.save_total_limit,
            self.state.best_model_checkpoint,
            self._hftrainer.checkpoints_written[-1:],
            self._sorted_checkpoints(use_mtime=use_mtime, output_dir=folder),
        )

    def _sorted_checkpoints(
        self,
        output_dir: str | None = None,
        checkpoint_prefix: str = names.PREFIX_CHECKPOINT_DIR,
        use_mtime: bool = False,
    ) -> list[str]:
        """The checkpoint folders, oldest first (until v5.0); the arguments are those of `_rotate_checkpoints`."""
        folder = output_dir if output_dir is not None else str(self.args.output_dir)
        found = sort_checkpoints(folder) if use_mtime else list(by_step(folder))[::-1]
        return [path for path in found if os.path.basename(path).startswith(f"{checkpoint_prefix}-")]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._hftrainer.saver.save_files(self._hftrainer.run.made_optimizer, output_dir)
        if not self._hftrainer.states.keeps_scheduler:
            path = os.path.join(output_dir, names.SCHEDULER_NAME)
            self._hftrainer.checkpoint_writer.save(self.lr_scheduler.state_dict(), path)

    def _save_scaler(self, output_dir: str) -> None:
        """Write the scale of the loss, with fp16."""
        if self.accelerator.scaler is not None and self._hftrainer.behaviours.saves_scaler:
            torch.save(self.accelerator.scaler.state_dict(), os.path.join(output_dir, names.SCALER_NAME))

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Load the scale of the loss, if the checkpoint has it."""
        if checkpoint is not None and self.accelerator.scaler is not None:
            resume.load_scaler(checkpoint, self.accelerator.scaler)

    def _save_rng_state(self, output_dir: str) -> None:
        save_rng_state(os.path.join(output_dir, names.rng_name(self.args.process_index, self.args.world_size)))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the weights of a checkpoint."""
        logger.info("Loading the model from %s.", resume_from_checkpoint)
        self._hftrainer.saver.load_weights(model if model is not None else self.model, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint."""
        best = self.state.best_model_checkpoint
        logger.info("Loading the best model, %s (metric %s).", best, self.state.best_metric)
        self._hftrainer.saver.load_best(self.model, str(best))

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Log which weights did not fit when a checkpoint was loaded.

        Args:
            load_result: with `missing_keys` and `unexpected_keys`, as `load_state_dict` returns it.
        """
        if load_result.missing_keys:
            logger.warning("The checkpoint lacks these weights of the model: %s", load_result.missing_keys)
        if load_result.unexpected_keys:
            logger.warning("The checkpoint has weights that the model lacks: %s", load_result.unexpected_keys)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the optimizer's and the scheduler's state, if the checkpoint has them."""
        if checkpoint is not None:
            self._hftrainer.states.load_optimizer_and_scheduler(
                checkpoint, self.model, self._hftrainer.run.made_optimizer, self.lr_scheduler
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
        value, best = metric_named(metrics, self.args.metric_for_best_model), self.state.best_metric
        if best is None:
            best = -math.inf if self.args.greater_is_better else math.inf
            self.state.best_metric = best
        if not (value > best if self.args.greater_is_better else value < best):
            return False
        self.state.best_metric = value
        if not self._hftrainer.behaviours.keeps_best_step:
            folder = f"{names.PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            self.state.best_model_checkpoint = os.path.join(self._get_output_dir(trial), folder)
        if self.args.save_strategy != SaveStrategy.NO:
            self.state.best_global_step = self.state.global_step
        return True

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
        from hftrainer.hub.repository import open_repository, repository_name
        from hftrainer.hub.snapshots import UploadSnapshots
        from hftrainer.hub.uploads import Uploads

        self._finish_current_push()
        args = self.args
        repository = open_repository(
            repository_name(args.hub_model_id, str(args.output_dir)),
            token=args.hub_token if token is None else token,
            private=args.hub_private_repo if private is None else private,
            revision=args.hub_revision,
        )
        self._hftrainer.uploads = Uploads(repository, UploadSnapshots(str(args.output_dir), self.processing_class))
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
        self._hftrainer.announce("on_push_begin")
        self.save_model(_internal_call=True)
        if self._hftrainer.uploads is None:
            self.init_hf_repo(token=token, private=private)
        if self._hftrainer.uploads is None:  # not the main process
            return None
        self.create_model_card(**card_parameters(kwargs, self.args, getattr(self.model, "model_tags", None)))
        return self._hftrainer.uploads.push_folder(
            str(self.args.output_dir), commit_message, blocking=blocking, token=token, revision=revision
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Begin to upload what `hub_strategy` wants of a checkpoint."""
        if self._hftrainer.uploads is None or self.args.hub_strategy == HubStrategy.END:
            return
        from hftrainer.hub.background import PushInProgress

        by_steps = self.args.save_strategy == SaveStrategy.STEPS
        commits = self._hftrainer.uploads.commits_for(checkpoint_folder, self.args.hub_strategy, by_steps=by_steps)
        if not commits:
            return
        done = self.push_in_progress is None or self.push_in_progress.is_done()
        if not done and not self.args.hub_always_push:
            self._hftrainer.uploads.skip(commits)
            return
        self._hftrainer.announce("on_push_begin")
        jobs = self._hftrainer.uploads.push(commits)
        self.push_in_progress = PushInProgress(jobs if done else [*self.push_in_progress.jobs, *jobs])

    def _finish_current_push(self) -> None:
        """Wait for the uploads, try again what has failed, and say what is up and what is missing."""
        if self._hftrainer.uploads is not None:
            self._hftrainer.uploads.finish(is_urgent=lambda: self._hftrainer.interruption.received is not None)

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
        elif not self._hftrainer.args_have_changed:
            return
        self._hftrainer.args_have_changed = False
        self._hftrainer.setup.resolve_arguments()
        self._validate_args()
        if isinstance(self.args, TrainingArguments):
            self.args.hf_deepspeed_config = begin_deepspeed(self.args)
        set_tf32(self.args.tf32)
        self._hftrainer.setup.follow_arguments()
        self.create_accelerator_and_postprocess()
        if self.model is not None:  # a trial that makes its model afterwards, as until v5.2, has none yet
            self._hftrainer.setup.set_model(self.model)

    def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        """Tell the search about an evaluation within a trial, which may end it."""
        if self._hftrainer.search is not None and trial is not None:
            self.objective = self._hftrainer.search.checked(self.compute_objective(dict(metrics)))
            self._hftrainer.search.report(self, trial, step, self.objective, metrics)

    # ---- Logs and metrics --------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add a line to `state.log_history` and announce it. Override it to do more.

        Args:
            logs: the values; gets the epoch added.
            start_time: when training began, in seconds.
        """
        if self.state.epoch is not None:  # until v5.2 before training
            logs["epoch"] = self.state.epoch
        if which_tokens(self.args.include_num_input_tokens_seen) != "no":
            logs["num_input_tokens_seen"] = seen = self.state.num_input_tokens_seen
            if start_time is not None and self._hftrainer.behaviours.logs_tokens_per_second:
                logs |= speed_metrics("train", start_time, num_tokens=seen - self._initial_num_input_tokens_seen)
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._hftrainer.announce("on_log", logs)

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

    def end(self) -> None:
        """Leave the process group, at the very end of a script: what needs other processes fails from then on.

        A checkpoint and uploads in the background are complete before.
        """
        self._hftrainer.checkpoint_writer.close()
        self._finish_current_push()
        self.accelerator.end_training()

    def is_local_process_zero(self) -> bool:
        """Whether this is the main process of its node."""
        return self.args.local_process_index == 0

    def is_world_process_zero(self) -> bool:
        """Whether this is the main process of all."""
        return self.args.process_index == 0


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
