"""Creates DeepSpeed's engine, and runs its steps and checkpoints."""

from __future__ import annotations

import contextlib
import glob
import os
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hftrainer.base.safe_loading import weights_only
from hftrainer.checkpointing.weights import has_deepspeed_states, read_deepspeed_tag, write_deepspeed_tag
from hftrainer.errors import DamagedCheckpoint, InvalidConfig, UnsafeCheckpoint
from hftrainer.parallel.plan import LightningPlan
from hftrainer.parallel.processes import Processes


class EngineHolder:
    """DeepSpeed's engine for one model. Each training run creates a new engine.

    Args:
        plan: the plan, with DeepSpeed's configuration.

    Attributes:
        config: the configuration; `complete` fills in values that depend on the run.
        engine: the `DeepSpeedEngine`, or None.
        is_training: whether the engine trains the model, rather than running inference.
    """

    def __init__(self, plan: LightningPlan) -> None:
        assert plan.deepspeed is not None
        self.config = self._base_config = plan.deepspeed
        self.engine: Any = None
        self.is_training = False

    def complete(self, args: Any, model: torch.nn.Module, steps: int) -> None:
        """Fill in the values of a run. The arguments are those of `DeepSpeedConfig.complete_with_run_values`."""
        self.config = self._base_config.complete_with_run_values(args, model, steps)

    @property
    def has_config_optimizer(self) -> bool:
        """Whether the configuration defines the optimizer."""
        return "optimizer" in self.config.config

    @property
    def has_config_scheduler(self) -> bool:
        """Whether the configuration defines a scheduler."""
        return "scheduler" in self.config.config

    def initialize(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        make_scheduler: Callable[[torch.optim.Optimizer], Any],
    ) -> Any:
        """Create the engine that trains a model.

        Args:
            model: the user's model.
            optimizer: the Trainer's optimizer; None if the configuration defines one.
            make_scheduler: makes the Trainer's scheduler for the configuration's optimizer. DeepSpeed then saves it, as
                with transformers, so that both can resume from each other's checkpoints.

        Returns:
            The optimizer for callbacks and schedulers, and the scheduler that the engine steps, or None if the
            Trainer steps it.
        """
        import deepspeed

        self.destroy()
        config = {**self.config.config}
        if optimizer is not None:
            config["zero_allow_untested_optimizer"] = True
            if self.config.get_value("zero_optimization.offload_optimizer.device") in ("cpu", "nvme") and config.get(
                "zero_force_ds_cpu_optimizer", True
            ):
                optimizer = cpu_optimizer(optimizer)
        parameters = None if optimizer is not None else [p for p in model.parameters() if p.requires_grad]
        set_leaf_layers(model)
        with name_refused_sections(config, make_scheduler) as make:
            self.engine, _, _, scheduler = deepspeed.initialize(
                model=model,
                optimizer=optimizer,
                model_parameters=parameters,
                lr_scheduler=make if self.has_config_optimizer and not self.has_config_scheduler else None,
                config=config,
                dist_init_required=False,
            )
        self.is_training = True
        configure_activation_checkpointing(config)
        self.engine.checkpoint_engine = writer = _ErrorDeferringWriter(self.engine.checkpoint_engine)
        self.engine._copy_recovery_script = writer.defer_errors(self.engine._copy_recovery_script)
        return EngineOptimizer(self.engine.optimizer), None if scheduler is None else EngineScheduler(scheduler)

    def initialize_inference(self, model: torch.nn.Module) -> Any:
        """The training engine, or else a new engine for inference with partitioned parameters."""
        import deepspeed

        if self.engine is None:
            training_keys = ("optimizer", "scheduler")
            config = {name: value for name, value in self.config.config.items() if name not in training_keys}
            self.engine = deepspeed.initialize(model=model, config=config, dist_init_required=False)[0]
        return self.engine

    def destroy(self) -> None:
        """Remove the engine of an earlier run from the model."""
        if self.engine is not None:
            self.engine.destroy()
        self.engine = None
        self.is_training = False

    # ---- Steps -------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, *, is_last: bool, **kwargs: Any) -> None:
        """Run the backward pass. After a window's last micro-batch (`is_last`), the engine also clips and steps."""
        self.engine.set_gradient_accumulation_boundary(is_boundary=is_last)
        # The Trainer has already divided the loss.
        self.engine.backward(loss, scale_wrt_gas=False, **kwargs)
        if is_last:
            self.engine.step()

    def grad_norm(self) -> Any:
        """The norm of the last step's gradients before clipping."""
        norm = self.engine.get_global_grad_norm()
        return norm.item() if isinstance(norm, torch.Tensor) else norm

    # ---- Checkpoints ---------------------------------------------------------------------------------------------

    @property
    def saves_full_weights(self) -> bool:
        """Whether checkpoints hold the full weights, not only the shards that the engine writes."""
        key = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
        return not (self.config.is_zero3() and self.is_training) or self.config.is_true(key)

    def gather_full_weights(self, model: torch.nn.Module, *, only_trainable: bool = False) -> dict[str, Any]:
        """Gather the weights by name. They are complete only on rank 0.

        Args:
            model: any model, partitioned or not.
            only_trainable: leave out frozen weights, if the weights are partitioned.
        """
        # ZeRO-3 sets this attribute.
        if not any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
            return model.state_dict()
        # The engine gathers one layer at a time.
        if self.engine is not None and self.engine.module is model:
            return self.engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=only_trainable) or {}
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}

    def save(self, folder: str, processes: Processes) -> None:
        """Write the engine's states. All ranks must call this.

        Raises:
            OSError: the first error of any rank.
        """
        from deepspeed.checkpoint import constants

        writer = self.engine.checkpoint_engine
        # Converting to a universal checkpoint needs this entry.
        universal = {constants.UNIVERSAL_CHECKPOINT_VERSION_KEY: constants.UNIVERSAL_CHECKPOINT_VERSION_VALUE}
        self.engine.save_checkpoint(
            folder,
            client_state={constants.UNIVERSAL_CHECKPOINT_INFO: universal},
            exclude_frozen_parameters=hasattr(self.engine.module, "peft_config"),
            # The file `latest` is written below: if rank 0 failed to write it here, the other ranks would hang.
            save_latest=False,
        )
        if processes.rank == 0:
            writer.defer_errors(write_deepspeed_tag)(folder, f"global_step{self.engine.global_steps}")
        errors = [error for error in processes.gather_objects([writer.pop_error()]) if error is not None]
        if errors:
            raise errors[0]

    def load(self, folder: str, *, strict: bool) -> None:
        """Load the engine's states, which include the model. All ranks must call this.

        Raises:
            InvalidConfig: if the folder has no states, or a different number of processes wrote them.
            DamagedCheckpoint: if the file `latest` names a path outside the checkpoint.
            UnsafeCheckpoint: if the checkpoint holds objects of classes that are not DeepSpeed's.
        """
        universal = self.config.is_true("checkpoint.load_universal")
        if not has_deepspeed_states(folder, universal=universal):
            raise InvalidConfig(_explain_unreadable(folder, universal))
        tag = read_deepspeed_tag(folder, universal=universal)
        ranks = len(glob.glob(os.path.join(folder, tag, "*zero_pp_rank_*_optim_states.pt")))
        if not universal and ranks not in (0, torch.distributed.get_world_size()):
            raise InvalidConfig(
                f"{folder} holds shards of {ranks} processes, but this run has "
                f"{torch.distributed.get_world_size()}. Convert it to a universal checkpoint with "
                "python -m deepspeed.checkpoint.ds_to_universal --input_folder "
                f"{os.path.join(folder, tag)} --output_folder {os.path.join(folder, 'universal')}, and set "
                "'checkpoint': {'load_universal': true} in the configuration."
            )
        try:
            with weights_only(folder, _classes()):
                path, _ = self.engine.load_checkpoint(folder, tag, load_module_strict=strict)
        except (OSError, MemoryError, UnsafeCheckpoint, DamagedCheckpoint):
            raise
        except Exception as error:
            # DeepSpeed raises arbitrary errors for a checkpoint that does not match.
            raise InvalidConfig(
                f"DeepSpeed cannot resume from {folder} ({error!r}): model, stage and optimizer must be those of the "
                "checkpoint."
            ) from error
        if path is None:
            raise InvalidConfig(f"DeepSpeed cannot resume from {folder}; see its messages above.")


# ---- Making the engine ----------------------------------------------------------------------------------------------


def cpu_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """DeepSpeed's CPU version of a torch optimizer.

    Raises:
        InvalidConfig: for an optimizer without a CPU version.
    """
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    options = {name: optimizer.defaults[name] for name in ("lr", "weight_decay") if name in optimizer.defaults}
    # The exact type: a subclass may step differently.
    exact_type = type(optimizer)
    if exact_type in (torch.optim.Adam, torch.optim.AdamW):
        cpu_version = DeepSpeedCPUAdam(optimizer.param_groups, adamw_mode=exact_type is torch.optim.AdamW, **options)
    elif exact_type is torch.optim.Adagrad:
        cpu_version = DeepSpeedCPUAdagrad(optimizer.param_groups, **options)
    else:
        raise InvalidConfig(
            "deepspeed: with offload_optimizer DeepSpeed steps with its own Adam, AdamW or Adagrad, but the optimizer "
            f"is {exact_type.__name__}: use one of them, or keep it with 'zero_force_ds_cpu_optimizer': false."
        )
    return cpu_version


def set_leaf_layers(model: torch.nn.Module) -> None:
    """Let ZeRO-3 gather each layer of the launcher's classes at once, for mixtures of experts.

    Raises:
        InvalidConfig: if the model has no such layers.
    """
    names = os.environ.get("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", "")
    if names in ("", "None"):
        return
    from deepspeed.utils import set_z3_leaf_modules

    try:
        set_z3_leaf_modules(model, [name.strip() for name in names.split(",")])
    except ValueError as error:
        raise InvalidConfig(
            f"deepspeed_moe_layer_cls_names={names!r} of accelerate's launcher: the model has no such layer."
        ) from error


@contextlib.contextmanager
def name_refused_sections(
    config: dict[str, Any], make_scheduler: Callable[[Any], Any]
) -> Iterator[Callable[[Any], Any]]:
    """Name the sections in errors of DeepSpeed's constructors. Yields a wrapped `make_scheduler`.

    Raises:
        InvalidConfig: for errors of DeepSpeed, unless it compiles then; errors of `make_scheduler` are unchanged.
    """
    script_errors: list[Exception] = []

    def make(optimizer: Any) -> Any:
        try:
            return make_scheduler(optimizer)
        except Exception as error:
            script_errors.append(error)
            raise

    try:
        yield make
    except (TypeError, AttributeError, KeyError, AssertionError, ValueError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        # The config did not cause what happens when DeepSpeed compiles its operations.
        if error in script_errors or any("op_builder" in frame.filename for frame in frames):
            raise
        sections = {name: config[name] for name in ("optimizer", "scheduler", "zero_optimization") if name in config}
        raise InvalidConfig(
            f"deepspeed: DeepSpeed cannot create an engine from {sections} ({type(error).__name__}: {error}): correct "
            "the type or the parameters that it names."
        ) from error


def configure_activation_checkpointing(config: dict[str, Any]) -> None:
    """Configure `deepspeed.checkpointing`, for models that use it, from the configuration's section."""
    import deepspeed

    section = config.get("activation_checkpointing")
    if section:
        deepspeed.checkpointing.configure(
            None,
            partition_activations=section.get("partition_activations"),
            contiguous_checkpointing=section.get("contiguous_memory_optimization"),
            num_checkpoints=section.get("number_checkpoints"),
            checkpoint_in_cpu=section.get("cpu_checkpointing"),
            synchronize=section.get("synchronize_checkpoint_boundary"),
            profile=section.get("profile"),
        )


# ---- Loading, and wrappers of DeepSpeed's objects -------------------------------------------------------------------


def _explain_unreadable(folder: str, universal: bool) -> str:
    if universal:
        return (
            f"checkpoint.load_universal is set, but {folder} has no file latest_universal: create it with python -m "
            "deepspeed.checkpoint.ds_to_universal, or remove the key."
        )
    return (
        f"{folder} was not written by DeepSpeed: load its weights into the model with from_pretrained, and train "
        "without resume_from_checkpoint, or resume without deepspeed."
    )


def _classes() -> list[type]:
    """DeepSpeed's classes whose instances its checkpoints contain."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]


class EngineOptimizer(torch.optim.Optimizer):
    """A torch optimizer for callbacks and schedulers. DeepSpeed's engine does the steps.

    DeepSpeed's optimizers are not torch optimizers, or free their tensors when Lightning deletes its copy of them.
    It has no attribute `optimizer`, since Lightning's callbacks would unwrap that.

    Args:
        optimizer: DeepSpeed's optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        self._engine_optimizer = optimizer
        self._optimizer_step_pre_hooks = self._optimizer_step_post_hooks = {}  # type: ignore[assignment]
        self.defaults = getattr(optimizer, "defaults", {})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups. With ZeRO their parameters are flat shards."""
        return self._engine_optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state by parameter."""
        return self._engine_optimizer.state

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank's shard."""
        return self._engine_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state from `state_dict`."""
        self._engine_optimizer.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: the engine has stepped."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the engine has cleared the gradients."""


class _Wrapper:
    """Wraps one of DeepSpeed's objects, and forwards its attributes.

    Args:
        wrapped_object: DeepSpeed's object.
    """

    def __init__(self, wrapped_object: Any) -> None:
        self._wrapped_object = wrapped_object

    def __getattr__(self, name: str) -> Any:
        # Unpickling and copying look it up before it exists.
        if name == "_wrapped_object":
            raise AttributeError(name)
        return getattr(self._wrapped_object, name)


class EngineScheduler(_Wrapper):
    """A scheduler that DeepSpeed's engine steps."""

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the engine has stepped the scheduler."""

    def get_last_lr(self) -> list[float]:
        """The learning rates; 0 before the first step that was not skipped."""
        return list(getattr(self._wrapped_object, "_last_lr", [0.0]))


class _ErrorDeferringWriter(_Wrapper):
    """Wraps DeepSpeed's checkpoint writer, and stores errors until all ranks can raise them.

    DeepSpeed's ranks wait for each other after writing: if one raised immediately, the others would hang.
    """

    def __init__(self, writer: Any) -> None:
        super().__init__(writer)
        self._error: OSError | RuntimeError | None = None
        self.save, self.makedirs = self.defer_errors(writer.save), self.defer_errors(writer.makedirs)

    def defer_errors(self, write: Callable[..., Any]) -> Callable[..., None]:
        """Wrap a function so that its storage error is stored instead of raised."""

        def call(*args: Any, **kwargs: Any) -> None:
            try:
                write(*args, **kwargs)
            except (OSError, RuntimeError) as error:
                # torch's writer raises RuntimeError when a disk is full.
                self._error = self._error or error

        return call

    def pop_error(self) -> OSError | RuntimeError | None:
        """The first error since the last call."""
        error, self._error = self._error, None
        return error
