"""Writing a checkpoint so that it is whole or absent.

All files are written into a folder beside `checkpoint-N`, then the manifest; all are flushed to the disk; then the
folder is renamed to `checkpoint-N`, by the one process that writes. Overrides of `_save` find the run's folder as the
parent of theirs, and the step at the end of its name. The name also says which process writes there: another run in the
same output folder completes or removes only what a process that is gone has left (`parallel/process_identity.py`).

Files that a script has written into `checkpoint-N` itself, before it called `super()._save_checkpoint`, are added
before the manifest is written (`added.py`).

Where a folder cannot be renamed (some network file systems, object stores), the files are copied one by one:
`trainer_state.json` last, since a folder without it is not a checkpoint, and before it the manifest, which lists the
others.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path

from hftrainer.checkpointing import names, stale_uploads
from hftrainer.checkpointing.manifest import damage, flush_to_disk, why_unusable, write_manifest
from hftrainer.parallel.process_identity import is_left_behind, this_process

logger = logging.getLogger(__name__)

_REPLACED, _REMOVED = "replaced_", "removed_"
#: The leading underscore keeps these folders out of repositories. No hyphen but that before the step: some split there.
_BESIDE = re.compile(
    rf"^_tmp_(?P<owner>.+\.\d+\.\d*)_(?P<what>{_REPLACED}|{_REMOVED}|)(?P<name>{names.PREFIX_CHECKPOINT_DIR}-\d+)$"
)


def staging_folder(folder: str | Path, what: str = "") -> Path:
    """The folder beside `folder` in which this process stages it, or keeps the one that it replaces or removes."""
    final = Path(folder)
    return final.with_name(f"_tmp_{this_process().replace('-', '~').replace(' ', '.')}_{what}{final.name}")


def final_folder(folder: str) -> str:
    """The final folder of a staging folder; any other folder unchanged."""
    path = Path(folder)
    found = _BESIDE.match(path.name)
    return str(path.with_name(found["name"])) if found else folder


def begin(staging: Path) -> None:
    """Create an empty staging folder."""
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)


def publish(folder: str) -> None:
    """Write the manifest, flush, and rename the staging folder to its final name."""
    staging, replaced, final = staging_folder(folder), staging_folder(folder, _REPLACED), Path(folder)
    write_manifest(staging)
    try:
        if final.exists():  # an earlier run in the same output folder wrote this step, perhaps only in part
            shutil.rmtree(replaced, ignore_errors=True)
            _move(final, replaced)
        _move(staging, final)
    except BaseException:
        discard(folder)
        raise
    flush_to_disk(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def discard(folder: str) -> None:
    """Remove what was written for `folder`; restores the checkpoint that it was to replace."""
    staging, replaced, final = staging_folder(folder), staging_folder(folder, _REPLACED), Path(folder)
    whole = why_unusable(replaced) is None and why_unusable(final) is not None
    if whole or (replaced.exists() and not final.exists()):
        shutil.rmtree(final, ignore_errors=True)
        _move(replaced, final)
    shutil.rmtree(staging, ignore_errors=True)
    shutil.rmtree(replaced, ignore_errors=True)


def _move(source: Path, target: Path) -> None:
    """Rename a folder; copy it if renaming fails."""
    try:
        source.rename(target)
    except OSError as error:
        logger.warning("%s cannot be renamed (%s): copying its files one by one.", source, error)
        _copy_in_order(source, target)
        shutil.rmtree(source)


def _copy_in_order(source: Path, target: Path) -> None:
    """Copy a checkpoint so that the target is not a checkpoint until the last file is copied."""
    last = (names.MANIFEST_NAME, names.TRAINER_STATE_NAME)
    files = [path for path in source.rglob("*") if path.is_file() and path.relative_to(source).as_posix() not in last]
    for path in [*files, *(source / name for name in last if (source / name).is_file())]:
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        flush_to_disk(copy)


def remove(folder: str | Path) -> None:
    """Delete a checkpoint so that no partial one is ever visible: rename it first."""
    path = Path(folder)
    if path.is_symlink():
        path.unlink()
        return
    aside = staging_folder(path, _REMOVED)
    shutil.rmtree(aside, ignore_errors=True)
    try:
        path = path.rename(aside)
    except OSError:  # cannot be renamed: first delete the file that makes it a checkpoint
        (path / names.TRAINER_STATE_NAME).unlink(missing_ok=True)
    shutil.rmtree(path)


def clear_stale(output_dir: str) -> None:
    """Complete or remove what processes that are gone left in `output_dir`."""
    if not os.path.isdir(output_dir):
        return
    stale_uploads.remove_stale(output_dir)
    beside = [
        (found["what"], path, found) for path in Path(output_dir).iterdir() if (found := _BESIDE.match(path.name))
    ]
    for what, path, found in sorted(beside):  # what was staged goes before what it was to replace
        try:
            if not is_left_behind(path, " ".join(found["owner"].replace("~", "-").rsplit(".", 2))):
                continue
            if what != _REMOVED:
                _complete(path, path.with_name(found["name"]))
            if path.exists():
                shutil.rmtree(path)
        except OSError as error:
            logger.warning("%s, left by a killed process, could not be removed: %s", path, error)


def _complete(left: Path, final: Path) -> None:
    """Publish a checkpoint whose process was killed between flush and rename, or between two renames."""
    whole = (left / names.MANIFEST_NAME).is_file() and damage(left) is None
    if whole and why_unusable(final) is not None:
        if final.exists():
            shutil.rmtree(final)
        _move(left, final)
        logger.warning("%s was complete, but not yet renamed, when its process was killed: renamed it now.", final)
