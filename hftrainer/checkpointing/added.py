"""Files that a script itself writes into `checkpoint-N`, in an override of `_save_checkpoint` before super()."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from hftrainer.checkpointing import names

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
