"""THE TABLE of adapters: packages beside this one, which are imported here alone, when they are needed."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from hftrainer_lightning.engine import LightningEngine as LightningEngine


class Plugin(NamedTuple):
    """An adapter.

    Attributes:
        package: its package.
        extra: the extra of hftrainer that installs what it needs; empty for none.
        shares: whether its strategy shares the model of a plan among the processes.
    """

    package: str
    extra: str = ""
    shares: Callable[[Any], bool] = lambda plan: False


PLUGINS = {
    "lightning": Plugin("hftrainer_lightning"),
    "deepspeed": Plugin("hftrainer_deepspeed", "deepspeed", lambda plan: plan.deepspeed is not None),
    "xla": Plugin("hftrainer_xla", "tpu", lambda plan: plan.on_xla),
    "tensorflow": Plugin("hftrainer_tensorflow", "tf"),
    "ray": Plugin("hftrainer_ray", "ray"),
}


def load(name: str, module: str = "") -> Any:
    """The package of an adapter, or one of its modules."""
    return import_module(f"{PLUGINS[name].package}.{module}".rstrip("."))


def adapter() -> Any:
    """The module `hftrainer_lightning.engine`, which is the API of the adapter for Lightning."""
    load("lightning").import_lightning()  # takes seconds
    return load("lightning", "engine")
