"""A folder at a URL, accessed with fsspec.

A checkpoint in it is complete if and only if its manifest exists. The manifest is uploaded last and deleted first, and
lists all other files. Listings are used only to find the checkpoints, since a listing may be incomplete.
"""

from __future__ import annotations

import errno
import functools
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import fsspec
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.registry import known_implementations
from huggingface_hub import constants

from hftrainer.checkpointing import layout
from hftrainer.checkpointing.writing.files import Entry, crc32_of_file, crc32_of_list, parse_manifest
from hftrainer.checkpointing.writing.folder import CheckpointFolder
from hftrainer.errors import DamagedCheckpoint, InvalidArgument, MissingPackage, StorageError
from hftrainer.hub.failures import call_with_retries, remove_tokens

T = TypeVar("T")

#: Seconds before each retry of a failed request.
WAITS = (1.0, 2.0, 4.0, 8.0, 16.0)
#: Errors that the same request would raise again.
_PERMANENT = (PermissionError, FileNotFoundError, IsADirectoryError, NotADirectoryError, ValueError, TypeError)
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
#: Names of environment variables whose values must not appear in messages.
_SECRET = re.compile(r"(SECRET|TOKEN|PASSWORD|_KEY|KEY_ID|SAS|CONNECTION_STRING)$")
#: Scheme of a URL → where its package looks for credentials.
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, of AWS_PROFILE in ~/.aws, or of the machine's role; storage "
    "other than Amazon's needs AWS_ENDPOINT_URL too",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS (a file), of `gcloud auth application-default login`, or of the machine",
    "abfs": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or of AZURE_STORAGE_CONNECTION_STRING",
    "hf": "HF_TOKEN, or of `hf auth login`",
}


class RemoteFolder:
    """A run's output folder at a URL. Names of checkpoints and files are relative to it.

    Args:
        url: such as `s3://bucket/run`; fsspec finds the credentials in the environment.

    Raises:
        InvalidArgument: if the package for the scheme refuses the URL.
        StorageError: for a URL of the Hub with HF_HUB_OFFLINE=1.
        MissingPackage: if the package for the scheme is not installed.
    """

    def __init__(self, url: str) -> None:
        scheme = url.partition("://")[0]
        if scheme == "hf" and constants.HF_HUB_OFFLINE:
            advice = "unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE, or use a local folder"
            raise StorageError(f"{url} cannot be reached, since HF_HUB_OFFLINE=1 is set: {advice}.")
        try:
            filesystem, path = fsspec.url_to_fs(url, **({"auto_mkdir": True} if scheme in ("file", "local") else {}))
        except ImportError:
            package = known_implementations[scheme]["class"].partition(".")[0]
            raise MissingPackage(f"{url} needs a package that is not installed: pip install {package}") from None
        except ValueError as error:
            raise InvalidArgument(f"{url!r}: {error}.") from None
        self.url = url
        self._filesystem = DirFileSystem(path, filesystem)

    def check_access(self) -> None:
        """Write and delete a small file.

        Raises:
            StorageError: if either fails.
        """
        probe = f"_tmp_{os.getpid()}"
        self._retry(lambda: self._filesystem.pipe_file(probe, b"hftrainer"), f"{self.url} cannot be written")
        self._retry(lambda: self._filesystem.rm_file(probe), f"Files at {self.url} cannot be deleted")

    # ---- Checkpoints -------------------------------------------------------------------------------------------

    def checkpoints(self, folder: str = "") -> list[str]:
        """The names of the checkpoints in a folder, complete or not, sorted by step."""
        found = self._list(self._filesystem.ls, folder, detail=False)
        checkpoints = [(step, name) for name in found if (step := layout.step_of(name)) is not None]
        return [name for _, name in sorted(checkpoints)]

    def manifest(self, checkpoint: str) -> dict[str, Entry] | None:
        """The entries of a checkpoint's manifest; None if the checkpoint is incomplete."""
        path = f"{checkpoint}/{layout.MANIFEST_NAME}"
        try:
            content = self._call_on_existing_file(
                lambda: self._filesystem.cat_file(path), f"{self.url}/{path} cannot be read"
            )
            return parse_manifest(content, f"{self.url}/{path}")
        # The upload was interrupted.
        except (FileNotFoundError, DamagedCheckpoint):
            return None

    def has_manifest(self, checkpoint: str) -> bool:
        """Whether a checkpoint has a manifest, readable or not."""
        path = f"{checkpoint}/{layout.MANIFEST_NAME}"
        return self._retry(lambda: self._filesystem.exists(path), f"{self.url}/{path} cannot be read")

    def upload(self, local: Path, checkpoint: str) -> None:
        """Upload a checkpoint, its manifest last: the manifest marks it as complete.

        Raises:
            StorageError: if the upload fails after retries.
        """
        manifest = f"{checkpoint}/{layout.MANIFEST_NAME}"
        entries = parse_manifest((local / layout.MANIFEST_NAME).read_bytes(), str(local))
        self.delete_files([manifest])
        self.delete_files(
            set(self._list(self._filesystem.find, checkpoint)) - {f"{checkpoint}/{name}" for name in entries}
        )
        for name in entries:
            self.upload_file(local / name, f"{checkpoint}/{name}")
        self.upload_file(local / layout.MANIFEST_NAME, manifest)

    def download(self, checkpoint: str, local: str) -> None:
        """Download a checkpoint into a local folder atomically.

        Raises:
            StorageError: if the download fails after retries.
            DamagedCheckpoint: if the checkpoint is incomplete, or a file differs from its entry in the manifest.
            OSError: if the local disk fails.
        """
        entries = self.manifest(checkpoint)
        if entries is None:
            raise DamagedCheckpoint(f"{self.url}/{checkpoint} has no manifest: its upload was interrupted.")
        folder = CheckpointFolder(local)
        folder.begin()
        try:
            for name, entry in entries.items():
                path, url = folder.staging / name, f"{self.url}/{checkpoint}/{name}"
                try:
                    self.download_file(f"{checkpoint}/{name}", path)
                except FileNotFoundError:
                    raise DamagedCheckpoint(f"{url} is missing.") from None
                if (path.stat().st_size, crc32_of_file(path)) != (entry.size, entry.crc32):
                    raise DamagedCheckpoint(f"The contents of {url} have changed since it was written.")
            folder.publish({str(folder.staging / name): entry for name, entry in entries.items()})
        except BaseException:
            folder.discard()
            raise

    def delete_checkpoint(self, checkpoint: str) -> None:
        """Delete a checkpoint, its manifest first."""
        self.delete_files([f"{checkpoint}/{layout.MANIFEST_NAME}"])
        self.delete_files(self._list(self._filesystem.find, checkpoint))
        failure = f"{self.url}/{checkpoint} cannot be deleted"
        # In object stores, folders are only parts of names.
        if self._retry(lambda: self._filesystem.isdir(checkpoint), failure):
            self._retry(lambda: self._filesystem.rm(checkpoint, recursive=True), failure)

    # ---- Files -------------------------------------------------------------------------------------------------

    def files(self) -> list[str]:
        """The names of all files outside of checkpoints."""
        file_names = self._list(self._filesystem.find, "")
        return [name for name in file_names if all(layout.step_of(part) is None for part in name.split("/")[:-1])]

    def upload_file(self, local: Path, name: str) -> None:
        """Upload one file. Raises FileNotFoundError if it does not exist locally."""
        local.stat()
        self._retry(lambda: self._filesystem.put_file(str(local), name), f"{self.url}/{name} cannot be written")

    def download_file(self, name: str, local: Path) -> None:
        """Download one file atomically. Raises FileNotFoundError if it does not exist."""
        local.parent.mkdir(parents=True, exist_ok=True)
        temporary = local.with_name(f"_tmp_{local.name}")
        self._call_on_existing_file(
            lambda: self._filesystem.get_file(name, str(temporary)), f"{self.url}/{name} cannot be read"
        )
        temporary.replace(local)

    def delete_files(self, files: Iterable[str]) -> None:
        """Delete the files that exist."""
        for name in files:
            failure = f"{self.url}/{name} cannot be deleted"
            try:
                if self._retry(functools.partial(self._filesystem.exists, name), failure):
                    self._call_on_existing_file(functools.partial(self._filesystem.rm_file, name), failure)
            except FileNotFoundError:
                continue

    def _list(self, method: Callable[..., list[str]], folder: str, **options: bool) -> list[str]:
        """The names that a method of the filesystem finds in a folder; empty if the folder does not exist."""
        self._filesystem.invalidate_cache()
        try:
            return self._call_on_existing_file(lambda: method(folder, **options), f"{self.url} cannot be listed")
        except FileNotFoundError:
            return []

    def _retry(self, operation: Callable[[], T], failure: str) -> T:
        """Call `operation` with retries. A missing file is an error like any other.

        Raises:
            OSError: if the local disk is full.
            StorageError: for all other errors, without their causes, which may show credentials.
        """
        try:
            return self._call_on_existing_file(operation, failure)
        except FileNotFoundError as error:
            raise StorageError(f"{failure}: {storage_reason(error)}.") from None

    def _call_on_existing_file(self, operation: Callable[[], T], failure: str) -> T:
        """Call `operation` as `_retry` does, but raise FileNotFoundError for a missing file."""
        try:
            return call_with_retries(operation, WAITS, _is_transient)
        except FileNotFoundError:
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno in _FULL:
                raise
            raise StorageError(f"{failure}: {storage_reason(error)}.{self._hint(error)}") from None

    def _hint(self, error: Exception) -> str:
        """Where the credentials are expected, if they are missing or refused."""
        source = _CREDENTIALS.get(self.url.partition("://")[0])
        is_refused = isinstance(error, PermissionError) or "Credential" in type(error).__name__
        return f" The credentials are those of {source}." if source and is_refused else ""


def digest(entries: dict[str, Entry] | None) -> int | None:
    """A checksum of a manifest, for comparing two copies of a checkpoint."""
    return None if entries is None else crc32_of_list({name: vars(entry) for name, entry in entries.items()})


def storage_reason(error: BaseException) -> str:
    """What went wrong, without credentials, as the end of a sentence."""
    text = remove_tokens(" ".join(str(error).split())).rstrip(".")
    for name, value in os.environ.items():
        if len(value) > 7 and _SECRET.search(name):
            text = text.replace(value, f"<{name}>")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _is_transient(error: BaseException) -> bool:
    """Whether a retry may succeed. It cannot if access is refused or the disk is full."""
    is_full = isinstance(error, OSError) and error.errno in _FULL
    return not (is_full or isinstance(error, _PERMANENT) or "Credential" in type(error).__name__)
