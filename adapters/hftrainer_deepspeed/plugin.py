"""`accelerator.state.deepspeed_plugin`, and `args.deepspeed_plugin`."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from hftrainer_deepspeed.settings import DeepSpeedConfig


class Configured(Protocol):
    """An object with a DeepSpeed configuration: a run, or the arguments."""

    config: DeepSpeedConfig

    @property
    def gathers(self) -> bool:
        """Whether checkpoints also hold whole weights."""


@dataclass
class Planned:
    """The configuration in the arguments, before a run."""

    config: DeepSpeedConfig

    @property
    def gathers(self) -> bool:
        """Whether checkpoints also hold whole weights."""
        return self.config.is_true("zero_optimization.stage3_gather_16bit_weights_on_model_save")


class DeepSpeedPlugin:
    """`accelerator.state.deepspeed_plugin`: the configuration under accelerate's names.

    Args:
        run: the object with the configuration, which is complete once training has started.
    """

    def __init__(self, run: Configured) -> None:
        self._run = run
        self.zero3_init_flag = run.config.is_zero3()
        self.selected = True

    @property
    def hf_ds_config(self) -> DeepSpeedConfig:
        """The configuration with its methods."""
        return self._run.config

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """The configuration as a dict."""
        return self.hf_ds_config.config

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage."""
        return self.hf_ds_config.stage

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self.get_value("gradient_accumulation_steps")

    @property
    def gradient_clipping(self) -> float:
        """The norm to which gradients are clipped; 0 disables clipping."""
        return self.get_value("gradient_clipping")

    @property
    def offload_optimizer_device(self) -> str:
        """Where the optimizer states are: 'none' (with the parameters), 'cpu' or 'nvme'."""
        return self.get_value("zero_optimization.offload_optimizer.device", "none")

    @property
    def offload_param_device(self) -> str:
        """Where the parameters are: 'none' (on the device), 'cpu' or 'nvme'."""
        return self.get_value("zero_optimization.offload_param.device", "none")

    @property
    def zero3_save_16bit_model(self) -> bool:
        """Whether checkpoints also hold whole weights."""
        return self._run.gathers

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The value of a key such as 'zero_optimization.stage'."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether a key is 'auto', to be filled in from the arguments."""
        return self.hf_ds_config.is_auto(ds_key_long)

    def is_zero3_init_enabled(self) -> bool:
        """Whether models are partitioned while they are created."""
        return self.zero3_init_flag

    @contextlib.contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Turn partitioning of models that transformers creates in the block on or off."""
        before, self.zero3_init_flag = self.zero3_init_flag, enable
        peer = sys.modules.get("transformers.integrations.deepspeed")
        announced = getattr(peer, "_hf_deepspeed_config_weak_ref", None)
        try:
            if peer is not None:
                peer._hf_deepspeed_config_weak_ref = weakref.ref(self.hf_ds_config) if enable else None  # type: ignore[attr-defined]
            yield
        finally:
            self.zero3_init_flag = before
            if peer is not None:
                peer._hf_deepspeed_config_weak_ref = announced  # type: ignore[attr-defined]
