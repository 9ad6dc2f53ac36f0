"""Checkpoint folders: finding the newest whole one, sorting them, and rotation."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from hftrainer.checkpointing import names, staging
from hftrainer.checkpointing.manifest import changes, why_unusable

logger = logging.getLogger(__name__)

_CHECKPOINT = re.compile(rf"^{names.PREFIX_CHECKPOINT_DIR}-(\d+)$")


def _step_of(folder: Path) -> int | None:
    match = _CHECKPOINT.match(folder.name)
    return int(match.group(1)) if match and folder.is_dir() else None


def by_step(folder: str) -> Iterator[str]:
    """The `checkpoint-xxx` folders, most optimizer steps first."""
    steps = {step: path for path in Path(folder).iterdir() if (step := _step_of(path)) is not None}
    return (os.path.join(folder, steps[step].name) for step in sorted(steps, reverse=True))


def get_last_checkpoint(folder: str) -> str | None:
    """The whole `checkpoint-xxx` folder with the most optimizer steps in `folder`, or None.

    Damaged folders are skipped, with a warning that names the file. (transformers returns the one with the most
    steps, whole or not.)
    """
    for path in by_step(folder):
        reason = why_unusable(path)
        if reason is None:
            return path
        logger.warning("%s is damaged and is skipped: %s.", path, reason)
    return None


def sort_checkpoints(output_dir: str) -> list[str]:
    """The checkpoint folders that a Trainer has written, oldest first.

    By modification time, so that an earlier run's higher step in the same folder does not count as newer; by step if
    all times lie within a second, as on file systems that do not keep them.
    """
    folders = [
        (path.stat().st_mtime, step, str(path))
        for path in Path(output_dir).iterdir()
        if (step := _step_of(path)) is not None and (path / names.TRAINER_STATE_NAME).is_file()
    ]
    times = [time for time, _, _ in folders]
    if times and max(times) - min(times) < 1.0:
        folders.sort(key=lambda entry: entry[1])
    else:
        folders.sort()
    return [path for _, _, path in folders]


def rotate_checkpoints(
    output_dir: str,
    save_total_limit: int | None,
    best: str | None,
    keep: Sequence[str] = (),
    checkpoints: Sequence[str] | None = None,
) -> None:
    """Delete the oldest checkpoints beyond `save_total_limit`; the newest whole one and the best are always kept.

    Args:
        output_dir: the folder of the checkpoints.
        save_total_limit: maximum number to keep; None for all.
        best: the best one, if any.
        keep: others to keep, such as the one just written.
        checkpoints: existing checkpoints, oldest first; default: all in `output_dir`.
    """
    if save_total_limit is None or save_total_limit <= 0:
        return
    checkpoints = sort_checkpoints(output_dir) if checkpoints is None else checkpoints
    staying = [path for path in (best, *keep) if path is not None]
    kept = {path for path in checkpoints if any(_same(path, other) for other in staying)}
    newest_whole = next((path for path in reversed(checkpoints) if why_unusable(path, contents=False) is None), None)
    kept |= {*checkpoints[-1:], *([newest_whole] if newest_whole is not None else [])}
    surplus = len(checkpoints) - max(save_total_limit, len(kept))
    for checkpoint in [path for path in checkpoints if path not in kept][: max(surplus, 0)]:
        logger.info("Deleting older checkpoint %s: save_total_limit=%s.", checkpoint, save_total_limit)
        staging.remove(checkpoint)


def complete_rotation(last: str, output_dir: str, save_total_limit: int | None, best: str | None) -> None:
    """Complete the rotation of a process that was killed right after its last save; storage errors are logged.

    Args:
        last: the last checkpoint of a finished run; ignored if it is not in `output_dir`.
        output_dir: the folder of the checkpoints.
        save_total_limit: maximum number to keep; None for all.
        best: the best one, if any.
    """
    if not _same(output_dir, os.path.dirname(os.path.abspath(last))):
        return
    try:
        rotate_checkpoints(output_dir, save_total_limit, best, [last])
    except OSError as error:
        logger.warning("Checkpoints beyond save_total_limit=%s were not deleted: %s", save_total_limit, error)


def keep_only(best: str, output_dir: str) -> None:
    """Delete every checkpoint but `best`, as `save_total_limit=1` does at the end of a run; none if it is damaged."""
    if changes(best, only_weights=True).damage(best) is not None:
        return
    for checkpoint in sort_checkpoints(output_dir):
        if not _same(checkpoint, best):
            logger.info("Deleting checkpoint %s: save_total_limit=1, and %s is the best.", checkpoint, best)
            try:
                staging.remove(checkpoint)
            except OSError as error:
                logger.warning("%s could not be deleted: %s", checkpoint, error)


def _same(path: str, other: str) -> bool:
    return os.path.exists(other) and os.path.samefile(path, other)
