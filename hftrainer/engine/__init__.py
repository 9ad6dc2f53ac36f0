"""The one door to the Lightning adapter, which is imported when it is first asked for: that takes seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hftrainer_lightning.engine import LightningEngine as LightningEngine


def adapter() -> Any:
    """The module `hftrainer_lightning.engine`, which has all that the adapter offers."""
    from hftrainer_lightning import engine

    return engine
