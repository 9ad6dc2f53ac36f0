"""Lightning's strategies and precision plugins: what of theirs has no public name."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.xla import XLAStrategy


def announce_gradients(precision: Precision, model: Any, optimizer: Any) -> None:
    """Tell callbacks and module that the gradients are there, and clip them; for plugins with steps of their own.

    What Lightning's do between closure and step. It has no public name.
    """
    precision._after_closure(model, optimizer)


class OwnPrecision(Strategy):
    """Takes the plan's precision plugin where Lightning's strategy insists on its own.

    That for FSDP has autocast on CUDA only, and clips no norms; that for XLA casts by environment variables.
    Lightning's trainer looks for it by the private name, before it asks by the public one.
    """

    _precision_plugin: Precision | None = None

    @property
    def precision_plugin(self) -> Any:
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = precision_plugin


class LaunchedXLA(XLAStrategy):
    """Believes that its processes are there, which torch_xla's launcher has started; Lightning would start its own."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._launched = True

    def _configure_launcher(self) -> None:
        pass
