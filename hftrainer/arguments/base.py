"""`BaseArguments`: the fields of `TrainingArguments`, and what follows from them alone.

Rooms that take arguments take these; a script's are ours or transformers' `TrainingArguments`.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hftrainer.arguments import legacy
from hftrainer.arguments.choices import ParallelMode
from hftrainer.arguments.data import DataArguments
from hftrainer.arguments.debugging import DebuggingArguments
from hftrainer.arguments.distribution import DistributionArguments
from hftrainer.arguments.evaluation import EvaluationArguments
from hftrainer.arguments.hub import HubArguments
from hftrainer.arguments.legacy import LegacyArguments
from hftrainer.arguments.logging import LOG_LEVELS, LoggingArguments
from hftrainer.arguments.optimizer import OptimizerArguments
from hftrainer.arguments.precision import PrecisionArguments
from hftrainer.arguments.resolved import ResolvedArguments
from hftrainer.arguments.saving import OutputArguments, SavingArguments
from hftrainer.arguments.schedule import ScheduleArguments
from hftrainer.arguments.serialization import as_json, plain_field
from hftrainer.errors import UnsupportedArgument
from hftrainer.parallel import devices

if TYPE_CHECKING:
    from hftrainer.parallel.environment import RankInfo


#: Arguments that may be given as the text of a JSON object.
JSON_FIELDS = (
    "lr_scheduler_kwargs",
    "activation_checkpointing_kwargs",
    "gradient_checkpointing_kwargs",
    "liger_kernel_config",
    "accelerator_config",
    "parallelism_config",
    "fsdp_config",
    "deepspeed",
    "lightning_config",
)
_SHOWN = object()
#: Arguments that the newest transformers does not have → their defaults.
_ONLY_HERE: dict[str, Any] = {
    **{field.name: field.default for field in dataclasses.fields(legacy.LegacyArguments)},
    **legacy.KEPT,
    **{"lightning_config": None, "eval_memmap_dir": None, "save_on_interrupt": True},
}


@dataclass
class BaseArguments(
    LegacyArguments,
    DebuggingArguments,
    DistributionArguments,
    HubArguments,
    SavingArguments,
    EvaluationArguments,
    LoggingArguments,
    DataArguments,
    PrecisionArguments,
    OptimizerArguments,
    ScheduleArguments,
    OutputArguments,
):
    """The fields, a module and a dataclass per subject, and what is derived from them."""

    #: Fields in which a JSON object may be given as text. Subclasses extend the list, by its name in transformers.
    _VALID_DICT_FIELDS = list(JSON_FIELDS)  # without an annotation it is no field

    # ---- Batch sizes -------------------------------------------------------------------------------------------

    @property
    def train_batch_size(self) -> int:
        """Samples in a training micro-batch of this process."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Samples in an evaluation batch of this process."""
        return self.per_device_eval_batch_size

    # ---- Where this process stands -----------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device that this process trains on: the accelerator torch finds, unless `use_cpu`."""
        return self._setup_devices

    @property
    def _setup_devices(self) -> torch.device:
        """What `device` is; subclasses override it."""
        if self._on_cpu:
            return torch.device("cpu")
        from hftrainer.parallel.xla import devices as xla

        if xla.available():
            return xla.device()
        kind = devices.found()
        if kind in ("cpu", "mps"):
            return torch.device(kind)
        return torch.device(kind, self._rank_info.device_index(devices.count(kind)))

    @property
    def _on_cpu(self) -> bool:
        """Whether the CPU is asked for, by `use_cpu` or by `accelerate launch --cpu`."""
        return self.use_cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "on", "t", "true", "y", "yes")

    @property
    def _rank_info(self) -> RankInfo:
        """Where this process stands among others."""
        return ResolvedArguments.of(self).rank_info

    def _count_gpus(self) -> int:
        from hftrainer.parallel.xla import devices as xla

        return 0 if self._on_cpu or xla.available() else devices.count(devices.found())

    @property
    def n_gpu(self) -> int:
        """GPUs that this process uses: one or none, since several mean several processes here, never DataParallel."""
        return self._n_gpu

    @property
    def _n_gpu(self) -> int:
        """What `n_gpu` is. Scripts set it to 1, against DataParallel."""
        return vars(self).get("_n_gpu", int(self.device.type not in ("cpu", "xla")))

    @_n_gpu.setter
    def _n_gpu(self, count: int) -> None:
        if count not in (0, 1):
            raise UnsupportedArgument(f"_n_gpu={count!r}: several GPUs need a process each, by torchrun for example.")
        vars(self)["_n_gpu"] = count

    @property
    def mixed_precision(self) -> str:
        """'bf16', 'fp16' or 'no': what the arguments ask for, or else the launcher, unless a script sets it."""
        asked = "fp16" if self.fp16 else "bf16" if self.bf16 else os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        return vars(self).get("_mixed_precision", asked)

    @mixed_precision.setter
    def mixed_precision(self, precision: str) -> None:
        if precision not in ("no", "fp16", "bf16"):
            raise UnsupportedArgument(f"mixed_precision={precision!r} is not supported: choose 'no', 'fp16' or 'bf16'.")
        vars(self)["_mixed_precision"] = precision

    @property
    def world_size(self) -> int:
        """Processes in this run."""
        return self._rank_info.world_size

    @property
    def process_index(self) -> int:
        """Rank of this process among all, from 0."""
        return self._rank_info.rank

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its node, from 0."""
        return self._rank_info.local_rank

    @property
    def parallel_mode(self) -> ParallelMode:
        """Whether several processes train together."""
        if self.device.type == "xla":
            return ParallelMode.TPU
        return ParallelMode.DISTRIBUTED if self.world_size > 1 else ParallelMode.NOT_PARALLEL

    @property
    def should_log(self) -> bool:
        """Whether this process writes log lines."""
        return (self.local_process_index if self.log_on_each_node else self.process_index) == 0

    @property
    def should_save(self) -> bool:
        """Whether this process writes checkpoints."""
        return (self.local_process_index if self.save_on_each_node else self.process_index) == 0

    @property
    def place_model_on_device(self) -> bool | None:
        """Override with False in a subclass to keep the Trainer from moving the model; None lets it decide."""
        return None

    @property
    def ddp_timeout_delta(self) -> datetime.timedelta:
        """`ddp_timeout` as a timedelta, as `torch.distributed` takes it."""
        return datetime.timedelta(seconds=self.ddp_timeout)

    def get_process_log_level(self) -> int:
        """The level, as a number, of this process's messages: `log_level` where `should_log`, else the replicas'."""
        name = self.log_level if self.should_log else self.log_level_replica
        if name == "passive":
            return logging.getLogger("hftrainer").getEffectiveLevel()
        return LOG_LEVELS[name]

    # ---- Derived values ----------------------------------------------------------------------------------------

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Optimizer steps of warm-up in a run of `num_training_steps` optimizer steps."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return math.ceil(num_training_steps * self.warmup_steps)

    # ---- Serialization -----------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The fields, enumerations and dtypes as plain values; tokens are replaced by their name.

        Arguments that `transformers` does not have, ours and older ones, are in it where they say something. A
        subclass's fields may hold objects without a JSON form. They stay what they are.
        """
        own = legacy.redeclared(type(self))
        mirrors, silent = legacy.RENAMED.keys() - own, {**_ONLY_HERE, **dict.fromkeys(own, _SHOWN)}
        shown = [field.name for field in dataclasses.fields(self) if field.init and field.name not in mirrors]
        values = {name: getattr(self, name) for name in shown}
        return {
            name: plain_field(name, value)
            for name, value in values.items()
            if name not in silent or value != silent[name]
        }

    def to_json_string(self) -> str:
        """The fields as an indented JSON object; what has no JSON form is written as text."""
        return json.dumps(as_json(self.to_dict()), indent=2)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """The fields as numbers, booleans, strings and tensors only, as TensorBoard's hyperparameters need them."""
        own = {**self.to_dict(), "train_batch_size": self.train_batch_size, "eval_batch_size": self.eval_batch_size}
        plain = (bool, int, float, str, torch.Tensor)
        return {name: value if type(value) in plain else str(value) for name, value in own.items()}
