"""`ResolvedArguments`: training arguments whose configurations are parsed once per Trainer and once per trial."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from hftrainer.arguments.accelerator_config import AcceleratorConfig
from hftrainer.base.config_files import env_flag, read_config
from hftrainer.errors import InvalidConfig
from hftrainer.parallel.environment import RankInfo, find_rank_info
from hftrainer.parallel.fsdp_settings import FsdpSettings, read_fsdp
from hftrainer.parallel.plan import ParallelLayout, read_layout
from hftrainer.plugins import import_adapter
from hftrainer.releases import followed
from hftrainer.releases.policy import ReleasePolicy

if TYPE_CHECKING:
    from hftrainer.arguments.base import BaseArguments


def asks_for_deepspeed(args: BaseArguments) -> bool:
    """Whether the arguments or `accelerate launch` ask for DeepSpeed."""
    return env_flag("ACCELERATE_USE_DEEPSPEED") or args.deepspeed not in (None, "", False)


def set_up_deepspeed(args: BaseArguments) -> Any:
    """Set up DeepSpeed's configuration for models created before the Trainer; None without DeepSpeed."""
    return import_adapter("deepspeed", "settings").set_up_config(args) if asks_for_deepspeed(args) else None


class ResolvedArguments:
    """Training arguments, ours or transformers', with each configuration parsed at first access.

    Parsed values do not change when the arguments change. Each access to a configuration that cannot be parsed raises
    `InvalidConfig`, or `InvalidArgument` for `accelerator_config`.

    Args:
        args: the training arguments.
        model: the model, which may have been split during loading; a Trainer sets it before it reads `layout`.
    """

    def __init__(self, args: BaseArguments, model: Any = None) -> None:
        self.args = args
        self.model = model

    @classmethod
    def from_args(cls, args: BaseArguments) -> ResolvedArguments:
        """The resolved arguments of the last Trainer made with `args`, or new ones."""
        return vars(args).get("_resolved") or cls(args)

    @functools.cached_property
    def lightning_config(self) -> Mapping[str, Any]:
        """The keyword arguments in `lightning_config`."""
        # Our callbacks also run in transformers' own Trainer, whose arguments have no lightning_config.
        return MappingProxyType(read_config(getattr(self.args, "lightning_config", None)))

    @functools.cached_property
    def config_or_empty(self) -> Mapping[str, Any]:
        """The keyword arguments in `lightning_config`, or none if it cannot be read, which the checks report."""
        try:
            return self.lightning_config
        except (OSError, InvalidConfig):
            return {}

    @functools.cached_property
    def policy(self) -> ReleasePolicy:
        """The policy of the followed release of transformers."""
        return followed.from_config(self.config_or_empty)

    @functools.cached_property
    def rank_info(self) -> RankInfo:
        """Rank and world size of this process."""
        # transformers' arguments would use several GPUs for DataParallel, so count one.
        return find_rank_info(self.config_or_empty, gpus=getattr(self.args, "_count_gpus", lambda: 1))

    def forget_rank_info(self) -> None:
        """Clear `rank_info` and the device, after the other processes have been started."""
        for name in ("rank_info", "device"):
            vars(self).pop(name, None)

    @functools.cached_property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.args.device

    @functools.cached_property
    def accelerator_config(self) -> AcceleratorConfig:
        """`accelerator_config`, with its defaults."""
        return AcceleratorConfig.read(self.args.accelerator_config)

    @functools.cached_property
    def layout(self) -> ParallelLayout:
        """How the processes share the model and the batches, by `parallelism_config` or the loaded model."""
        return read_layout(self.args.parallelism_config, self.model)

    @functools.cached_property
    def fsdp(self) -> FsdpSettings | None:
        """FSDP's settings, from `fsdp` and `fsdp_config` or from the launcher, or None without FSDP."""
        return read_fsdp(self.args.fsdp, self.args.fsdp_config)

    @property
    def sharding(self) -> FsdpSettings | None:
        """How the model is sharded; `dp_shard_size` alone means FSDP2 with the defaults of `fsdp_config`."""
        return self.fsdp or (FsdpSettings() if self.layout.shards else None)

    @functools.cached_property
    def deepspeed(self) -> Any:
        """DeepSpeed's configuration, completed from the arguments, or None without DeepSpeed."""
        return import_adapter("deepspeed", "settings").make_config(self.args) if asks_for_deepspeed(self.args) else None

    @functools.cached_property
    def precision(self) -> str:
        """Lightning's precision, from DeepSpeed, `lightning_config`, the arguments or the launcher, in this order."""
        if self.deepspeed is not None:
            return self.deepspeed.precision
        if (precision := self.lightning_config.get("precision")) is not None:
            return "32-true" if str(precision) == "32" else str(precision)
        return {"bf16": "bf16-mixed", "fp16": "16-mixed"}.get(requested_precision(self.args), "32-true")


def requested_precision(args: Any) -> str:
    """'bf16', 'fp16' or 'no', from a script's `mixed_precision`, the arguments, or else the launcher."""
    argument_precision = "fp16" if args.fp16 else "bf16" if args.bf16 else None
    launcher_precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    return vars(args).get("_mixed_precision", argument_precision or launcher_precision)
