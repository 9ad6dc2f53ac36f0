"""What can be found out about where a model and its data come from, and what the model is for."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

from hftrainer.compat import peers

logger = logging.getLogger(__name__)

#: Task → what transformers calls it in the names of its `MODEL_FOR_..._MAPPING_NAMES`; the last that fits counts.
TASKS: dict[str, tuple[str, ...]] = {
    "text-generation": ("CAUSAL_LM",),
    "image-classification": ("IMAGE_CLASSIFICATION",),
    "image-segmentation": ("IMAGE_SEGMENTATION",),
    "fill-mask": ("MASKED_LM",),
    "object-detection": ("OBJECT_DETECTION",),
    "question-answering": ("QUESTION_ANSWERING",),
    "text2text-generation": ("SEQ_TO_SEQ_CAUSAL_LM",),
    "text-classification": ("SEQUENCE_CLASSIFICATION",),
    "table-question-answering": ("TABLE_QUESTION_ANSWERING",),
    "token-classification": ("TOKEN_CLASSIFICATION",),
    "audio-classification": ("AUDIO_CLASSIFICATION",),
    "automatic-speech-recognition": ("CTC", "SPEECH_SEQ_2_SEQ"),
    "zero-shot-image-classification": ("ZERO_SHOT_IMAGE_CLASSIFICATION",),
    "image-text-to-text": ("IMAGE_TEXT_TO_TEXT",),
}
_TASK_NAMES = {"fill-mask": "Masked Language Modeling", "text-generation": "Causal Language Modeling"}
#: Seconds to wait for the Hub's word on a licence; a card without one is better than a run that waits.
LICENSE_TIMEOUT = 5.0


class DatasetOrigin(NamedTuple):
    """A dataset as the builder of the datasets library names it."""

    tag: str
    config: str | None
    split: str | None


def task_name(task: str) -> str:
    """What the Hub calls a task."""
    return _TASK_NAMES.get(task) or task.replace("-", " ").title()


def task_of(model: Any) -> str | None:
    """The task that a transformers model is for, or the model below an adapter, by the name of its class."""
    tasks = _tasks_by_class() if "transformers" in sys.modules else {}
    return tasks.get(type(peers.without_adapters(model)).__name__.removeprefix("FSDP"))


@functools.lru_cache(maxsize=1)
def _tasks_by_class() -> dict[str, str]:
    from transformers.models.auto import modeling_auto

    found: dict[str, str] = {}
    for task, kinds in TASKS.items():
        for kind in kinds:
            for names in getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES", {}).values():
                found |= dict.fromkeys([names] if isinstance(names, str) else names, task)
    return found


def base_model_of(model: Any) -> str | None:
    """The repository that the model's weights came from; None for folders and for models that were made anew."""
    name = getattr(getattr(model, "config", None), "_name_or_path", None)
    return name if isinstance(name, str) and not os.path.isdir(name) and is_repo_id(name) else None


def is_repo_id(name: str) -> bool:
    """Whether the Hub could have a repository of this name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented, and not listed there

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


@functools.lru_cache(maxsize=64)
def license_of(repo_id: str) -> str | None:
    """The licence that the Hub has for a model; None when it cannot be asked, or not within `LICENSE_TIMEOUT`.

    Asked once in a process: a network that does not answer is waited for once.
    """
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return None
    found: list[str] = []

    def ask() -> None:
        try:
            tags = HfApi().model_info(repo_id, timeout=LICENSE_TIMEOUT).tags or []
        except Exception as error:  # whatever keeps the Hub from answering must not keep the card from being written
            logger.info("The licence of %s is not known: %s.", repo_id, type(error).__name__)
        else:
            found.extend(tag.removeprefix("license:") for tag in tags if tag.startswith("license:"))

    asking = threading.Thread(target=ask, daemon=True)  # looking up a name can take longer than any timeout
    asking.start()
    asking.join(LICENSE_TIMEOUT)
    return found[-1] if found else None


def datasets_of(dataset: Any) -> list[DatasetOrigin]:
    """The named datasets of the datasets library in a dataset, or in a dict of them; none twice."""
    found: dict[str, DatasetOrigin] = {}
    for one in dataset.values() if isinstance(dataset, Mapping) else [dataset]:
        name = one.builder_name if peers.is_any_dataset(one) else None
        if name is not None and not _reads_files(name):
            split = None if one.split is None else str(one.split)
            found.setdefault(name, DatasetOrigin(name, one.config_name, split))
    return list(found.values())


def _reads_files(builder: str) -> bool:
    """Whether a builder comes with the datasets library, for files or functions of any kind: it names no dataset."""
    return importlib.util.find_spec(f"datasets.packaged_modules.{builder}") is not None
