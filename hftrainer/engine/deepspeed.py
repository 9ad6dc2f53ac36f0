"""Sets up DeepSpeed when the arguments are made, before there is a Trainer."""

from __future__ import annotations

from typing import Any

from hftrainer.arguments.base import BaseArguments
from hftrainer.arguments.deepspeed import configure
from hftrainer.compat import peers
from hftrainer.engine import adapter
from hftrainer.parallel.deepspeed.plugin import DeepSpeedPlugin, Planned
from hftrainer.parallel.deepspeed.start import connect
from hftrainer.parallel.processes import Processes


def begin_deepspeed(args: BaseArguments) -> Any:
    """The completed configuration, for models that are made before the Trainer; None without DeepSpeed.

    With ZeRO-3 the process group starts now, and `from_pretrained` partitions models while it loads them, as long as
    these arguments exist.
    """
    config = configure(args)
    if config is None:
        return None
    peers.announce_deepspeed(config)
    if config.is_zero3():
        adapter().start_others(args._rank_info, args.ddp_timeout)
        processes = Processes.at(args._rank_info)
        processes.connect(args.device, args.ddp_backend, args.ddp_timeout_delta, even_alone=True)
        connect(processes, args.device, args.ddp_timeout_delta, config)
    return config


def deepspeed_plugin(config: Any) -> Any:
    """The configuration as `args.deepspeed_plugin`, under accelerate's names; None without DeepSpeed."""
    if config is None:
        return None
    return DeepSpeedPlugin(Planned(config))
