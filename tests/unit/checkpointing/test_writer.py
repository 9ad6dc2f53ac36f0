"""Which errors are the storage's, and which files of a script belong to a checkpoint."""

import errno
import time

import pytest

from hftrainer.checkpointing.writing.folder import CheckpointFolder
from hftrainer.checkpointing.writing.writer import ScriptFiles, is_storage_error
from tests.support.jobs import names_in


@pytest.mark.parametrize(
    ("error", "is_of_storage"),
    [
        (OSError(errno.ENOSPC, "full"), True),
        (FileNotFoundError(errno.ENOENT, "missing", "/out/checkpoint-1/a"), True),
        (FileNotFoundError(errno.ENOENT, "missing", "/vocab"), False),
        (ConnectionError("hub"), False),
        (Exception("No space left on device (os error 28)"), True),
        (Exception("something else"), False),
        (RuntimeError("PytorchStreamWriter failed writing file"), True),
        (RuntimeError("size mismatch"), False),
    ],
)
def test_storage_errors_are_told_from_others(error, is_of_storage):
    assert is_storage_error(error, "/out") is is_of_storage


@pytest.mark.parametrize("knows_folder", [True, False])
def test_new_files_of_the_script_are_added(tmp_path, monkeypatch, knows_folder):
    """Those written before the run are not; where its folder is not known, their times tell."""
    checkpoint = CheckpointFolder(tmp_path / "checkpoint-1")
    for folder in (checkpoint.path, checkpoint.staging):
        folder.mkdir()
        (folder / "old").write_text(folder.name)
    script_files, start = ScriptFiles(), time.time_ns() + 3_000_000_000
    monkeypatch.setattr(time, "time_ns", lambda: start)
    script_files.begin_run(str(tmp_path) if knows_folder else None)
    (checkpoint.path / "new").touch()
    (checkpoint.path / "old").write_text("changed, but the Trainer writes one too")
    script_files.copy_to(checkpoint)
    assert names_in(checkpoint.staging) == ["new"] * knows_folder + ["old"]
    assert (checkpoint.staging / "old").read_text() == checkpoint.staging.name
