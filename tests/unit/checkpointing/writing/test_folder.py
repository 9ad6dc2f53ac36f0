"""A `checkpoint-N` folder is complete or absent, whenever its process ends and where folders cannot be renamed."""

import contextlib
import os
import shutil
import time
from pathlib import Path
from unittest import mock

import pytest

from hftrainer.checkpointing.writing import folder as folder_module
from hftrainer.checkpointing.writing.folder import CheckpointFolder, ScriptFiles, clear_stale, staging_folder
from hftrainer.trainer_utils import get_last_checkpoint
from tests.support.checkpoints import make_trainer
from tests.support.jobs import names_in


def test_staging_folder_of_a_living_process_is_kept(tmp_path, monkeypatch):
    with monkeypatch.context() as other:
        other.setattr(os, "getpid", os.getppid)
        theirs = staging_folder(tmp_path / "checkpoint-3")
    theirs.mkdir()
    (theirs / "config.json").write_text("{}")
    make_trainer(tmp_path, max_steps=3).train()
    assert (theirs / "config.json").is_file()
    assert names_in(tmp_path) == [theirs.name, "checkpoint-3"]


def test_staging_folder_of_another_machine_is_removed_after_a_day(tmp_path):
    """Whether its process still runs cannot be known."""
    folder = tmp_path / "_tmp_node~7.lan.12.3456_checkpoint-3"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    clear_stale(str(tmp_path))
    assert folder.is_dir()
    for path in (folder / "config.json", folder):
        os.utime(path, (0, 0))
    clear_stale(str(tmp_path))
    assert names_in(tmp_path) == []


@pytest.fixture
def no_renaming(monkeypatch):
    """As on some network file systems."""
    monkeypatch.setattr(Path, "rename", mock.Mock(side_effect=OSError(18, "Invalid cross-device link")))


@pytest.mark.parametrize("renames", [True, False])
@pytest.mark.parametrize("moment", range(4))
def test_interrupted_replacement_leaves_one_complete_checkpoint(tmp_path, monkeypatch, request, renames, moment):
    """As by a second Ctrl-C between two renamings."""
    make_trainer(tmp_path, max_steps=3).train()
    if not renames:
        request.getfixturevalue("no_renaming")
    place = (Path, "rename") if renames else (shutil, "copyfile")
    left, original = [moment], getattr(*place)

    def act(*args):
        left[0] -= 1
        if left[0] == -1:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(*place, act)
    with contextlib.suppress(KeyboardInterrupt):
        make_trainer(tmp_path, max_steps=3).train()
    monkeypatch.undo()
    monkeypatch.setattr(folder_module, "has_writer_ended", lambda *_: True)
    clear_stale(str(tmp_path))
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-3")
    assert names_in(tmp_path) == ["checkpoint-3"]


def test_half_copied_checkpoint_is_replaced_by_the_staged_one(tmp_path, monkeypatch):
    """As left by a process that died where folders cannot be renamed."""
    make_trainer(tmp_path, max_steps=3).train()
    monkeypatch.setattr(folder_module, "has_writer_ended", lambda *_: True)
    checkpoint = tmp_path / "checkpoint-3"
    for prefix in ("", "replaced_"):
        shutil.copytree(checkpoint, staging_folder(checkpoint, prefix))
    (staging_folder(checkpoint) / "notes.txt").touch()
    (checkpoint / "trainer_state.json").unlink()
    clear_stale(str(tmp_path))
    assert get_last_checkpoint(str(tmp_path)) == str(checkpoint) and (checkpoint / "notes.txt").is_file()


def test_failed_replacement_restores_what_was_there(tmp_path):
    """Also the script's own files, which are no checkpoint."""
    checkpoint = tmp_path / "checkpoint-3"
    replaced = staging_folder(checkpoint, "replaced_")
    replaced.mkdir()
    (replaced / "notes.txt").touch()
    CheckpointFolder(checkpoint).discard()
    assert names_in(tmp_path) == ["checkpoint-3"] and names_in(checkpoint) == ["notes.txt"]


def test_files_are_copied_where_folders_cannot_be_renamed(tmp_path, monkeypatch, no_renaming, caplog):
    """`trainer_state.json` comes last."""
    copy = mock.Mock(side_effect=shutil.copyfile)
    monkeypatch.setattr(shutil, "copyfile", copy)
    make_trainer(tmp_path, save_total_limit=1).train()
    assert names_in(tmp_path) == ["checkpoint-9"]
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-9")
    order = [os.path.basename(call.args[1]) for call in copy.mock_calls]
    assert order[-2:] == ["hftrainer_manifest.json", "trainer_state.json"]
    assert "copying its files one by one" in caplog.text


@pytest.mark.parametrize(("knows_folder", "files"), [(True, ["new", "old"]), (False, ["old"])])
def test_new_files_of_the_script_are_added(tmp_path, monkeypatch, knows_folder, files):
    """Those written before the run are not; where its folder is not known, their times tell."""
    checkpoint = CheckpointFolder(tmp_path / "checkpoint-1")
    for folder in (checkpoint.path, checkpoint.staging):
        folder.mkdir()
        (folder / "old").write_text(folder.name)
    script_files, start = ScriptFiles(), time.time_ns() + 3_000_000_000
    monkeypatch.setattr(time, "time_ns", lambda: start)
    script_files.record_existing_files(str(tmp_path) if knows_folder else None)
    (checkpoint.path / "new").touch()
    (checkpoint.path / "old").write_text("changed, but the Trainer writes one too")
    script_files.copy_to(checkpoint)
    assert names_in(checkpoint.staging) == files
    assert (checkpoint.staging / "old").read_text() == checkpoint.staging.name
