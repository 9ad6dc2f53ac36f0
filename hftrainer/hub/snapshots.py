"""Creates the folder for one upload, a snapshot of hard links. Later saves do not change it.

Files of a checkpoint are never rewritten, only deleted, and a hard link keeps their contents. So the snapshot of a
checkpoint takes no disk space, and `save_total_limit` may delete the checkpoint while its upload is running. Other
files in the output folder, such as logs, are copied if they are small.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

from hftrainer.checkpointing import names
from hftrainer.checkpointing.folder import clear_stale, staging_folder
from hftrainer.hub.repository import IGNORED

#: Files of at least this many bytes are linked, not copied.
_LARGE = 64 << 20
#: Files of weights are linked too, since they are written once.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack")
#: Patterns of files that the client leaves out of every commit, besides `IGNORED`.
_IGNORED_BY_CLIENT = (".git/*", "*/.git/*", ".cache/huggingface/*", "*/.cache/huggingface/*")
_MODEL = (
    *("config.json", "generation_config.json"),
    *(names.WEIGHTS_NAME, names.SAFE_WEIGHTS_NAME),
    *("adapter_config.json", names.ADAPTER_WEIGHTS_NAME, names.ADAPTER_SAFE_WEIGHTS_NAME),
)
#: Counts the Trainers of this process that upload.
_trainers = itertools.count()


def model_files(checkpoint: str) -> list[str]:
    """The names of the files in a checkpoint that belong to the model, and of the training arguments."""
    folder = Path(checkpoint)
    indexes = [name for name in (names.WEIGHTS_INDEX_NAME, names.SAFE_WEIGHTS_INDEX_NAME) if (folder / name).is_file()]
    shards = {shard for name in indexes for shard in json.loads((folder / name).read_text())["weight_map"].values()}
    wanted = (*_MODEL, *indexes, *sorted(shards), names.TRAINING_ARGS_NAME)
    return [name for name in wanted if (folder / name).is_file()]


@dataclass(eq=False)
class Commit:
    """A commit to make.

    Attributes:
        number: increases with each commit.
        checkpoint: the folder to upload.
        path_in_repo: the target folder: "" uploads the model to the top of the repository, any other path the whole
            checkpoint.
        message: the commit message.
        snapshot: the folder with its files; None before it is created, and once it is deleted.
        reason: why it is not uploaded, as the end of a sentence.
    """

    number: int
    checkpoint: str
    path_in_repo: str
    message: str
    snapshot: str | None = None
    reason: str = "its upload had not finished"


@dataclass
class UploadSnapshots:
    """Creates and deletes the snapshots of a Trainer.

    Args:
        output_dir: the output folder of the run.
        processing_class: saved with the model.
    """

    output_dir: str
    processing_class: Any = None

    def __post_init__(self) -> None:
        clear_stale(self.output_dir)
        # A process that is killed leaves its folder, which `clear_stale` then removes.
        self._root = staging_folder(Path(self.output_dir) / f"uploads-{next(_trainers)}")

    def create(self, commit: Commit) -> str:
        """Create the folder to upload for a commit.

        Raises:
            OSError: if storage fails.
        """
        target = self._root / str(commit.number)
        target.mkdir(parents=True)
        try:
            if commit.path_in_repo:
                for name in _files(commit.checkpoint):
                    _link(Path(commit.checkpoint) / name, target / name)
            else:
                self._add_model(commit.checkpoint, target)
        except BaseException:
            self.delete(str(target))
            raise
        return str(target)

    def _add_model(self, checkpoint: str, target: Path) -> None:
        """Add the model of a checkpoint, and the other files of the output folder."""
        # Save this before linking: writing through a hard link would change the checkpoint.
        if self.processing_class is not None:
            self.processing_class.save_pretrained(target)
        for name in model_files(checkpoint):
            (target / name).unlink(missing_ok=True)
            _link(Path(checkpoint) / name, target / name)
        for name in filter_repo_objects(_files(self.output_dir), ignore_patterns=[*IGNORED, *_IGNORED_BY_CLIENT]):
            path = Path(self.output_dir) / name
            if (target / name).exists() or not path.is_file():  # not a file: a pipe, or a broken symbolic link
                continue
            with contextlib.suppress(FileNotFoundError):  # a temporary file of another program
                _link(path.resolve(), target / name, copy=path.suffix not in _WEIGHTS and path.stat().st_size < _LARGE)

    def delete(self, snapshot: str) -> None:
        """Delete one snapshot."""
        shutil.rmtree(snapshot, ignore_errors=True)
        with contextlib.suppress(OSError):  # the folder holds other snapshots
            self._root.rmdir()

    def delete_all(self) -> None:
        """Delete all snapshots of this Trainer."""
        shutil.rmtree(self._root, ignore_errors=True)


def _files(folder: str) -> list[str]:
    """The paths of all files below a folder, relative to it."""
    return [
        Path(root, name).relative_to(folder).as_posix() for root, _, found in os.walk(folder) for name in sorted(found)
    ]


def _link(source: Path, target: Path, *, copy: bool = False) -> None:
    """Hard-link a file, or copy it where the file system has no hard links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if not copy:
        with contextlib.suppress(OSError):  # a file that is missing is reported by the copy
            os.link(source, target)
            return
    shutil.copyfile(source, target)
