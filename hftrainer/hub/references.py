"""Names of checkpoints on the Hub, and the model card of a push. This module does not import the slow Hub client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

#: The folder of a repository that holds the newest checkpoint, with `hub_strategy='checkpoint'`.
LAST_CHECKPOINT = "last-checkpoint"


def is_reference(resume_from_checkpoint: str | bool | None) -> bool:
    """Whether `train(resume_from_checkpoint=...)` names a checkpoint on the Hub."""
    return isinstance(resume_from_checkpoint, str) and resume_from_checkpoint.startswith("hub:")


def card_parameters(given: dict[str, Any], args: Any, model_tags: Any) -> dict[str, Any]:
    """The keywords that `push_to_hub` passes to `create_model_card`: the user's, a model name, the model's tags."""
    name = (args.hub_model_id or Path(args.output_dir).name).split("/")[-1]
    found = {**given, "model_name": given.get("model_name") or name}
    if model_tags is not None:
        tags = given.get("tags", [])
        own = [tags] if isinstance(tags, str) else list(tags or [])
        found["tags"] = [*own, *(tag for tag in model_tags if tag not in own)]
    return found
