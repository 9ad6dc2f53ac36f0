"""A model's repository on the Hub: opened before training, so that what is wrong is known before anything has run."""

from __future__ import annotations

import contextlib
import inspect
import shlex
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from hftrainer.errors import HubError, InvalidArgument
from hftrainer.hub.failures import reason, with_retries

#: Seconds to wait before the second and third attempt to open a repository.
_WAITS = (1.0, 4.0)
#: What of the output folder is never uploaded as the model: private files and the checkpoints,
#: also those of trials, which are in folders of their own.
IGNORED = ("_*", "checkpoint-*", "tmp-checkpoint-*", "*/checkpoint-*", "*/tmp-checkpoint-*")


@dataclass(frozen=True)
class Repository:
    """Where a Trainer uploads to.

    Attributes:
        id: its name with its owner's, `owner/name`.
        token: what gives the right to; None for that of `hf auth login`.
        revision: the branch; None for main.
    """

    id: str
    token: str | None = field(default=None, repr=False)
    revision: str | None = None

    def __post_init__(self) -> None:
        _check(self.token)

    def __str__(self) -> str:
        return self.id if self.revision is None else f"{self.id}, branch {self.revision}"

    def has_branch_of(self, other: Repository) -> bool:
        """Whether both upload to the same branch."""
        return (self.revision or "main") == (other.revision or "main")

    def upload(
        self, folder: str, message: str, *, path_in_repo: str = "", ignore: tuple[str, ...] = (), shown: bool = False
    ) -> Any:
        """Make one commit of a folder.

        Args:
            folder: its files become the commit's.
            message: of the commit.
            path_in_repo: where they are put; the top by default.
            ignore: patterns of what is left out.
            shown: with progress bars, if the user wants any.

        Returns:
            A `CommitInfo`.
        """
        with contextlib.nullcontext() if shown else _without_progress_bars():
            return _api().upload_folder(
                repo_id=self.id,
                folder_path=folder,
                path_in_repo=path_in_repo or None,
                commit_message=message,
                token=self.token,
                ignore_patterns=list(ignore),
                revision=self.revision,
            )

    def command(
        self, folder: str, path_in_repo: str, *, only: tuple[str, ...] = (), without: tuple[str, ...] = ()
    ) -> str:
        """The command line that makes the same commit."""
        words = ["hf", "upload", self.id, folder, path_in_repo or "."]
        words += [word for name in only for word in ("--include", name)]
        words += [word for name in without for word in ("--exclude", name)]
        words += ["--revision", self.revision] if self.revision else []
        return shlex.join(words)


def _check(token: str | None) -> None:
    """Refuse what is no token, before the client puts it into a header, and the header into an error."""
    if token == "":
        raise InvalidArgument("hub_token is empty: give one, or None for that of `hf auth login`.")
    if token is not None and token.split() != [token]:
        raise InvalidArgument("hub_token has a space or a line break in it: give it without.")


class _Switch:
    """The client's switch for progress bars, one for the whole process, turned off by any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._was_on = False

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        with self._lock:
            if self._users == 0:
                self._was_on = not are_progress_bars_disabled()
            if self._was_on:
                disable_progress_bars()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0 and self._was_on:
                    enable_progress_bars()


_without_progress_bars = _Switch().off


def _api() -> HfApi:
    return HfApi(library_name="hftrainer")


def repository_name(hub_model_id: str | None, output_dir: str) -> str:
    """The name to ask for: `hub_model_id`, or that of the output folder."""
    return hub_model_id or Path(output_dir).absolute().name


def open_repository(name: str, *, token: str | None, private: bool | None, revision: str | None) -> Repository:
    """Make the repository, unless it is there, and see that it can be written to.

    Args:
        name: with or without its owner's, which is the user otherwise.
        token: see `Repository`.
        private: whether a new one is.
        revision: the branch that must be there; None for main.

    Raises:
        InvalidArgument: for a name that no repository can have.
        HubError: when it cannot be written to, and why.
    """
    if constants.HF_HUB_OFFLINE:
        raise HubError(f"push_to_hub to {name!r}: HF_HUB_OFFLINE=1 is set: unset it, or train without push_to_hub.")
    if token is None and huggingface_hub.get_token() is None:
        raise HubError(f"push_to_hub to {name!r} needs a token: run `hf auth login`, or give hub_token.")
    _check(token)
    try:
        return with_retries(lambda: _open(name, token, private, revision), _WAITS)
    except HFValidationError as error:
        raise InvalidArgument(f"hub_model_id={name!r} is no name for a repository: {reason(error, token)}") from None
    except Exception as error:  # not from it: a traceback with it may show the token
        where = f"{name!r}" if revision is None else f"{name!r}, hub_revision={revision!r}"
        raise HubError(
            f"push_to_hub to {where}: {reason(error, token)}. A run without push_to_hub needs no Hub, and "
            "trainer.push_to_hub() uploads it later."
        ) from None


def _open(name: str, token: str | None, private: bool | None, revision: str | None) -> Repository:
    api = _api()
    found = api.create_repo(name, token=token, private=private, exist_ok=True).repo_id
    if "write" in inspect.signature(api.auth_check).parameters:  # of huggingface_hub 1.0
        api.auth_check(found, token=token, write=True)
    if revision is not None:
        api.repo_info(found, revision=revision, token=token)
    return Repository(found, token, revision)
