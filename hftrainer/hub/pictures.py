"""What one upload consists of: a folder of links to the files as they are now, which later saves cannot change.

A checkpoint's files are never written again, only deleted; a link keeps them until the upload has ended. So a picture
takes no room, however long it takes to upload it, and `save_total_limit` may delete the checkpoint meanwhile.
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
from hftrainer.hub.repository import IGNORED

#: In the output folder; the underscore keeps it out of the repository.
_FOLDER = "_hub_uploads"
#: Seconds after which a file that nobody has written to is taken for one that stays as it is.
_RECENT = 3600.0
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
        shutil.rmtree(self._root, ignore_errors=True)  # what a killed process has left

    @property
    def _root(self) -> Path:
        return Path(self.output_dir) / _FOLDER

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
        for name in model_files(checkpoint):
            _link(Path(checkpoint) / name, target / name)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(target)
        for name in filter_repo_objects(_files(self.output_dir), ignore_patterns=list(IGNORED)):
            path = Path(self.output_dir) / name
            if (target / name).exists():
                continue
            with contextlib.suppress(FileNotFoundError):  # somebody's temporary file
                recent = time.time() - path.stat().st_mtime < _RECENT
                _link(path, target / name, copy=recent and names.PREFIX_CHECKPOINT_DIR not in name)

    def discard(self, picture: str) -> None:
        """Delete the folder of an upload that has ended."""
        shutil.rmtree(picture, ignore_errors=True)
        with contextlib.suppress(OSError):  # others are in it
            self._root.rmdir()


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
