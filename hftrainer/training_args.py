"""`TrainingArguments`: plain data.

Constructing it validates. Outside itself it touches the states of DeepSpeed and accelerate, where there are such; and
processes that a launcher has started meet, as scripts rely on it that call `torch.distributed` before the Trainer.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import inspect
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hftrainer.arguments import accelerate_state, legacy
from hftrainer.arguments.accelerator_config import as_object
from hftrainer.arguments.base import BaseArguments
from hftrainer.arguments.choices import IntervalStrategy, OptimizerNames, ParallelMode
from hftrainer.arguments.releases import annotate
from hftrainer.arguments.resolved import ResolvedArguments
from hftrainer.arguments.setters import ChainingSetters
from hftrainer.arguments.validation import ALIASES, check_values, normalize
from hftrainer.engine.deepspeed import begin_deepspeed, deepspeed_plugin
from hftrainer.errors import InvalidArgument, UnknownArgument, UnsupportedArgument

__all__ = ["IntervalStrategy", "OptimizerNames", "ParallelMode", "TrainingArguments"]

if TYPE_CHECKING:
    from hftrainer.arguments.explain import Explanation

logger = logging.getLogger(__name__)


@dataclass
class TrainingArguments(ChainingSetters, BaseArguments):
    """All settings of a training run, with the names and defaults of `transformers.TrainingArguments`.

    The fields are documented in `hftrainer.arguments`, a module per subject. It is a dataclass: subclass it to add
    fields, or hand it to `HfArgumentParser`.

    Raises:
        UnknownArgument: for a keyword that is no field, with the nearest name.
        InvalidArgument: for values out of range or in contradiction; one error names them all.
    """

    #: The optimizer of a run that names none.
    default_optim = BaseArguments.__dataclass_fields__["optim"].default

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
        found = check_values(ResolvedArguments(self))
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

    # ---- Processes ------------------------------------------------------------------------------------------------

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

    def _connect_launched(self) -> None:
        """Let processes that torchrun or the like has started meet, as scripts rely on it once there are arguments.

        What cannot work is refused when there is a Trainer; nobody waits for it here.
        """
        rank_info = self._rank_info
        if rank_info.world_size == 1 or "LOCAL_RANK" not in os.environ or rank_info.self_started:
            return
        from hftrainer.arguments.table import check_supported, process_group_backend
        from hftrainer.parallel.processes import Processes

        resolved = ResolvedArguments.of(self)
        if self.device.type == "xla" or torch.distributed.is_initialized() or check_supported(resolved):
            return
        Processes.at(rank_info).connect(self.device, process_group_backend(resolved), self.ddp_timeout_delta)

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
        from hftrainer.arguments.table import check_launch
        from hftrainer.parallel.processes import Processes

        processes = Processes.at(self._rank_info)
        if not processes.several or (processes.self_started and not torch.distributed.is_initialized()):
            yield
            return
        if found := check_launch(ResolvedArguments.of(self)):
            raise UnsupportedArgument("\n".join(found))
        processes.connect(self.device, self.ddp_backend, self.ddp_timeout_delta)
        logger.debug("Process %d of %d: %s, the main process first.", processes.rank, processes.world_size, desc)
        with processes.in_turn(first=(processes.local_rank if local else processes.rank) == 0):
            yield

    def explain(self) -> Explanation:
        """What becomes of each argument that differs from its default; print it, or take its `to_json()`."""
        from hftrainer.arguments.explain import explain

        return explain(self)

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
