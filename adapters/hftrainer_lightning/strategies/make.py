"""Builds Lightning's strategy for a run."""

from __future__ import annotations

import importlib

from lightning.pytorch.strategies import Strategy

from hftrainer.parallel.parallelism import Parallelism
from hftrainer_lightning.strategies.base import StrategySettings


def build_strategy(parallelism: Parallelism, settings: StrategySettings) -> Strategy:
    """The strategy, by the function `build` of the module beside this one that `parallelism.builder` names.

    Found by its name, so that another strategy needs no change here; imported late, since few runs need a given one.
    """
    module = importlib.import_module(f"hftrainer_lightning.strategies.{parallelism.builder}")
    strategy = module.build(parallelism, settings)
    strategy.shards = parallelism.shards
    return strategy
