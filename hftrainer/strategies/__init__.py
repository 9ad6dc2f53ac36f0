"""Strategies: how the processes of a run share one model. `make_strategy` selects the one for a plan."""

from __future__ import annotations

from hftrainer.parallel.plan import LightningPlan
from hftrainer.plugins import ADAPTERS, import_adapter
from hftrainer.strategies.ddp import DdpStrategy
from hftrainer.strategies.strategy import Strategy


def make_strategy(plan: LightningPlan) -> Strategy:
    """The strategy that a plan asks for."""
    for name, adapter in ADAPTERS.items():
        if adapter.provides_strategy(plan):
            return import_adapter(name, "strategy").make_strategy(plan)
    if plan.spreads_model:
        # Import lazily, since torch's FSDP takes a second to import.
        from hftrainer.strategies.fsdp import FsdpStrategy

        return FsdpStrategy(plan)
    return DdpStrategy(plan)
