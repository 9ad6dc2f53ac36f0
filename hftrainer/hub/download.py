"""Finds and downloads a checkpoint on the Hub, through the client's cache."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

from hftrainer.checkpointing import layout
from hftrainer.errors import CheckpointNotFound
from hftrainer.hub.failures import hub_reason, is_transient

_REFERENCE = re.compile(r"hub:(?P<id>[^/@]+(?:/[^/@]+)?)(?:/(?P<folder>[^@]+?))?/?(?:@(?P<revision>.+))?")
_STATE_FILE = re.compile(
    rf"(?P<folder>{layout.LAST_CHECKPOINT}|{layout.PREFIX_CHECKPOINT_DIR}-(?P<step>\d+))/{layout.TRAINER_STATE_NAME}"
)


#: The Hub client's errors, by class → the reason in our message.
_REASONS = {
    "RepositoryNotFoundError": "the repository does not exist, or the token has no read access",
    "RevisionNotFoundError": "the revision does not exist",
}


def download_checkpoint(reference: str, args: Any) -> str:
    """Download a checkpoint unless it is cached, and return its local folder.

    Args:
        reference: `hub:owner/name`, optionally followed by `@revision`, for `last-checkpoint` or, without one, the
            `checkpoint-xxx` with the most steps; `hub:owner/name/checkpoint-500` for that checkpoint.
        args: the training arguments, with a token, and the run's own repository and branch. If the reference names
            that repository, this branch is the default revision.

    Raises:
        CheckpointNotFound: if the checkpoint does not exist or cannot be downloaded.
    """
    match = _parse_reference(reference)
    repo_id, folder, token = match["id"], match["folder"], args.hub_token
    revision = match["revision"] or (args.hub_revision if repo_id == args.hub_model_id else None)
    try:
        files, is_offline = _list_files(repo_id, revision, token)
        folder = folder or _newest_checkpoint(files)
        if folder is None:
            raise CheckpointNotFound(
                f"the repository has no checkpoint, neither {layout.LAST_CHECKPOINT} nor checkpoint-xxx; "
                "hub_strategy='checkpoint' and 'all_checkpoints' upload them. If it has only weights, load them with "
                "from_pretrained and start a new run"
            )
        root = snapshot_download(
            repo_id, revision=revision, allow_patterns=[f"{folder}/*"], token=token, local_files_only=is_offline
        )
        if not os.path.isdir(path := os.path.join(root, folder)):
            raise CheckpointNotFound(f"the repository has no folder {folder!r}")
        return path
    # Raise from None: the traceback of the cause may show the token.
    except Exception as error:
        problem = _REASONS.get(type(error).__name__) or hub_reason(error, token)
        raise CheckpointNotFound(f"resume_from_checkpoint={reference!r}: {problem}.") from None


def _parse_reference(reference: str) -> re.Match[str]:
    match = _REFERENCE.fullmatch(reference)
    parts = re.split(r"[/\\]", match["folder"] or "whole") if match else [""]
    # A folder with such parts would be outside of the cache.
    if match is None or not {"", ".", ".."}.isdisjoint(parts):
        raise CheckpointNotFound(
            f"resume_from_checkpoint={reference!r}: pass 'hub:owner/name', 'hub:owner/name/checkpoint-500' or "
            "'hub:owner/name@revision'."
        )
    return match


def _list_files(repo_id: str, revision: str | None, token: str | None) -> tuple[list[str], bool]:
    """The files of a repository, and whether these are only the cached ones.

    The cache is used if the Hub cannot be reached.
    """
    try:
        return HfApi(library_name="hftrainer").list_repo_files(repo_id, revision=revision, token=token), False
    except Exception as error:
        if not (is_transient(error) or isinstance(error, OfflineModeIsEnabled)):
            raise
        try:
            # The pattern matches no file: this finds the cached folder, complete or not.
            root = Path(snapshot_download(repo_id, revision=revision, allow_patterns=["/"], local_files_only=True))
        except LocalEntryNotFoundError:
            raise error from None
    return [path.relative_to(root).as_posix() for path in root.rglob("*")], True


def _newest_checkpoint(files: Iterable[str]) -> str | None:
    """`last-checkpoint`, or else the checkpoint with the most optimizer steps; None without a checkpoint."""
    matches = [match for name in files if (match := _STATE_FILE.fullmatch(name))]
    best = max(matches, key=lambda match: float(match["step"] or "inf"), default=None)
    return best["folder"] if best is not None else None
