"""The files of a model card: the tags of an earlier card, the plot of the run, and PEFT's parts of a card."""

from __future__ import annotations

import functools
import logging
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hftrainer.base.messages import log_once
from hftrainer.errors import MissingPackage
from hftrainer.model_card import card_contents
from hftrainer.reporting.curves import curves_of_run
from hftrainer.reporting.metrics import write_file_atomically
from hftrainer.reporting.plot import draw_picture

if TYPE_CHECKING:
    from hftrainer.callbacks.state import TrainerState

logger = logging.getLogger(__name__)

CARD_NAME = "README.md"
PLOT_NAME = "training.png"
#: Minimum number of seconds between two plots, since a plot blocks training for half a second.
_SECONDS_BETWEEN_PLOTS = 60
_ADAPTER_OF = "base_model:adapter:"


def read_tags(path: Path) -> list[str]:
    """The tags of an existing card; empty if there is no card."""
    import yaml
    from huggingface_hub import metadata_load

    if not path.is_file():
        return []
    try:
        tags = (metadata_load(path) or {}).get("tags") or []
    except (ValueError, yaml.YAMLError) as error:
        logger.warning("The metadata of %s cannot be read, so its tags are not kept: %s", path, error)
        return []
    return [tag for tag in ([tags] if isinstance(tags, str) else tags) if isinstance(tag, str)]


def draw_plot(state: TrainerState, folder: Path, *, force: bool) -> str | None:
    """Plot the metrics of a run.

    Args:
        state: the state of the run, with its log history.
        folder: the folder for the plot.
        force: draw even if a recent plot exists.

    Returns:
        The file name of the plot; None if there is nothing to plot, or matplotlib is not installed.
    """
    path = folder / PLOT_NAME
    if not force and path.exists() and time.time() - path.stat().st_mtime < _SECONDS_BETWEEN_PLOTS:
        return PLOT_NAME
    lines = curves_of_run(state)
    if not any(len(line.steps) > 1 for line in lines):
        return None
    try:
        write_file_atomically(str(path), functools.partial(draw_picture, lines, title=folder.name))
    except MissingPackage as error:
        log_once(logger, f"The model card has no plot of the training run. {error}", logging.INFO)
        return None
    return PLOT_NAME


def add_peft_parts(card: str, model: Any) -> str:
    """Add PEFT's parts to a card, and restore the tags and the base model that PEFT removes."""
    from huggingface_hub import ModelCard

    old_data: Any = ModelCard(card).data
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / CARD_NAME
        path.write_text(card, encoding="utf-8")
        try:
            model.create_or_update_model_card(folder)
        # Models with mixed adapter types raise this.
        except NotImplementedError:
            return card
        new_card = ModelCard.load(path)
    data: Any = new_card.data
    # PEFT's tag for the base model is invalid if the model was loaded from a folder, or has no name.
    data.tags = [
        tag
        for tag in dict.fromkeys([*old_data.tags, *data.tags])
        if not tag.startswith(_ADAPTER_OF) or card_contents.is_repo_id(tag.removeprefix(_ADAPTER_OF))
    ]
    data.base_model = old_data.base_model
    return f"{new_card}\n"
