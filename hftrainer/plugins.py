"""The table of adapters: separate packages that only this module imports, at first use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from hftrainer.errors import MissingPackage, cause_if_installed

if TYPE_CHECKING:
    from hftrainer_lightning.engine import LightningEngine as LightningEngine


class Adapter(NamedTuple):
    """An adapter.

    Attributes:
        package: the adapter's package.
        extra: the extra of hftrainer that installs the adapter's dependencies; empty without dependencies.
        provides_strategy: returns whether a plan uses this adapter's strategy.
    """

    package: str
    extra: str = ""
    provides_strategy: Callable[[Any], bool] = lambda plan: False


ADAPTERS = {
    "lightning": Adapter("hftrainer_lightning"),
    "deepspeed": Adapter("hftrainer_deepspeed", "deepspeed", lambda plan: plan.deepspeed is not None),
    "xla": Adapter("hftrainer_xla", "tpu", lambda plan: plan.device.startswith("xla")),
    "tensorflow": Adapter("hftrainer_tensorflow", "tf"),
    "ray": Adapter("hftrainer_ray", "ray"),
}


def import_adapter(name: str, module: str = "") -> Any:
    """The package of an adapter, or one of its modules.

    Raises:
        MissingPackage: if a dependency is not installed.
    """
    adapter = ADAPTERS[name]
    try:
        return import_module(f"{adapter.package}.{module}".rstrip("."))
    except ImportError as error:
        if not adapter.extra:
            raise
        raise MissingPackage(
            f"{name} cannot be used ({error}): pip install 'hftrainer[{adapter.extra}]'."
        ) from cause_if_installed(error)


@functools.cache
def lightning_engine_module() -> Any:
    """The module `hftrainer_lightning.engine`, which is the API of the adapter for Lightning."""
    # The import takes seconds.
    import_adapter("lightning").import_lightning()
    return import_adapter("lightning", "engine")
