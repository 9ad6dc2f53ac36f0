"""`Mirror`: uploads a run's output folder in the background, and fetches checkpoints from it."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from hftrainer.checkpointing import names
from hftrainer.checkpointing.files import read_manifest
from hftrainer.checkpointing.folder import (
    CheckpointFolder,
    checkpoints_newest_first,
    delete_all_but_best,
    sort_checkpoints,
)
from hftrainer.errors import CheckpointNotWritten, DamagedCheckpoint, StorageError
from hftrainer.storage.remote import RemoteFolder, digest

logger = logging.getLogger(__name__)

#: In the local folder: URL → checkpoint that was uploaded or downloaded → a checksum of its manifest.
_UPLOADED = "uploaded.json"
#: Files outside of checkpoints to which a run that resumes on another machine appends.
_CONTINUED = re.compile(r"^(runs/.+|[^/]+\.(json|jsonl|md))$")
_Stamp = tuple[int, int]


class Mirror:
    """Keeps a local output folder at a URL. One thread uploads, while a run lasts.

    Args:
        remote: the folder at the URL.
        local: the local one.
        keep_local: local checkpoints to keep besides the best; also, how many may wait for their upload.
        stop_on_error: raise `CheckpointNotWritten` if a checkpoint cannot be uploaded, instead of trying again later.
    """

    def __init__(self, remote: RemoteFolder, local: str, keep_local: int, *, stop_on_error: bool) -> None:
        self.remote, self.local = remote, Path(local)
        self._keep_local, self._stop_on_error = keep_local, stop_on_error
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="storage-upload")
        self._jobs: list[Future[None]] = []
        #: Folder of a run → its checkpoints at the URL, oldest first.
        self._there: dict[str, list[str]] = {}
        #: Checkpoint → why it is not uploaded.
        self._missing: dict[str, str] = {}
        # Existing local files may be older than those at the URL: upload only files that change from now on.
        self._known_files = {name: self._stamp(name) for name in self._local_files()}

    # ---- Uploads -----------------------------------------------------------------------------------------------

    def begin(self, run_dir: str, *, resumes: bool) -> None:
        """Check that the URL can be written, and find the checkpoints there.

        Raises:
            StorageError: if it cannot.
        """
        self.remote.check_access()
        folder = self._name(run_dir)
        there = self._there[folder] = self.remote.checkpoints(folder)
        if there and not resumes:
            logger.warning(
                "%s already has checkpoints, up to %s, and this run starts from scratch: it replaces those of the same "
                "steps, and save_total_limit deletes them first. To go on with the earlier run, pass "
                "resume_from_checkpoint=True; otherwise use another storage_url.",
                self.remote.url,
                there[-1],
            )

    def wait_for_room(self) -> None:
        """Wait until fewer than `keep_local` checkpoints are being uploaded, so that local space is bounded.

        Raises:
            CheckpointNotWritten: with `stop_on_error`, when one could not be uploaded.
        """
        while len(self._jobs) >= self._keep_local:
            self._jobs.pop(0).result()
        if self._stop_on_error and self._missing:
            name, why = next(iter(self._missing.items()))
            raise CheckpointNotWritten(f"{self.local / name} is written, but not uploaded: {why}")

    def add(self, checkpoint: str, limit: int | None, keep: Collection[str]) -> None:
        """Upload a checkpoint in the background, then delete older ones, here and at the URL.

        Args:
            checkpoint: its local folder.
            limit: checkpoints to keep at the URL; None for all.
            keep: local folders that are kept, such as the best.
        """
        kept = {self._name(path) for path in (checkpoint, *keep)}
        self._jobs.append(self._thread.submit(self._upload, self._name(checkpoint), limit, kept))

    def wait(self) -> None:
        """Wait until no upload is running."""
        while self._jobs:
            self._jobs.pop(0).result()

    def finish(self) -> bool:
        """Wait until all is uploaded; False, and an error in the log, if a checkpoint is not.

        Raises:
            CheckpointNotWritten: with `stop_on_error`, when a checkpoint could not be uploaded.
        """
        if self._jobs:
            logger.info("Waiting for the uploads to %s.", self.remote.url)
        self.wait()
        for name in list(self._missing):
            self._try_upload(name)
        self.upload_files()
        if self._missing:
            left = (
                f"Not uploaded to {self.remote.url}: {', '.join(self._missing)}. They are in {self.local}; a run that "
            )
            logger.error("%sresumes on this machine uploads the newest.", left)
            self.wait_for_room()
        return not self._missing

    def upload_files(self) -> None:
        """Upload the files outside of checkpoints that have changed: logs, results, the final model."""
        for name in self._local_files():
            try:
                stamp = self._stamp(name)
                if self._known_files.get(name) != stamp:
                    self.remote.upload_file(self.local / name, name)
                    self._known_files[name] = stamp
            except FileNotFoundError:  # deleted meanwhile
                continue
            except (StorageError, OSError) as error:
                logger.error("%s is not uploaded: %s", self.local / name, error)
                return

    def delete_all_but(self, best: str, run_dir: str) -> None:
        """Delete all other checkpoints of a run; at the URL if this one is whole there."""
        delete_all_but_best(best, run_dir)
        name, folder = self._name(best), self._name(run_dir)
        try:
            if self._folder(name) == folder and self.remote.manifest(name) is not None:
                self._remove([other for other in self.remote.checkpoints(folder) if other != name])
        except StorageError as error:
            logger.warning("Checkpoints other than %s were not deleted: %s", name, error)

    def discard(self, checkpoints: Iterable[str]) -> None:
        """Delete the checkpoints of a failed attempt at training that is restarted."""
        self.wait()
        self._remove([self._name(path) for path in checkpoints])

    def _upload(self, name: str, limit: int | None, kept: Collection[str]) -> None:
        """Upload a checkpoint and the missing ones, then delete those beyond the limits."""
        there = self._there.setdefault(self._folder(name), [])
        # The step may have been saved again.
        if name in there:
            there.remove(name)
        there.append(name)
        if self._try_upload(name):
            for other in list(self._missing):
                if not self._try_upload(other):
                    break
            self._rotate(there, limit, kept)
        try:
            self._prune(self._folder(name), kept)
        except OSError as error:
            logger.warning("Older checkpoints could not be deleted: %s", error)
        self.upload_files()

    def _try_upload(self, name: str) -> bool:
        """Upload a checkpoint; False, and an error in the log, if that fails."""
        path = self.local / name
        try:
            self.remote.upload(path, name)
            self._note_uploaded(name)
        except FileNotFoundError:
            logger.warning("%s was deleted before it was uploaded to %s.", path, self.remote.url)
            self._forget(name)
            return False
        except (StorageError, OSError, DamagedCheckpoint) as error:
            if name not in self._missing:
                logger.error("%s is written, but not uploaded, which is tried again later: %s", path, error)
            self._missing[name] = str(error)
            return False
        self._missing.pop(name, None)
        return True

    def _forget(self, name: str) -> None:
        """Neither wait for a checkpoint nor count it: it is neither here nor at the URL."""
        self._missing.pop(name, None)
        self._there[self._folder(name)].remove(name)

    def _rotate(self, there: list[str], limit: int | None, kept: Collection[str]) -> None:
        """Delete the oldest checkpoints of a run beyond `limit`, at the URL."""
        if limit is None or limit <= 0:
            return
        uploaded = [name for name in there if name not in self._missing]
        surplus = len(uploaded) - max(limit, len([name for name in uploaded if name in kept]))
        self._remove([name for name in uploaded if name not in kept][: max(surplus, 0)])

    def _prune(self, folder: str, kept: Collection[str]) -> None:
        """Delete the oldest local checkpoints of a run beyond `keep_local`, of those that were meant to be uploaded."""
        local = [self._name(path) for path in sort_checkpoints(str(self.local / folder))]
        for name in [name for name in local[: -self._keep_local] if name not in kept]:
            if name in self._missing:
                logger.error("%s is deleted, though it was not uploaded: keep_local=%s.", name, self._keep_local)
                self._forget(name)
            elif not self.is_uploaded(name):
                continue
            CheckpointFolder(self.local / name).remove()

    def _remove(self, checkpoints: Iterable[str]) -> None:
        """Delete checkpoints at the URL."""
        for name in checkpoints:
            try:
                self.remote.remove(name)
                there = self._there.get(self._folder(name), [])
                there[:] = [other for other in there if other != name]
            except StorageError as error:
                logger.warning("An older checkpoint was not deleted: %s", error)

    # ---- Fetching ----------------------------------------------------------------------------------------------

    def fetch_newest(self, run_dir: str) -> str | None:
        """The name of the newest whole checkpoint, here or at the URL, after fetching it; None if there is none.

        Raises:
            StorageError: if the URL cannot be read.
        """
        local = self._newest_local(run_dir)
        for name in reversed(self.remote.checkpoints(self._name(run_dir))):
            if local is not None and (names.step_of(name) or 0) <= (names.step_of(local) or 0):
                break
            try:
                self._download(name)
                self._fetch_files()
                return name
            except DamagedCheckpoint as error:
                logger.warning("%s/%s is skipped: %s", self.remote.url, name, error)
        return local

    def fetch(self, name: str) -> None:
        """Download a checkpoint, unless it is here.

        Raises:
            DamagedCheckpoint, StorageError, OSError: as `RemoteFolder.download`.
        """
        path = self.local / name
        if not path.is_dir() or digest(read_manifest(path)) != digest(self.remote.manifest(name)):
            self._download(name)

    def _download(self, name: str) -> None:
        logger.info("Downloading %s/%s.", self.remote.url, name)
        self.remote.download(name, str(self.local / name))
        self._note_uploaded(name)

    def _fetch_files(self) -> None:
        """Download the files to which a run appends, such as logs; those here are older."""
        for name in filter(_CONTINUED.match, self.remote.files()):
            self.remote.download_file(name, self.local / name)
            self._known_files[name] = self._stamp(name)

    def holds(self, path: str) -> bool:
        """Whether the checkpoint of a local path is whole at the URL."""
        name = self._name(path)
        return not name.startswith("..") and self.remote.manifest(name) is not None

    def is_uploaded(self, name: str) -> bool:
        """Whether the local checkpoint was uploaded to this URL, or downloaded."""
        noted = self._uploaded().get(self.remote.url, {}).get(name)
        return noted is not None and noted == digest(read_manifest(self.local / name))

    def _newest_local(self, run_dir: str) -> str | None:
        """The newest whole local checkpoint that nobody has deleted or replaced at the URL."""
        for path in checkpoints_newest_first(run_dir) if os.path.isdir(run_dir) else ():
            name = self._name(path)
            if (reason := CheckpointFolder(path).inspect().skip_reason) is not None:
                logger.warning("%s is damaged and is skipped: %s.", path, reason)
            elif self.is_uploaded(name) and not self._is_unchanged(name):
                logger.warning("%s is skipped: it was uploaded, and is no longer at %s.", path, self.remote.url)
            else:
                return name
        return None

    def _is_unchanged(self, name: str) -> bool:
        there = self.remote.manifest(name)
        # A missing manifest means that it was deleted; a damaged one, that its second upload was interrupted.
        if there is None:
            return self.remote.has_manifest(name)
        return digest(there) == digest(read_manifest(self.local / name))

    # ---- Names -------------------------------------------------------------------------------------------------

    def _name(self, path: str) -> str:
        """The name of a local path at the URL; it begins with '..' if the path is not in the output folder."""
        name = Path(os.path.relpath(path, self.local)).as_posix()
        return "" if name == "." else name

    @staticmethod
    def _folder(name: str) -> str:
        """The folder of a run of a checkpoint: empty, or that of a trial."""
        return name.rpartition("/")[0]

    def _stamp(self, name: str) -> _Stamp:
        found = (self.local / name).stat()
        return found.st_mtime_ns, found.st_size

    def _local_files(self) -> Iterator[str]:
        for root, folders, files in os.walk(self.local):
            folders[:] = [each for each in folders if not each.startswith((f"{names.PREFIX_CHECKPOINT_DIR}-", "_tmp_"))]
            for name in sorted(files):
                path = os.path.join(root, name)
                if name != _UPLOADED and not name.startswith("_tmp_") and os.path.isfile(path):
                    yield self._name(path)

    def _uploaded(self) -> dict[str, dict[str, int]]:
        try:
            uploaded: dict[str, dict[str, int]] = json.loads((self.local / _UPLOADED).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):  # none yet, or a killed process left a part of it
            return {}
        return uploaded

    def _note_uploaded(self, name: str) -> None:
        of_all = self._uploaded()
        noted = {
            known: sum_ for known, sum_ in of_all.get(self.remote.url, {}).items() if (self.local / known).is_dir()
        }
        of_all[self.remote.url] = {**noted, name: digest(read_manifest(self.local / name)) or 0}
        (self.local / _UPLOADED).write_text(json.dumps(of_all), encoding="utf-8")
