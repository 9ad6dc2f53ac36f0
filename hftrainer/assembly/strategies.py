"""THE TABLE of strategies: for each, which objects do what differs from one strategy to another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hftrainer.checkpointing.states import ModelStates
from hftrainer.checkpointing.states.deepspeed import DeepSpeedStates
from hftrainer.checkpointing.states.fsdp import ShardedStates
from hftrainer.checkpointing.states.whole import WholeStates
from hftrainer.checkpointing.states.xla import XlaStates
from hftrainer.parallel.deepspeed.parallelism import DeepSpeedParallelism
from hftrainer.parallel.parallelism import Parallelism
from hftrainer.parallel.plan import LightningPlan
from hftrainer.parallel.xla.parallelism import XlaFsdpParallelism, XlaParallelism, XlaSpmdParallelism
from hftrainer.training.deepspeed import DeepSpeedPreparation, check_given
from hftrainer.training.loader_factory import LoaderFactory
from hftrainer.training.preparation import Preparation

if TYPE_CHECKING:
    from hftrainer.training.components import Components

#: Attributes by which transformers' Trainer names its strategy; scripts read them. All are False but those of the row.
FLAGS = (
    *("is_deepspeed_enabled", "is_fsdp_enabled"),
    *("is_fsdp_xla_enabled", "is_fsdp_xla_v1_enabled", "is_fsdp_xla_v2_enabled"),
)


@dataclass(frozen=True)
class StrategyRow:
    """A row of the table.

    Attributes:
        applies: whether a plan asks for it.
        parallelism: makes the object that distributes the model.
        states: makes the object that gathers, saves and loads the states of model and optimizer.
        preparation: makes the object that prepares model, optimizer and schedule.
    """

    applies: Callable[[LightningPlan], bool]
    parallelism: Callable[[LightningPlan], Parallelism]
    states: Callable[[Components, Any], ModelStates]
    preparation: Callable[[Components, LoaderFactory], Preparation] = Preparation


def _fsdp(plan: LightningPlan) -> Parallelism:
    from hftrainer.parallel.fsdp.parallelism import FsdpParallelism  # torch's FSDP takes a second to import

    return FsdpParallelism(plan)


def _whole_states(components: Components, _: Parallelism) -> ModelStates:
    return WholeStates(components.engine.saving)


def _deepspeed_states(components: Components, parallelism: DeepSpeedParallelism) -> ModelStates:
    check_given(parallelism.run, *components.optimizers_given)
    return DeepSpeedStates(parallelism.run)


def _xla_states(components: Components, of_xla: XlaFsdpParallelism) -> ModelStates:
    decayed = components.trainer.get_decay_parameter_names
    return XlaStates(of_xla.plan.processes, of_xla.to_cpu, of_xla.whole_weights, decayed)


#: The first row that applies is taken: the order matters.
STRATEGIES = (
    StrategyRow(lambda plan: plan.deepspeed is not None, DeepSpeedParallelism, _deepspeed_states, DeepSpeedPreparation),
    StrategyRow(lambda plan: plan.by_spmd, XlaSpmdParallelism, _whole_states),
    StrategyRow(lambda plan: plan.on_xla and plan.sharding is not None, XlaFsdpParallelism, _xla_states),
    StrategyRow(lambda plan: plan.on_xla, XlaParallelism, _whole_states),
    StrategyRow(lambda plan: plan.spreads_model, _fsdp, lambda _, fsdp: ShardedStates(fsdp.plugin)),
    StrategyRow(lambda plan: True, Parallelism, _whole_states),
)


def strategy_of(plan: LightningPlan) -> StrategyRow:
    """The row for a plan."""
    return next(row for row in STRATEGIES if row.applies(plan))
