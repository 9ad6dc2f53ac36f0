"""The model card."""

from __future__ import annotations

import os
from typing import Any


def create_model_card(trainer: Any, **parameters: Any) -> None:
    """Write `README.md` to the output folder."""
    if not trainer.is_world_process_zero():
        return
    from huggingface_hub import ModelCard, ModelCardData

    data = {name: parameters[name] for name in ("language", "license", "tags", "model_name") if parameters.get(name)}
    card = ModelCard(f"---\n{ModelCardData(library_name='transformers', **data).to_yaml()}\n---\n")
    card.save(os.path.join(str(trainer.args.output_dir), "README.md"))
