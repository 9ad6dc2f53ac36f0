"""Files that a script itself puts into `checkpoint-N`: overrides of `_save_checkpoint` do so before super()."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from hftrainer.checkpointing import names

#: Time of change in ns and size in bytes. Not the time of modification, which copies may keep from their source.
_Stamp = tuple[int, int]
#: Times of files may be so many ns behind the clock.
_COARSE = 2_000_000_000


class AddedFiles:
    """Tells a script's new files in checkpoint folders from those of earlier runs, and from those of the Trainer.

    A process that was killed may have left such a folder without its last files, and its leftovers are no part of the
    checkpoint that this run writes there.
    """

    def __init__(self) -> None:
        self._run_dir: Path | None = None
        self._began: int | None = None
        self._known: dict[Path, dict[Path, _Stamp]] = {}

    def begin_run(self, run_dir: str | None, first_step: int) -> None:
        """Remember what is in the folders that a run may write.

        Args:
            run_dir: where its checkpoints will be; None where only a subclass knows, which is asked when they are
                written: files of an earlier time are then those of earlier runs.
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
        """Copy the script's new files from `final` to `staging`; files that the Trainer has written are kept.

        Does nothing outside a run. Links are copied as links, and not checked by the manifest.
        """
        if self._began is None:
            return
        of_trainer, there = dict(_stamps(staging)), dict(_stamps(final))
        known = self._known.get(final, {})
        if final.parent != self._run_dir and final not in self._known:
            known = {name: stamp for name, stamp in there.items() if stamp[0] < self._began - _COARSE}
        for name in [name for name, stamp in there.items() if known.get(name) != stamp and name not in of_trainer]:
            place = staging / name
            place.parent.mkdir(parents=True, exist_ok=True)
            _link(final / name, place)
        self._known[final] = of_trainer  # written again, a file of the script's is a new one


def _stamps(folder: Path) -> Iterator[tuple[Path, _Stamp]]:
    """The files in a folder, by their names in it; nothing for one that is not there."""
    own = {folder / names.MANIFEST_NAME, folder / f"_{names.MANIFEST_NAME}"}
    for path in folder.rglob("*"):
        if (path.is_file() or path.is_symlink()) and path not in own:
            stat = path.lstat()
            yield path.relative_to(folder), (stat.st_ctime_ns, stat.st_size)


def _link(source: Path, target: Path) -> None:
    """Let `target` be the same file, or a copy where the file system has no links: it may be large."""
    try:
        os.link(source, target, follow_symlinks=False)
    except (OSError, NotImplementedError):
        shutil.copy2(source, target, follow_symlinks=False)
