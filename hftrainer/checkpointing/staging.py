"""Writing a checkpoint so that it is whole or absent.

All files are written into a folder beside `checkpoint-N`, then the manifest; all are flushed to the disk; then the
folder is renamed to `checkpoint-N`, by the one process that writes. Overrides of `_save` find the run's folder as the
parent of theirs, and the step at the end of its name. The name also says which process writes there: another run in the
same output folder completes or removes only what a process that is gone has left (`parallel/environment.py`).

Files that a script has written into `checkpoint-N` itself, before it called `super()._save_checkpoint`, are added
before the manifest is written (`AddedFiles`).

Where a folder cannot be renamed (some network file systems, object stores), the files are copied one by one:
`trainer_state.json` last, since a folder without it is not a checkpoint, and before it the manifest, which lists the
others.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from hftrainer.checkpointing import names
from hftrainer.checkpointing.manifest import damage, flush_to_disk, why_unusable, write_manifest
from hftrainer.parallel.environment import is_gone, is_left_behind, this_process

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
    remove_stale_uploads(output_dir)
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


# A folder of upload snapshots is stale when its process has ended without deleting it. `hub/snapshots.py` fills these
# folders; the cleanup is here, without the Hub client, because a run without uploads deletes stale folders too.

#: Folder of upload snapshots, one in it for each Trainer of each process. The leading underscore keeps it out of the
#: repository.
_UPLOADS = "_hub_uploads"
_count = itertools.count()


def new_uploads_folder(output_dir: str) -> Path:
    """A path that no other Trainer and no other process uses. The folder is not created."""
    return Path(output_dir) / _UPLOADS / "-".join([*this_process().split(" "), str(next(_count))])


def remove_stale_uploads(output_dir: str) -> None:
    """Delete the folders of processes that have ended."""
    outer = Path(output_dir) / _UPLOADS
    if not outer.is_dir():
        return
    for folder in outer.iterdir():
        hostname, *process = folder.name.rsplit("-", 3)
        if len(process) == 3 and is_gone(" ".join([hostname, *process[:2]])):
            shutil.rmtree(folder, ignore_errors=True)
    remove_if_empty(outer)


def remove_if_empty(folder: Path) -> None:
    """Delete a folder if it exists and is empty."""
    try:
        folder.rmdir()
    except OSError:
        return


#: Change time (ctime) in ns and size in bytes. Not mtime, which copies may keep from their source.
_Stamp = tuple[int, int]
#: File times may lag behind the clock by this many ns.
_COARSE = 2_000_000_000


class AddedFiles:
    """Distinguishes a script's new files in checkpoint folders from those of earlier runs and of the Trainer.

    A killed process may have left an incomplete folder; its files are not part of the checkpoint that this run writes
    there.
    """

    def __init__(self) -> None:
        self._run_dir: Path | None = None
        self._began: int | None = None
        self._known: dict[Path, dict[Path, _Stamp]] = {}

    def begin_run(self, run_dir: str | None, first_step: int) -> None:
        """Record the files in the folders that a run may write.

        Args:
            run_dir: the folder of its checkpoints; None when a subclass decides it only when saving: files older than
                the run then count as those of earlier runs.
            first_step: optimizer steps done when it begins.
        """
        self._run_dir, self._began = None if run_dir is None else Path(run_dir), time.time_ns()
        self._known = {}
        if self._run_dir is None:
            return
        prefix = f"{names.PREFIX_CHECKPOINT_DIR}-"
        found = [path for path in self._run_dir.glob(f"{prefix}*") if path.name.removeprefix(prefix).isdigit()]
        reachable = [path for path in found if int(path.name.removeprefix(prefix)) >= first_step and path.is_dir()]
        self._known = {path: dict(_stamps(path)) for path in reachable}

    def take(self, final: Path, staging: Path) -> None:
        """Copy the script's new files from `final` to `staging`, without overwriting the Trainer's files.

        Does nothing outside a run. Links are copied as links; the manifest does not check them.
        """
        if self._began is None:
            return
        of_trainer, found = dict(_stamps(staging)), dict(_stamps(final))
        known = self._known.get(final, {})
        if final.parent != self._run_dir and final not in self._known:
            known = {name: stamp for name, stamp in found.items() if stamp[0] < self._began - _COARSE}
        for name in [name for name, stamp in found.items() if known.get(name) != stamp and name not in of_trainer]:
            target = staging / name
            target.parent.mkdir(parents=True, exist_ok=True)
            _link(final / name, target)
        self._known[final] = of_trainer  # a script's file that is written again counts as new


def _stamps(folder: Path) -> Iterator[tuple[Path, _Stamp]]:
    """The files in a folder, by relative path; nothing for a missing folder."""
    own = {folder / names.MANIFEST_NAME, folder / f"_{names.MANIFEST_NAME}"}
    for path in folder.rglob("*"):
        if (path.is_file() or path.is_symlink()) and path not in own:
            stat = path.lstat()
            yield path.relative_to(folder), (stat.st_ctime_ns, stat.st_size)


def _link(source: Path, target: Path) -> None:
    """Hard-link `target` to `source`, which may be large; copy it where the file system has no links."""
    try:
        os.link(source, target, follow_symlinks=False)
    except (OSError, NotImplementedError):
        shutil.copy2(source, target, follow_symlinks=False)
