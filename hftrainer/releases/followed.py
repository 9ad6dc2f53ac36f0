"""Which release of `transformers` a Trainer follows.

A Trainer reads it once, when it is made. `from hftrainer import Trainer` follows the newest release; `install()` and
`python -m hftrainer run` follow the installed one; and `lightning_config={"behaviour": "4.57"}` selects one.
"""

from __future__ import annotations

import importlib.metadata
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from hftrainer.base.messages import command_name, log_once
from hftrainer.releases.earlier import POLICIES
from hftrainer.releases.policy import NEWEST, RELEASES, Release, ReleasePolicy

logger = logging.getLogger(__name__)

#: The policy of Trainers whose arguments select no release.
_default = ReleasePolicy()


def make_policy(release: Release) -> ReleasePolicy:
    """The policy of a known release."""
    return next(kind for kind in POLICIES if release <= kind.last_release)(release)


def from_text(text: Any) -> ReleasePolicy:
    """The policy of a release, or of the newest known one for a later release.

    Args:
        text: a release or a version, such as '4.57' or '4.57.6'.

    Raises:
        ValueError: if the release is not known; the message names the known ones.
    """
    if isinstance(text, (int, float)):
        raise ValueError(f"{text!r} is a number, and 5.10 would be read as 5.1: write the release as text.")
    if not isinstance(text, str):
        raise ValueError(f"{text!r} is not text: write a release as text, such as '{NEWEST}'.")
    release = Release.from_text(text) if re.fullmatch(r"\d+\.\d+(\..*)?", text) else None
    if release is None or (release not in RELEASES and release < NEWEST):
        raise ValueError(
            f"{text!r} is not a release of transformers whose behaviour is known, from {RELEASES[0]} to {NEWEST}"
            + (f"; the nearest is '{_nearest_known(release)}'." if release else ".")
        )
    _log_info_once(describe_newer_release(text))
    return make_policy(_nearest_known(release))


def describe_newer_release(version: str) -> str | None:
    """A sentence about a version of transformers after the newest known release, or None."""
    if Release.from_text(version) <= NEWEST:
        return None
    return (
        f"transformers {version} is newer than {NEWEST}, the newest release that this hftrainer knows: later changes "
        f"are not followed. A newer hftrainer may know it."
    )


def describe_older_release(config: Mapping[str, Any]) -> str | None:
    """A sentence about an installed transformers older than the default release, or None."""
    if "behaviour" in config or (transformers := sys.modules.get("transformers")) is None:
        return None
    installed = Release.from_text(transformers.__version__)
    if installed >= _default.release:
        return None
    return (
        f"transformers {installed} is installed, but this Trainer follows {_default.release}. To follow "
        f"{installed}, use {command_name()} run or hftrainer.install(); "
        f"lightning_config={{'behaviour': '{_default.release}'}} turns this message off."
    )


def _log_info_once(sentence: str | None) -> None:
    if sentence:
        log_once(logger, sentence, logging.INFO)


def _nearest_known(release: Release) -> Release:
    """The latest known release not after `release`; the first one if all are later."""
    return max((known for known in RELEASES if known <= release), default=RELEASES[0])


def from_config(config: Mapping[str, Any]) -> ReleasePolicy:
    """The policy of a Trainer.

    Args:
        config: its `lightning_config`, whose 'behaviour' names a release.
    """
    return from_text(config["behaviour"]) if "behaviour" in config else _default


def check_release(config: Mapping[str, Any]) -> Iterator[str]:
    """An error message if the 'behaviour' in `lightning_config` is not a known release."""
    try:
        from_config(config)
    except ValueError as error:
        yield f"lightning_config['behaviour']: {error}"


def is_before(release: str) -> bool:
    """Whether the default release, of Trainers whose arguments choose none, is earlier than `release`."""
    return _default.release < Release.from_text(release)


def follow(release: Release) -> None:
    """Set the release that new Trainers follow by default."""
    global _default
    _default = make_policy(release)


def installed_release() -> Release:
    """The known release nearest to the installed transformers, or the newest if none is installed."""
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return NEWEST
    _log_info_once(describe_newer_release(version))
    return _nearest_known(Release.from_text(version))
