"""A model repository on the Hub, opened before training so that errors appear early."""

from __future__ import annotations

import contextlib
import inspect
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from hftrainer.errors import HubError, InvalidArgument
from hftrainer.hub.failures import call_with_retries, hub_reason

#: Seconds to wait before each retry of opening a repository.
_WAITS = (1.0, 4.0)
#: Files that SageMaker writes while it copies a folder to S3; never uploaded.
_SAGEMAKER_FILES = ("*.sagemaker-uploading", "*.sagemaker-uploaded")
#: Files of the output folder that are never uploaded with the model: private files, and checkpoints, including those of
#: trials.
IGNORE_PATTERNS = ("_*", "checkpoint-*", "*/checkpoint-*", "*/_tmp_*")


@dataclass(frozen=True)
class Repository:
    """The repository that a Trainer uploads to.

    Attributes:
        id: `owner/name`.
        token: a token with write access; None for that of `hf auth login`.
        revision: the branch; None for main.
    """

    id: str
    token: str | None = field(default=None, repr=False)
    revision: str | None = None

    def __post_init__(self) -> None:
        """Check that an HTTP header can hold the token. The client's error would reveal it."""
        if self.token == "":
            raise InvalidArgument("hub_token is empty: pass a token, or None for that of `hf auth login`.")
        if self.token is not None and self.token.split() != [self.token]:
            raise InvalidArgument("hub_token contains a space or a line break: remove it.")

    def __str__(self) -> str:
        return self.id if self.revision is None else f"{self.id}, branch {self.revision}"

    def upload(
        self,
        folder: str,
        message: str,
        *,
        path_in_repo: str = "",
        ignore_patterns: tuple[str, ...] = (),
        show_progress: bool = False,
    ) -> Any:
        """Upload a folder as one commit.

        Args:
            folder: the folder to upload.
            message: the commit message.
            path_in_repo: the target folder; the root of the repository by default.
            ignore_patterns: patterns of files to leave out.
            show_progress: show progress bars, unless the user has disabled them.

        Returns:
            A `CommitInfo`.
        """
        with contextlib.nullcontext() if show_progress else _without_progress_bars():
            return HfApi(library_name="hftrainer").upload_folder(
                repo_id=self.id,
                folder_path=folder,
                path_in_repo=path_in_repo or None,
                commit_message=message,
                token=self.token,
                ignore_patterns=[*ignore_patterns, *_SAGEMAKER_FILES],
                revision=self.revision,
            )

    def command(
        self, folder: str, path_in_repo: str, *, include: tuple[str, ...] = (), exclude: tuple[str, ...] = ()
    ) -> str:
        """The command line that makes the same upload."""
        words = ["hf", "upload", self.id, folder, path_in_repo or "."]
        words += [word for name in include for word in ("--include", name)]
        words += [word for name in exclude for word in ("--exclude", name)]
        words += ["--revision", self.revision] if self.revision else []
        return shlex.join(words)


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Turn off the client's progress bars. Since the switch is global, other uploads may show theirs."""
    with contextlib.ExitStack() as stack:
        if not are_progress_bars_disabled():
            stack.callback(enable_progress_bars)
        disable_progress_bars()
        yield


def open_repository(
    name: str, *, token: str | None, private: bool | None, revision: str | None, is_for_run: bool = True
) -> Repository:
    """Create the repository unless it exists, and check that the token has write access.

    Args:
        name: `owner/name`, or only `name` in the user's namespace.
        token: see `Repository`.
        private: whether a new repository is private.
        revision: a branch that must exist; None for main.
        is_for_run: whether a run will upload, rather than `trainer.push_to_hub()`.

    Raises:
        InvalidArgument: if the name is invalid.
        HubError: if the repository cannot be written to.
    """
    repository = Repository(name, token, revision)
    try:
        return call_with_retries(lambda: _open_repository(repository, private), _WAITS)
    except HFValidationError as error:
        problem = hub_reason(error, token)
        raise InvalidArgument(f"hub_model_id={name!r} is not a valid repository name: {problem}") from None
    # Raise from None: the traceback of the cause may show the token.
    except Exception as error:
        where = f"{name!r}" if revision is None else f"{name!r}, hub_revision={revision!r}"
        later = " You can train without push_to_hub, and upload later with trainer.push_to_hub()." if is_for_run else ""
        raise HubError(f"push_to_hub to {where}: {hub_reason(error, token)}.{later}") from None


def _open_repository(repository: Repository, private: bool | None) -> Repository:
    api, token = HfApi(library_name="hftrainer"), repository.token
    repo_id = api.create_repo(repository.id, token=token, private=private, exist_ok=True).repo_id
    # `write` is new in huggingface_hub 1.0. Offline, only a client that a script has replaced gets here.
    if "write" in inspect.signature(api.auth_check).parameters and not constants.HF_HUB_OFFLINE:
        api.auth_check(repo_id, token=token, write=True)
    if repository.revision is not None:
        api.repo_info(repo_id, revision=repository.revision, token=token)
    return replace(repository, id=repo_id)
