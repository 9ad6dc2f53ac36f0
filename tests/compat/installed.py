"""The same training by the classes of the installed transformers, and by those that `install()` puts in their place."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers

import hftrainer
from tests.support.parity import Record, assert_same, train


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
    """Train as `install()` leaves transformers, then with `transformers` as it is."""
    with installed():
        ours = train("transformers", model, folder / "ours", **settings)
    return ours, train_theirs(folder, model, **settings)


def train_theirs(folder: Path, model: str, **settings: Any) -> Record:
    """Train with transformers as it is."""
    assert transformers.Trainer.__module__ == "transformers.trainer"
    return train("transformers", model, folder / "theirs", **settings)


def compare(folder: Path, model: str, **settings: Any) -> Record:
    """Our run, after asserting that transformers does the same."""
    with installed():
        ours = train("transformers", model, folder / "ours", **settings)
    assert_same(ours, train_theirs(folder, model, **settings))
    return ours
