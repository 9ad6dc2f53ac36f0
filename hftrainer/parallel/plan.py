"""The plan: exactly what is needed to build a `lightning.Trainer`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from hftrainer.parallel.fsdp.settings import FsdpSettings
    from hftrainer.parallel.layout import Layout
    from hftrainer.parallel.processes import Processes


@dataclass(frozen=True)
class LightningPlan:
    """The training arguments, translated for Lightning.

    Attributes:
        accelerator: name of Lightning's accelerator.
        device: the torch device, as a string.
        precision: Lightning's precision; mixed ones wrap the model's forward pass only.
        accumulate_grad_batches: micro-batches per optimizer step.
        deterministic: whether torch is restricted to deterministic kernels.
        default_root_dir: where Lightning callbacks write by default.
        processes: the processes of the run.
        process_group_backend: backend of the process group; None uses the device's default.
        timeout: timeout of a collective operation, in seconds.
        ddp: the given keywords of `DistributedDataParallel`.
        sharding: how FSDP shards the model; None without FSDP.
        layout: how the processes share the model and the batches.
        deepspeed: DeepSpeed's configuration; None without DeepSpeed.
        async_checkpoint: whether checkpoints are written in the background.
        stop_on_save_error: whether training stops if a checkpoint cannot be written.
        read_once: argument → its value when the plan was made, for those that are not read again.
        config: further keywords of `lightning.Trainer`, from `lightning_config`; they override the others.
    """

    accelerator: str
    device: str
    precision: Literal["32-true", "bf16-mixed", "16-mixed"]
    accumulate_grad_batches: int
    deterministic: bool
    default_root_dir: str
    processes: Processes
    process_group_backend: str | None
    timeout: int
    ddp: Mapping[str, Any]
    sharding: FsdpSettings | None
    layout: Layout
    deepspeed: Any
    async_checkpoint: bool
    stop_on_save_error: bool
    read_once: Mapping[str, Any]
    config: Mapping[str, Any]

    @property
    def mixed_precision(self) -> str:
        """The precision, under accelerate's name."""
        return {"32-true": "no", "bf16-mixed": "bf16", "16-mixed": "fp16"}[self.precision]

    @property
    def shows_its_own_device(self) -> bool:
        """Whether the launcher makes only its own GPU visible to each process."""
        processes = self.processes
        return torch.device(self.device).index not in (None, processes.local_rank)

    @property
    def limits_by_share(self) -> bool:
        """Whether `lightning_config` limits an evaluation to a fraction of its batches."""
        limits = [value for name, value in self.config.items() if name.startswith("limit_")]
        return any(isinstance(value, float) and value < 1 for value in limits)

    @property
    def on_xla(self) -> bool:
        """Whether training runs on XLA devices."""
        return self.accelerator == "xla"

    @property
    def spreads_model(self) -> bool:
        """Whether each process has only a part of the model or of the optimizer's state."""
        sharded = self.sharding is not None and not self.by_spmd
        return sharded or self.layout.tp_size > 1 or self.deepspeed is not None

    @property
    def by_spmd(self) -> bool:
        """Whether one process drives several XLA devices, which shard the model's tensors (SPMD)."""
        xla = None if self.sharding is None else self.sharding.xla
        return xla is not None and xla.spmd

    def trainer_keywords(self) -> dict[str, Any]:
        """Keywords of `lightning.Trainer` that follow from the arguments, as plain values."""
        return {
            "accelerator": self.accelerator,
            "devices": 1 if self.shows_its_own_device else self.processes.local_world_size,
            "num_nodes": self.processes.nodes,
            "precision": self.precision,
            "accumulate_grad_batches": self.accumulate_grad_batches,
            "deterministic": self.deterministic or None,
            "default_root_dir": self.default_root_dir,
            **self.config,
        }
