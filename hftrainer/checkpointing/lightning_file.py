"""Resuming from a Lightning checkpoint (`x.ckpt`) of our own runs: the file is converted to a checkpoint folder."""

from __future__ import annotations

import json
import os
from typing import Any

import torch

from hftrainer.checkpointing import names
from hftrainer.checkpointing.distributed import WHOLES
from hftrainer.compat.reading import read_torch
from hftrainer.data.randomness import numpy_state_types
from hftrainer.errors import CheckpointNotFound

#: Key of the Trainer's own part in the file.
OWN_PART = "hftrainer"
#: Keys that Lightning itself writes; all others come from callbacks.
_LIGHTNING_KEYS = {
    *("epoch", "global_step", "pytorch-lightning_version", "state_dict", "loops", "optimizer_states", "lr_schedulers"),
    *("hparams_name", "hyper_parameters", "hparams_type"),
}

#: The generated module's name for the model.
_PREFIX = "model."


def unpack(path: str, folder: str) -> str:
    """Convert a Lightning checkpoint to a checkpoint of the Trainer in `folder`; returns `folder`.

    Raises:
        CheckpointNotFound: when the file does not exist, or was written by another LightningModule than ours.
        UnsafeCheckpoint, DamagedCheckpoint: when it cannot be read.
    """
    if not os.path.isfile(path):
        raise CheckpointNotFound(f"resume_from_checkpoint={path!r}: the file does not exist.")
    with torch.serialization.safe_globals(numpy_state_types()):
        saved = read_torch(path)
    if not isinstance(saved, dict) or OWN_PART not in saved or "state_dict" not in saved:
        raise CheckpointNotFound(
            f"resume_from_checkpoint={path!r} is not a Lightning checkpoint of this Trainer. Load its weights into "
            "the model yourself, and train without resuming."
        )
    own = saved[OWN_PART]

    def write(name: str, value: Any) -> None:
        torch.save(value, os.path.join(folder, name))

    write(names.WEIGHTS_NAME, {name.removeprefix(_PREFIX): tensor for name, tensor in saved["state_dict"].items()})
    optimizer = saved["optimizer_states"][0]
    named = any(isinstance(key, str) for key in optimizer["state"])  # written by a sharded run
    write(WHOLES["optimizer"] if named else names.OPTIMIZER_NAME, _by_model_names(optimizer) if named else optimizer)
    write(names.SCHEDULER_NAME, own["scheduler"])
    write(names.rng_name(0, 1), own["rng"])
    write(names.progress_name(0, 1), own["progress"])
    if own["scaler"] is not None:
        write(names.SCALER_NAME, own["scaler"])
    if kept := {name: value for name, value in saved.items() if name not in _LIGHTNING_KEYS | {OWN_PART}}:
        write(names.LIGHTNING_CALLBACKS_NAME, kept)
    with open(os.path.join(folder, names.TRAINER_STATE_NAME), "w", encoding="utf-8") as file:
        json.dump(own["trainer_state"], file)
    return folder


def _by_model_names(optimizer: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state by the model's own parameter names."""
    groups = [
        {**group, "params": [name.removeprefix(_PREFIX) for name in group["params"]]}
        for group in optimizer["param_groups"]
    ]
    return {
        "state": {name.removeprefix(_PREFIX): state for name, state in optimizer["state"].items()},
        "param_groups": groups,
    }
