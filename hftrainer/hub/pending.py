"""Commits that are not in the repository yet, and the snapshots that are kept for another attempt."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class PendingCommit:
    """A commit to make.

    Attributes:
        number: increases with each commit; of two commits to the same path, the newer has the higher number.
        checkpoint: the folder to upload.
        path_in_repo: the target folder: "" uploads the model to the top of the repository, any other path the whole
            checkpoint.
        message: the commit message.
    """

    number: int
    checkpoint: str
    path_in_repo: str
    message: str


@dataclass(frozen=True)
class PendingUpload:
    """A commit that has not been uploaded.

    Attributes:
        commit: the commit.
        why: the reason, as the end of a sentence.
        snapshot: the folder to upload; None without one.
        queued: whether the upload is queued or running, and still needs the snapshot.
    """

    commit: PendingCommit
    why: str
    snapshot: str | None = None
    queued: bool = False


class PendingUploads:
    """For each path in the repository, the newest commit that has not been uploaded. Thread-safe.

    At most two snapshots are kept for another attempt: one of the newest model and one of the newest checkpoint. More
    would occupy the disk space of checkpoints that `save_total_limit` has deleted.

    Args:
        delete: deletes a snapshot.
    """

    def __init__(self, delete: Callable[[str], None]) -> None:
        self._delete = delete
        self._lock = threading.Lock()
        self._pending: dict[str, PendingUpload] = {}
        self._uploaded: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._pending)

    def oldest_first(self) -> list[PendingUpload]:
        """All pending uploads."""
        with self._lock:
            return sorted(self._pending.values(), key=lambda entry: entry.commit.number)

    def uploaded(self) -> dict[str, str]:
        """Path in the repository → the message of the last commit there."""
        with self._lock:
            return dict(self._uploaded)

    def clear_uploaded(self) -> None:
        """Empty the list of what was uploaded."""
        with self._lock:
            self._uploaded.clear()

    def add(self, entry: PendingUpload) -> None:
        """Add or update a pending upload, unless a newer commit to the same path is pending."""
        with self._lock:
            path = entry.commit.path_in_repo
            known = self._pending.get(path)
            if known is not None and known.commit.number > entry.commit.number:
                self._delete_snapshot(entry)
                return
            self._pending[path] = entry
            if known is not None and known.snapshot != entry.snapshot:
                self._delete_snapshot(known)
            if not entry.queued:
                self._delete_older_snapshots(of_checkpoints=bool(path))

    def mark_uploaded(self, commit: PendingCommit, snapshot: str | None = None) -> None:
        """Record an upload. Older pending commits to the same path are no longer needed."""
        with self._lock:
            self._uploaded[commit.path_in_repo] = commit.message
            if snapshot is not None:
                self._delete(snapshot)
            known = self._pending.get(commit.path_in_repo)
            if known is not None and known.commit.number <= commit.number:
                self._delete_snapshot(self._pending.pop(commit.path_in_repo))

    def remove(self, commit: PendingCommit, snapshot: str) -> None:
        """Remove a commit whose upload was cancelled."""
        with self._lock:
            known = self._pending.get(commit.path_in_repo)
            if known is not None and known.commit is commit:
                del self._pending[commit.path_in_repo]
            self._delete(snapshot)

    def _delete_older_snapshots(self, *, of_checkpoints: bool) -> None:
        """Keep the snapshot of the newest checkpoint, or of the newest model, alone."""
        waiting = [entry for entry in self._pending.values() if entry.snapshot is not None and not entry.queued]
        same_kind = [entry for entry in waiting if bool(entry.commit.path_in_repo) is of_checkpoints]
        for entry in sorted(same_kind, key=lambda entry: entry.commit.number)[:-1]:
            self._delete_snapshot(entry)
            self._pending[entry.commit.path_in_repo] = replace(entry, snapshot=None)

    def _delete_snapshot(self, entry: PendingUpload) -> None:
        if entry.snapshot is not None and not entry.queued:
            self._delete(entry.snapshot)
