"""Lightning's strategies and precision plugins: uses of their private names."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from lightning.pytorch.strategies.xla import XLAStrategy

from hftrainer.parallel.process_group import device_mesh
from hftrainer_lightning.private_api.trainer import is_watched


def announce_gradients(precision: Precision, model: Any, optimizer: Any) -> None:
    """Announce the gradients to callbacks and module, and clip them; for plugins with their own optimizer step.

    Lightning's plugins do this between closure and step, under a private name.
    """
    if is_watched(model.trainer):
        precision._after_closure(model, optimizer)
    elif model.automatic_optimization:
        model.configure_gradient_clipping(optimizer)


class OwnPrecision(Strategy):
    """Uses the plan's precision plugin where Lightning's strategy requires its own.

    Lightning's plugin for FSDP has autocast on CUDA only, and does not clip norms; that for XLA casts by environment
    variables. Lightning's trainer reads the private attribute before the public one.
    """

    _precision_plugin: Precision | None = None

    @property
    def precision_plugin(self) -> Any:
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = precision_plugin


class SharesMesh(ModelParallelStrategy):
    """Has the device mesh of earlier runs of this process: Lightning makes one for each, whose process groups stay."""

    def setup_environment(self) -> None:
        super(ModelParallelStrategy, self).setup_environment()
        self._setup_distributed()
        sizes = int(self._data_parallel_size), int(self._tensor_parallel_size)
        self._device_mesh = device_mesh(self.root_device.type, sizes, ("data_parallel", "tensor_parallel"))
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh


class LaunchedXLA(XLAStrategy):
    """Skips Lightning's launcher: torch_xla's launcher has started the processes already."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._launched = True

    def _configure_launcher(self) -> None:
        pass
