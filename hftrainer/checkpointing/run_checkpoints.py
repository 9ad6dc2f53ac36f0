"""The checkpoints of a run: finds the newest, and deletes the oldest."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from hftrainer.checkpointing.inspection import inspect_checkpoint
from hftrainer.checkpointing.layout import checkpoints_newest_first, sort_checkpoints
from hftrainer.checkpointing.writing.folder import CheckpointFolder

logger = logging.getLogger(__name__)


def get_last_checkpoint(folder: str) -> str | None:
    """The intact `checkpoint-xxx` folder with the most optimizer steps in `folder`, or None.

    Damaged folders are skipped, with a warning that names the file. transformers returns the folder with the most
    steps even if it is damaged.
    """
    return find_intact(folder)[0]


def find_intact(run_folder: str) -> tuple[str | None, list[str]]:
    """The result of `get_last_checkpoint`, and the name and damage of each folder that it skipped."""
    damages: list[str] = []
    for path in checkpoints_newest_first(run_folder) if os.path.isdir(run_folder) else ():
        reason = inspect_checkpoint(path).relative_skip_reason
        if reason is None:
            return path, damages
        logger.warning("%s is damaged and is skipped: %s.", path, reason)
        damages.append(f"{os.path.basename(path)} is damaged: {reason}")
    return None, damages


def rotate_checkpoints(
    run_folder: str,
    save_total_limit: int | None,
    best: str | None,
    keep: Sequence[str] = (),
    checkpoints: Sequence[str] | None = None,
) -> None:
    """Delete the oldest checkpoints beyond `save_total_limit`.

    The newest intact one and the best one are always kept.

    Args:
        run_folder: the folder of the run, with its checkpoints.
        save_total_limit: maximum number to keep; None for all.
        best: the best one, if any.
        keep: others to keep, such as the one just written.
        checkpoints: existing checkpoints, oldest first; None for all in `run_folder`.
    """
    if save_total_limit is None or save_total_limit <= 0:
        return
    checkpoints = sort_checkpoints(run_folder) if checkpoints is None else checkpoints
    protected = [path for path in (best, *keep) if path is not None]
    kept_paths = {path for path in checkpoints if any(_is_same(path, other) for other in protected)}
    kept_paths.update(checkpoints[-1:])
    for path in reversed(checkpoints):
        if inspect_checkpoint(path, contents=False).skip_reason is None:
            kept_paths.add(path)
            break
    surplus = len(checkpoints) - max(int(save_total_limit), len(kept_paths))
    for checkpoint in [path for path in checkpoints if path not in kept_paths][: max(surplus, 0)]:
        logger.info("Deleting older checkpoint %s: save_total_limit=%s.", checkpoint, save_total_limit)
        CheckpointFolder(checkpoint).remove()


def delete_all_but_best(best: str, run_folder: str) -> None:
    """Delete every checkpoint except `best`, for `save_total_limit=1` at the end of a run.

    If `best` is damaged, nothing is deleted.
    """
    if inspect_checkpoint(best, only_weights=True).refusal_reason is not None:
        return
    for checkpoint in sort_checkpoints(run_folder):
        if not _is_same(checkpoint, best):
            logger.info("Deleting checkpoint %s: save_total_limit=1 keeps the best, %s.", checkpoint, best)
            try:
                CheckpointFolder(checkpoint).remove()
            except OSError as error:
                logger.warning("%s could not be deleted: %s", checkpoint, error)


def _is_same(path: str, other: str) -> bool:
    return os.path.exists(other) and os.path.samefile(path, other)
