"""Devices and processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hftrainer.arguments._field import arg


@dataclass(kw_only=True)
class DistributionArguments:
    """Where training runs, and how it is split over processes."""

    use_cpu: bool = arg(False, "Train on the CPU even where there is an accelerator.")
    local_rank: int = arg(-1, "Rank of this process on its node; launchers set it in the environment.")
    accelerator_config: dict[str, Any] | str | Any | None = arg(
        None,
        "How data is distributed to processes: an `AcceleratorConfig`, a dict of its keys, or the path of a JSON file.",
    )
    parallelism_config: dict[str, Any] | str | Any | None = arg(
        None,
        "accelerate's `ParallelismConfig`, or a dict of its sizes, each a number of processes: `dp_shard_size`, ...",
    )
    ddp_find_unused_parameters: bool | None = arg(None, "`find_unused_parameters` of DDP.")
    ddp_bucket_cap_mb: int | None = arg(None, "`bucket_cap_mb` of DDP, in MiB.")
    ddp_broadcast_buffers: bool | None = arg(None, "`broadcast_buffers` of DDP.")
    ddp_static_graph: bool | None = arg(None, "`static_graph` of DDP.")
    ddp_backend: str | None = arg(None, "Communication backend: 'nccl', 'gloo', ...")
    ddp_timeout: int = arg(1800, "Seconds until a collective operation times out.")
    fsdp: str | None = arg(None, "FSDP options, separated by spaces.", bare=True)
    fsdp_config: dict[str, Any] | str | None = arg(None, "FSDP settings, as a dict or as the path of a JSON file.")
    lightning_config: dict[str, Any] | str | None = arg(
        None, "Keywords of `lightning.Trainer`, as a dict, a JSON object, or the path of a JSON or YAML file."
    )
    deepspeed: dict[str, Any] | str | None = arg(None, "DeepSpeed settings, as a dict or as the path of a JSON file.")
