"""`TrainingArguments`, which validates its values; fields and defaults are in `arguments/fields/current.py`.

The constructor also sets up the global state of DeepSpeed and accelerate, and joins the process group of launched
processes, so that scripts can use `torch.distributed` before they create a Trainer.
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

import numpy as np
import torch

from hftrainer.arguments import old_names
from hftrainer.arguments.accelerate import get_partial_state, initialize_state
from hftrainer.arguments.accelerator_config import as_accelerator_config
from hftrainer.arguments.checks.validation import ALIASES, check_values, normalize
from hftrainer.arguments.choices import (
    IntervalStrategy as IntervalStrategy,
    OptimizerNames as OptimizerNames,
    ParallelMode as ParallelMode,
)
from hftrainer.arguments.lightning_config import check_keywords, explain_keyword
from hftrainer.arguments.resolved import ResolvedArguments, set_up_deepspeed
from hftrainer.arguments.setters import ChainingSetters
from hftrainer.base.tracebacks import HideEngineFrames
from hftrainer.errors import InvalidArgument, UnknownArgument, UnsupportedArgument
from hftrainer.parallel.processes import Processes
from hftrainer.plugins import import_adapter

if TYPE_CHECKING:
    from hftrainer.arguments.explain import Explanation

logger = logging.getLogger(__name__)


class _HiddenFieldsMeta(abc.ABCMeta):
    """Accepts, under `install()`, arguments that the installed release lacks.

    A subclass's generated `__init__` has no parameters for them, so they are removed before the call.
    """

    @property
    def __signature__(cls) -> inspect.Signature:
        """The parameters of `__init__`, which scripts read."""
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        candidates = [name for name in kwargs if name in old_names.HIDDEN_FIELDS]
        hidden_names = _find_unknown_keywords(cls.__init__, candidates)  # type: ignore[misc]
        hidden_values = {name: kwargs.pop(name) for name in hidden_names}
        with HideEngineFrames():
            instance: Any = cls.__new__(cls, *args, **kwargs)  # type: ignore[arg-type]
            vars(instance)["_hidden_values"] = hidden_values
            instance.__init__(*args, **kwargs)
        # A subclass's `__post_init__` may not have called ours.
        vars(instance).pop("_hidden_values", None)
        return instance


@dataclass
class TrainingArguments(ChainingSetters, metaclass=_HiddenFieldsMeta):
    """All settings of a training run, with the names and defaults of `transformers.TrainingArguments`.

    The class is a dataclass: subclass it to add fields, or pass it to `HfArgumentParser`.

    Raises:
        UnknownArgument: for a keyword argument that is not a field; the message suggests the nearest name.
        InvalidArgument: for values that are out of range or contradict each other; one error lists all of them.
    """

    #: The default optimizer.
    default_optim = ChainingSetters.__dataclass_fields__["optim"].default

    def __new__(cls, *args: Any, **kwargs: Any) -> TrainingArguments:
        """Check the keyword arguments before the generated `__init__`, to suggest the nearest names."""
        field_names = {field.name for field in dataclasses.fields(cls) if field.init}
        unknown = [name for name in kwargs if name not in field_names]
        if unknown and (unknown := _find_unknown_keywords(cls.__init__, unknown)):
            hints = {name: explain_keyword(name, kwargs[name], field_names) for name in unknown}
            raise UnknownArgument(
                "; ".join(f"{cls.__name__} has no argument {name!r}{hints[name]}" for name in unknown)
            )
        if len(args) > 1:
            _check_positional(cls, args)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        fields = [*old_names.HIDDEN_FIELDS.values(), *dataclasses.fields(self)]
        defaults = {field.name: field.default for field in fields}
        old_names.translate(self, defaults)
        given = dict(vars(self))
        normalize(self)
        if self.use_cpu:
            self.dataloader_pin_memory = False
        resolved = ResolvedArguments(self)
        errors = [*check_values(resolved, complete=False), *check_keywords(resolved.config_or_empty)]
        if errors:
            raise InvalidArgument("\n".join(errors))
        self.hf_deepspeed_config = set_up_deepspeed(self)
        self._join_process_group()
        initialize_state(ResolvedArguments(self))
        old_names.set_release_values(self)
        values = vars(self).items()
        # As text, since a script may change a list or dict in place.
        vars(self)["_derived"] = {name: repr(v) for name, v in values if given.get(name) == defaults.get(name) != v}

    def __getstate__(self) -> dict[str, Any]:
        """Exclude resolved arguments, which belong to one Trainer and process, from copies and pickles."""
        return {name: value for name, value in vars(self).items() if name != "_resolved"}

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an argument; an old name also sets the current one. numpy's numbers become Python's, as JSON needs."""
        value = value.item() if isinstance(value, np.generic) else value
        is_initialized = "_legacy_done" in vars(self)
        if name == "accelerator_config" and is_initialized:
            value = as_accelerator_config(value)
        object.__setattr__(self, name, value)
        if name in ALIASES and is_initialized:
            object.__setattr__(self, ALIASES[name], value)
        elif name in old_names.RENAMED and is_initialized:
            old_names.set_current(self, name, value)

    # ---- Processes ------------------------------------------------------------------------------------------------

    @property
    def distributed_state(self) -> Any:
        """Rank and world size: accelerate's `PartialState`, or without accelerate an object with its attributes."""
        state = vars(self).get("_distributed_state")
        return get_partial_state(ResolvedArguments.from_args(self)) if state is None else state

    @distributed_state.setter
    def distributed_state(self, state: Any) -> None:
        vars(self)["_distributed_state"] = state

    @property
    def deepspeed_plugin(self) -> Any:
        """DeepSpeed's configuration under accelerate's names; None without DeepSpeed.

        The plugin is not cached: it would keep `hf_deepspeed_config` alive, and thus ZeRO-3's partitioning in
        `from_pretrained`.
        """
        config = self.hf_deepspeed_config
        return None if config is None else import_adapter("deepspeed", "settings").DeepSpeedPlugin(config)

    @deepspeed_plugin.setter
    def deepspeed_plugin(self, plugin: Any) -> None:
        if plugin is not None or vars(self).get("hf_deepspeed_config") is not None:
            raise UnsupportedArgument(
                f"deepspeed_plugin={plugin!r} cannot be set: pass the configuration as `deepspeed` instead."
            )

    def _join_process_group(self) -> None:
        """Start the process group of launched processes, which scripts use after creating arguments.

        Unsupported arguments raise in the Trainer; here they only prevent the start of the process group.
        """
        rank_info = self._rank_info
        if rank_info.world_size == 1 or "LOCAL_RANK" not in os.environ or rank_info.is_self_launched:
            return
        from hftrainer.arguments.checks.unsupported import check_supported
        from hftrainer.arguments.lightning_plan import process_group_backend

        resolved = ResolvedArguments.from_args(self)
        if self.device.type == "xla" or torch.distributed.is_initialized() or check_supported(resolved):
            return
        Processes.from_ranks(rank_info).connect(self.device, process_group_backend(resolved), self.ddp_timeout_delta)

    @contextlib.contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Run the block in the main process first, then in the others.

        Starts the process group if needed. If this process starts the others, it does so after the block, so no process
        waits.

        Args:
            local: whether the main process of each node runs first, or only rank 0.
            desc: description of the block, for the debug log.

        Raises:
            UnsupportedArgument: if the launcher has not set how the processes connect.
        """
        from hftrainer.arguments.checks.unsupported import check_launch

        processes = Processes.from_ranks(self._rank_info)
        if not processes.is_distributed or (processes.is_self_launched and not torch.distributed.is_initialized()):
            yield
            return
        if errors := check_launch(ResolvedArguments.from_args(self)):
            raise UnsupportedArgument("\n".join(errors))
        processes.connect(self.device, self.ddp_backend, self.ddp_timeout_delta)
        logger.debug("Process %d of %d: %s, the main process first.", processes.rank, processes.world_size, desc)
        with processes.run_in_order(first=(processes.local_rank if local else processes.rank) == 0):
            yield

    def explain(self) -> Explanation:
        """The effect of each argument that differs from its default; print it, or call `to_json()`."""
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


def _find_unknown_keywords(initialize: Callable[..., None], names: list[str]) -> list[str]:
    """The keyword arguments that `__init__` rejects; a subclass may define its own `__init__`."""
    parameters = inspect.signature(initialize).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return []
    return [name for name in names if name not in parameters]


def _check_positional(cls: type[TrainingArguments], values: tuple[Any, ...]) -> None:
    """Check that positional arguments have v4's order: v5 has numbers in place of v4's booleans."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    if len(values) > len(names):
        raise UnknownArgument(
            f"{cls.__name__} accepts {len(names)} positional arguments, not {len(values)}: pass those after "
            f"{names[-1]} by name, since their order differs between releases."
        )
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    for name, value in zip(names, values, strict=False):
        if isinstance(defaults.get(name), bool) and value is not None and not isinstance(value, bool):
            raise InvalidArgument(
                f"{name}={value!r} by position: it must be True or False. The order is that of transformers 4 "
                f"({', '.join(names)}); v5 has another order. Pass arguments by name."
            )
