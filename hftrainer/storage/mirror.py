"""`Mirror`: uploads a run's output folder in the background, and fetches checkpoints from it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from hftrainer.checkpointing import names
from hftrainer.checkpointing.files import read_manifest
from hftrainer.checkpointing.folder import (
    CheckpointFolder,
    delete_all_but_best,
    get_last_checkpoint,
    sort_checkpoints,
)
from hftrainer.errors import CheckpointNotWritten, DamagedCheckpoint, StorageError
from hftrainer.storage.remote import RemoteFolder, digest

logger = logging.getLogger(__name__)

#: In the local folder: the checkpoints that were uploaded, with a checksum of each manifest. One of them that is no
#: longer at the URL, or another one there, was removed or replaced by somebody.
_UPLOADED = "uploaded.json"
#: Not fetched to resume: nobody reads them.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")


class Mirror:
    """Keeps a local output folder at a URL. Uploads are done by one thread, which outlives no training.

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
        self._there: dict[str, list[str]] = {}  # folder of a run → its checkpoints at the URL, oldest first
        self._missing: dict[str, str] = {}  # checkpoint → why it is not uploaded
        self._uploaded_files: dict[str, tuple[int, int]] = {}  # other files → change time and size

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

    def add(self, checkpoint: str, limit: int | None, keep: Collection[str]) -> None:
        """Upload a checkpoint in the background, then delete older ones, here and at the URL.

        Args:
            checkpoint: its local folder.
            limit: checkpoints to keep at the URL; None for all.
            keep: local folders that are kept, such as the best.

        Raises:
            CheckpointNotWritten: with `stop_on_error`, when an earlier one could not be uploaded.
        """
        while len(self._jobs) >= self._keep_local:  # so that local space is bounded
            self._jobs.pop(0).result()
        self._stop_if_asked()
        kept = {self._name(path) for path in (checkpoint, *keep)}
        self._jobs.append(self._thread.submit(self._upload, self._name(checkpoint), limit, kept))

    def finish(self) -> None:
        """Wait until all is uploaded; log what is not.

        Raises:
            CheckpointNotWritten: with `stop_on_error`, when a checkpoint could not be uploaded.
        """
        if self._jobs:
            logger.info("Waiting for the uploads to %s.", self.remote.url)
        while self._jobs:
            self._jobs.pop(0).result()
        for name in list(self._missing):
            self._try_upload(name)
        self.upload_files()
        if self._missing:
            left = (
                f"Not uploaded to {self.remote.url}: {', '.join(self._missing)}. They are in {self.local}; a run that "
            )
            logger.error("%sresumes on this machine uploads the newest.", left)
            self._stop_if_asked()

    def upload_files(self) -> None:
        """Upload the files outside of checkpoints that are new or have changed: logs, results, the final model."""
        for name in self._local_files():
            path = self.local / name
            try:
                stamp = (path.stat().st_mtime_ns, path.stat().st_size)
                if self._uploaded_files.get(name) != stamp:
                    self.remote.upload_file(path, name)
                    self._uploaded_files[name] = stamp
            except FileNotFoundError:  # deleted meanwhile
                continue
            except (StorageError, OSError) as error:
                logger.error("%s is not uploaded: %s", path, error)
                return

    def delete_all_but(self, best: str) -> None:
        """Delete all other checkpoints of a run; at the URL if this one is whole there."""
        name = self._name(best)
        delete_all_but_best(best, str(self.local / self._folder(name)))
        if self.holds(name):
            for other in self.remote.checkpoints(self._folder(name)):
                if other != name:
                    self._remove(other)

    def _stop_if_asked(self) -> None:
        if self._stop_on_error and self._missing:
            name, why = next(iter(self._missing.items()))
            raise CheckpointNotWritten(f"{self.local / name} is written, but not uploaded: {why}")

    def _upload(self, name: str, limit: int | None, kept: Collection[str]) -> None:
        """Upload a checkpoint and what is missing, and delete what is beyond the limits."""
        there = self._there.setdefault(self._folder(name), [])
        if name in there:  # the step was saved again
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
        except FileNotFoundError:  # deleted meanwhile, as by a script
            logger.warning("%s was deleted before it was uploaded to %s.", path, self.remote.url)
        except (StorageError, OSError) as error:
            if name not in self._missing:
                logger.error("%s is written, but not uploaded, which is tried again later: %s", path, error)
            self._missing[name] = str(error)
            return False
        self._missing.pop(name, None)
        return True

    def _rotate(self, there: list[str], limit: int | None, kept: Collection[str]) -> None:
        """Delete the oldest checkpoints of a run beyond `limit`, at the URL."""
        if limit is None or limit <= 0:
            return
        uploaded = [name for name in there if name not in self._missing]
        surplus = len(uploaded) - max(limit, len([name for name in uploaded if name in kept]))
        for name in [name for name in uploaded if name not in kept][: max(surplus, 0)]:
            if self._remove(name):
                there.remove(name)

    def _prune(self, folder: str, kept: Collection[str]) -> None:
        """Delete the oldest local checkpoints of a run beyond `keep_local`."""
        local = [self._name(path) for path in sort_checkpoints(str(self.local / folder))]
        for name in [name for name in local[: -self._keep_local] if name not in kept]:
            if self._missing.pop(name, None) is not None:
                logger.error("%s is deleted, though it was not uploaded: keep_local=%s.", name, self._keep_local)
            CheckpointFolder(self.local / name).remove()

    def _remove(self, name: str) -> bool:
        try:
            self.remote.remove(name)
        except StorageError as error:
            logger.warning("An older checkpoint was not deleted: %s", error)
            return False
        return True

    # ---- Fetching ----------------------------------------------------------------------------------------------

    def fetch_newest(self, run_dir: str) -> str | None:
        """The name of the newest whole checkpoint, here or at the URL, after fetching it; None if there is none.

        Raises:
            StorageError: if the URL cannot be read.
        """
        folder = self._name(run_dir)
        local = self._newest_local(run_dir)
        for name in reversed(self.remote.checkpoints(folder)):
            if local is not None and _step(name) <= _step(local):
                break
            try:
                self._download(name)
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

    def fetch_files(self) -> None:
        """Download the files outside of checkpoints that are not here, such as logs, to which a run appends."""
        for name in self.remote.files():
            path = self.local / name
            if not (path.exists() or name.endswith(_WEIGHTS)):
                self.remote.download_file(name, path)

    def holds(self, name: str) -> bool:
        """Whether the checkpoint is whole at the URL."""
        return self.remote.manifest(name) is not None

    def is_uploaded(self, name: str) -> bool:
        """Whether the local checkpoint was uploaded, or downloaded."""
        return self._uploaded().get(name) == digest(read_manifest(self.local / name))

    def _newest_local(self, run_dir: str) -> str | None:
        """The newest whole local checkpoint, after deleting those that somebody has deleted or replaced at the URL."""
        if not os.path.isdir(run_dir):
            return None
        for path in sort_checkpoints(run_dir):
            name = self._name(path)
            own = digest(read_manifest(Path(path)))
            if own is not None and self._uploaded().get(name) == own != digest(self.remote.manifest(name)):
                logger.warning("%s is deleted: it was uploaded, and is no longer at %s.", path, self.remote.url)
                CheckpointFolder(path).remove()
        newest = get_last_checkpoint(run_dir)
        return None if newest is None else self._name(newest)

    # ---- Names -------------------------------------------------------------------------------------------------

    def _name(self, path: str) -> str:
        """The name of a local path at the URL."""
        name = Path(os.path.relpath(path, self.local)).as_posix()
        return "" if name == "." else name

    @staticmethod
    def _folder(name: str) -> str:
        """The folder of a run of a checkpoint: empty, or that of a trial."""
        return name.rpartition("/")[0]

    def _local_files(self) -> Iterator[str]:
        for root, folders, files in os.walk(self.local):
            folders[:] = [each for each in folders if not each.startswith((f"{names.PREFIX_CHECKPOINT_DIR}-", "_tmp_"))]
            for name in sorted(files):
                path = os.path.join(root, name)
                if name != _UPLOADED and not name.startswith("_tmp_") and os.path.isfile(path):
                    yield self._name(path)

    def _uploaded(self) -> dict[str, int]:
        try:
            uploaded: dict[str, int] = json.loads((self.local / _UPLOADED).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):  # none yet, or a killed process left a part of it
            return {}
        return uploaded

    def _note_uploaded(self, name: str) -> None:
        noted = {known: sum_ for known, sum_ in self._uploaded().items() if (self.local / known).is_dir()}
        noted[name] = digest(read_manifest(self.local / name)) or 0
        (self.local / _UPLOADED).write_text(json.dumps(noted), encoding="utf-8")


def _step(name: str) -> int:
    return int(name.rpartition("-")[2])
