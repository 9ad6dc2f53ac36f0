"""Checkpoints on the Hub: found and downloaded, once, through the client's cache."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

from hftrainer.checkpointing import names
from hftrainer.errors import CheckpointNotFound
from hftrainer.hub.failures import is_passing, reason
from hftrainer.hub.references import LAST_CHECKPOINT

_REFERENCE = re.compile(r"hub:(?P<id>[^/@]+(?:/[^/@]+)?)(?:/(?P<folder>[^@]+?))?/?(?:@(?P<revision>.+))?")
_STATE = re.compile(
    rf"(?P<folder>{LAST_CHECKPOINT}|{names.PREFIX_CHECKPOINT_DIR}-(?P<step>\d+))/{names.TRAINER_STATE_NAME}"
)


def download_checkpoint(
    reference: str, token: str | None = None, *, hub_model_id: str | None = None, hub_revision: str | None = None
) -> str:
    """The folder of a checkpoint on the Hub, downloaded unless the cache has it.

    Args:
        reference: `hub:owner/name`, with `@revision` or not; its `last-checkpoint` is meant, or else the
            `checkpoint-xxx` of the most steps. `hub:owner/name/checkpoint-500` names one.
        token: what gives the right to read it; None for that of `hf auth login`.
        hub_model_id: the repository of the run.
        hub_revision: its branch, which is meant when the reference is to that repository and names no revision.

    Raises:
        CheckpointNotFound: when there is none, or the Hub does not give it.
    """
    match = _match(reference)
    repo_id, folder = match["id"], match["folder"]
    revision = match["revision"] or (hub_revision if repo_id == hub_model_id else None)
    try:
        files, offline = _list_files(repo_id, revision, token)
        folder = folder or _newest(files)
        if folder is None:
            raise CheckpointNotFound(
                f"resume_from_checkpoint={reference!r}: the repository holds no checkpoint, neither {LAST_CHECKPOINT} "
                "nor checkpoint-xxx, which hub_strategy='checkpoint' and 'all_checkpoints' upload. With weights alone, "
                "load them by from_pretrained and begin a new run."
            )
        root = snapshot_download(
            repo_id, revision=revision, allow_patterns=[f"{folder}/*"], token=token, local_files_only=offline
        )
    except CheckpointNotFound:
        raise
    except Exception as error:  # not from it: a traceback with it may show the token
        raise CheckpointNotFound(f"resume_from_checkpoint={reference!r}: {_words(error, token)}.") from None
    found = os.path.join(root, folder)
    if not os.path.isdir(found):
        raise CheckpointNotFound(f"resume_from_checkpoint={reference!r}: the repository has no folder {folder!r}.")
    return found


def _match(reference: str) -> re.Match[str]:
    """The parts of a reference."""
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise CheckpointNotFound(
            f"resume_from_checkpoint={reference!r}: give 'hub:owner/name' or 'hub:owner/name@revision'."
        )
    return match


def _words(error: Exception, token: str | None) -> str:
    if type(error).__name__ == "RepositoryNotFoundError":
        return "there is no such repository, or the token may not read it"
    if type(error).__name__ == "RevisionNotFoundError":
        return "there is no such revision"
    return reason(error, token)


def _list_files(repo_id: str, revision: str | None, token: str | None) -> tuple[list[str], bool]:
    """The files of a repository; those in the cache, and True, when the Hub cannot be reached."""
    try:
        return HfApi(library_name="hftrainer").list_repo_files(repo_id, revision=revision, token=token), False
    except Exception as error:
        if not (is_passing(error) or isinstance(error, OfflineModeIsEnabled)):
            raise
        try:  # where it is, without asking whether all of it is there
            root = Path(snapshot_download(repo_id, revision=revision, allow_patterns=["/"], local_files_only=True))
        except LocalEntryNotFoundError:
            raise error from None
    return [path.relative_to(root).as_posix() for path in root.rglob("*")], True


def _newest(files: Iterable[str]) -> str | None:
    """The checkpoint to go on from: `last-checkpoint`, or that of the most optimizer steps."""
    found = [match for name in files if (match := _STATE.fullmatch(name))]
    best = max(found, key=lambda match: float(match["step"] or "inf"), default=None)
    return best["folder"] if best is not None else None
