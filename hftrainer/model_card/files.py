"""The files of a model card: what is kept of an earlier one, the picture, what PEFT adds, and how they are written."""

from __future__ import annotations

import functools
import logging
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hftrainer.errors import MissingPackage
from hftrainer.model_card import origins
from hftrainer.reporting.metrics import write_whole
from hftrainer.reporting.plot import draw_png, lines_of

if TYPE_CHECKING:
    from hftrainer.callbacks.state import TrainerState

logger = logging.getLogger(__name__)

CARD_NAME = "README.md"
PICTURE_NAME = "training.png"
#: A picture takes half a second, which training waits for.
_SECONDS_BETWEEN_PICTURES = 60
_ADAPTER_OF = "base_model:adapter:"


def tags_in(path: Path) -> list[str]:
    """The tags of a card that is there already."""
    import yaml
    from huggingface_hub import metadata_load

    if not path.is_file():
        return []
    try:
        tags = (metadata_load(path) or {}).get("tags") or []
    except (ValueError, yaml.YAMLError) as error:
        logger.warning("%s has metadata that cannot be read, and its tags are not kept: %s", path, error)
        return []
    return [tag for tag in ([tags] if isinstance(tags, str) else tags) if isinstance(tag, str)]


def draw(state: TrainerState, folder: Path, *, again: bool) -> str | None:
    """Draw the curves of a run; returns the name of the picture, or None when there is nothing to draw or no way.

    Args:
        state: the run.
        folder: where the picture goes.
        again: draw also when there is a picture that is recent.
    """
    path = folder / PICTURE_NAME
    if not again and path.exists() and time.time() - path.stat().st_mtime < _SECONDS_BETWEEN_PICTURES:
        return PICTURE_NAME
    drawn = list(lines_of(state))
    if not any(len(line.steps) > 1 for line in drawn):
        return None
    try:
        write_whole(str(path), functools.partial(draw_png, drawn))
    except MissingPackage as error:
        _say_once(f"The model card has no picture of the training run. {error}")
        return None
    return PICTURE_NAME


@functools.lru_cache
def _say_once(sentence: str) -> None:
    logger.info(sentence)


def completed_by_peft(card: str, model: Any) -> str:
    """The card with what PEFT adds, and with what PEFT would take out: other tags, and a base model that can be had."""
    from huggingface_hub import ModelCard

    before: Any = ModelCard(card).data
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / CARD_NAME
        path.write_text(card, encoding="utf-8")
        try:
            model.create_or_update_model_card(folder)
        except NotImplementedError:  # mixed adapters
            return card
        after = ModelCard.load(path)
    data: Any = after.data
    data.tags = [tag for tag in dict.fromkeys([*before.tags, *data.tags]) if _is_tag(tag)]
    data.base_model = before.base_model
    return f"{after}\n"


def _is_tag(tag: str) -> bool:
    """Whether a tag says something; PEFT names the base model by a folder, or not at all, if it is no repository."""
    return not tag.startswith(_ADAPTER_OF) or origins.is_repo_id(tag.removeprefix(_ADAPTER_OF))
