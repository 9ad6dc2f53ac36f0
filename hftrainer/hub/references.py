"""Names on the Hub, and of what goes there; without the client, which takes a while to import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

#: The folder of a repository that `hub_strategy='checkpoint'` keeps the newest checkpoint in.
LAST_CHECKPOINT = "last-checkpoint"


def is_reference(resume_from_checkpoint: str | bool | None) -> bool:
    """Whether `train(resume_from_checkpoint=...)` means a checkpoint on the Hub."""
    return isinstance(resume_from_checkpoint, str) and resume_from_checkpoint.startswith("hub:")


def card_parameters(given: dict[str, Any], args: Any, model_tags: Any) -> dict[str, Any]:
    """What `push_to_hub` gives to `create_model_card`: the model's name and its tags, besides what the user gives."""
    name = (args.hub_model_id or Path(args.output_dir).name).split("/")[-1]
    found = {**given, "model_name": given.get("model_name") or name}
    if model_tags is not None:
        tags = given.get("tags", [])
        own = [tags] if isinstance(tags, str) else list(tags or [])
        found["tags"] = [*own, *(tag for tag in model_tags if tag not in own)]
    return found
