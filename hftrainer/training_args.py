"""`TrainingArguments`: plain data.

Constructing it validates. Outside itself it touches the states of DeepSpeed and accelerate, where there are such; and
processes that a launcher has started meet, as scripts rely on it that call `torch.distributed` before the Trainer.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import difflib
import inspect
import json
import logging
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hftrainer.arguments import fields as groups
from hftrainer.arguments import legacy
from hftrainer.arguments.accelerator_config import as_object
from hftrainer.arguments.logging import LOG_LEVELS
from hftrainer.arguments.releases import annotate
from hftrainer.arguments.resolved import ResolvedArguments
from hftrainer.arguments.serialization import as_json, plain_field
from hftrainer.arguments.setters import ChainingSetters
from hftrainer.arguments.validation import ALIASES, JSON_FIELDS, normalize, problems
from hftrainer.errors import InvalidArgument, UnknownArgument, UnsupportedArgument
from hftrainer.parallel import accelerate_state, devices
from hftrainer.trainer_utils import IntervalStrategy, OptimizerNames, ParallelMode
from hftrainer.training.deepspeed import begin as begin_deepspeed
from hftrainer.training.deepspeed import plugin as deepspeed_plugin

__all__ = ["IntervalStrategy", "OptimizerNames", "ParallelMode", "TrainingArguments"]

if TYPE_CHECKING:
    from hftrainer.cli.explain import Explanation
    from hftrainer.parallel.environment import Place

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
    groups.OutputArguments,
):
    """All settings of a training run, with the names and defaults of `transformers.TrainingArguments`.

    The fields are documented in `hftrainer.arguments`, a module per subject. It is a dataclass: subclass it to add
    fields, or hand it to `HfArgumentParser`.

    Raises:
        UnknownArgument: for a keyword that is no field, with the nearest name.
        InvalidArgument: for values out of range or in contradiction; one error names them all.
    """

    #: Fields in which a JSON object may be given as text. Subclasses extend the list, by its name in transformers.
    _VALID_DICT_FIELDS = list(JSON_FIELDS)  # without an annotation it is no field

    #: The optimizer of a run that names none.
    default_optim = groups.OptimizerArguments.__dataclass_fields__["optim"].default

    def __new__(cls, *args: Any, **kwargs: Any) -> TrainingArguments:
        """Check the keywords before the generated `__init__` does, to suggest the right one."""
        known = {field.name for field in dataclasses.fields(cls) if field.init}
        unknown = [name for name in kwargs if name not in known]
        if unknown and (unknown := _not_taken(cls.__init__, unknown)):
            raise UnknownArgument("; ".join(_unknown_message(cls, name, known) for name in unknown))
        instance = super().__new__(cls)
        vars(instance)["_copied"] = legacy.copied(kwargs)
        return instance

    def __post_init__(self) -> None:
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        legacy.translate(self, defaults, vars(self).pop("_copied", None))
        normalize(self)
        if self.use_cpu:
            self.dataloader_pin_memory = False
        found = problems(ResolvedArguments(self))
        if found:
            raise InvalidArgument("\n".join(found))
        self.hf_deepspeed_config = begin_deepspeed(self)
        self._connect_launched()
        accelerate_state.begin(self)

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles hold: not what a Trainer has resolved, which belongs to it and to this process."""
        return {name: value for name, value in vars(self).items() if name != "_resolved"}

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an argument; the names of v4 that still have a field of their own set that of today too."""
        if name == "accelerator_config" and "_legacy_done" in vars(self):
            value = as_object(value)
        object.__setattr__(self, name, value)
        if name in ALIASES and "_legacy_done" in vars(self):
            object.__setattr__(self, ALIASES[name], value)

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
        return torch.device(kind, self._place.device_index(devices.count(kind)))

    @property
    def _on_cpu(self) -> bool:
        """Whether the CPU is asked for, by `use_cpu` or by `accelerate launch --cpu`."""
        return self.use_cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "on", "t", "true", "y", "yes")

    @property
    def _place(self) -> Place:
        """Where this process stands among others."""
        return ResolvedArguments.of(self).place

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
    def distributed_state(self) -> Any:
        """Where the process stands: accelerate's `PartialState`, or an object like it where that is not installed."""
        given = vars(self).get("_distributed_state")
        return accelerate_state.current(self) if given is None else given

    @distributed_state.setter
    def distributed_state(self, state: Any) -> None:
        vars(self)["_distributed_state"] = state

    @property
    def deepspeed_plugin(self) -> Any:
        """DeepSpeed's configuration under accelerate's names; None without DeepSpeed.

        Nothing is kept: `from_pretrained` partitions models as long as there is a reference to `hf_deepspeed_config`.
        """
        return deepspeed_plugin(self.hf_deepspeed_config)

    @deepspeed_plugin.setter
    def deepspeed_plugin(self, plugin: Any) -> None:
        if plugin is not None or vars(self).get("hf_deepspeed_config") is not None:
            raise UnsupportedArgument(
                f"deepspeed_plugin={plugin!r} cannot be set: give the configuration as `deepspeed`, or leave it out."
            )

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

    def _connect_launched(self) -> None:
        """Let processes that torchrun or the like has started meet, as scripts rely on it once there are arguments.

        What cannot work is refused when there is a Trainer; nobody waits for it here.
        """
        place = self._place
        if place.world_size == 1 or "LOCAL_RANK" not in os.environ or place.self_started:
            return
        from hftrainer.arguments.table import process_group_backend, unsupported
        from hftrainer.parallel.processes import Processes

        resolved = ResolvedArguments.of(self)
        if self.device.type == "xla" or torch.distributed.is_initialized() or unsupported(resolved):
            return
        Processes.at(place).connect(self.device, process_group_backend(resolved), self.ddp_timeout_delta)

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
        from hftrainer.arguments.table import misplaced
        from hftrainer.parallel.processes import Processes

        processes = Processes.at(self._place)
        if not processes.several or (processes.self_started and not torch.distributed.is_initialized()):
            yield
            return
        if found := misplaced(ResolvedArguments.of(self)):
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
        from hftrainer.cli.explain import explain

        return explain(self)

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

    def __str__(self) -> str:
        lines = "".join(f"{name}={value!r},\n" for name, value in sorted(self.to_dict().items()))
        return f"{type(self).__name__}(\n{lines})"

    __repr__ = __str__


_SHOWN = object()
#: Arguments that the newest transformers does not have → their defaults.
_ONLY_HERE: dict[str, Any] = {
    **{field.name: field.default for field in dataclasses.fields(legacy.LegacyArguments)},
    **legacy.KEPT,
    **{"lightning_config": None, "eval_memmap_dir": None, "save_on_interrupt": True},
}
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


def _not_taken(initialize: Callable[..., None], names: list[str]) -> list[str]:
    """The keywords that an `__init__` does not take: a subclass may have one of its own, and `InitVar`s."""
    taken = inspect.signature(initialize).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        return []
    return [name for name in names if name not in taken]


def _unknown_message(cls: type, name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{cls.__name__} has no argument {name!r}{hint}"
