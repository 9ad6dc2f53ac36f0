"""Publishes, discards and removes `checkpoint-N` folders, each complete or absent, and finds a script's files in them.

One process writes all files into a staging folder beside `checkpoint-N`, and the manifest after them. It flushes all
to the disk, and then renames the folder to `checkpoint-N`. Overrides of `_save` find the run's folder as the parent of
the staging folder, and the step at the end of its name. The name also identifies the process: another run in the same
output folder completes or removes only folders of processes that have ended (`parallel/environment.py`).

Where a folder cannot be renamed (some network file systems, object stores), we copy the files one by one. The manifest
and then `trainer_state.json` are last, since a folder without `trainer_state.json` is not a checkpoint.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from hftrainer.checkpointing import layout
from hftrainer.checkpointing.inspection import inspect_checkpoint
from hftrainer.checkpointing.writing.files import Entry, flush_to_disk, link_or_copy, write_manifest
from hftrainer.parallel.environment import has_writer_ended, process_identifier

logger = logging.getLogger(__name__)

_REPLACED, _REMOVED = "replaced_", "removed_"
#: Temporary folders of one process; `name` is the final name. The leading underscore keeps them out of repositories.
#: The only hyphen is the one before the step, since some scripts split names there.
_TEMPORARY_FOLDER = re.compile(
    rf"^_tmp_(?P<owner>.+\.\d+\.\d*)_(?P<prefix>{_REPLACED}|{_REMOVED}|)"
    rf"(?P<name>({layout.PREFIX_CHECKPOINT_DIR}|uploads)-\d+)$"
)
#: Change time (ctime) in ns, and size in bytes. Copies may keep the mtime of their source.
_Stamp = tuple[int, int]
#: File times may lag behind the clock by this many ns.
_CLOCK_LAG_NS = 2_000_000_000


class CheckpointFolder:
    """Moves a checkpoint's folder, which need not exist: begun, published, discarded or removed as a whole.

    Args:
        path: the `checkpoint-N` folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.staging = staging_folder(path)
        self._replaced_folder = staging_folder(path, _REPLACED)

    def begin(self) -> None:
        """Create an empty staging folder."""
        shutil.rmtree(self.staging, ignore_errors=True)
        self.staging.mkdir(parents=True)

    def publish(self, known_entries: Mapping[str, Entry] | None = None) -> None:
        """Write the manifest, flush, and rename the staging folder to its final name.

        `known_entries` is that of `write_manifest`.
        """
        write_manifest(self.staging, known_entries)
        # An earlier run in the same output folder wrote this step, perhaps only in part.
        if self.path.exists():
            shutil.rmtree(self._replaced_folder, ignore_errors=True)
            _move_folder(self.path, self._replaced_folder)
        _move_folder(self.staging, self.path)
        flush_to_disk(self.path.parent)
        shutil.rmtree(self._replaced_folder, ignore_errors=True)

    def discard(self) -> None:
        """Remove the partial checkpoint, and restore the one that it would have replaced."""
        replaced = self._replaced_folder
        should_restore = inspect_checkpoint(self.path).skip_reason and not inspect_checkpoint(replaced).skip_reason
        if should_restore or (replaced.exists() and not self.path.exists()):
            shutil.rmtree(self.path, ignore_errors=True)
            _move_folder(replaced, self.path)
        shutil.rmtree(self.staging, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)

    def remove(self) -> None:
        """Delete the checkpoint. Rename it first, so that a partial one is never visible."""
        if self.path.is_symlink():
            self.path.unlink()
            return
        path = staging_folder(self.path, _REMOVED)
        shutil.rmtree(path, ignore_errors=True)
        try:
            self.path.rename(path)
        # The folder cannot be renamed: first delete the file that makes it a checkpoint.
        except OSError:
            path = self.path
            (path / layout.TRAINER_STATE_NAME).unlink(missing_ok=True)
        shutil.rmtree(path)

    def complete(self, source: Path) -> None:
        """Publish the folder of a process that was killed before the last rename."""
        is_intact = (source / layout.MANIFEST_NAME).is_file() and inspect_checkpoint(source).skip_reason is None
        if is_intact and inspect_checkpoint(self.path).skip_reason is not None:
            if self.path.exists():
                shutil.rmtree(self.path)
            _move_folder(source, self.path)
            logger.warning(
                "%s was complete but not yet renamed when its process was killed: it is now renamed.", self.path
            )


class ScriptFiles:
    """Finds files that the script itself writes into checkpoint folders, and adds them.

    Overrides of `_save_checkpoint` write such files before they call `super()`. The files in an incomplete folder of
    a killed process do not belong to the checkpoint that this run writes there.
    """

    def __init__(self) -> None:
        self._oldest: int | None = None
        self._known_stamps: dict[Path, _Stamp] = {}

    def record_existing_files(self, run_folder: str | None) -> None:
        """Record the existing files in the folders that a run may write.

        Args:
            run_folder: the folder of its checkpoints; None if a subclass chooses it only when saving. Then files older
                than the run count as files of earlier runs.
        """
        self._oldest = time.time_ns() - _CLOCK_LAG_NS if run_folder is None else 0
        folders = [] if run_folder is None else Path(run_folder).glob(f"{layout.PREFIX_CHECKPOINT_DIR}-*")
        self._known_stamps = {folder / name: stamp for folder in folders for name, stamp in _stamps(folder).items()}

    def copy_to(self, checkpoint: CheckpointFolder) -> None:
        """Copy the script's new files from the final folder to the staging folder.

        Files that the Trainer has written there take precedence. Outside of a run, nothing is copied. Links are copied
        as links; the manifest does not check them.
        """
        if self._oldest is None:
            return
        trainer_files = _stamps(checkpoint.staging)
        for name, stamp in _stamps(checkpoint.path).items():
            is_new = stamp != self._known_stamps.get(checkpoint.path / name) and stamp[0] >= self._oldest
            if is_new and name not in trainer_files:
                link_or_copy(checkpoint.path / name, checkpoint.staging / name)
        # If the step is saved again, the files that the Trainer wrote this time do not count as the script's.
        self._known_stamps |= {checkpoint.path / name: stamp for name, stamp in trainer_files.items()}


def _stamps(folder: Path) -> dict[Path, _Stamp]:
    """Relative path → stamp of each file in a folder; empty for a missing folder."""
    manifests = {folder / layout.MANIFEST_NAME, folder / f"_{layout.MANIFEST_NAME}"}
    paths = [path for path in folder.rglob("*") if (path.is_file() or path.is_symlink()) and path not in manifests]
    return {path.relative_to(folder): (path.lstat().st_ctime_ns, path.lstat().st_size) for path in paths}


def _move_folder(source: Path, target: Path) -> None:
    """Rename a folder; copy it if renaming fails."""
    try:
        source.rename(target)
    except OSError as error:
        logger.warning("%s cannot be renamed (%s): copying its files one by one.", source, error)
        _copy_in_order(source, target)
        shutil.rmtree(source)


def _copy_in_order(source: Path, target: Path) -> None:
    """Copy a checkpoint so that the target becomes a checkpoint only with its last file."""
    last = (layout.MANIFEST_NAME, layout.TRAINER_STATE_NAME)
    files = [path for path in source.rglob("*") if path.is_file() and path.relative_to(source).as_posix() not in last]
    for path in [*files, *(source / name for name in last if (source / name).is_file())]:
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        flush_to_disk(copy)


def staging_folder(final_path: str | Path, prefix: str = "") -> Path:
    """The temporary folder of this process beside `final_path`.

    Args:
        final_path: the folder once it is published.
        prefix: '' for staging; or the prefix for the folder that is replaced or removed.
    """
    owner = process_identifier().replace("-", "~").replace(" ", ".")
    return Path(final_path).with_name(f"_tmp_{owner}_{prefix}{Path(final_path).name}")


def final_folder(folder: str) -> str:
    """The final folder of a staging folder; any other folder is returned unchanged."""
    path = Path(folder)
    match = _TEMPORARY_FOLDER.match(path.name)
    return str(path.with_name(match["name"])) if match else folder


def clear_stale(run_folder: str) -> None:
    """Complete the checkpoints of ended processes in `run_folder`, and remove their other folders."""
    if not os.path.isdir(run_folder):
        return
    paths = Path(run_folder).iterdir()
    folders = [(match["prefix"], path, match) for path in paths if (match := _TEMPORARY_FOLDER.match(path.name))]
    # A staging folder comes before the folder that it would have replaced.
    for prefix, path, match in sorted(folders):
        try:
            if not has_writer_ended(path, " ".join(match["owner"].replace("~", "-").rsplit(".", 2))):
                continue
            if prefix != _REMOVED:
                CheckpointFolder(path.with_name(match["name"])).complete(path)
            if path.exists():
                shutil.rmtree(path)
        except OSError as error:
            logger.warning("%s of a killed process could not be removed: %s", path, error)
