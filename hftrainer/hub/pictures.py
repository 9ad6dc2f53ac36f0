"""What one upload consists of: a folder of links to the files as they are now, which later saves cannot change.

A checkpoint's files are never written again, only deleted; a link keeps them until the upload has ended. So its picture
takes no room, however long it takes to upload it, and `save_total_limit` may delete the checkpoint meanwhile. Of the
rest of the output folder, small files that were written of late, such as logs, are copied.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

from hftrainer.checkpointing import names
from hftrainer.hub import leftovers
from hftrainer.hub.repository import IGNORED

#: Seconds after which a file that nobody has written to is taken for one that stays as it is.
_RECENT = 3600.0
#: Bytes from which on a file is never copied, and endings of those that are not either: of weights, which are written
#: in one go.
_LARGE = 64 << 20
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack")
#: Besides `IGNORED`, what the client leaves out of every commit.
_OF_TOOLS = (".git/*", "*/.git/*", ".cache/huggingface/*", "*/.cache/huggingface/*")
_MODEL = (
    *("config.json", "generation_config.json"),
    *(names.WEIGHTS_NAME, names.SAFE_WEIGHTS_NAME),
    *("adapter_config.json", names.ADAPTER_WEIGHTS_NAME, names.ADAPTER_SAFE_WEIGHTS_NAME),
)


@dataclass(frozen=True)
class Parcel:
    """One commit to come.

    Attributes:
        number: counts up; of two to one place, the higher is the newer.
        checkpoint: the folder that it is made of.
        path_in_repo: where it goes: "" for the model at the top, else the whole checkpoint.
        message: of the commit.
    """

    number: int
    checkpoint: str
    path_in_repo: str
    message: str


def model_files(checkpoint: str) -> list[str]:
    """The files of a checkpoint that are the model, and the arguments."""
    there = Path(checkpoint)
    indexes = [name for name in (names.WEIGHTS_INDEX_NAME, names.SAFE_WEIGHTS_INDEX_NAME) if (there / name).is_file()]
    shards = {shard for name in indexes for shard in json.loads((there / name).read_text())["weight_map"].values()}
    wanted = (*_MODEL, *indexes, *sorted(shards), names.TRAINING_ARGS_NAME)
    return [name for name in wanted if (there / name).is_file()]


@dataclass
class Pictures:
    """Makes the folders that are uploaded.

    Args:
        output_dir: of the run.
        processing_class: saved with the model.
    """

    output_dir: str
    processing_class: Any = None

    def __post_init__(self) -> None:
        leftovers.clear(self.output_dir)
        self._root = leftovers.new_folder(self.output_dir)

    def take(self, parcel: Parcel) -> str:
        """The folder to upload for a parcel.

        Raises:
            OSError: when it could not be made.
        """
        target = self._root / str(parcel.number)
        target.mkdir(parents=True)
        try:
            if parcel.path_in_repo:
                _link_all(parcel.checkpoint, target)
            else:
                self._gather_model(parcel.checkpoint, target)
        except BaseException:
            self.discard(str(target))
            raise
        return str(target)

    def _gather_model(self, checkpoint: str, target: Path) -> None:
        """The model, and everything else in the output folder, such as logs; what may still change is copied."""
        if self.processing_class is not None:  # first: what it writes again would go through a link
            self.processing_class.save_pretrained(target)
        for name in model_files(checkpoint):
            (target / name).unlink(missing_ok=True)
            _link(Path(checkpoint) / name, target / name)
        for name in filter_repo_objects(_files(self.output_dir), ignore_patterns=[*IGNORED, *_OF_TOOLS]):
            path = Path(self.output_dir) / name
            if (target / name).exists() or not path.is_file():  # a pipe, a link to nothing
                continue
            with contextlib.suppress(FileNotFoundError):  # somebody's temporary file
                _link(path.resolve(), target / name, copy=_may_change(path))

    def discard(self, picture: str) -> None:
        """Delete the folder of an upload that has ended."""
        shutil.rmtree(picture, ignore_errors=True)
        self._remove_if_empty()

    def discard_all(self) -> None:
        """Delete all of them, at the end of the process."""
        shutil.rmtree(self._root, ignore_errors=True)
        self._remove_if_empty()

    def _remove_if_empty(self) -> None:
        for folder in (self._root, self._root.parent):
            leftovers.remove_if_empty(folder)


def _may_change(path: Path) -> bool:
    """Whether somebody may still write to a file."""
    found = path.stat()
    lasting = path.suffix in _WEIGHTS or found.st_size >= _LARGE
    return not lasting and time.time() - found.st_mtime < _RECENT


def _files(folder: str) -> list[str]:
    """The files below a folder, by their paths in it."""
    return [
        Path(root, name).relative_to(folder).as_posix() for root, _, found in os.walk(folder) for name in sorted(found)
    ]


def _link_all(source: str, target: Path) -> None:
    for name in _files(source):
        _link(Path(source) / name, target / name)


def _link(source: Path, target: Path, *, copy: bool = False) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        if copy:
            shutil.copyfile(source, target)
        else:
            os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # file systems without links
        shutil.copyfile(source, target)
