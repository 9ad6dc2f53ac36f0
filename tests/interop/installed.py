"""The same training by the classes of the installed transformers, and by those that `install()` puts in their place."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers

import hftrainer
from tests.parity.support import Record, assert_same, train

#: Of transformers, as in (4, 57).
RELEASE = tuple(int(part) for part in transformers.__version__.split(".")[:2])


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """What the name transformers gives is ours, for a while."""
    hftrainer.install()
    try:
        assert transformers.Trainer is hftrainer.Trainer
        yield
    finally:
        hftrainer.uninstall()


def train_both(folder: Path, model: str, **settings: Any) -> tuple[Record, Record]:
    """Train with `transformers` as it is, then as `install()` leaves it."""
    assert transformers.Trainer.__module__ == "transformers.trainer"
    theirs = train("transformers", model, folder / "theirs", **settings)
    with installed():
        ours = train("transformers", model, folder / "ours", **settings)
    return ours, theirs


def compare(folder: Path, model: str, **settings: Any) -> tuple[Record, Record]:
    """Train with both, and assert that they did the same."""
    ours, theirs = train_both(folder, model, **settings)
    assert_same(ours, theirs)
    return ours, theirs
