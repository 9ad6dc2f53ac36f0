"""The Hugging Face Hub."""

from __future__ import annotations

from dataclasses import dataclass

from hftrainer.arguments._field import arg
from hftrainer.arguments.choices import HubStrategy


@dataclass(kw_only=True)
class HubArguments:
    """Uploads of checkpoints and models."""

    push_to_hub: bool = arg(False, "Upload each save.")
    hub_model_id: str | None = arg(None, "Repository to upload to.")
    hub_strategy: HubStrategy | str = arg(
        "every_save",
        "'end' or 'every_save'; 'checkpoint' and 'all_checkpoints' also upload the last or all of them at every save.",
    )
    hub_token: str | None = arg(None, "Token for the upload; None uses the token of `hf auth login`.")
    hub_private_repo: bool | None = arg(None, "Whether a new repository is private.")
    hub_always_push: bool = arg(
        False, "Upload every save, waiting for a running upload; otherwise a save during an upload is not uploaded."
    )
    hub_revision: str | None = arg(None, "Branch to upload to; it must exist.")
