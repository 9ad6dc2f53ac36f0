"""Checkpoint folders: finding the newest whole one, ordering them, and deleting those that are no longer wanted."""

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
    """The `checkpoint-xxx` folders, the one of the most optimizer steps first."""
    steps = {step: path for path in Path(folder).iterdir() if (step := _step_of(path)) is not None}
    return (os.path.join(folder, steps[step].name) for step in sorted(steps, reverse=True))


def get_last_checkpoint(folder: str) -> str | None:
    """The whole `checkpoint-xxx` folder of the most optimizer steps in `folder`, or None.

    Damaged ones are passed over, with a warning that names the file. (transformers returns the one of the most steps,
    whole or not.)
    """
    for path in by_step(folder):
        reason = why_unusable(path)
        if reason is None:
            return path
        logger.warning("%s is damaged and passed over: %s.", path, reason)
    return None


def sort_checkpoints(output_dir: str) -> list[str]:
    """The checkpoint folders that a Trainer has written, oldest first.

    By modification time, so that a fresh run in a used folder does not take an old run's higher step for newer; by
    step where all times lie within a second, as on file systems that do not keep them.
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
    """Delete the oldest checkpoints beyond `save_total_limit`; the newest whole one and the best always stay.

    Args:
        output_dir: where they are.
        save_total_limit: how many may stay; None for all.
        best: the best one, if there is one.
        keep: others that stay, as the one just written.
        checkpoints: which there are, oldest first; default all in `output_dir`.
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
        logger.info("Deleting the older checkpoint %s: save_total_limit=%s.", checkpoint, save_total_limit)
        staging.remove(checkpoint)


def complete_rotation(last: str, output_dir: str, save_total_limit: int | None, best: str | None) -> None:
    """Do what a process that was killed right after its last save has not done; if the storage fails, it is said.

    Args:
        last: the checkpoint of a run that is complete; one that is elsewhere changes nothing.
        output_dir: where the others are.
        save_total_limit: how many may stay; None for all.
        best: the best one, if there is one.
    """
    if not _same(output_dir, os.path.dirname(os.path.abspath(last))):
        return
    try:
        rotate_checkpoints(output_dir, save_total_limit, best, [last])
    except OSError as error:
        logger.warning("Checkpoints beyond save_total_limit=%s stay: %s", save_total_limit, error)


def keep_only(best: str, output_dir: str) -> None:
    """Delete every checkpoint but `best`, what `save_total_limit=1` leaves when a run ends; none if it is not whole."""
    if changes(best, only_weights=True).damage(best) is not None:
        return
    for checkpoint in sort_checkpoints(output_dir):
        if not _same(checkpoint, best):
            logger.info("Deleting the checkpoint %s: save_total_limit=1, and %s is the best.", checkpoint, best)
            try:
                staging.remove(checkpoint)
            except OSError as error:
                logger.warning("%s could not be deleted: %s", checkpoint, error)


def _same(path: str, other: str) -> bool:
    return os.path.exists(other) and os.path.samefile(path, other)
