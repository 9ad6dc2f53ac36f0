"""The table of adapters: separate packages that only this module imports, at first use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from hftrainer.errors import MissingPackage, unless_absent

if TYPE_CHECKING:
    from hftrainer_lightning.engine import LightningEngine as LightningEngine


class Plugin(NamedTuple):
    """An adapter.

    Attributes:
        package: the adapter's package.
        extra: the extra of hftrainer that installs the adapter's dependencies; empty without dependencies.
        shares: a function: whether the adapter's strategy distributes the model over processes, for a plan.
    """

    package: str
    extra: str = ""
    shares: Callable[[Any], bool] = lambda plan: False


PLUGINS = {
    "lightning": Plugin("hftrainer_lightning"),
    "deepspeed": Plugin("hftrainer_deepspeed", "deepspeed", lambda plan: plan.deepspeed is not None),
    "xla": Plugin("hftrainer_xla", "tpu", lambda plan: plan.accelerator == "xla"),
    "tensorflow": Plugin("hftrainer_tensorflow", "tf"),
    "ray": Plugin("hftrainer_ray", "ray"),
}


def load(name: str, module: str = "") -> Any:
    """The package of an adapter, or one of its modules.

    Raises:
        MissingPackage: if a dependency is not installed.
    """
    plugin = PLUGINS[name]
    try:
        return import_module(f"{plugin.package}.{module}".rstrip("."))
    except ImportError as error:
        if not plugin.extra:
            raise
        raise MissingPackage(
            f"{name} cannot be used ({error}): pip install 'hftrainer[{plugin.extra}]'."
        ) from unless_absent(error)


@functools.cache
def lightning_adapter() -> Any:
    """The module `hftrainer_lightning.engine`, which is the API of the adapter for Lightning."""
    # The import takes seconds.
    load("lightning").import_lightning()
    return load("lightning", "engine")
