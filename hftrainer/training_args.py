"""`TrainingArguments`: plain data.

The constructor validates. It also sets up the global state of DeepSpeed and accelerate, and joins the process group of
launched processes, so that scripts can use `torch.distributed` before they make a Trainer.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import dataclasses
import inspect
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hftrainer.arguments import legacy
from hftrainer.arguments.accelerate import get_partial_state, initialize_state
from hftrainer.arguments.accelerator_config import as_accelerator_config
from hftrainer.arguments.choices import (
    IntervalStrategy as IntervalStrategy,
    OptimizerNames as OptimizerNames,
    ParallelMode as ParallelMode,
)
from hftrainer.arguments.resolved import ResolvedArguments, set_up_deepspeed
from hftrainer.arguments.setters import ChainingSetters
from hftrainer.arguments.validation import ALIASES, check_values, normalize
from hftrainer.compat.tracebacks import HideEngineFrames
from hftrainer.errors import InvalidArgument, UnknownArgument, UnsupportedArgument, suggest
from hftrainer.parallel.processes import Processes
from hftrainer.plugins import load

if TYPE_CHECKING:
    from hftrainer.arguments.explain import Explanation

logger = logging.getLogger(__name__)


class _HiddenFieldsMeta(abc.ABCMeta):
    """Accepts, under `install()`, keywords for fields that the installed release lacks.

    The generated `__init__` of a subclass has no parameters for them, so they are taken out before it is called.
    """

    @property
    def __signature__(cls) -> inspect.Signature:
        """The parameters of `__init__`, which scripts read."""
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        hidden = _find_unaccepted(cls.__init__, [name for name in kwargs if name in legacy.HIDDEN_FIELDS])  # type: ignore[misc]
        given = {name: kwargs.pop(name) for name in hidden}
        with HideEngineFrames():
            instance: Any = cls.__new__(cls, *args, **kwargs)  # type: ignore[arg-type]
            vars(instance)["_hidden_given"] = given
            instance.__init__(*args, **kwargs)
        vars(instance).pop("_hidden_given", None)  # where a subclass's `__post_init__` has not called ours
        return instance


@dataclass
class TrainingArguments(ChainingSetters, metaclass=_HiddenFieldsMeta):
    """All settings of a training run, with the names and defaults of `transformers.TrainingArguments`.

    COMPATIBILITY.md has a table of the fields. It is a dataclass: subclass it to add
    fields, or pass it to `HfArgumentParser`.

    Raises:
        UnknownArgument: for a keyword that is not a field; the message suggests the nearest name.
        InvalidArgument: for values that are out of range or contradict each other; one error names them all.
    """

    #: The default optimizer.
    default_optim = ChainingSetters.__dataclass_fields__["optim"].default

    def __new__(cls, *args: Any, **kwargs: Any) -> TrainingArguments:
        """Check the keywords before the generated `__init__`, to suggest the right ones."""
        known = {field.name for field in dataclasses.fields(cls) if field.init}
        unknown = [name for name in kwargs if name not in known]
        if unknown and (unknown := _find_unaccepted(cls.__init__, unknown)):
            raise UnknownArgument(
                "; ".join(f"{cls.__name__} has no argument {name!r}{suggest(name, known)}" for name in unknown)
            )
        if len(args) > 1:
            _check_positional(cls, args)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        fields = [*legacy.HIDDEN_FIELDS.values(), *dataclasses.fields(self)]
        defaults = {field.name: field.default for field in fields}
        legacy.translate(self, defaults)
        normalize(self)
        if self.use_cpu:
            self.dataloader_pin_memory = False
        found = check_values(ResolvedArguments(self), complete=False)
        if found:
            raise InvalidArgument("\n".join(found))
        self.hf_deepspeed_config = set_up_deepspeed(self)
        self._join_process_group()
        initialize_state(ResolvedArguments(self))
        legacy.set_release_values(self)

    def __getstate__(self) -> dict[str, Any]:
        """Exclude a Trainer's resolved arguments from copies and pickles: they belong to that Trainer and process."""
        return {name: value for name, value in vars(self).items() if name != "_resolved"}

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an argument; an old name also sets the current one."""
        is_made = "_legacy_done" in vars(self)
        if name == "accelerator_config" and is_made:
            value = as_accelerator_config(value)
        object.__setattr__(self, name, value)
        if name in ALIASES and is_made:
            object.__setattr__(self, ALIASES[name], value)
        elif name in legacy.RENAMED and is_made:
            legacy.set_current(self, name, value)

    # ---- Processes ------------------------------------------------------------------------------------------------

    @property
    def distributed_state(self) -> Any:
        """Rank and world size: accelerate's `PartialState`; without accelerate, an object with its attributes."""
        given = vars(self).get("_distributed_state")
        return get_partial_state(ResolvedArguments.of(self)) if given is None else given

    @distributed_state.setter
    def distributed_state(self, state: Any) -> None:
        vars(self)["_distributed_state"] = state

    @property
    def deepspeed_plugin(self) -> Any:
        """DeepSpeed's configuration under accelerate's names; None without DeepSpeed.

        Not cached: a cached plugin would keep `hf_deepspeed_config` alive, and with it ZeRO-3's partitioning in
        `from_pretrained`.
        """
        config = self.hf_deepspeed_config
        return None if config is None else load("deepspeed", "settings").DeepSpeedPlugin(config)

    @deepspeed_plugin.setter
    def deepspeed_plugin(self, plugin: Any) -> None:
        if plugin is not None or vars(self).get("hf_deepspeed_config") is not None:
            raise UnsupportedArgument(
                f"deepspeed_plugin={plugin!r} cannot be set: give the configuration as `deepspeed`, or leave it out."
            )

    def _join_process_group(self) -> None:
        """Start the process group of launched processes, which scripts expect once arguments exist.

        Unsupported arguments raise when the Trainer is made; here they only keep the process group from starting.
        """
        rank_info = self._rank_info
        if rank_info.world_size == 1 or "LOCAL_RANK" not in os.environ or rank_info.is_self_launched:
            return
        from hftrainer.arguments.support import check_supported, process_group_backend

        resolved = ResolvedArguments.of(self)
        if self.device.type == "xla" or torch.distributed.is_initialized() or check_supported(resolved):
            return
        Processes.at(rank_info).connect(self.device, process_group_backend(resolved), self.ddp_timeout_delta)

    @contextlib.contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Run the block in the main process first, then in the others.

        Starts the process group if needed. If the script starts the other processes itself, it does so after the block,
        so no process waits.

        Args:
            local: whether the main process of each node runs first, instead of rank 0 only.
            desc: name of the work, for the debug log.

        Raises:
            UnsupportedArgument: if the launcher has not set how the processes connect.
        """
        from hftrainer.arguments.support import check_launch

        processes = Processes.at(self._rank_info)
        if not processes.several or (processes.is_self_launched and not torch.distributed.is_initialized()):
            yield
            return
        if found := check_launch(ResolvedArguments.of(self)):
            raise UnsupportedArgument("\n".join(found))
        processes.connect(self.device, self.ddp_backend, self.ddp_timeout_delta)
        logger.debug("Process %d of %d: %s, the main process first.", processes.rank, processes.world_size, desc)
        with processes.run_in_order(first=(processes.local_rank if local else processes.rank) == 0):
            yield

    def explain(self) -> Explanation:
        """How each argument that differs from its default is handled; print it, or use its `to_json()`."""
        from hftrainer.arguments.explain import explain

        return explain(self)

    def __str__(self) -> str:
        lines = "".join(f"{name}={value!r},\n" for name, value in sorted(self.to_dict().items()))
        return f"{type(self).__name__}(\n{lines})"

    __repr__ = __str__


def without_tokens(args: Any) -> Any:
    """A copy of training arguments, ours or transformers', without Hub tokens, so that it can be saved."""
    copied = copy.copy(args)
    for name in ("hub_token", "push_to_hub_token"):
        if vars(copied).get(name) is not None:
            vars(copied)[name] = None
    return copied


def _find_unaccepted(initialize: Callable[..., None], names: list[str]) -> list[str]:
    """The keyword arguments that `__init__` rejects; a subclass may define its own `__init__`."""
    taken = inspect.signature(initialize).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        return []
    return [name for name in names if name not in taken]


def _check_positional(cls: type[TrainingArguments], values: tuple[Any, ...]) -> None:
    """Check that positional arguments have the order of v4. In v5, numbers come where v4 has booleans."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    if len(values) > len(names):
        raise UnknownArgument(
            f"{cls.__name__} takes {len(names)} arguments by position, but {len(values)} were given: give those after "
            f"{names[-1]} by name, since each release has them in another order."
        )
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    for name, value in zip(names, values, strict=False):
        if isinstance(defaults.get(name), bool) and value is not None and not isinstance(value, bool):
            raise InvalidArgument(
                f"{name}={value!r} by position: it is True or False. The order is that of transformers 4 "
                f"({', '.join(names)}), and v5 has another: give arguments by name."
            )
