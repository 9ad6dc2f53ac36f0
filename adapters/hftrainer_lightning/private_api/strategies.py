"""Lightning's strategies: their precision plugin, DDP's backward, the device mesh, and the launching of processes."""

from __future__ import annotations

import sys
from typing import Any

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy as LightningStrategy
from lightning.pytorch.strategies.ddp import _DDPForwardRedirection
from lightning.pytorch.strategies.launchers import subprocess_script
from lightning.pytorch.strategies.xla import XLAStrategy

from hftrainer.parallel.process_group import device_mesh


class PrecisionFromPlan(LightningStrategy):
    """Uses the plan's precision plugin in strategies that require a plugin of Lightning's.

    Lightning's FSDP plugin autocasts on CUDA only and cannot clip by norm; its XLA plugin casts by environment
    variables. Lightning's trainer reads the private attribute before the public one.
    """

    _precision_plugin: Precision | None = None

    @property
    def precision_plugin(self) -> Any:
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = precision_plugin


class _BackwardWithinForward(_DDPForwardRedirection):
    """Runs the training step, which includes backward, as the `forward` of DDP's wrapper."""

    def on_after_inner_forward(self, wrapper_module: Any, original_module: Any) -> None:
        """Let the wrapper prepare nothing now: `pre_backward` has."""
        self._syncs_buffers = wrapper_module.require_forward_param_sync
        wrapper_module.require_backward_grad_sync = False

    def on_after_outer_forward(self, wrapper_module: Any, original_module: Any) -> None:
        wrapper_module.require_backward_grad_sync = True
        wrapper_module.require_forward_param_sync = self._syncs_buffers


class BackwardWithinForwardDDPStrategy(DDPStrategy):
    """DDP for a training step that includes backward. Lightning does the same, for its manual optimization alone."""

    _is_static_graph_ready = False

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._forward_redirection = _BackwardWithinForward()

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        """Prepare the reducer."""
        model: Any = self.model
        prepare_for_backward(model, closure_loss)

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Start the first all-reduce of a static graph."""
        model: Any = self.model
        if model.static_graph and not self._is_static_graph_ready:
            model.reducer._delay_all_reduce()
            self._is_static_graph_ready = True


class SharedMeshStrategy(ModelParallelStrategy):
    """Reuses the device mesh of earlier runs. Lightning would create one, with new process groups, for each run."""

    def setup_environment(self) -> None:
        super(ModelParallelStrategy, self).setup_environment()
        self._setup_distributed()
        sizes = int(self._data_parallel_size), int(self._tensor_parallel_size)
        self._device_mesh = device_mesh(self.root_device.type, sizes, ("data_parallel", "tensor_parallel"))
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh


class LaunchedXLAStrategy(XLAStrategy):
    """Skips Lightning's launcher, since torch_xla has started the processes already."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._launched = True

    def _configure_launcher(self) -> None:
        """Make no launcher: Lightning's would start the processes once more."""


def start_script_again(environment: ClusterEnvironment, processes: int) -> Any:
    """Start this command line again for each further process. Returns Lightning's launcher, which ends them.

    Lightning would build the command from `sys.argv`, which lacks `python -m hftrainer run` and contains the script's
    changes.
    """
    module: Any = subprocess_script
    launcher = module._SubprocessScriptLauncher(environment, processes, num_nodes=1)
    original_command = module._basic_subprocess_cmd
    module._basic_subprocess_cmd = lambda: [sys.executable, *sys.orig_argv[1:]]
    try:
        launcher.launch(lambda: None)
    finally:
        module._basic_subprocess_cmd = original_command
    return launcher
