"""Where a model and its data come from, and which task the model is for, as far as the objects tell."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from hftrainer.compat import peers

logger = logging.getLogger(__name__)

_TASK_NAMES = {"fill-mask": "Masked Language Modeling", "text-generation": "Causal Language Modeling"}
#: Seconds to wait for the Hub when asking for a licence. After that, the card has no licence.
LICENSE_TIMEOUT = 5.0


class DatasetSource(NamedTuple):
    """A dataset of the `datasets` library: the names of its builder, configuration and split."""

    tag: str
    config: str | None
    split: str | None


def task_name(task: str) -> str:
    """The name of a task on the Hub."""
    return _TASK_NAMES.get(task) or task.replace("-", " ").title()


def task_of(model: Any) -> str | None:
    """The task of a transformers model, or of the model inside an adapter, by its class; None if unknown."""
    tasks = _tasks_by_class() if "transformers" in sys.modules else {}
    return tasks.get(type(peers.without_adapters(model)).__name__.removeprefix("FSDP"))


@functools.lru_cache(maxsize=1)
def _tasks_by_class() -> dict[str, str]:
    from transformers.modelcard import TASK_MAPPING

    tables: dict[str, Any] = TASK_MAPPING
    listed = [(task, names) for task, models in tables.items() for names in models.values()]
    return {name: task for task, names in listed for name in ([names] if isinstance(names, str) else names)}


def base_model_of(model: Any) -> str | None:
    """The repository of the pretrained weights; None if they came from a folder, or there are none."""
    name = getattr(getattr(model, "config", None), "_name_or_path", None)
    return name if isinstance(name, str) and not os.path.isdir(name) and is_repo_id(name) else None


def is_repo_id(name: str) -> bool:
    """Whether this is a valid repository name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented, but not in its __all__

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


@functools.lru_cache(maxsize=64)
def license_of(repo_id: str) -> str | None:
    """The licence of a model on the Hub; None if the Hub does not answer within `LICENSE_TIMEOUT`.

    The answer is cached, so that a process waits at most once for a network that does not answer.
    """
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        tags = HfApi().model_info(repo_id, timeout=LICENSE_TIMEOUT).tags or []
    except Exception as error:  # no failure of the Hub may prevent the card
        logger.info("The licence of %s is unknown: %s.", repo_id, type(error).__name__)
        return None
    return next((tag.removeprefix("license:") for tag in tags if tag.startswith("license:")), None)


def datasets_of(dataset: Any) -> list[DatasetSource]:
    """The named datasets among one dataset or a dict of datasets, without duplicates."""
    found: dict[str, DatasetSource] = {}
    for one in dataset.values() if isinstance(dataset, Mapping) else [dataset]:
        name = one.builder_name if peers.is_any_dataset(one) else None
        # A generic reader of the `datasets` library, such as 'csv', does not name a dataset.
        if name is not None and importlib.util.find_spec(f"datasets.packaged_modules.{name}") is None:
            split = None if one.split is None else str(one.split)
            found.setdefault(name, DatasetSource(name, one.config_name, split))
    return list(found.values())
