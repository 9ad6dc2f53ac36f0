"""Writing a checkpoint so that it is whole or absent.

All files are written into `tmp-checkpoint-N/checkpoint-N`, then the manifest; all are flushed to the disk; then the
folder is renamed to `checkpoint-N`, by the one process that writes. A killed process leaves a `tmp-` folder, which the
next run in the same output folder completes or removes.

Files that a script has written into `checkpoint-N` itself, before it called `super()._save_checkpoint`, are added
before the manifest is written (`added.py`).

Where a folder cannot be renamed (some network file systems, object stores), the files are copied one by one:
`trainer_state.json` last, since a folder without it is not a checkpoint, and before it the manifest, which lists the
others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from pathlib import Path

from hftrainer.checkpointing import names, stale_uploads
from hftrainer.checkpointing.manifest import damage, flush_to_disk, why_unusable, write_manifest

logger = logging.getLogger(__name__)

_STAGING = "tmp-"
_STALE = re.compile(rf"^{_STAGING}{names.PREFIX_CHECKPOINT_DIR}-\d+$")
_REPLACED = "replaced"
_REMOVED = "removed"


def staging_folder(folder: str) -> Path:
    """The folder in which `folder` is staged: with the same name, since overrides of `_save` parse the step from it."""
    final = Path(folder)
    return final.with_name(_STAGING + final.name) / final.name


def final_folder(folder: str) -> str:
    """The final folder of a staging folder; any other folder unchanged."""
    path = Path(folder)
    staged = path.name and path.parent.name == _STAGING + path.name
    return str(path.parent.with_name(path.name)) if staged else folder


def begin(staging: Path) -> None:
    """Create an empty staging folder."""
    shutil.rmtree(staging.parent, ignore_errors=True)
    staging.mkdir(parents=True)


def publish(folder: str) -> None:
    """Write the manifest, flush, and rename the staging folder to its final name."""
    staging, final = staging_folder(folder), Path(folder)
    write_manifest(staging)
    try:
        if final.exists():  # an earlier run in the same output folder wrote this step, perhaps only in part
            _move(final, staging.parent / _REPLACED)
        _move(staging, final)
    except BaseException:
        discard(folder)
        raise
    flush_to_disk(final.parent)
    shutil.rmtree(staging.parent, ignore_errors=True)


def discard(folder: str) -> None:
    """Remove what was written for `folder`; restores the checkpoint that it was to replace."""
    staging, final = staging_folder(folder), Path(folder)
    replaced = staging.parent / _REPLACED
    whole = why_unusable(replaced) is None and why_unusable(final) is not None
    if whole or (replaced.exists() and not final.exists()):
        shutil.rmtree(final, ignore_errors=True)
        _move(replaced, final)
    shutil.rmtree(staging.parent, ignore_errors=True)


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
    aside = path.with_name(_STAGING + path.name)
    try:
        aside.mkdir(exist_ok=True)
        shutil.rmtree(aside / _REMOVED, ignore_errors=True)
        path = path.rename(aside / _REMOVED)
    except OSError:  # cannot be renamed: first delete the file that makes it a checkpoint
        (path / names.TRAINER_STATE_NAME).unlink(missing_ok=True)
    shutil.rmtree(path)
    with contextlib.suppress(OSError):
        aside.rmdir()


def clear_stale(output_dir: str) -> None:
    """Complete or remove what a killed process left in `output_dir`."""
    if not os.path.isdir(output_dir):
        return
    stale_uploads.remove_stale(output_dir)
    for outer in [path for path in Path(output_dir).iterdir() if _STALE.match(path.name) and path.is_dir()]:
        try:
            _complete(outer)
            shutil.rmtree(outer)
        except OSError as error:
            logger.warning("%s, left by a killed process, could not be removed: %s", outer, error)


def _complete(outer: Path) -> None:
    """Publish a checkpoint whose process was killed between flush and rename, or between two renames."""
    final = outer.with_name(outer.name.removeprefix(_STAGING))
    for candidate in (outer / final.name, outer / _REPLACED):
        whole = (candidate / names.MANIFEST_NAME).is_file() and damage(candidate) is None
        if whole and why_unusable(final) is not None:
            if final.exists():
                shutil.rmtree(final)
            _move(candidate, final)
            logger.warning("%s was complete, but not yet renamed, when its process was killed: renamed it now.", final)
