"""Checkpoint folders: their names and those of their files, as in `transformers.Trainer`, and which a run has."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

PREFIX_CHECKPOINT_DIR = "checkpoint"
_CHECKPOINT = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")
#: The folder in a repository for the newest checkpoint, with `hub_strategy='checkpoint'`.
LAST_CHECKPOINT = "last-checkpoint"
TRAINER_STATE_NAME = "trainer_state.json"
TRAINING_ARGS_NAME = "training_args.bin"
OPTIMIZER_NAME = "optimizer.pt"
SCHEDULER_NAME = "scheduler.pt"
SCALER_NAME = "scaler.pt"
#: Written under FSDP: state of a sharded model → the folder with a shard from each process.
SHARD_FOLDERS = {"model": "pytorch_model_fsdp_0", "optimizer": "optimizer_0"}
#: Written with `checkpoint_format='dcp'`: the folder with the shards of both states.
DCP_FOLDER = "dcp"
#: In each of these folders: the file that lists the shards, and the suffix of a shard.
LIST_OF_SHARDS, SHARD_SUFFIX = ".metadata", ".distcp"
#: Written under FSDP: state of a sharded model → the file with the full state.
FULL_STATE_FILES = {"model": "pytorch_model_fsdp.bin", "optimizer": "optimizer.bin"}
#: Not in transformers: the states of Lightning's callbacks, if any.
LIGHTNING_CALLBACKS_NAME = "lightning_callbacks.pt"
#: Prefix of the user's model in the state dict of `TrainerModule`, and so in Lightning's checkpoints.
MODEL_PREFIX = "model."
#: Not in transformers: sizes and checksums of all other files.
MANIFEST_NAME = "hftrainer_manifest.json"

SAFE_WEIGHTS_NAME = "model.safetensors"
SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"
WEIGHTS_NAME = "pytorch_model.bin"
WEIGHTS_INDEX_NAME = "pytorch_model.bin.index.json"
ADAPTER_SAFE_WEIGHTS_NAME = "adapter_model.safetensors"
ADAPTER_WEIGHTS_NAME = "adapter_model.bin"


def progress_name(process_index: int, world_size: int) -> str:
    """The file with the progress of one process. transformers has no such file."""
    return "progress.pt" if world_size <= 1 else f"progress_{process_index}.pt"


def rng_name(process_index: int, world_size: int) -> str:
    """The file with the random states of one process."""
    return "rng_state.pth" if world_size <= 1 else f"rng_state_{process_index}.pth"


def step_of(path: str) -> int | None:
    """The optimizer step in the name of a `checkpoint-xxx` folder; None for other names."""
    match = _CHECKPOINT.fullmatch(path.rstrip("/").rpartition("/")[2])
    return int(match[1]) if match is not None else None


def _step_of_folder(folder: Path) -> int | None:
    step = step_of(folder.name)
    return step if step is not None and folder.is_dir() else None


def checkpoints_newest_first(run_folder: str) -> Iterator[str]:
    """The `checkpoint-xxx` folders, the one with the most optimizer steps first."""
    steps = {step: path for path in Path(run_folder).iterdir() if (step := _step_of_folder(path)) is not None}
    return (os.path.join(run_folder, steps[step].name) for step in sorted(steps, reverse=True))


def save_time(checkpoint: str | Path) -> float:
    """When the state of a checkpoint was written, in seconds since 1970."""
    return os.path.getmtime(os.path.join(checkpoint, TRAINER_STATE_NAME))


def sort_checkpoints(run_folder: str) -> list[str]:
    """The checkpoint folders that a Trainer has written, oldest first.

    They are sorted by the time of their state, so that an earlier run's higher step in the same folder does not count
    as newer, nor an older checkpoint to which somebody has added a file. If all times lie within a second, as on file
    systems that do not keep them, they are sorted by step.
    """
    folders = []
    for path in Path(run_folder).iterdir():
        step = _step_of_folder(path)
        if step is not None and (path / TRAINER_STATE_NAME).is_file():
            folders.append((save_time(path), step, str(path)))
    times = [time for time, _, _ in folders] or [0.0]
    if max(times) - min(times) < 1.0:
        folders = [(0.0, step, path) for _, step, path in folders]
    return [path for _, _, path in sorted(folders)]


def not_a_checkpoint_reason(folder: str | Path) -> str | None:
    """Why the folder is not a checkpoint; None if it has a trainer state."""
    folder = Path(folder)
    if (folder / TRAINER_STATE_NAME).is_file():
        return None
    if folder.is_dir():
        return f"it lacks {TRAINER_STATE_NAME}"
    return "it is not a folder" if folder.exists() else "the folder does not exist"


def describe_nearest(missing: str, *folders: str) -> str:
    """At most five checkpoints in place of a missing one, nearest step first; '' if there are none.

    Args:
        missing: the path of the missing checkpoint, in whose parent they are searched first.
        folders: other folders to search.
    """
    step = step_of(missing)
    missing = os.path.normpath(missing)
    for folder in (os.path.dirname(missing) or os.getcwd(), *folders):
        if os.path.isdir(folder) and (found := sort_checkpoints(folder)):
            steps = {os.path.basename(path): step_of(path) or 0 for path in reversed(found)}
            # Without a step, the newest come first.
            nearest = sorted(steps, key=lambda name: 0 if step is None else abs(steps[name] - step))
            return f"nearest in {folder}: {', '.join(nearest[:5])}"
    return ""


def has_state_files(files: dict[str, str], state_name: str, folder: str) -> bool:
    """Whether a checkpoint holds a state in a layout.

    Args:
        files: the layout, `SHARD_FOLDERS` or `FULL_STATE_FILES`.
        state_name: 'model' or 'optimizer'.
        folder: the checkpoint.
    """
    return os.path.exists(os.path.join(folder, files[state_name]))


#: State → the files of the other formats. If one of them exists, the folder `DCP_FOLDER` belongs to the script.
_OTHER_FORMATS = {
    "model": (
        *(SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME),
        *(ADAPTER_SAFE_WEIGHTS_NAME, ADAPTER_WEIGHTS_NAME, FULL_STATE_FILES["model"], SHARD_FOLDERS["model"]),
    ),
    "optimizer": (OPTIMIZER_NAME, FULL_STATE_FILES["optimizer"], SHARD_FOLDERS["optimizer"]),
}


def find_shard_folder(state_name: str, folder: str) -> str | None:
    """The folder that may hold the shards of the 'model' or the 'optimizer', or None."""
    has_others = any(os.path.exists(os.path.join(folder, name)) for name in _OTHER_FORMATS[state_name])
    if not has_others and os.path.isfile(os.path.join(folder, DCP_FOLDER, LIST_OF_SHARDS)):
        return os.path.join(folder, DCP_FOLDER)
    shards = os.path.join(folder, SHARD_FOLDERS[state_name])
    return shards if os.path.exists(shards) else None
