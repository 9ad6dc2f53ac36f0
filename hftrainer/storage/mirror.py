"""`Mirror`: uploads a run's output folder in the background, and fetches checkpoints."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from hftrainer.checkpointing import layout
from hftrainer.checkpointing.inspection import inspect_checkpoint
from hftrainer.checkpointing.run_checkpoints import delete_all_but_best
from hftrainer.checkpointing.writing.files import read_manifest
from hftrainer.checkpointing.writing.folder import CheckpointFolder
from hftrainer.errors import CheckpointNotWritten, DamagedCheckpoint, StorageError
from hftrainer.storage.remote import RemoteFolder, digest

logger = logging.getLogger(__name__)

#: A file in the local folder: URL → transferred checkpoint → checksum of its manifest.
_UPLOADS_FILE = "uploaded.json"
#: Files outside of checkpoints to which a resumed run appends.
_LOG_FILES = re.compile(r"^(runs/.+|[^/]+\.(json|jsonl|md))$")


class Mirror:
    """Mirrors a local output folder to a URL. During a run, one thread uploads.

    Args:
        remote: the folder at the URL.
        local: the local folder.
        keep_local: number of local checkpoints to keep besides the best; also the number that may wait for upload.
        stop_on_error: raise `CheckpointNotWritten` if a checkpoint cannot be uploaded, instead of retrying later.
    """

    def __init__(self, remote: RemoteFolder, local: str, keep_local: int, *, stop_on_error: bool) -> None:
        self.remote, self.local = remote, Path(local)
        self._keep_local, self._stop_on_error = keep_local, stop_on_error
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="storage-upload")
        self._jobs: list[Future[None]] = []
        #: Folder of a run → its checkpoints at the URL, oldest first.
        self._remote_checkpoints: dict[str, list[str]] = {}
        #: Checkpoint → why it is not uploaded.
        self._missing_reasons: dict[str, str] = {}
        # Existing local files may be older than those at the URL: upload only files that change from now on.
        self._known_files = {name: self._stamp(name) for name in self._local_files()}

    # ---- Uploads -----------------------------------------------------------------------------------------------

    def begin(self, run_folder: str, *, resumes: bool) -> None:
        """Check that the URL can be written, and list its checkpoints.

        Raises:
            StorageError: if the URL cannot be written or listed.
        """
        self.remote.check_access()
        folder = self._remote_name(run_folder)
        checkpoints = self._remote_checkpoints[folder] = self.remote.checkpoints(folder)
        if checkpoints and not resumes:
            logger.warning(
                "%s already has checkpoints, up to %s, but this run starts from scratch: it replaces those of the same "
                "steps, and save_total_limit deletes the earlier ones first. To continue the earlier run, pass "
                "resume_from_checkpoint=True; otherwise use another storage_url.",
                self.remote.url,
                checkpoints[-1],
            )

    def wait_for_local_space(self) -> None:
        """Wait until fewer than `keep_local` checkpoints await upload, which bounds local space.

        Raises:
            CheckpointNotWritten: with `stop_on_error`, if a checkpoint could not be uploaded.
        """
        while len(self._jobs) >= self._keep_local:
            self._jobs.pop(0).result()
        if self._stop_on_error and self._missing_reasons:
            name, problem = next(iter(self._missing_reasons.items()))
            raise CheckpointNotWritten(f"{self.local / name} is written but not uploaded: {problem}")

    def add_checkpoint(self, checkpoint: str, limit: int | None, keep: Collection[str]) -> None:
        """Upload a checkpoint in the background, then delete older ones locally and at the URL.

        Args:
            checkpoint: its local folder.
            limit: number of checkpoints to keep at the URL; None for all.
            keep: other checkpoints to keep, such as the best; local folders.
        """
        kept_names = {self._remote_name(path) for path in (checkpoint, *keep)}
        self._jobs.append(self._thread.submit(self._upload, self._remote_name(checkpoint), limit, kept_names))

    def wait(self) -> None:
        """Wait until no upload is running."""
        while self._jobs:
            self._jobs.pop(0).result()

    def drain(self) -> bool:
        """Wait for all uploads. If a checkpoint is not uploaded, log an error and return False.

        Raises:
            CheckpointNotWritten: with `stop_on_error`, if a checkpoint could not be uploaded.
        """
        if self._jobs:
            logger.info("Waiting for the uploads to %s.", self.remote.url)
        self.wait()
        for name in list(self._missing_reasons):
            self._try_upload(name)
        self.upload_files()
        if self._missing_reasons:
            missing = f"Not uploaded to {self.remote.url}: {', '.join(self._missing_reasons)}. They are in {self.local}"
            logger.error("%s. A run that resumes on this machine uploads the newest.", missing)
            self.wait_for_local_space()
        return not self._missing_reasons

    def upload_files(self) -> None:
        """Upload the changed files outside of checkpoints: logs, results, the final model."""
        for name in self._local_files():
            try:
                stamp = self._stamp(name)
                if self._known_files.get(name) != stamp:
                    self.remote.upload_file(self.local / name, name)
                    self._known_files[name] = stamp
            # The file was deleted meanwhile.
            except FileNotFoundError:
                continue
            except (StorageError, OSError) as error:
                logger.error("%s is not uploaded: %s", self.local / name, error)
                return

    def delete_other_checkpoints(self, best: str, run_folder: str) -> None:
        """Delete a run's other checkpoints; at the URL only if `best` is complete there."""
        delete_all_but_best(best, run_folder)
        name, folder = self._remote_name(best), self._remote_name(run_folder)
        try:
            if self._folder(name) == folder and self.remote.manifest(name) is not None:
                self._delete_remote([other for other in self.remote.checkpoints(folder) if other != name])
        except StorageError as error:
            logger.warning("Checkpoints other than %s were not deleted: %s", name, error)

    def discard_checkpoints(self, checkpoints: Iterable[str]) -> None:
        """Delete the checkpoints of a failed attempt at training that is restarted."""
        self.wait()
        self._delete_remote([self._remote_name(path) for path in checkpoints])

    def _upload(self, name: str, limit: int | None, kept_names: Collection[str]) -> None:
        """Upload a checkpoint and the missing ones, then delete those beyond the limits."""
        checkpoints = self._remote_checkpoints.setdefault(self._folder(name), [])
        # The step may have been saved again.
        if name in checkpoints:
            checkpoints.remove(name)
        checkpoints.append(name)
        if self._try_upload(name):
            for other in list(self._missing_reasons):
                if not self._try_upload(other):
                    break
            self._rotate(checkpoints, limit, kept_names)
        try:
            self._prune(self._folder(name), kept_names)
        except OSError as error:
            logger.warning("Older checkpoints could not be deleted: %s", error)
        self.upload_files()

    def _try_upload(self, name: str) -> bool:
        """Upload a checkpoint. If that fails, log an error and return False."""
        path = self.local / name
        try:
            self.remote.upload(path, name)
            self._record_upload(name)
        except FileNotFoundError:
            logger.warning("%s was deleted before it was uploaded to %s.", path, self.remote.url)
            self._forget(name)
            return False
        except (StorageError, OSError, DamagedCheckpoint) as error:
            if name not in self._missing_reasons:
                logger.error("%s is written but not uploaded; the upload will be retried: %s", path, error)
            self._missing_reasons[name] = str(error)
            return False
        self._missing_reasons.pop(name, None)
        return True

    def _forget(self, name: str) -> None:
        """Stop tracking a checkpoint that exists neither locally nor at the URL."""
        self._missing_reasons.pop(name, None)
        self._remote_checkpoints[self._folder(name)].remove(name)

    def _rotate(self, checkpoints: list[str], limit: int | None, kept_names: Collection[str]) -> None:
        """Delete the oldest checkpoints of a run beyond `limit` at the URL."""
        if limit is None or limit <= 0:
            return
        uploaded_names = [name for name in checkpoints if name not in self._missing_reasons]
        surplus = len(uploaded_names) - max(int(limit), len([name for name in uploaded_names if name in kept_names]))
        self._delete_remote([name for name in uploaded_names if name not in kept_names][: max(surplus, 0)])

    def _prune(self, folder: str, kept_names: Collection[str]) -> None:
        """Delete the oldest local checkpoints of a run beyond `keep_local`.

        Checkpoints that this mirror does not upload are kept.
        """
        local = [self._remote_name(path) for path in layout.sort_checkpoints(str(self.local / folder))]
        for name in [name for name in local[: -self._keep_local] if name not in kept_names]:
            if name in self._missing_reasons:
                logger.error("%s is deleted, though it was not uploaded: keep_local=%s.", name, self._keep_local)
                self._forget(name)
            elif not self.is_uploaded(name):
                continue
            CheckpointFolder(self.local / name).remove()

    def _delete_remote(self, checkpoints: Iterable[str]) -> None:
        """Delete checkpoints at the URL."""
        for name in checkpoints:
            try:
                self.remote.delete_checkpoint(name)
                remaining = self._remote_checkpoints.get(self._folder(name), [])
                remaining[:] = [other for other in remaining if other != name]
            except StorageError as error:
                logger.warning("An older checkpoint was not deleted: %s", error)

    # ---- Fetching ----------------------------------------------------------------------------------------------

    def fetch_newest(self, run_folder: str) -> str | None:
        """Fetch the newest intact checkpoint, local or at the URL. Returns its name, or None.

        Raises:
            StorageError: if the URL cannot be read.
        """
        local = self._newest_local(run_folder)
        for name in reversed(self.remote.checkpoints(self._remote_name(run_folder))):
            if local is not None and (layout.step_of(name) or 0) <= (layout.step_of(local) or 0):
                break
            try:
                self._download(name)
                # Files to which a run appends, such as logs: local ones are older.
                for path in filter(_LOG_FILES.match, self.remote.files()):
                    self.remote.download_file(path, self.local / path)
                    self._known_files[path] = self._stamp(path)
                return name
            except DamagedCheckpoint as error:
                logger.warning("%s/%s is skipped: %s", self.remote.url, name, error)
        return local

    def fetch(self, name: str) -> None:
        """Download a checkpoint, unless the local copy is the same.

        Raises:
            DamagedCheckpoint, StorageError, OSError: as `RemoteFolder.download`.
        """
        path = self.local / name
        if not path.is_dir() or digest(read_manifest(path)) != digest(self.remote.manifest(name)):
            self._download(name)

    def _download(self, name: str) -> None:
        logger.info("Downloading %s/%s.", self.remote.url, name)
        self.remote.download(name, str(self.local / name))
        self._record_upload(name)

    def holds(self, path: str) -> bool:
        """Whether the URL has a complete copy of a local checkpoint."""
        name = self._remote_name(path)
        return not name.startswith("..") and self.remote.manifest(name) is not None

    def is_uploaded(self, name: str) -> bool:
        """Whether the local checkpoint was uploaded to this URL or downloaded from it."""
        recorded_digest = self._read_uploads().get(self.remote.url, {}).get(name)
        return recorded_digest is not None and recorded_digest == digest(read_manifest(self.local / name))

    def _newest_local(self, run_folder: str) -> str | None:
        """The newest intact local checkpoint that was not deleted or replaced at the URL."""
        for path in layout.checkpoints_newest_first(run_folder) if os.path.isdir(run_folder) else ():
            name = self._remote_name(path)
            if (reason := inspect_checkpoint(path).relative_skip_reason) is not None:
                logger.warning("%s is damaged and is skipped: %s.", path, reason)
            elif self.is_uploaded(name) and not self._is_unchanged(name):
                logger.warning("%s is skipped: it was uploaded, but is no longer at %s.", path, self.remote.url)
            else:
                return name
        return None

    def _is_unchanged(self, name: str) -> bool:
        remote_manifest = self.remote.manifest(name)
        # A missing manifest means that it was deleted; a damaged one, that its second upload was interrupted.
        if remote_manifest is None:
            return self.remote.has_manifest(name)
        return digest(remote_manifest) == digest(read_manifest(self.local / name))

    # ---- Names -------------------------------------------------------------------------------------------------

    def _remote_name(self, path: str) -> str:
        """The name of a local path at the URL; '../…' outside of the output folder."""
        name = Path(os.path.relpath(path, self.local)).as_posix()
        return "" if name == "." else name

    @staticmethod
    def _folder(name: str) -> str:
        """The run's folder in a checkpoint's name: empty, or that of a trial."""
        return name.rpartition("/")[0]

    def _stamp(self, name: str) -> tuple[int, int]:
        status = (self.local / name).stat()
        return status.st_mtime_ns, status.st_size

    def _local_files(self) -> Iterator[str]:
        for root, dirs, files in os.walk(self.local):
            dirs[:] = [name for name in dirs if not name.startswith((f"{layout.PREFIX_CHECKPOINT_DIR}-", "_tmp_"))]
            for name in sorted(files):
                path = os.path.join(root, name)
                if name != _UPLOADS_FILE and not name.startswith("_tmp_") and os.path.isfile(path):
                    yield self._remote_name(path)

    def _read_uploads(self) -> dict[str, dict[str, int]]:
        try:
            uploads: dict[str, dict[str, int]] = json.loads((self.local / _UPLOADS_FILE).read_text(encoding="utf-8"))
        # The file does not exist yet, or a killed process wrote only a part of it.
        except (FileNotFoundError, ValueError):
            return {}
        return uploads

    def _record_upload(self, name: str) -> None:
        uploads = self._read_uploads()
        digests = {path: crc for path, crc in uploads.get(self.remote.url, {}).items() if (self.local / path).is_dir()}
        uploads[self.remote.url] = {**digests, name: digest(read_manifest(self.local / name)) or 0}
        (self.local / _UPLOADS_FILE).write_text(json.dumps(uploads), encoding="utf-8")
