"""Converts a `.ckpt` file of Lightning, written in a run of ours, to a checkpoint folder."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from hftrainer.base.safe_loading import load_torch_file
from hftrainer.checkpointing import layout
from hftrainer.data.randomness import numpy_state_types
from hftrainer.errors import CheckpointNotFound

#: Key of the Trainer's entry in a Lightning checkpoint.
TRAINER_KEY = "hftrainer"
#: Keys that Lightning itself writes; all others come from callbacks.
_LIGHTNING_KEYS = {
    *("epoch", "global_step", "pytorch-lightning_version", "state_dict", "loops", "optimizer_states", "lr_schedulers"),
    *("hparams_name", "hyper_parameters", "hparams_type"),
}


@contextlib.contextmanager
def unpacked_ckpt(resume_from_checkpoint: str | bool | None) -> Iterator[str | bool | None]:
    """Yields a temporary folder with the Trainer checkpoint of a `.ckpt` file; any other value unchanged.

    Raises:
        CheckpointNotFound: if the file does not exist, or was not written by our LightningModule.
        UnsafeCheckpoint, DamagedCheckpoint: if the file cannot be read.
    """
    path = str(resume_from_checkpoint)
    if not path.endswith(".ckpt"):
        yield resume_from_checkpoint
        return
    with tempfile.TemporaryDirectory(prefix=f"{os.path.basename(path)}-") as folder:
        _convert_ckpt(path, folder)
        yield folder


def _convert_ckpt(path: str, folder: str) -> None:
    """Convert a Lightning checkpoint to a Trainer checkpoint in `folder`."""
    saved, trainer_entry = _read_ckpt(path)

    def write(name: str, value: Any) -> None:
        torch.save(value, os.path.join(folder, name))

    prefix = layout.MODEL_PREFIX
    write(layout.WEIGHTS_NAME, {name.removeprefix(prefix): tensor for name, tensor in saved["state_dict"].items()})
    optimizer = saved["optimizer_states"][0]
    # A sharded run keys the states by name.
    has_names = any(isinstance(key, str) for key in optimizer["state"])
    if has_names:
        optimizer["state"] = {name.removeprefix(prefix): state for name, state in optimizer["state"].items()}
        for group in optimizer["param_groups"]:
            group["params"] = [name.removeprefix(prefix) for name in group["params"]]
    write(layout.FULL_STATE_FILES["optimizer"] if has_names else layout.OPTIMIZER_NAME, optimizer)
    write(layout.SCHEDULER_NAME, trainer_entry["scheduler"])
    write(layout.rng_name(0, 1), trainer_entry["rng"])
    write(layout.progress_name(0, 1), trainer_entry["progress"])
    if trainer_entry["scaler"] is not None:
        write(layout.SCALER_NAME, trainer_entry["scaler"])
    if callback_states := {name: value for name, value in saved.items() if name not in _LIGHTNING_KEYS | {TRAINER_KEY}}:
        write(layout.LIGHTNING_CALLBACKS_NAME, callback_states)
    with open(os.path.join(folder, layout.TRAINER_STATE_NAME), "w", encoding="utf-8") as file:
        json.dump(trainer_entry["trainer_state"], file)


def _read_ckpt(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A Lightning checkpoint, and the Trainer's entry in it."""
    if not os.path.isfile(path):
        raise CheckpointNotFound(f"resume_from_checkpoint={path!r}: the file does not exist.")
    saved = load_torch_file(path, allowed=numpy_state_types())
    if not isinstance(saved, dict) or TRAINER_KEY not in saved or "state_dict" not in saved:
        raise CheckpointNotFound(
            f"resume_from_checkpoint={path!r} is not a Lightning checkpoint of this Trainer. Load its weights into "
            "the model yourself, and train without resuming."
        )
    return saved, load_torch_file(path, allowed=numpy_state_types(), packed_value=saved[TRAINER_KEY])
