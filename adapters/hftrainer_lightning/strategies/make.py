"""Builds Lightning's strategy for a run."""

from __future__ import annotations

import importlib

from lightning.pytorch.strategies import Strategy

from hftrainer.parallel.parallelism import Parallelism
from hftrainer_lightning.strategies.in_place import StrategySettings


def build_strategy(parallelism: Parallelism, settings: StrategySettings) -> Strategy:
    """The strategy, by `build` of the module beside this one that the parallelism names; DeepSpeed's is optional."""
    module = importlib.import_module(f"hftrainer_lightning.strategies.{parallelism.lightning}")
    return module.build(parallelism, settings)
