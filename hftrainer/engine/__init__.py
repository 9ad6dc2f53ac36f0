"""The only entry to the Lightning adapter, which is imported at the first call, since that takes seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hftrainer_lightning.engine import LightningEngine as LightningEngine


def adapter() -> Any:
    """The module `hftrainer_lightning.engine`, which contains the API of the adapter."""
    import hftrainer_lightning

    hftrainer_lightning.import_lightning()
    from hftrainer_lightning import engine

    return engine
