"""`storage_url`, also given as `output_dir`."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from huggingface_hub import constants

from hftrainer.errors import InvalidArgument

if TYPE_CHECKING:
    from hftrainer.arguments.base import BaseArguments


def separate_storage(args: BaseArguments) -> None:
    """Move a URL from `output_dir` to `storage_url`, so that `output_dir` is always a local folder.

    Raises:
        InvalidArgument: for two URLs, or one with a password.
    """
    given = str(args.output_dir)
    if re.match(r"[a-z][a-z0-9]+:/[^/]", given):
        raise InvalidArgument(f"output_dir={given!r} is a URL with one slash: use {given.replace(':/', '://', 1)!r}.")
    if args.storage_url is not None:
        check_url("storage_url", args.storage_url)
    if "://" in given:
        check_url("output_dir", given)
        if args.storage_url not in (None, given):
            raise InvalidArgument(f"output_dir={given!r}, storage_url={args.storage_url!r}: set only one.")
        args.storage_url = given
        args.output_dir = staging_folder_of(given)
    if args.storage_url is not None:
        args.storage_url = args.storage_url.rstrip("/")


def check_url(argument: str, url: str) -> None:
    """Raise `InvalidArgument` for what is no URL, and for one with credentials."""
    if "://" not in url:
        raise InvalidArgument(f"{argument}={url!r}: give a URL, such as 's3://bucket/run'.")
    parts = urlsplit(url)
    if parts.password or parts.query:
        raise InvalidArgument(
            f"{argument}: a password or a signature in a URL would be written into logs and checkpoints. Give the "
            "credentials as the environment variables or the configuration file of the package for its kind of storage."
        )


def why_no_local_folder(path: str) -> str | None:
    """Why a command cannot read a path, if it is a URL."""
    if "://" not in path:
        return None
    return f"a URL cannot be read here. On the machine that trains, the run's files are in {staging_folder_of(path)}"


def staging_folder_of(url: str) -> str:
    """The local folder for the files of a URL, in the cache of Hugging Face (HF_HOME)."""
    parts = urlsplit(url)
    inside = os.path.normpath(f"/{parts.netloc.rpartition('@')[2]}/{parts.path}").lstrip("/")
    return os.path.join(constants.HF_HOME, "hftrainer", parts.scheme, inside)
