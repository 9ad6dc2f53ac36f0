"""What is in a checkpoint is on the disk before the checkpoint has its name: the power may fail at any time."""

import os

import pytest

from tests.support.parity import build


@pytest.fixture
def events(monkeypatch):
    """What is flushed, as inodes, and what a folder is renamed to, in the order in which it happens."""
    seen, fsync, rename = [], os.fsync, os.rename

    def flush(descriptor):
        fsync(descriptor)
        seen.append(os.fstat(descriptor).st_ino)

    def move(source, target, **keywords):
        rename(source, target, **keywords)
        seen.append(os.fspath(target))

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "rename", move)
    return seen


@pytest.mark.parametrize("background", [False, True])
def test_flushed_before_it_is_named(tmp_path, events, background):
    trainer, _ = build(
        "hftrainer",
        "plain",
        tmp_path,
        max_steps=2,
        save_strategy="steps",
        save_steps=2,
        lightning_config={"async_checkpoint": background},
    )
    trainer.train()
    folder = tmp_path / "checkpoint-2"
    named = events.index(str(folder))
    inside = [folder, *folder.rglob("*")]
    assert len(inside) > 6
    assert {path.name for path in inside if path.stat().st_ino not in events[:named]} == set()
    assert tmp_path.stat().st_ino in events[named:]  # the name itself
