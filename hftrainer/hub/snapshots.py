"""Creates a snapshot of the files of one upload, which later saves do not change.

The snapshot is a folder of hard links. Files of a checkpoint are never rewritten, only deleted, and a hard link keeps
their contents. So the snapshot of a checkpoint needs no disk space, and `save_total_limit` may delete the checkpoint
while its upload is running. Other files in the output folder, such as logs, are copied if they are small.
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

from hftrainer.checkpointing import layout
from hftrainer.checkpointing.writing import files
from hftrainer.checkpointing.writing.folder import clear_stale, staging_folder
from hftrainer.hub.repository import IGNORE_PATTERNS

#: Files of at least this many bytes are linked, not copied.
_MIN_LINK_BYTES = 64 << 20
#: Suffixes of weights files, which are linked too, since they are written once.
_WEIGHTS_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack")
#: Patterns of files that the client excludes from every commit, besides `IGNORE_PATTERNS`.
_IGNORED_BY_CLIENT = (".git/*", "*/.git/*", ".cache/huggingface/*", "*/.cache/huggingface/*")
_MODEL_FILES = (
    *("config.json", "generation_config.json"),
    *(layout.WEIGHTS_NAME, layout.SAFE_WEIGHTS_NAME),
    *("adapter_config.json", layout.ADAPTER_WEIGHTS_NAME, layout.ADAPTER_SAFE_WEIGHTS_NAME),
)
#: Counts the Trainers of this process that upload.
_trainer_numbers = itertools.count()


def model_files(checkpoint: str) -> list[str]:
    """The names of a checkpoint's model files, and of its training arguments."""
    path = Path(checkpoint)
    indexes = [name for name in (layout.WEIGHTS_INDEX_NAME, layout.SAFE_WEIGHTS_INDEX_NAME) if (path / name).is_file()]
    shards = {shard for name in indexes for shard in json.loads((path / name).read_text())["weight_map"].values()}
    candidates = (*_MODEL_FILES, *indexes, *sorted(shards), layout.TRAINING_ARGS_NAME)
    return [name for name in candidates if (path / name).is_file()]


@dataclass(eq=False)
class PendingCommit:
    """A commit to make.

    Attributes:
        number: increases with each commit.
        checkpoint: the folder to upload.
        path_in_repo: the target folder. "" uploads the model to the top of the repository, any other path the full
            checkpoint.
        message: the commit message.
        snapshot: the folder with its files; None before the folder is created and after it is deleted.
        reason: why the commit is not uploaded, as the end of a sentence.
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
        self._root = staging_folder(Path(self.output_dir) / f"uploads-{next(_trainer_numbers)}")

    def create(self, commit: PendingCommit) -> str:
        """Create the folder to upload for a commit.

        Raises:
            OSError: if storage fails.
        """
        target = self._root / str(commit.number)
        target.mkdir(parents=True)
        try:
            if commit.path_in_repo:
                for name in _list_files(commit.checkpoint):
                    files.link_or_copy((Path(commit.checkpoint) / name).resolve(), target / name)
            else:
                self._add_model(commit.checkpoint, target)
        except BaseException:
            self.delete(str(target))
            raise
        return str(target)

    def _add_model(self, checkpoint: str, target: Path) -> None:
        """Add the model of a checkpoint, and the other files of the output folder."""
        # Save before linking: writing through a hard link would change the checkpoint.
        if self.processing_class is not None:
            self.processing_class.save_pretrained(target)
        for name in model_files(checkpoint):
            (target / name).unlink(missing_ok=True)
            files.link_or_copy((Path(checkpoint) / name).resolve(), target / name)
        ignored = [*IGNORE_PATTERNS, *_IGNORED_BY_CLIENT]
        for name in filter_repo_objects(_list_files(self.output_dir), ignore_patterns=ignored):
            path = Path(self.output_dir) / name
            # The path may be a pipe or a broken symbolic link.
            if (target / name).exists() or not path.is_file():
                continue
            # Another program may have deleted its temporary file.
            with contextlib.suppress(FileNotFoundError):
                is_linked = path.suffix in _WEIGHTS_SUFFIXES or path.stat().st_size >= _MIN_LINK_BYTES
                files.link_or_copy(path.resolve(), target / name, link=is_linked)

    def delete(self, snapshot: str) -> None:
        """Delete one snapshot."""
        shutil.rmtree(snapshot, ignore_errors=True)
        # The folder may hold other snapshots.
        with contextlib.suppress(OSError):
            self._root.rmdir()

    def delete_all(self) -> None:
        """Delete all snapshots of this Trainer."""
        shutil.rmtree(self._root, ignore_errors=True)


def _list_files(folder: str) -> list[str]:
    """The paths of all files below a folder, relative to it."""
    paths = (Path(root, name) for root, _, names in os.walk(folder) for name in sorted(names))
    return [path.relative_to(folder).as_posix() for path in paths]
