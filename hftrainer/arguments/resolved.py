"""What training arguments mean: all that is parsed or looked up for them, once for a Trainer and once for a trial."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from hftrainer.arguments.accelerator_config import AcceleratorConfig

if TYPE_CHECKING:
    from hftrainer.arguments.base import BaseArguments
    from hftrainer.parallel.deepspeed.settings import DeepSpeedConfig
    from hftrainer.parallel.environment import RankInfo
    from hftrainer.parallel.fsdp.settings import FsdpSettings
    from hftrainer.parallel.layout import Layout


class ResolvedArguments:
    """Training arguments, ours or transformers', with each configuration parsed when it is first asked for.

    What was parsed stays as it was when the arguments change. A configuration that cannot be parsed raises
    `WrongConfig`, and one of accelerate's raises `InvalidArgument`, whenever it is asked for.

    Args:
        args: the training arguments.
        model: the model, which may have been split while it was loaded; a Trainer sets it before it asks for `layout`.
    """

    def __init__(self, args: BaseArguments, model: Any = None) -> None:
        self.args = args
        self.model = model

    @classmethod
    def of(cls, args: BaseArguments) -> ResolvedArguments:
        """What the last Trainer that was made with these arguments has resolved; new without one."""
        return vars(args).get("_resolved") or cls(args)

    @functools.cached_property
    def lightning_config(self) -> Mapping[str, Any]:
        """The keywords in `lightning_config`."""
        from hftrainer.parallel.config_files import read_config

        return MappingProxyType(read_config(getattr(self.args, "lightning_config", None)))

    @property
    def readable_config(self) -> Mapping[str, Any]:
        """The keywords in `lightning_config`; none when it cannot be read, which the checks report."""
        from hftrainer.errors import WrongConfig

        try:
            return self.lightning_config
        except (OSError, WrongConfig):
            return {}

    @functools.cached_property
    def rank_info(self) -> RankInfo:
        """Where this process stands among others."""
        from hftrainer.parallel.environment import find_rank_info

        # Arguments of transformers count no GPUs: several would mean DataParallel.
        return find_rank_info(self.readable_config, gpus=getattr(self.args, "_count_gpus", lambda: 1))

    def forget_rank_info(self) -> None:
        """Forget `rank_info`: the other processes have been started since."""
        vars(self).pop("rank_info", None)

    @functools.cached_property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.args.device

    @functools.cached_property
    def accelerator_config(self) -> AcceleratorConfig:
        """`accelerator_config`, with its defaults."""
        return AcceleratorConfig.read(self.args.accelerator_config)

    @functools.cached_property
    def layout(self) -> Layout:
        """How `parallelism_config`, and the model, let the processes share the model and the batches."""
        from hftrainer.parallel.layout import read_layout

        return read_layout(self.args.parallelism_config, self.model)

    @functools.cached_property
    def fsdp(self) -> FsdpSettings | None:
        """What `fsdp` and `fsdp_config`, or the launcher, ask for."""
        from hftrainer.parallel.fsdp.settings import read_fsdp

        return read_fsdp(self.args.fsdp, self.args.fsdp_config)

    @property
    def sharding(self) -> FsdpSettings | None:
        """How the model is sharded: `dp_shard_size` asks for FSDP2 with what `fsdp_config` would begin with."""
        from hftrainer.parallel.fsdp.settings import FsdpSettings

        return self.fsdp or (FsdpSettings() if self.layout.shards else None)

    @functools.cached_property
    def deepspeed(self) -> DeepSpeedConfig | None:
        """DeepSpeed's configuration, completed from the arguments; None without DeepSpeed."""
        from hftrainer.arguments.deepspeed import configure

        return configure(self.args)

    @functools.cached_property
    def precision(self) -> str:
        """Lightning's precision: that of DeepSpeed, of `lightning_config`, of the arguments, or the launcher's."""
        if self.deepspeed is not None:
            return self.deepspeed.precision
        return self.lightnings_precision

    @functools.cached_property
    def lightnings_precision(self) -> str:
        """The same without DeepSpeed."""
        if (given := self.lightning_config.get("precision")) is not None:
            return "32-true" if str(given) == "32" else str(given)
        args, launchers = self.args, os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        asked = "bf16" if args.bf16 else "fp16" if args.fp16 else launchers
        asked = vars(args).get("_mixed_precision", asked)  # set by the script, in the place of the arguments
        return {"bf16": "bf16-mixed", "fp16": "16-mixed"}.get(asked, "32-true")
