"""THE TABLE of strategies: the objects that implement their differences."""

from __future__ import annotations

from hftrainer.checkpointing.states import ModelStates
from hftrainer.checkpointing.states.deepspeed import DeepSpeedStates
from hftrainer.checkpointing.states.fsdp import ShardedStates
from hftrainer.checkpointing.states.whole import WholeStates
from hftrainer.checkpointing.states.xla import XlaStates
from hftrainer.parallel.plan import LightningPlan
from hftrainer.training.context import TrainerContext
from hftrainer.training.deepspeed import DeepSpeedPreparation, check_given
from hftrainer.training.loader_factory import LoaderFactory
from hftrainer.training.preparation import Preparation


def make_states(context: TrainerContext, plan: LightningPlan) -> ModelStates:
    """The object that gathers, saves and loads the states of model and optimizer for the strategy."""
    engine = context.engine
    if not plan.spreads_model:
        return WholeStates(engine.saving)
    if plan.deepspeed is not None:
        check_given(engine.deepspeed, *context.optimizers_given)
        return DeepSpeedStates(engine.deepspeed)
    if plan.on_xla:
        decayed = context.trainer.get_decay_parameter_names
        return XlaStates(plan.processes, engine.to_cpu, engine.whole_weights, decayed)
    return ShardedStates(context.trainer.accelerator.state.fsdp_plugin)


def make_preparation(context: TrainerContext, loaders: LoaderFactory, plan: LightningPlan) -> Preparation:
    """The object that prepares model, optimizer and schedule for the strategy."""
    kind = Preparation if plan.deepspeed is None else DeepSpeedPreparation
    return kind(context, loaders)


def flags(plan: LightningPlan) -> dict[str, bool]:
    """Attributes by which transformers' Trainer names its strategy; scripts read them."""
    shards_on_xla = plan.on_xla and plan.sharding is not None
    return {
        "is_deepspeed_enabled": plan.deepspeed is not None,
        "is_fsdp_enabled": plan.sharding is not None and not plan.on_xla,
        "is_fsdp_xla_enabled": shards_on_xla,
        "is_fsdp_xla_v1_enabled": shards_on_xla and not plan.by_spmd,
        "is_fsdp_xla_v2_enabled": plan.by_spmd,
    }
