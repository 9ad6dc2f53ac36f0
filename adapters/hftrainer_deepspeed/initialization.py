"""What is done around DeepSpeed's engine when it is made: its optimizer for the CPU, its layers, its errors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hftrainer.errors import WrongConfig


def cpu_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """DeepSpeed's CPU version of a torch optimizer.

    Raises:
        WrongConfig: for an optimizer without a CPU version.
    """
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    given: dict[str, Any] = {
        name: optimizer.defaults[name] for name in ("lr", "weight_decay") if name in optimizer.defaults
    }
    kind = type(optimizer)  # exact type: a subclass may step differently
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        adam: torch.optim.Optimizer = DeepSpeedCPUAdam(
            optimizer.param_groups, adamw_mode=kind is torch.optim.AdamW, **given
        )
        return adam
    if kind is torch.optim.Adagrad:
        adagrad: torch.optim.Optimizer = DeepSpeedCPUAdagrad(optimizer.param_groups, **given)
        return adagrad
    raise WrongConfig(
        f"deepspeed: with offload_optimizer DeepSpeed steps with its own Adam, AdamW or Adagrad, but the optimizer is "
        f"{type(optimizer).__name__}: choose one of them, or keep it with 'zero_force_ds_cpu_optimizer': false."
    )


def gather_layers_as_one(model: torch.nn.Module) -> None:
    """Let ZeRO-3 gather the layers of the classes that the launcher names as one, as mixtures of experts need it.

    Raises:
        WrongConfig: if the model has no such layers.
    """
    names = os.environ.get("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", "")
    if names in ("", "None"):
        return
    from deepspeed.utils import set_z3_leaf_modules

    try:
        set_z3_leaf_modules(model, [name.strip() for name in names.split(",")])
    except ValueError as error:
        raise WrongConfig(
            f"deepspeed_moe_layer_cls_names={names!r} of accelerate's launcher: the model has no such layer."
        ) from error


@contextlib.contextmanager
def refusals_named(config: dict[str, Any], make_scheduler: Callable[[Any], Any]) -> Iterator[Callable[[Any], Any]]:
    """Name the sections of which DeepSpeed makes objects, if it cannot make them; yields `make_scheduler`.

    Raises:
        WrongConfig: for what DeepSpeed raises; errors of `make_scheduler` itself stay as they are.
    """
    of_script: list[Exception] = []

    def make(optimizer: Any) -> Any:
        try:
            return make_scheduler(optimizer)
        except Exception as error:
            of_script.append(error)
            raise

    try:
        yield make
    except (TypeError, AttributeError, KeyError, AssertionError, ValueError) as error:
        if error in of_script:
            raise
        shown = {name: config[name] for name in ("optimizer", "scheduler", "zero_optimization") if name in config}
        raise WrongConfig(
            f"deepspeed: DeepSpeed makes no engine of {shown} ({type(error).__name__}: {error}): correct the type or "
            "the parameters that it names."
        ) from error


def configure_activation_checkpointing(config: dict[str, Any]) -> None:
    """Pass the section to `deepspeed.checkpointing`, for models that call it."""
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
