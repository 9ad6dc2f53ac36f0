"""How the processes of a run share one model: a class for each way, and which one a plan asks for."""

from __future__ import annotations

from hftrainer.parallel.plan import LightningPlan
from hftrainer.strategies.replicas import ReplicasStrategy
from hftrainer.strategies.strategy import Strategy


def make_strategy(plan: LightningPlan) -> Strategy:
    """The strategy that a plan asks for."""
    if plan.deepspeed is not None:
        from hftrainer.strategies.deepspeed import DeepSpeedStrategy

        return DeepSpeedStrategy(plan)
    if plan.on_xla:
        from hftrainer.strategies import xla

        return xla.make_strategy(plan)
    if plan.spreads_model:
        from hftrainer.strategies.fsdp import FsdpStrategy  # torch's FSDP takes a second to import

        return FsdpStrategy(plan)
    return ReplicasStrategy(plan)
