"""`Trainer`: the documented API. Each method makes one decision or calls a part."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler

from hftrainer.arguments.checks.unsupported import refuse_unknown
from hftrainer.arguments.checks.validation import add_missing_fields
from hftrainer.arguments.choices import HPSearchBackend
from hftrainer.assembly.object_checks import check_objects, merge_tokenizer_argument
from hftrainer.assembly.trainer_parts import TrainerParts
from hftrainer.base.tracebacks import HideEngineFrames
from hftrainer.callbacks.handler import CallbackHandler, restore_callbacks, warn_about_unrestored_callbacks
from hftrainer.callbacks.progress_bar import ProgressCallback
from hftrainer.callbacks.state import TrainerState
from hftrainer.checkpointing import layout, resume
from hftrainer.checkpointing.lightning_ckpt import unpacked_ckpt
from hftrainer.checkpointing.optimizer_state import load_scheduler_or_scaler
from hftrainer.compat.overrides import overridable_property, record_methods
from hftrainer.data import collators, mixture
from hftrainer.data.collators import number_of_tokens
from hftrainer.data.randomness import load_rng_file, rng_state
from hftrainer.errors import HubError, InvalidArgument, InvalidSetup, MissingMethod, NotACallback
from hftrainer.model.apply_arguments import set_tf32
from hftrainer.model.inspection import parameters
from hftrainer.model_card.card import create_model_card
from hftrainer.optimizers import factory
from hftrainer.optimizers.optimizer_setup import call_create_scheduler, check_optimizer_pair
from hftrainer.releases.earlier import EarlierLengths
from hftrainer.releases.earlier_methods import EarlierMethods
from hftrainer.reporting.memory import TrainerMemoryTracker
from hftrainer.reporting.metrics import print_table, write_metrics
from hftrainer.search import run_search
from hftrainer.trackers import registry
from hftrainer.trainer_callback import DEFAULT_CALLBACKS as DEFAULT_CALLBACKS
from hftrainer.trainer_pt_utils import get_model_param_count, metrics_format
from hftrainer.trainer_utils import BestRun, EvalLoopOutput, PredictionOutput, TrainOutput
from hftrainer.training.run import RunAttribute
from hftrainer.training.run_lengths import RunLengths
from hftrainer.training.steps import loss_division
from hftrainer.training_args import TrainingArguments

if TYPE_CHECKING:
    from hftrainer.callbacks.state import TrainerControl
    from hftrainer.evaluation.metrics import ComputeMetrics
    from hftrainer.trainer_pt_utils import LabelSmoother

logger = logging.getLogger(__name__)

# Scripts import these names from this module.
TRAINER_STATE_NAME, TRAINING_ARGS_NAME = layout.TRAINER_STATE_NAME, layout.TRAINING_ARGS_NAME
OPTIMIZER_NAME, SCHEDULER_NAME, SCALER_NAME = layout.OPTIMIZER_NAME, layout.SCHEDULER_NAME, layout.SCALER_NAME
PREFIX_CHECKPOINT_DIR = layout.PREFIX_CHECKPOINT_DIR

#: Class of the progress bar, named as in transformers. Notebooks use `NotebookProgressCallback` instead.
DEFAULT_PROGRESS_CALLBACK = ProgressCallback


@record_methods
class Trainer(EarlierMethods):
    """Trains, evaluates and predicts with a model, as `transformers.Trainer` does, on PyTorch Lightning.

    Args:
        model: a transformers model, a PEFT model, or any `nn.Module` whose `forward` accepts the batch's keys as
            keyword arguments and returns a tuple with the loss first, or a mapping with the key 'loss'.
        args: the training arguments; default `TrainingArguments("tmp_trainer")`.
        data_collator: builds a batch from a list of samples. Default: `DataCollatorWithPadding` if `processing_class`
            is a tokenizer or sequence feature extractor, else `default_data_collator`.
        train_dataset: a map-style, iterable or `datasets.Dataset`, or a dict source → dataset (see `mixture_weights`).
        eval_dataset: a dataset, or a dict of name → dataset; metric names then contain the dataset's name.
        processing_class: the tokenizer or processor, saved with the model; named `tokenizer` before v4.46.
        model_init: creates the model, from a hyperparameter trial or without arguments. Each `train()` calls it.
        compute_loss_func: `(outputs, labels, num_items_in_batch=...)` → loss. The model's inputs then have no labels.
        compute_metrics: `EvalPrediction` → dict of metrics; or a torchmetrics `Metric`, a `MetricCollection`, a dict of
            these, or a `TorchMetrics` that wraps them, updated with each batch on the device.
        callbacks: Trainer callbacks and Lightning callbacks, as classes or instances.
        optimizers: `(optimizer, scheduler)`; each may be None.
        optimizer_cls_and_kwargs: `(class, keyword arguments)`; overrides `args.optim`.
        preprocess_logits_for_metrics: `(logits, labels)` → the predictions to keep; called for each batch.
        loggers: Lightning loggers, in addition to those of `report_to`. They receive the hyperparameters once, and each
            log line at its optimizer step, with names such as `train/loss`.

    Attributes:
        model: the user's model.
        model_wrapped: the outermost wrapper around the model, or the model itself.
        is_in_train: whether `train()` is running.
        gather_function: gathers an evaluation's results from all ranks. Each evaluation resets it to
            `accelerator.gather_for_metrics`. With `accelerator.gather`, the loss counts an incomplete batch as full.
        loss_is_scaled_for_ga: whether a subclass already scales its loss for gradient accumulation.
        hp_study: the study of the last hyperparameter search.
        hub_model_id: the repository for uploads; None before it is opened, and on ranks other than 0.

    Raises:
        InvalidArgument: for arguments that contradict each other.
        UnsupportedArgument: for unsupported settings, all in one error.
        MissingPackage: for a tracker whose package is not installed.
        HubError: with push_to_hub, if the repository is not writable.
        UnknownArgument: for an unknown keyword argument; the message suggests the nearest name.
    """

    loss_is_scaled_for_ga: bool | None = None
    # Seconds; an evaluation without training sets it.
    model_preparation_time: float
    # The parts set these attributes, mostly during construction.
    model: nn.Module
    model_wrapped: nn.Module
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
    is_fsdp_enabled: bool
    is_fsdp_xla_enabled: bool
    is_fsdp_xla_v1_enabled: bool
    is_fsdp_xla_v2_enabled: bool
    current_flos = RunAttribute("flos")
    current_gradient_accumulation_steps = RunAttribute("current_gradient_accumulation_steps")
    hp_name: Callable[[Any], str] | None
    hp_search_backend: HPSearchBackend | None
    hp_space: Callable[[Any], dict[str, Any]]
    compute_objective: Callable[[dict[str, float]], Any]
    objective: Any
    hub_model_id: str | None
    push_in_progress: Any
    _train_batch_size = RunAttribute("train_batch_size")
    _eval_dataloaders: dict[Any, Any]
    _signature_columns: list[str] | None
    _past = RunAttribute("mems")
    _trial = RunAttribute("trial")
    _created_lr_scheduler = RunAttribute("has_created_scheduler")
    _tr_loss = RunAttribute("loss_since_log")
    _total_loss_scalar = RunAttribute("loss_up_to_log")
    _globalstep_last_logged = RunAttribute("last_logged_step")
    _initial_global_step = RunAttribute("initial_step")
    _initial_num_input_tokens_seen = RunAttribute("initial_tokens_seen")
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
        compute_metrics: ComputeMetrics | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        *,
        tokenizer: Any = None,
        loggers: list[Any] | None = None,
        **unknown: NoReturn,
    ) -> None:
        with HideEngineFrames():
            refuse_unknown("Trainer", Trainer.__init__, unknown)
            functions = {"model_init": model_init, "compute_loss_func": compute_loss_func}
            functions["preprocess_logits_for_metrics"] = preprocess_logits_for_metrics
            check_objects(args, model, tokenizer if processing_class is None else processing_class, functions)
            self._hftrainer = parts = TrainerParts(self, optimizers)
            if args is None:
                args = TrainingArguments("tmp_trainer")
                logger.info("No args passed to Trainer: output_dir is %s.", args.output_dir)
            add_missing_fields(args, TrainingArguments)
            self.args = args
            parts.trainer_setup.resolve_arguments()
            parts.policy = parts.resolved.policy
            self._memory_tracker = TrainerMemoryTracker(self.args.skip_memory_metrics)
            self._memory_tracker.start()
            parts.trainer_setup.set_log_level()
            set_tf32(self.args)
            self.train_dataset = mixture.as_mixture(train_dataset)
            self.eval_dataset = eval_dataset
            self.processing_class = merge_tokenizer_argument(processing_class, tokenizer)
            self.model_init = model_init
            self.compute_loss_func = compute_loss_func
            self.compute_metrics = compute_metrics
            self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
            self.optimizer, self.lr_scheduler = check_optimizer_pair(optimizers)
            self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
            self.data_collator = data_collator if data_collator is not None else parts.trainer_setup.choose_collator()
            if (model is None) == (model_init is None):
                problem = "neither" if model is None else "both"
                raise InvalidSetup(f"Trainer needs either a model or a model_init, but got {problem}.")
            # Wrong arguments must raise before `create_accelerator_and_postprocess` starts other processes.
            self._validate_args()
            registry.add_kubeflow_tracker(self.args)
            reports = registry.select_trackers(self.args.report_to)
            further_loggers = registry.further_loggers(reports, loggers, self.args)
            # None until model_init is called.
            self.model = model  # type: ignore[assignment]
            self.create_accelerator_and_postprocess()
            # Building the engine imports libraries that draw random numbers.
            parts.model_setup.seed_generators()
            parts.model_setup.set_model(model if model is not None else self.call_model_init())
            parts.trainer_setup.init_attributes()
            if not isinstance(callbacks, (list, tuple, type(None))):
                example = getattr(callbacks, "__name__", f"{type(callbacks).__name__}()")
                raise NotACallback(f"callbacks takes a list: callbacks=[{example}].")
            trackers = registry.callback_classes(reports)
            # The callback handler gets the model, and `on_init_end` sees a complete Trainer.
            parts.trainer_setup.init_callbacks([*trackers, *(callbacks or [])], further_loggers)
            parts.trainer_setup.finish_init()
            self._memory_tracker.stop_and_update_metrics()

    def __getstate__(self) -> dict[str, Any]:
        return self._hftrainer.trainer_state_for_copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._hftrainer.rebuild()

    # ---- Construction ------------------------------------------------------------------------------------------

    def _validate_args(self) -> None:
        """Check the arguments, which the script may have changed, before building anything."""
        self._hftrainer.trainer_setup.validate_args()

    def create_accelerator_and_postprocess(self) -> None:
        """Build the engine from the arguments, and `self.accelerator` from the engine."""
        self._hftrainer.trainer_setup.make_engine_and_accelerator()

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Move the model to a device, unless it already spans several devices."""
        self._hftrainer.model_setup.move_model(model, device)

    @functools.cached_property
    def _hftrainer(self) -> TrainerParts:
        """The internal parts; created here if a subclass calls methods before `super().__init__()`."""
        return TrainerParts(self)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """A new model from `model_init`, which receives the trial if it accepts an argument."""
        return self._hftrainer.model_setup.call_model_init(trial)

    @property
    def tokenizer(self) -> Any:
        """Old name of `processing_class` (before v4.46), or the value assigned to `tokenizer`."""
        if "tokenizer" in vars(self):
            return vars(self)["tokenizer"]
        warnings.warn("Trainer.tokenizer is now Trainer.processing_class", FutureWarning, stacklevel=2)
        return self.processing_class

    @tokenizer.setter
    def tokenizer(self, value: Any) -> None:
        # As in v5, this is a normal attribute: some subclasses set it before they call __init__.
        vars(self)["tokenizer"] = value

    @overridable_property
    def lightning_trainer(self) -> Any:
        """The `lightning.Trainer` of the last training or evaluation; None before the first."""
        return self._hftrainer.engine.pl_trainer

    @overridable_property
    def lightning_module(self) -> Any:
        """The `LightningModule` around the model in the last training or evaluation; None before the first."""
        return self._hftrainer.engine.pl_module

    @overridable_property
    def loggers(self) -> list[Any]:
        """The Lightning loggers of this process, from `report_to` and `loggers`. Reading them opens their runs."""
        return self._hftrainer.open_loggers()

    @overridable_property
    def hp_study(self) -> Any:
        """The Optuna study of the last hyperparameter search, in the main process; otherwise None."""
        return self._hftrainer.hp_study

    # ---- Callbacks ---------------------------------------------------------------------------------------------

    def add_callback(self, callback: Any) -> None:
        """Add a Trainer or Lightning callback, as a class or an instance.

        A Lightning progress bar replaces the Trainer's, in whichever order they are added.
        """
        with HideEngineFrames():
            self._hftrainer.trainer_setup.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, by class or instance, and return it; None if not found."""
        return self._hftrainer.trainer_setup.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, by class or instance."""
        self._hftrainer.trainer_setup.pop_callback(callback)

    # ---- Data --------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader:
        """The training loader: batches on the device, in the order of `_get_train_sampler`."""
        if self.train_dataset is None:
            raise InvalidArgument("Training needs a train_dataset: pass one to Trainer.")
        return self._get_dataloader(
            self.train_dataset, "training", self._train_batch_size, self._get_train_sampler, is_training=True
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """The evaluation loader.

        Args:
            eval_dataset: a dataset, or a name in the Trainer's dict; default the Trainer's `eval_dataset`.
        """
        return self._hftrainer.loader_factory.make_evaluation_loader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """The loader for `predict`, in dataset order unless a subclass overrides `_get_eval_sampler`."""
        return self._hftrainer.loader_factory.make_test_loader(test_dataset)

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[..., Sampler | None] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> DataLoader:
        """A loader of a dataset's batches for this rank, on its device."""
        return self._hftrainer.loader_factory.make_loader(dataset, description, batch_size, sampler_fn, is_training)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler | None:
        """The training sampler; None for a dataset without a length."""
        dataset = self.train_dataset if train_dataset is None else train_dataset
        return self._hftrainer.loader_factory.make_training_sampler(dataset)

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler | None:
        """The evaluation sampler: grouped by length or sequential; None for a dataset without a length."""
        return self._hftrainer.loader_factory.make_evaluation_sampler(eval_dataset)

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            columns = collators.signature_columns(self._hftrainer.unwrapped_model, self.label_names)
            self._hftrainer.model_setup.set_inferred_attributes({"_signature_columns": columns})

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """The dataset without the columns that the model does not accept."""
        if not self.args.remove_unused_columns:
            return dataset
        return self._hftrainer.loader_factory.remove_unused_columns(dataset, description)

    def _get_collator_with_removed_columns(
        self, data_collator: Callable[[list[Any]], Any], description: str | None = None
    ) -> Callable[[list[Any]], Any]:
        """The collator, wrapped to drop the keys that the model does not accept."""
        if not self.args.remove_unused_columns:
            return data_collator
        return self._hftrainer.loader_factory.wrap_collator(data_collator, description)

    def num_examples(self, dataloader: DataLoader) -> int:
        """Number of samples in a loader, estimated from its batches if its dataset has no length."""
        return self._hftrainer.loader_factory.num_examples(dataloader)

    @staticmethod
    def num_tokens(train_dl: DataLoader, max_steps: int | None = None) -> int:
        """Number of input tokens in a loader; with `max_steps`, the first batch's tokens times `max_steps`."""
        return number_of_tokens(train_dl, max_steps)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The micro-batches of one optimizer step, and the number of items that divides its loss."""
        samples = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        return samples, self._get_num_items_in_batch(samples, device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> torch.Tensor | int | None:
        """Number of labels that are not -100, over all micro-batches; None if it is not used.

        With `average_tokens_across_devices`, the sum over all ranks, except in evaluations.
        """
        return loss_division.count_items(self._hftrainer, batch_samples, device)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """The batch on the device."""
        return self._hftrainer.loss_computer.prepare_inputs(inputs)

    def _prepare_input(self, data: Any) -> Any:
        """Move the data to the device, including the tensors in containers."""
        return self._hftrainer.loss_computer.prepare_input(data)

    # ---- Optimizer and scheduler -------------------------------------------------------------------------------

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Create the optimizer and the scheduler. Override this method, or one of the two that it calls.

        Args:
            num_training_steps: optimizer steps of the run.
        """
        self.create_optimizer()
        call_create_scheduler(self, num_training_steps)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer, unless it exists. Weight decay excludes biases and normalization layers."""
        if self.optimizer is None:
            self.optimizer = self._hftrainer.optimizer_setup.create_optimizer(self.model if model is None else model)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Create the learning-rate scheduler, unless it exists.

        Args:
            num_training_steps: optimizer steps of the run.
            optimizer: the optimizer whose learning rates the scheduler sets; default the Trainer's.
        """
        if self.lr_scheduler is None:
            optimizer = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = self._hftrainer.optimizer_setup.create_scheduler(num_training_steps, optimizer)
        return self.lr_scheduler

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: nn.Module | None = None) -> tuple[Any, Any]:
        """The class and keyword arguments of the optimizer that `args.optim` selects."""
        return factory.optimizer_cls_and_kwargs(args, model)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters that weight decay applies to."""
        return self._hftrainer.optimizer_setup.decay_parameter_names(model)

    def get_num_trainable_parameters(self) -> int:
        """Number of elements in the trainable parameters."""
        return get_model_param_count(self.model, trainable_only=True)

    def get_learning_rates(self) -> list[float]:
        """The learning rate of each parameter group."""
        return [group["lr"] for group in self._hftrainer.require_optimizer().param_groups]

    def get_optimizer_group(self, param: Any = None) -> Any:
        """The parameter group that contains `param`; without `param`, the parameters of each group."""
        return self._hftrainer.optimizer_setup.find_group(param)

    def _get_learning_rate(self) -> float:
        """The learning rate to log, of the first parameter group."""
        return self._hftrainer.optimizer_setup.learning_rate()

    # ---- Training ----------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
        *,
        model_path: str | bool | None = None,
        **unknown: NoReturn,
    ) -> TrainOutput:
        """Train the model.

        Args:
            resume_from_checkpoint: a checkpoint folder, or a Lightning checkpoint `x.ckpt` of this Trainer; True for
                the newest complete checkpoint in `output_dir`; "auto" for the same, or a new run if none exists;
                "hub:owner/name[@revision]" for `last-checkpoint` in a Hub repository, else its newest checkpoint-xxx.
            trial: a hyperparameter trial or a dict. `model_init` receives it, and its values replace those of the
                arguments.
            ignore_keys_for_eval: the model's outputs that evaluation leaves out.
            model_path: old name of `resume_from_checkpoint` (v4.0 to v4.57). A folder without `trainer_state.json` is
                ignored: v4.1 scripts pass their pretrained model.
            unknown: rejected; the error suggests the nearest name.

        Returns:
            The number of optimizer steps, the mean training loss, and the final metrics.

        Raises:
            CheckpointNotFound: if the checkpoint to resume from does not exist.
            DamagedCheckpoint: if it is damaged, or lacks the weights.
        """
        if model_path is not None:
            resume_from_checkpoint = resume.resume_path_from_model_path(model_path, resume_from_checkpoint)
        with HideEngineFrames():
            refuse_unknown("train()", Trainer.train, unknown)
            self._hftrainer.training_runner.check_call(resume_from_checkpoint)
            with unpacked_ckpt(resume_from_checkpoint) as checkpoint:
                self._memory_tracker.start()
                self._hftrainer.training_runner.prepare_train(checkpoint, trial)
                return self._hftrainer.training_runner.run_attempts(trial, ignore_keys_for_eval)

    @overridable_property
    def fit(self) -> NoReturn:
        """Lightning's name for `train()`; reading it raises an error that names `train()`."""
        raise MissingMethod(f"{type(self).__name__} has no method 'fit', unlike Lightning's Trainer: call train().")

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: TrainingArguments | None = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train once with this batch size: `train()` calls it again if that size does not fit, or after a rollback."""
        return self._hftrainer.training_runner.run_attempt(
            batch_size, args, resume_folder=resume_from_checkpoint, trial=trial, ignore_keys=ignore_keys_for_eval
        )

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: Any, total_train_batch_size: int | None = None
    ) -> RunLengths | EarlierLengths:
        """The lengths of the run, from the arguments and the loader's length.

        Args:
            args: the training arguments.
            dataloader: the training loader.
            total_train_batch_size: samples per optimizer step over all processes; passed until v5.2.

        Returns:
            Seven values. Before v5.3, the fifth and sixth are `epoch_based` and `len_dataloader`.
        """
        return self._hftrainer.training_runner.planner.initial_values(args, dataloader, total_train_batch_size)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Samples per optimizer step, over all ranks with distinct batches."""
        processes = args.world_size // self.get_tp_size() // self.get_cp_size() // self.get_sp_size()
        return self._train_batch_size * self._hftrainer.engine.accumulation_steps_of(0) * processes

    def get_tp_size(self) -> int:
        """Tensor-parallel size: the ranks that share each layer."""
        return self.accelerator.processes.tp_size

    def get_cp_size(self) -> int:
        """Context-parallel size: always 1, since context parallelism is not supported."""
        return 1

    def get_sp_size(self) -> int:
        """DeepSpeed's sequence-parallel size: always 1, since sequence parallelism is not supported."""
        return 1

    def _update_auto_batch_size(self, batch_size: int) -> None:
        """Set the batch size of an attempt with `auto_find_batch_size`."""
        self._train_batch_size = batch_size
        self.model_wrapped = self.model

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, Any]:
        """Prepare the model, optimizer and scheduler; returns the model to train, and the loader."""
        model = self._hftrainer.model_setup.prepare_for_training(max_steps, resume_from_checkpoint)
        self.callback_handler.train_dataloader = train_dataloader
        return model, train_dataloader

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """The model, unchanged: Lightning's strategies distribute it. Override this method to wrap the model.

        Args:
            model: the model.
            training: whether the model will be trained, rather than evaluated.
            dataloader: the evaluation loader.
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
        """Create or load the state. Returns completed epochs, and completed micro-batches of the next epoch."""
        planner = self._hftrainer.training_runner.planner
        return planner.init_state(max_steps, num_train_epochs, resume_from_checkpoint, trial)

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
        """Run one epoch with Lightning's loop. Only overrides call this, to add code before and after it.

        Raises:
            UnsupportedArgument: if an override changed an argument.
        """
        arguments = {name: value for name, value in locals().items() if name != "self"}
        self._hftrainer.engine.run_epoch(arguments)

    def _finalize_training(self, trial: Any, num_train_samples: float, start_time: float) -> TrainOutput:
        """Write the last log line, load the best model, and end the run."""
        return self._hftrainer.training_runner.run_end.finish(trial, num_train_samples, start_time)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run forward and backward passes of one micro-batch; returns the detached loss.

        An override must call `self.accelerator.backward(loss)`.

        Args:
            model: the model to train.
            inputs: the batch.
            num_items_in_batch: number of items in all micro-batches of the optimizer step.
        """
        context, inputs = self._prepare_context_parallel_inputs(model, inputs)
        with context():
            loss = self._hftrainer.loss_computer.micro_batch_loss(model, inputs, num_items_in_batch)
            is_fused = self.args.optim in ("lomo", "adalomo")
            self.accelerator.backward(loss, **({"learning_rate": self._get_learning_rate()} if is_fused else {}))
        return loss.detach()

    def _prepare_context_parallel_inputs(
        self, model: nn.Module, inputs: dict[str, Any]
    ) -> tuple[Callable[[], contextlib.AbstractContextManager], dict[str, Any]]:
        """An empty context and the unchanged batch, since we do not split sequences."""
        return contextlib.nullcontext, inputs

    def log_metric(self, name: str, value: Any) -> None:
        """Log the mean of a value over the training steps until the next log line.

        Call it anywhere in a step. Values from an evaluation are ignored, since `compute_loss` runs there too.

        Args:
            name: the name in the log line.
            value: a number, or a tensor of shape `()`, which stays on its device until the log line.

        Raises:
            InvalidArgument: for a tensor of another shape.
        """
        self._hftrainer.run.attempt.logged_metrics.add(name, value)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        """The loss of a batch, from `compute_loss_func` or the model's outputs. Override it to change the loss.

        Args:
            model: the model.
            inputs: the batch; labels are removed from it if `compute_loss_func` receives them.
            return_outputs: whether to also return the model's outputs.
            num_items_in_batch: number of items that divides the loss, passed to models that accept it.

        Returns:
            The loss, or `(loss, outputs)`.
        """
        loss, outputs = self._hftrainer.loss_computer.loss_and_outputs(model, inputs, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def compute_loss_context_manager(self) -> contextlib.ExitStack:
        """The context of `compute_loss`, from `autocast_smart_context_manager`. Override it to change the context."""
        stack = contextlib.ExitStack()
        context = self.autocast_smart_context_manager()
        if not isinstance(context, contextlib.nullcontext):
            stack.enter_context(context)
        return stack

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> contextlib.AbstractContextManager:
        """An empty context, as in v4.30 and later: the model's forward pass has its own autocast."""
        return contextlib.nullcontext()

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Clip the gradients to `max_grad_norm`; returns their norm before clipping."""
        if self._has_mixed_mesh_grads(model):
            return self._mixed_mesh_grad_norm(model, self.args.max_grad_norm)
        return self.accelerator.clip_grad_norm_(parameters(model), self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The gradient norm for the log line, computed unless clipping returned it."""
        if grad_norm is not None:
            return grad_norm
        if self._has_mixed_mesh_grads(model):
            return self._mixed_mesh_grad_norm(model, math.inf)
        return self.accelerator.clip_grad_norm_(parameters(model), math.inf)

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        """Whether to clip each device mesh's gradients separately. False: the strategy clips them together."""
        # A subclass may have set it. transformers too finds it at the first clipping, and keeps it.
        if self._mixed_mesh_grads is None:
            self._mixed_mesh_grads = False
        return self._mixed_mesh_grads

    def _mixed_mesh_grad_norm(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        """Clip gradients on several meshes, if a subclass has them; returns the norm before clipping."""
        return self.accelerator.clip_grad_norm_(model.parameters(), max_norm)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Forward and backward FLOPs of a batch: 6 per token and parameter; 0 if unknown."""
        return self._hftrainer.counters.floating_point_ops(inputs)

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """Count the input tokens of a micro-batch over all ranks, if an argument enables it."""
        self._hftrainer.counters.track_tokens(inputs)

    def store_flos(self) -> None:
        """Add the operations counted since the last call to `state.total_flos`."""
        self._hftrainer.counters.store_flos()

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
        """Log, save and evaluate as the control flags request.

        Overrides for v4.37 and earlier lack `grad_norm`, and pass the other arguments by position.
        """
        if isinstance(grad_norm, nn.Module):
            Trainer._maybe_log_save_evaluate(self, tr_loss, None, grad_norm, model, trial, epoch)
            return
        actions = self._hftrainer.control_actions
        actions.log_if_requested(tr_loss, grad_norm, learning_rate, start_time)
        metrics = actions.evaluate_if_requested(trial, ignore_keys_for_eval)
        actions.save_if_requested(model, trial, metrics)

    # ---- Evaluation and prediction -----------------------------------------------------------------------------

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        """Evaluate during training; a metric-driven scheduler then steps."""
        return self._hftrainer.control_actions.evaluate(trial, ignore_keys_for_eval, steps_schedule=not skip_scheduler)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate, log the metrics and return them.

        Args:
            eval_dataset: a dataset, a name in the Trainer's dict, or such a dict; default the Trainer's `eval_dataset`.
            ignore_keys: the model's outputs to leave out of the predictions.
            metric_key_prefix: prefix of each metric's name, joined by an underscore. Outside training, a prefix that
                begins with 'test' runs Lightning's test loop instead of its validation loop.

        Returns:
            The loss, the metrics of `compute_metrics`, the run time in seconds, and samples and batches per second.
        """
        runner, uses_names = self._hftrainer.evaluation_runner, eval_dataset is None
        datasets = self.eval_dataset if uses_names else eval_dataset
        if isinstance(datasets, Mapping):
            with HideEngineFrames():
                return runner.evaluate_sets(datasets, ignore_keys, metric_key_prefix, uses_names=uses_names)
        self._memory_tracker.start()
        with HideEngineFrames(), self._hftrainer.loader_factory.explain_removed_columns(datasets):
            metrics = runner.evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        self._memory_tracker.stop_and_update_metrics(metrics)
        return metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predict, and compute the metrics if the dataset has labels.

        Args:
            test_dataset: the dataset to predict.
            ignore_keys: the model's outputs to leave out.
            metric_key_prefix: prefix of each metric's name, joined by an underscore.

        Returns:
            Predictions and labels of shape `(samples, ...)`, padded on the right with -100, and the metrics.
        """
        self._memory_tracker.start()
        with HideEngineFrames(), self._hftrainer.loader_factory.explain_removed_columns(test_dataset):
            output = self._hftrainer.evaluation_runner.predict(test_dataset, ignore_keys, metric_key_prefix)
        self._memory_tracker.stop_and_update_metrics(output.metrics)
        return output

    def prediction_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """The name of `evaluation_loop` until v4.4; `use_legacy_prediction_loop` uses it until v4.57."""
        return self.evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Run one of Lightning's loops once over a loader, with or without labels.

        Args:
            dataloader: the loader.
            description: 'Evaluation' or 'Prediction'; the latter runs Lightning's prediction loop, and returns the
                predictions even if the metrics are computed for each batch.
            prediction_loss_only: whether to drop the predictions; default `args.prediction_loss_only`.
            ignore_keys: the model's outputs to leave out.
            metric_key_prefix: prefix of each metric's name, joined by an underscore.
        """
        return self._hftrainer.evaluation_runner.evaluation_loop(
            dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
        )

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Loss, logits and labels of one batch, each None if missing. Override it to change them.

        Args:
            model: the model.
            inputs: the batch.
            prediction_loss_only: whether to return only the loss.
            ignore_keys: the model's outputs to leave out; default those in its config.
        """
        return self._hftrainer.evaluation_runner.prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    # ---- Saving and loading ------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write weights, config, processing class and arguments, so that `from_pretrained` can load them.

        With `push_to_hub`, also upload the model; a failed upload is logged.

        Args:
            output_dir: the folder; default `args.output_dir`.
        """
        folder = output_dir if output_dir is not None else str(self.args.output_dir)
        saver = self._hftrainer.checkpoint_saver
        with HideEngineFrames(), saver.prepare_save(folder, internal=_internal_call) as arguments:
            if arguments is not None:
                self._save(folder, **arguments)
        self._hftrainer.storage_sync.upload_files()
        if self.args.push_to_hub and not _internal_call:
            try:
                self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
            except HubError as error:
                logger.error("%s", error)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write the model's files into a folder; `state_dict` replaces the model's weights."""
        folder = output_dir if output_dir is not None else str(self.args.output_dir)
        self._hftrainer.checkpoint_saver.save_model_files(folder, state_dict)

    def save_lightning_checkpoint(self, path: str) -> None:
        """Write a Lightning checkpoint (one file), during or after `train()`.

        Args:
            path: the file, ending in '.ckpt'; `train(resume_from_checkpoint=path)` resumes from it.

        Raises:
            InvalidArgument: for another suffix, or before the first `train()`.
        """
        if not str(path).endswith(".ckpt"):
            raise InvalidArgument(f"save_lightning_checkpoint({str(path)!r}): pass a file name that ends in .ckpt.")
        if not self._hftrainer.engine.save_lightning_checkpoint(str(path)):
            raise InvalidArgument("save_lightning_checkpoint() needs a run: call it after train(), or in a callback.")

    def save_state(self) -> None:
        """Write `trainer_state.json` to the output folder."""
        if self.is_world_process_zero():
            self._hftrainer.checkpoint_saver.write_state(str(self.args.output_dir))

    def _get_output_dir(self, trial: Any) -> str:
        """The checkpoint folder: `output_dir`, or a subfolder for each trial of a search."""
        backend = self._hftrainer.search_backend
        if backend is None or trial is None:
            return str(self.args.output_dir)
        name = self.hp_name(trial) if self.hp_name is not None else f"run-{backend.run_id(trial)}"
        return os.path.join(str(self.args.output_dir), name)

    def _save_checkpoint(self, model: nn.Module, trial: Any, metrics: dict[str, float] | None = None) -> None:
        """Write `checkpoint-{step}` atomically, and delete checkpoints beyond `save_total_limit`.

        If the storage fails (full, read-only), we log an error, skip the checkpoint and continue training. Files that
        an override has already written to the folder become part of the checkpoint.

        Args:
            model: the model in training.
            trial: the hyperparameter trial, if any.
            metrics: an evaluation's metrics, to find the best model; passed until v4.46.
        """
        if metrics is not None and metrics is not self._hftrainer.run.attempt.evaluation_metrics:
            self._determine_best_metric(metrics, trial)
        self._hftrainer.checkpoint_saver.write_checkpoint(trial)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write the states of the optimizer and the scheduler."""
        self._hftrainer.checkpoint_saver.save_state_files(self._hftrainer.require_optimizer, output_dir)
        if not self._hftrainer.strategy.owns_scheduler:
            path = os.path.join(output_dir, layout.SCHEDULER_NAME)
            self._hftrainer.checkpoint_writer.save(self.lr_scheduler.state_dict(), path)

    def _save_scaler(self, output_dir: str) -> None:
        """Write the loss scaler's state, if training uses fp16."""
        if self.accelerator.scaler is not None and self._hftrainer.policy.saves_scaler:
            torch.save(self.accelerator.scaler.state_dict(), os.path.join(output_dir, layout.SCALER_NAME))

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Load the loss scaler's state, if the checkpoint has it."""
        if checkpoint is not None and self.accelerator.scaler is not None:
            load_scheduler_or_scaler(self.accelerator.scaler, checkpoint, "scaler")

    def _save_rng_state(self, output_dir: str) -> None:
        """Write this process's random states."""
        path = os.path.join(output_dir, layout.rng_name(self.args.process_index, self.args.world_size))
        torch.save(rng_state(), path)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the weights of a checkpoint."""
        logger.info("Loading the model from %s.", resume_from_checkpoint)
        self._hftrainer.checkpoint_restorer.load_weights(self.model if model is None else model, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint."""
        best = self.state.best_model_checkpoint
        logger.info("Loading the best model, %s (metric %s).", best, self.state.best_metric)
        self._hftrainer.checkpoint_restorer.load_weights(self.model, str(best), is_best=True)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Log missing and unexpected weights after loading a checkpoint.

        Args:
            load_result: the result of `load_state_dict`, with `missing_keys` and `unexpected_keys`.
        """
        if load_result.missing_keys:
            logger.warning("Weights that the checkpoint lacks (missing keys): %s", load_result.missing_keys)
        if load_result.unexpected_keys:
            logger.warning("Weights that the model lacks (unexpected keys): %s", load_result.unexpected_keys)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the optimizer's and the scheduler's state, if the checkpoint has them."""
        if checkpoint is not None:
            self._hftrainer.strategy.load_optimizer_and_scheduler(
                checkpoint, self.model, self._hftrainer.require_optimizer, self.lr_scheduler
            )

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore the random states of a checkpoint."""
        if checkpoint is not None:
            name = layout.rng_name(self.args.process_index, self.args.world_size)
            load_rng_file(os.path.join(checkpoint, name))

    def _load_callback_state(self) -> None:
        """Restore the callbacks' states, with `restore_callback_states_from_checkpoint` or after a rollback."""
        if self.args.restore_callback_states_from_checkpoint or self._hftrainer.run.has_rolled_back:
            self.control = restore_callbacks(self.callback_handler, self.control, self.state.stateful_callbacks)
        else:
            warn_about_unrestored_callbacks(self.callback_handler.callbacks, self.state.stateful_callbacks)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Record the metric if it is the best so far; returns whether it is.

        Raises:
            MetricNotFound: if evaluation does not return the metric; the error lists the metrics it returns.
        """
        return self._hftrainer.control_actions.determine_best_metric(metrics, trial)

    # ---- The Hub and the model card ----------------------------------------------------------------------------

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Create the repository `hub_model_id`, unless it exists, and check write access.

        Args:
            token: a token with write access; default `hub_token`.
            private: whether a new repository is private; default `hub_private_repo`.

        Raises:
            InvalidArgument: for an invalid repository name.
            HubError: without write access; the error gives the reason.
        """
        with HideEngineFrames():
            self._hftrainer.trainer_hub.open_repository(token, private)

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
        """Write `README.md` and `training.png` to the output folder, in the main process.

        The card lists the origins of model and data, the results, the hyperparameters and the versions. Call it at any
        time, even during training. The plot needs `hftrainer[plot]`.

        Args:
            language: ISO codes of the data's languages; the Hub checks them and the licence when the card is uploaded.
            license: an identifier such as 'apache-2.0'; default the pretrained model's, if the Hub has it.
            tags: tags to add to `generated_from_trainer` and to those of the model and an existing card.
            model_name: the heading; default the output folder's name.
            finetuned_from: the repository of the pretrained model; default that in its config.
            tasks: identifiers such as 'text-classification'; default by the model's class.
            dataset_tags: identifiers of datasets on the Hub; default those of the evaluation or training data.
            dataset: names of the datasets; default their tags.
            dataset_args: for each tag, the arguments that loaded the dataset.

        Raises:
            InvalidArgument: for values of a wrong type; the error names them.
        """
        arguments = dict(locals())
        create_model_card(arguments.pop("self"), **arguments)

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save the model in `output_dir`, write its card, and upload the folder without the checkpoints.

        Args:
            commit_message: the commit message.
            blocking: whether to wait for the upload, or to return a future, which the script must wait for.
            token: a token with write access; default `hub_token`.
            revision: the branch; default `hub_revision`, or main.
            private: whether a new repository is private; default `hub_private_repo`.
            **kwargs: arguments of `create_model_card`.

        Returns:
            A `CommitInfo`, or a `Future` of it; None outside the main process.

        Raises:
            HubError: if the upload fails; the model is in `output_dir`.
        """
        with HideEngineFrames():
            return self._hftrainer.trainer_hub.push_model(
                commit_message, blocking=blocking, token=token, revision=revision, private=private, card=kwargs
            )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Start uploading the parts of a checkpoint that `hub_strategy` selects."""
        self._hftrainer.trainer_hub.push_checkpoint(checkpoint_folder)

    def _finish_current_push(self) -> None:
        """Wait for uploads, retry failed uploads, and log which succeeded and which are missing."""
        self._hftrainer.trainer_hub.finish_uploads()

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
        """Train a new model for each choice of hyperparameters, and return the best trial.

        The main process has Optuna's study in `hp_study`. With `storage`, `study_name` and `load_if_exists=True`,
        an interrupted search continues, and several processes or machines can share a search.

        Ray trains each trial in a separate process, with this working directory and a copy of this Trainer. An
        interrupted search continues with `name` and `resume="AUTO"`. Interrupted trials, and those of population-based
        training, resume from the last evaluated step that was saved.

        Args:
            hp_space: trial → a dict of the trial's arguments; with Ray, None → a dict of Ray's distributions; with
                W&B, None → the configuration of the sweep. Default: `default_hp_space_optuna`, `_ray`, `_wandb`.
            compute_objective: evaluation metrics → a number, or one number per direction; default
                `default_compute_objective`.
            n_trials: total number of trials in the study, including earlier trials; may be None with a `timeout`. For
                'wandb', the number of runs that this process trains.
            direction: 'minimize' or 'maximize'; a list of these for several objectives.
            backend: 'optuna' (default), 'ray' or 'wandb'.
            hp_name: trial → the name of its folder and of its tracker runs; default: folder `run-{number}`, and no
                name in trackers. With Ray the trial is a dict of values, and the default is `run-{trial_id}` for both.
            kwargs: arguments of `optuna.create_study` (sampler, pruner, storage, study_name, load_if_exists) and
                `Study.optimize` (timeout in seconds, n_jobs, catch, callbacks, gc_after_trial, show_progress_bar).
                `n_jobs` processes train trials, all but the first with a pickled copy of the Trainer. With Ray:
                arguments of `ray.tune.run`; resources_per_trial defaults to one CPU, and one GPU if the Trainer uses
                it. With W&B: arguments of `search.wandb_search.WandbSearch.run`.

        Returns:
            The best trial (for 'wandb', the best of this process); with several objectives, a list of Pareto-optimal
            trials.

        Raises:
            InvalidArgument: without a `model_init`, or for invalid values.
            UnknownArgument: for a name in `hp_space` that is not an argument.
            UnsupportedArgument: for an unsupported backend.
            MissingPackage: for a backend that is not installed.
            SearchFailed: if no trial completes.
        """
        try:
            with HideEngineFrames():
                return run_search.search(
                    self._hftrainer, hp_space, compute_objective, n_trials, direction, backend, hp_name, **kwargs
                )
        finally:
            self._finish_current_push()

    def _hp_search_setup(self, trial: Any) -> None:
        """Set the arguments of a trial, and rebuild the parts that depend on them."""
        self._trial = trial
        if trial is not None:
            run_search.set_trial_arguments(self._hftrainer, trial)
        elif not self._hftrainer.needs_rebuild:
            return
        self._hftrainer.trainer_setup.rebuild_from_arguments()

    def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        """Report a trial's evaluation to the search, which may end the trial."""
        if self._hftrainer.search_backend is not None and trial is not None:
            self.objective = self._hftrainer.search_backend.compute_trial_objective(self, metrics)
            self._hftrainer.search_backend.report(self, trial, step, self.objective, metrics)

    # ---- Logs and metrics --------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add a line to `state.log_history` and call `on_log`. Override it to extend logging.

        Args:
            logs: the values of the line, to which we add the epoch.
            start_time: when training began, from `time.time()`.
        """
        # Until v5.2, it is None before training.
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        logs |= self._hftrainer.counters.token_metrics(start_time)
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._hftrainer.call_callbacks("on_log", logs)
        self._hftrainer.engine.show_values(logs)

    @staticmethod
    def metrics_format(metrics: Mapping[str, Any]) -> dict[str, Any]:
        """The metrics, formatted for display."""
        return metrics_format(metrics)

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Print metrics as a table, in the main process.

        Args:
            split: 'train', 'eval' or 'test', for the title.
            metrics: the metrics to print.
        """
        if self.is_world_process_zero():
            print_table(f"{split} metrics", self.metrics_format(metrics))

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Write metrics to `{split}_results.json`, in the main process.

        Args:
            split: 'train', 'eval', 'test' or 'all'.
            metrics: the metrics to write.
            combined: whether to also merge them into `all_results.json`.
        """
        if self.is_world_process_zero():
            write_metrics(str(self.args.output_dir), split, metrics, combined=combined)
            self._hftrainer.storage_sync.upload_files()

    # ---- Processes ---------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Wait for background checkpoints and uploads, then leave the process group.

        Call it at the end of a script: later operations that need other processes fail.
        """
        self._hftrainer.checkpoint_writer.close()
        self._finish_current_push()
        self.accelerator.end_training()

    def is_local_process_zero(self) -> bool:
        """Whether this is the main process of its node."""
        return self.args.local_process_index == 0

    def is_world_process_zero(self) -> bool:
        """Whether this process has rank 0."""
        return self.args.process_index == 0
