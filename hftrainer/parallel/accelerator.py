"""`trainer.accelerator`: the parts of accelerate's `Accelerator` that scripts and libraries use.

Neither a device, for which see `devices.py`, nor Lightning's `Accelerator`, a device type.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from hftrainer.errors import InvalidConfig
from hftrainer.parallel import devices
from hftrainer.parallel.process_group import disconnect
from hftrainer.parallel.process_state import GradientState, ProcessState
from hftrainer.parallel.processes import Processes

if TYPE_CHECKING:
    from hftrainer.plugins import LightningEngine


#: The keys of `accelerator_config` that apply to loaders.
_LOADER_KEYS = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking")


def _make_property(owner: str, name: str) -> Any:
    """A property that forwards to an attribute of another object, as in accelerate."""

    def get(self: EngineAccelerator) -> Any:
        return getattr(getattr(self, owner), name)

    def set_(self: EngineAccelerator, value: Any) -> None:
        setattr(getattr(self, owner), name, value)

    return property(get, set_, doc=f"`{owner}.{name}`; a new value applies to loaders prepared later.")


class EngineAccelerator(ProcessState):
    """accelerate's `Accelerator`, implemented with the engine. Each process of a run has one device.

    Args:
        engine: runs backward.
        device: the device that training runs on.
        prepare_loader: prepares a `DataLoader` in the same way as the Trainer's.
        is_trainer_model: returns whether a model is the Trainer's, which `train()` prepares.
        config: the keys of `accelerator_config`.
        gradient_divisor: what divides the gradients, besides the division of the loss; accelerate's `num_steps`.
        divide_loss: divides a loss by it before its backward pass.

    Attributes:
        gradient_state: whether this micro-batch ends an optimizer step, and the active loader's position.
        dataloader_config: settings for loaders that are prepared later.
    """

    def __init__(
        self,
        engine: LightningEngine,
        device: torch.device,
        prepare_loader: Callable[[torch.utils.data.DataLoader[Any]], Any],
        is_trainer_model: Callable[[torch.nn.Module], bool],
        config: Mapping[str, Any],
        gradient_divisor: int,
        divide_loss: Callable[[EngineAccelerator, torch.Tensor], torch.Tensor],
    ) -> None:
        plan = engine.plan
        processes = plan.processes
        settings = {
            "mixed_precision": plan.mixed_precision,
            "parallelism_config": plan.layout if plan.layout.total_size > 1 else None,
            "is_fsdp2": plan.sharding is not None and plan.sharding.version == 2,
        }
        super().__init__(processes, device, engine.strategy.distributed_type, **settings)
        plugins = {"deepspeed_plugin": None, "fsdp_plugin": None, **engine.strategy.plugins()}
        self.state = ProcessState(processes, device, self.distributed_type, **plugins, **settings)
        self.deepspeed_plugin = self.state.deepspeed_plugin
        self._engine = engine
        self._strategy = engine.strategy
        self._prepare_loader = prepare_loader
        self._is_trainer_model = is_trainer_model
        self._divide_loss = divide_loss
        self._loaders: weakref.WeakSet[Any] = weakref.WeakSet()
        # This name is accelerate's: scripts check whether the list is empty.
        self._models: list[torch.nn.Module] = []
        self.dataloader_config = SimpleNamespace(
            **{name: config[name] for name in _LOADER_KEYS},
            data_seed=plan.read_once["data_seed"],
            use_stateful_dataloader=False,
        )
        self.device_placement = True
        self.processes: Processes = processes
        self.scaler = engine.scaler
        self.optimizer_step_was_skipped = False
        self.multi_device = processes.is_distributed
        accumulation = {**(config["gradient_accumulation_kwargs"] or {}), "num_steps": gradient_divisor}
        self.gradient_state = GradientState(self._loaders, processes.data_world_size, accumulation)

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError for any other name; suggest an alternative for names of accelerate."""
        alternative = _ALTERNATIVES.get(name)
        raise AttributeError(f"accelerator.{name} does not exist" + (f": {alternative}." if alternative else "."))

    split_batches = _make_property("dataloader_config", "split_batches")
    dispatch_batches = _make_property("dataloader_config", "dispatch_batches")
    even_batches = _make_property("dataloader_config", "even_batches")
    use_seedable_sampler = _make_property("dataloader_config", "use_seedable_sampler")
    non_blocking = _make_property("dataloader_config", "non_blocking")
    use_stateful_dataloader = _make_property("dataloader_config", "use_stateful_dataloader")
    sync_gradients = _make_property("gradient_state", "sync_gradients")

    @property
    def gradient_accumulation_steps(self) -> int:
        """Accumulation steps of accelerate: 1, since the Trainer accumulates, except in v5.2 to v5.5."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self.gradient_state.plugin_kwargs["num_steps"] = steps

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run backward through the strategy and the precision plugin, after `divide_in_backward`."""
        self._engine.backward(self._divide_loss(self, loss), **kwargs)

    def prepare(self, *objects: Any) -> Any:
        """Prepare loaders and models, and return optimizers and schedulers unchanged."""
        results = tuple(self._prepare_object(item) for item in objects)
        return results[0] if len(results) == 1 else results

    def _prepare_object(self, item: Any) -> Any:
        if isinstance(item, torch.utils.data.DataLoader):
            return self.prepare_data_loader(item)
        if isinstance(item, torch.nn.Module):
            return self.prepare_model(item)
        if isinstance(item, torch.optim.Optimizer):
            return self.prepare_optimizer(item)
        if isinstance(item, torch.optim.lr_scheduler.LRScheduler):
            return self.prepare_scheduler(item)
        return item

    def prepare_data_loader(self, loader: torch.utils.data.DataLoader[Any]) -> Any:
        """A loader that shards and moves batches like the Trainer's."""
        prepared_loader = self._prepare_loader(loader)
        self._loaders.add(prepared_loader)
        return prepared_loader

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """The model on the device, wrapped in DDP or sharded like the Trainer's model.

        Args:
            model: any model; the Trainer's is returned unchanged, since `train()` wraps it.
            device_placement: False leaves the model where it is.
            evaluation_mode: whether the model is only evaluated, so that its gradients need no all-reduce.
        """
        if not any(prepared_model is model for prepared_model in self._models):
            self._models.append(model)
        if self._is_trainer_model(model):
            return model
        if device_placement is not False:
            self._strategy.move_model(model, self.device)
        is_trainable = any(parameter.requires_grad for parameter in model.parameters())
        if evaluation_mode or not is_trainable or not self.processes.is_distributed:
            return model
        return self._strategy.prepare_extra_model(model)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """The optimizer, unchanged, on any device."""
        return optimizer

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """The scheduler, unchanged."""
        return scheduler

    def unwrap_model(
        self, model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> Any:
        """The user's model, without the wrappers of DDP, FSDP or DeepSpeed.

        Args:
            model: the model, wrapped or not.
            keep_fp32_wrapper: False removes autocast from the `forward` of a model that is being trained.
            keep_torch_compile: False returns the original of a compiled model.
        """
        compiled = model if hasattr(model, "_orig_mod") else None
        inner_model: Any = model if compiled is None else compiled._orig_mod
        while self._strategy.is_wrapper(inner_model):
            inner_model = inner_model.module
        if not keep_fp32_wrapper and hasattr(inner_model.__dict__.get("forward"), "__wrapped__"):
            del inner_model.forward
        if compiled is None or not keep_torch_compile:
            return inner_model
        compiled._orig_mod = inner_model
        return compiled

    def gather(self, tensor: Any) -> Any:
        """Tensors of all ranks, concatenated along the first dimension."""
        return self.processes.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Like `gather`, but without the padding rows of the loader's last batch.

        Padding rows are those of a filler batch, those that complete the last batches of training, and losses repeated
        beyond the size of an incomplete last batch.

        Args:
            input_data: tensors in nested containers, or with `use_gather_object` a sequence of any objects.
            use_gather_object: gather pickled objects instead of tensors.
        """
        loader = self.gradient_state.active_dataloader
        num_samples = None if loader is None else loader.position.counted_samples
        if num_samples is not None:
            input_data = self.processes.first_rows(input_data, num_samples, objects=use_gather_object)
        if use_gather_object or self.processes.tp_size > 1:
            rows = self.processes.gather(input_data, objects=use_gather_object, one_per_tp_group=True)
        else:
            rows = self.gather(input_data)
        if loader is None or loader.remainder is None:
            return rows
        return self.processes.first_rows(rows, loader.remainder, objects=use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Tensors, reduced over all ranks.

        Args:
            tensor: tensors in nested containers.
            reduction: 'sum', 'mean', 'max' or 'none'.
            scale: the factor that accelerate applies on TPUs only.

        Raises:
            InvalidConfig: for a scale other than 1.
        """
        if scale != 1.0:
            raise InvalidConfig(f"reduce(scale={scale}) is for TPUs only: multiply the result instead.")
        return self.processes.reduce(tensor, reduction)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Tensors, padded in one dimension to the largest size on any rank."""
        return self.processes.pad(tensor, dim, pad_index, pad_first)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients, and return their norm before clipping."""
        self.unscale_gradients()
        return self._strategy.clip_grad_norm(parameters, max_norm, norm_type)

    def autocast(self) -> Any:
        """Autocast to the precision of the training arguments, for computations outside the model."""
        if self.mixed_precision == "no":
            return contextlib.nullcontext()
        dtype = torch.bfloat16 if self.mixed_precision == "bf16" else torch.float16
        return torch.autocast(self.device.type, dtype=dtype)

    def no_sync(self, model: Any = None) -> Any:
        """Do not all-reduce the gradients of backward passes in the block."""
        return self._strategy.no_sync(self._engine.fitting_strategy)

    @contextlib.contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """Do nothing: the Trainer accumulates gradients itself."""
        yield

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Do nothing. It is for scripts only: with float16, the run unscales gradients before it clips them."""

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write an object, or tensors by name, on the main process.

        Args:
            obj: any object for `torch.save`, or with `safe_serialization` a dict of tensors.
            f: the file.
            safe_serialization: write safetensors.
        """
        if not self.is_main_process:
            return
        if safe_serialization:
            from safetensors.torch import save_file

            save_file(obj, f, metadata={"format": "pt"})
        else:
            torch.save(obj, f)

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: Any,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's full weights to a folder, on the main process; all ranks must call it.

        Args:
            model: any model, sharded or not.
            save_directory: the folder.
            max_shard_size: maximum size of a file, in bytes or as text such as '10GB'.
            safe_serialization: write safetensors; otherwise use `torch.save`.
        """
        from huggingface_hub import save_torch_state_dict

        weights = self.get_state_dict(model)
        if self.is_main_process:
            os.makedirs(save_directory, exist_ok=True)
            save_torch_state_dict(
                weights, save_directory, max_shard_size=max_shard_size, safe_serialization=safe_serialization
            )

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The model's weights. All ranks must call this, since it gathers those of a sharded model."""
        return self._strategy.gather_full_weights(model)

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """Do nothing: the accelerator has no trackers; `Trainer.log` keeps the history."""

    def free_memory(self, *objects: Any) -> Any:
        """Release objects, prepared models and cached device memory, and return None for each object."""
        self._models.clear()
        devices.empty_cache()
        return [None for _ in objects]

    clear = free_memory

    def end_training(self) -> None:
        """Leave the process group, if any. The Trainer closes its trackers when training ends."""
        disconnect()


_CHECKPOINTS = (
    "the Trainer handles checkpoints: save_strategy writes them, train(resume_from_checkpoint=...) reads them"
)
_DECORATORS = "check is_main_process, is_last_process, is_local_main_process or process_index in the function"
_TRACKING = "the Trainer handles trackers: report_to or Trainer(loggers=[...]) opens them, Trainer.log writes to them"
#: Names of accelerate → what to use instead.
_ALTERNATIVES = {
    **dict.fromkeys(("save_state", "load_state", "save_iteration"), _CHECKPOINTS),
    **dict.fromkeys(("register_save_state_pre_hook", "register_load_state_pre_hook"), "override _save_checkpoint"),
    "register_for_checkpointing": "a callback that exports its state is saved with checkpoints",
    **dict.fromkeys(("on_main_process", "on_last_process", "on_process"), _DECORATORS),
    **dict.fromkeys(("on_local_main_process", "on_local_process"), _DECORATORS),
    **dict.fromkeys(("set_trigger", "check_trigger"), "reduce a flag over the ranks: accelerator.reduce(flag, 'sum')"),
    "skip_first_batches": "train(resume_from_checkpoint=...) skips the batches that training has used",
    "clip_grad_value_": "use torch.nn.utils.clip_grad_value_",
    **dict.fromkeys(("init_trackers", "get_tracker", "trackers", "log_with"), _TRACKING),
    "profile": "use lightning_config={'profiler': ...}",
    "join_uneven_inputs": "the Trainer's loaders give all processes the same number of batches",
    "maybe_context_parallel": "context parallelism is not supported; use fsdp",
    "trigger_sync_in_backward": "gradients are all-reduced at the end of each accumulation window",
    "lomo_backward": "optim='lomo' steps in accelerator.backward",
}
