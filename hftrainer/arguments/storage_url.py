"""Separates `storage_url` from `output_dir`, where a URL may also be passed, and checks it."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from hftrainer.errors import InvalidArgument

if TYPE_CHECKING:
    from hftrainer.arguments.base import BaseArguments


#: Beginning of a URL that lacks a colon or a slash.
_MISSPELT = re.compile(r"([a-z][a-z0-9]+:/|(s3a?|gc?s|az|abfss?|adl|hf|hdfs|oss)//)[^/]")


def separate_storage(args: BaseArguments) -> None:
    """Move a URL from `output_dir` to `storage_url`, so that `output_dir` is always a local folder.

    Raises:
        InvalidArgument: for two URLs, or one that `check_url` refuses.
    """
    output_dir = str(args.output_dir)
    if _MISSPELT.match(output_dir):
        url = re.sub(":?/+", "://", output_dir, count=1)
        raise InvalidArgument(
            f"output_dir={output_dir!r} looks like a URL without '://': use {url!r}, or './{output_dir}' for a folder."
        )
    if args.storage_url is not None:
        check_url("storage_url", args.storage_url)
    if "://" in output_dir:
        check_url("output_dir", output_dir)
        if args.storage_url not in (None, output_dir):
            raise InvalidArgument(f"output_dir={output_dir!r}, storage_url={args.storage_url!r}: set only one.")
        args.storage_url = output_dir
        args.output_dir = staging_folder_of(output_dir)
    if args.storage_url is not None:
        args.storage_url = args.storage_url.rstrip("/")


def check_url(argument: str, url: str) -> None:
    """Raise `InvalidArgument` if `url` is incomplete, has an unknown scheme, or contains credentials."""
    parts = urlsplit(url)
    if parts.password or parts.query:
        raise InvalidArgument(
            f"{argument}: a password or a signature in a URL would be written to logs and checkpoints. Set the "
            "credentials in the environment variables or the configuration file of the package for that storage."
        )
    # Imported late, since it takes 0.1 s.
    from fsspec.registry import known_implementations, registry

    # The last scheme, as in simplecache::s3://bucket.
    scheme, path = re.findall(r"^(?:(?:.*::)?(.+?)://(?:datasets/)?)?(.*)", url)[0]
    if os.path.isabs(url):
        raise InvalidArgument(f"{argument}={url!r} is a path, but must be a URL: 'file://{url}', or use output_dir.")
    hint = f" (did you mean {re.sub(':?/+', '://', url, count=1)!r}?)" if _MISSPELT.match(url) else ""
    if scheme not in {*known_implementations, *registry} - {"http", "https"}:
        problem = f"has the scheme {scheme!r}, which is unknown or read-only" if scheme else f"has no scheme{hint}"
    elif re.match({"s3": "[^/]", "gs": "[^/]", "hf": "[^/]+/[^/]"}.get(scheme, "/*[^/]"), path) is None:
        problem = "names no bucket, repository or folder"
    else:
        return
    examples = "'s3://bucket/run', 'gs://bucket/run', 'hf://datasets/user/name/run' or 'file:///folder'"
    raise InvalidArgument(f"{argument}={url!r} {problem}. Use a URL such as {examples}.")


def explain_unreadable_url(path: str) -> str | None:
    """The reason why a command cannot read a path that is a URL, or None."""
    if "://" not in path:
        return None
    return f"a URL cannot be read here. On the machine that trains, the run's files are in {staging_folder_of(path)}"


def staging_folder_of(url: str) -> str:
    """The local folder for the files of a URL, in the cache of Hugging Face (HF_HOME)."""
    # Imported late, since most runs have no URL.
    from huggingface_hub import constants

    parts = urlsplit(url)
    relative_path = os.path.normpath(f"/{parts.netloc.rpartition('@')[2]}/{parts.path}").lstrip("/")
    return os.path.join(constants.HF_HOME, "hftrainer", parts.scheme, relative_path)
