"""`BaseArguments`, the type of training arguments that our functions accept."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hftrainer.arguments import old_names
from hftrainer.arguments.accelerator_config import CONSTRUCTION_KEY
from hftrainer.arguments.choices import LOG_LEVELS, ParallelMode
from hftrainer.arguments.fields.argument import OURS
from hftrainer.arguments.fields.old import OldArguments
from hftrainer.arguments.fields.table import ARGUMENTS
from hftrainer.arguments.resolved import ResolvedArguments, requested_precision
from hftrainer.base.config_files import env_flag
from hftrainer.errors import UnsupportedArgument
from hftrainer.parallel import devices
from hftrainer.parallel.environment import RankInfo
from hftrainer.plugins import import_adapter

_ALWAYS_SHOWN = object()
#: Arguments that the newest transformers does not have → the value with which `to_dict` omits them.
_EXTRA_ARGUMENT_DEFAULTS = {
    name: argument.default if argument.neutral_value is None else argument.neutral_value
    for name, argument in ARGUMENTS.items()
    if argument.until is not None or argument.since == OURS
}


@dataclass
class BaseArguments(OldArguments):
    """The fields of `TrainingArguments`, and the values derived from them alone.

    Scripts pass our `TrainingArguments` or those of transformers.
    """

    #: Fields that accept a JSON object as text. Subclasses extend this list. The name is that of transformers.
    #: With an annotation, it would become a field.
    _VALID_DICT_FIELDS = [name for name, argument in ARGUMENTS.items() if argument.json]

    # ---- Batch sizes -------------------------------------------------------------------------------------------

    @property
    def train_batch_size(self) -> int:
        """Samples in a training micro-batch of this process."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Samples in an evaluation batch of this process."""
        return self.per_device_eval_batch_size

    # ---- Rank and device of this process -----------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device that this process trains on: the accelerator that torch finds, unless `use_cpu`."""
        return self._setup_devices

    @property
    def _setup_devices(self) -> torch.device:
        """The value of `device`; subclasses override it."""
        if self._should_use_cpu:
            return torch.device("cpu")
        if devices.uses_xla():
            return import_adapter("xla", "devices").device()
        device_type = devices.detect_device_type()
        if device_type in ("cpu", "mps"):
            return torch.device(device_type)
        # torch_tpu shows each process its own TPU as index 0.
        if device_type == "tpu":
            return torch.device(device_type, 0)
        return torch.device(device_type, self._rank_info.device_index(devices.device_count(device_type)))

    @property
    def _should_use_cpu(self) -> bool:
        """Whether to use the CPU, set by `use_cpu` or by `accelerate launch --cpu`."""
        return self.use_cpu or env_flag("ACCELERATE_USE_CPU")

    @property
    def _rank_info(self) -> RankInfo:
        """Rank and world size of this process."""
        return ResolvedArguments.from_args(self).rank_info

    def _count_gpus(self) -> int:
        return 0 if self._should_use_cpu or devices.uses_xla() else devices.device_count(devices.detect_device_type())

    @property
    def n_gpu(self) -> int:
        """GPUs that this process uses: 1 or 0. Several GPUs need several processes; DataParallel is never used."""
        return self._n_gpu

    @property
    def _n_gpu(self) -> int:
        """The value of `n_gpu`. Scripts set it to 1 to avoid DataParallel."""
        return vars(self).get("_n_gpu", int(self.device.type not in ("cpu", "xla")))

    @_n_gpu.setter
    def _n_gpu(self, count: int) -> None:
        if count not in (0, 1):
            raise UnsupportedArgument(
                f"_n_gpu={count!r}: several GPUs need one process each: start the processes with torchrun, for example."
            )
        vars(self)["_n_gpu"] = count

    @property
    def mixed_precision(self) -> str:
        """'bf16', 'fp16' or 'no', from a script, the arguments, or else the launcher."""
        return requested_precision(self)

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
        """Global rank of this process, from 0."""
        return self._rank_info.rank

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its node, from 0."""
        return self._rank_info.local_rank

    @property
    def parallel_mode(self) -> ParallelMode:
        """The kind of parallelism: on TPUs, in several processes, or none."""
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
        """None: the Trainer decides whether to move the model. Subclasses return False to prevent it."""
        return None

    @property
    def ddp_timeout_delta(self) -> datetime.timedelta:
        """`ddp_timeout` as a timedelta, as `torch.distributed` needs it."""
        return datetime.timedelta(seconds=self.ddp_timeout)

    def get_process_log_level(self) -> int:
        """Log level of this process as a number: `log_level` if `should_log`, else `log_level_replica`."""
        name = self.log_level if self.should_log else self.log_level_replica
        if name == "passive":
            return logging.getLogger("hftrainer").getEffectiveLevel()
        return LOG_LEVELS[name]

    # ---- Derived values ----------------------------------------------------------------------------------------

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Optimizer steps of warm-up in a run of `num_training_steps` optimizer steps."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        uses_ratio = self.warmup_steps == 0 and old_names.is_v4_warmup_ratio("warmup_ratio")
        return math.ceil(num_training_steps * ((self.warmup_ratio or 0) if uses_ratio else self.warmup_steps))

    # ---- Serialization -----------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values. Enumerations and dtypes become strings; tokens become placeholders.

        Arguments that `transformers` does not have, ours and older ones, are included only if they are set. Objects
        without a JSON form, in a subclass's fields, are not converted.
        """
        declared_names = old_names.redeclared_old_names(type(self)) | old_names.CURRENT_FIELDS
        mirror_names = old_names.RENAMED.keys() - declared_names
        omitted_values = {**_EXTRA_ARGUMENT_DEFAULTS, **dict.fromkeys(declared_names, _ALWAYS_SHOWN)}
        names = [field.name for field in dataclasses.fields(self) if field.init and field.name not in mirror_names]
        values = {name: getattr(self, name) for name in names}
        return {
            name: f"<{name.upper()}>" if name.endswith("_token") else _to_plain_value(name, value)
            for name, value in values.items()
            if name not in omitted_values or value != omitted_values[name]
        }

    def to_json_string(self) -> str:
        """The fields as an indented JSON object. Values without a JSON form are written as text."""
        return json.dumps(self.to_dict(), indent=2, default=_to_json_value)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """The fields as numbers, booleans, strings and tensors, as TensorBoard needs hyperparameters."""
        values = {**self.to_dict(), "train_batch_size": self.train_batch_size, "eval_batch_size": self.eval_batch_size}
        plain_types = (bool, int, float, str, torch.Tensor)
        return {name: value if type(value) in plain_types else str(value) for name, value in values.items()}


#: Keys, at any depth, whose `torch.dtype` is written by name ('torch_dtype' until v4.55).
_DTYPE_KEYS = ("dtype", "torch_dtype")


def _to_plain_value(name: str, value: Any) -> Any:
    """The value of a field, or of a key in one, as `to_dict` returns it.

    Enumerations, dtypes and configurations are converted. Other objects are kept, so that the dict can be converted
    back to arguments, as in transformers.
    """
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, torch.dtype) and name in _DTYPE_KEYS:
        return str(value).removeprefix("torch.")
    if isinstance(value, list):
        return [item.value if isinstance(item, enum.Enum) else item for item in value]
    if name == "parallelism_config" and dataclasses.is_dataclass(value):
        return {key: size for key, size in vars(value).items() if key.endswith("_size")}
    if name in ("accelerator_config", "quantization_config") and callable(getattr(value, "to_dict", None)):
        value = value.to_dict()
    if not isinstance(value, dict):
        return value
    if name == "lightning_config":
        return {key: item if isinstance(item, _JSON_TYPES) else str(item) for key, item in value.items()}
    return {key: _to_plain_value(key, item) for key, item in value.items() if key != CONSTRUCTION_KEY}


_JSON_TYPES = (bool, int, float, str, list, dict, type(None))


def _to_json_value(value: Any) -> Any:
    """A value that JSON supports: an enumeration's value, a dtype's name, `to_dict()`, or the text."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return dict(value)
    return value.to_dict() if callable(getattr(value, "to_dict", None)) and not isinstance(value, type) else str(value)
