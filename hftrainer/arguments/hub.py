"""The Hugging Face Hub."""

from __future__ import annotations

from dataclasses import dataclass

from hftrainer.arguments._field import arg
from hftrainer.arguments.choices import HubStrategy


@dataclass(kw_only=True)
class HubArguments:
    """Uploading what is saved."""

    push_to_hub: bool = arg(False, "Upload each save.")
    hub_model_id: str | None = arg(None, "Repository to upload to.")
    hub_strategy: HubStrategy | str = arg(
        "every_save", "'end', 'every_save', or with the last 'checkpoint' or 'all_checkpoints' besides."
    )
    hub_token: str | None = arg(None, "Token for the upload; None takes the one of `hf auth login`.")
    hub_private_repo: bool | None = arg(None, "Whether a new repository is private.")
    hub_always_push: bool = arg(False, "Let saves wait for the upload under way, instead of leaving them out.")
    hub_revision: str | None = arg(None, "Branch to upload to, which must be there.")
