"""`TrainingArguments`: plain data. Constructing it validates, and touches nothing outside itself."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import difflib
import enum
import json
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hftrainer import arguments as groups
from hftrainer import devices
from hftrainer.arguments import legacy
from hftrainer.arguments._field import arg
from hftrainer.arguments.releases import annotate
from hftrainer.arguments.setters import ChainingSetters
from hftrainer.arguments.validation import LOG_LEVELS, normalize, problems
from hftrainer.deepspeed import begin as begin_deepspeed
from hftrainer.errors import InvalidArgument, UnknownArgument, UnsupportedArgument
from hftrainer.trainer_utils import IntervalStrategy, OptimizerNames, ParallelMode

__all__ = ["IntervalStrategy", "OptimizerNames", "ParallelMode", "TrainingArguments"]

if TYPE_CHECKING:
    from hftrainer.explain import Explanation
    from hftrainer_lightning.environment import Place

logger = logging.getLogger(__name__)


@dataclass
class TrainingArguments(
    ChainingSetters,
    groups.LegacyArguments,
    groups.DebuggingArguments,
    groups.DistributionArguments,
    groups.HubArguments,
    groups.SavingArguments,
    groups.EvaluationArguments,
    groups.LoggingArguments,
    groups.DataArguments,
    groups.PrecisionArguments,
    groups.OptimizerArguments,
    groups.ScheduleArguments,
):
    """All settings of a training run, with the names and defaults of `transformers.TrainingArguments`.

    The fields are documented in `hftrainer.arguments`, a module per subject. It is a dataclass: subclass it to add
    fields, or hand it to `HfArgumentParser`.

    Raises:
        UnknownArgument: for a keyword that is no field, with the nearest name.
        InvalidArgument: for values out of range or in contradiction; one error names them all.
    """

    output_dir: str | None = arg(None, "Folder for checkpoints and the final model; default 'trainer_output'.")

    def __new__(cls, *args: Any, **kwargs: Any) -> TrainingArguments:
        """Check the keywords before the generated `__init__` does, to suggest the right one."""
        known = {field.name for field in dataclasses.fields(cls) if field.init}
        unknown = [name for name in kwargs if name not in known]
        if unknown:
            raise UnknownArgument("; ".join(_unknown_message(cls, name, known) for name in unknown))
        instance = super().__new__(cls)
        vars(instance)["_copied"] = legacy.is_copy(kwargs)
        return instance

    def __post_init__(self) -> None:
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        legacy.translate(self, defaults, copied=vars(self).pop("_copied", False))
        normalize(self)
        found = problems(self)
        if found:
            raise InvalidArgument("\n".join(found))
        self.hf_deepspeed_config = begin_deepspeed(self)

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
        if self._on_cpu:
            return torch.device("cpu")
        from hftrainer_lightning import xla

        if xla.available():
            return xla.device()
        kind = devices.found()
        if kind in ("cpu", "mps"):
            return torch.device(kind)
        return torch.device(kind, self._place.device_index(devices.count(kind)))

    @property
    def _on_cpu(self) -> bool:
        """Whether the CPU is asked for, by `use_cpu` or by `accelerate launch --cpu`."""
        return self.use_cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "on", "t", "true", "y", "yes")

    @property
    def _place(self) -> Place:
        """Where this process stands among others."""
        from hftrainer_lightning.config import readable_config
        from hftrainer_lightning.environment import find_place

        return find_place(readable_config(self.lightning_config), gpus=self._count_gpus)

    def _count_gpus(self) -> int:
        from hftrainer_lightning import xla

        return 0 if self._on_cpu or xla.available() else devices.count(devices.found())

    @property
    def _setup_devices(self) -> torch.device:
        """Old way to ask for `device`."""
        return self.device

    @property
    def n_gpu(self) -> int:
        """GPUs that this process uses: one or none, since several mean several processes here, never DataParallel."""
        return int(self.device.type not in ("cpu", "xla"))

    @property
    def world_size(self) -> int:
        """Processes in this run."""
        return self._place.world_size

    @property
    def process_index(self) -> int:
        """Rank of this process among all, from 0."""
        return self._place.rank

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its node, from 0."""
        return self._place.local_rank

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

    @contextlib.contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Let the main process do some work before the others, which then find it done.

        The processes meet for it, if they have not yet. A script that starts the others itself has done the work when
        it does, so nobody waits before.

        Args:
            local: the main process of each node goes first, instead of that of all nodes.
            desc: what the work is, for the debug log.

        Raises:
            UnsupportedArgument: when a launcher has not said how the processes meet.
        """
        from hftrainer_lightning.arguments import misplaced
        from hftrainer_lightning.processes import Processes

        processes = Processes.at(self._place)
        if not processes.several or (processes.self_started and not torch.distributed.is_initialized()):
            yield
            return
        if found := misplaced(self):
            raise UnsupportedArgument("\n".join(found))
        processes.connect(self.device, self.ddp_backend, self.ddp_timeout_delta)
        logger.debug("Process %d of %d: %s, the main process first.", processes.rank, processes.world_size, desc)
        with processes.in_turn(first=(processes.local_rank if local else processes.rank) == 0):
            yield

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

    def explain(self) -> Explanation:
        """What becomes of each argument that differs from its default; print it, or take its `to_json()`."""
        from hftrainer.explain import explain

        return explain(self)

    # ---- Derived values ----------------------------------------------------------------------------------------

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Optimizer steps of warm-up in a run of `num_training_steps` optimizer steps."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return math.ceil(num_training_steps * self.warmup_steps)

    # ---- Serialization -----------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-serializable values; tokens are replaced by their name."""
        result: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not field.init or field.name in legacy.RENAMED or value == legacy.KEPT.get(field.name, ...):
                continue
            if isinstance(value, enum.Enum):
                value = value.value
            elif field.name == "lightning_config" and isinstance(value, dict):
                value = {key: item if _is_plain(item) else str(item) for key, item in value.items()}
            elif field.name == "parallelism_config" and dataclasses.is_dataclass(value):
                value = {name: size for name, size in vars(value).items() if name.endswith("_size")}
            elif isinstance(value, list):
                value = [item.value if isinstance(item, enum.Enum) else item for item in value]
            if field.name.endswith("_token"):
                value = f"<{field.name.upper()}>"
            result[field.name] = value
        return result

    def to_json_string(self) -> str:
        """The fields as an indented JSON object."""
        return json.dumps(self.to_dict(), indent=2)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """The fields as numbers, booleans and strings only, as TensorBoard's hyperparameters need them."""
        own = {**self.to_dict(), "train_batch_size": self.train_batch_size, "eval_batch_size": self.eval_batch_size}
        return {name: value if type(value) in (bool, int, float, str) else str(value) for name, value in own.items()}

    def __str__(self) -> str:
        lines = "".join(f"{name}={value!r},\n" for name, value in sorted(self.to_dict().items()))
        return f"{type(self).__name__}(\n{lines})"

    __repr__ = __str__


for _name in legacy.RENAMED:
    setattr(TrainingArguments, _name, legacy.mirror(_name))
annotate(TrainingArguments)


def without_tokens(args: Any) -> Any:
    """A copy of training arguments, ours or transformers', that can be saved: it holds no token of the Hub."""
    copied = copy.copy(args)
    for name in ("hub_token", "push_to_hub_token"):
        if vars(copied).get(name) is not None:
            vars(copied)[name] = None
    return copied


def _is_plain(value: Any) -> bool:
    """Whether JSON can hold the value; `lightning_config` may hold plugins and profilers."""
    return value is None or isinstance(value, (bool, int, float, str, list, dict))


def _unknown_message(cls: type, name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{cls.__name__} has no argument {name!r}{hint}"
