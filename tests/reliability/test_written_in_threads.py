"""Several threads write, flush and check a checkpoint: it is on the disk before it has its name, whole or absent."""

import contextlib
import errno
import json
import os
import random
import signal
import threading
import zipfile
import zlib
from pathlib import Path
from unittest import mock

import pytest
import torch

from hftrainer import Trainer
from hftrainer.checkpointing.inspection import inspect_checkpoint
from hftrainer.checkpointing.layout import MANIFEST_NAME
from hftrainer.checkpointing.run_checkpoints import get_last_checkpoint
from hftrainer.checkpointing.writing import files
from hftrainer.checkpointing.writing.files import write_manifest
from hftrainer.checkpointing.writing.folder import CheckpointFolder, clear_stale
from tests.support.checkpoints import flip, make_trainer, train_to_end
from tests.support.faults import FailsOnce
from tests.support.jobs import names_in
from tests.support.parity import assert_same_weights, leaves


def damage(folder):
    return inspect_checkpoint(folder).skip_reason


LARGE = 5 * 2**20 + 12_345  # more than a part that is read at once, and no multiple of it


def write_files(folder):
    (folder / "part").mkdir(parents=True)
    contents = {"model.safetensors": LARGE, "optimizer.pt": LARGE, "part/0.distcp": 1 << 20, "empty": 0}
    for name, size in contents.items():
        (folder / name).write_bytes(random.Random(name).randbytes(size))
    (folder / "trainer_state.json").write_text('{"global_step": 2}')


def assert_listed(folder):
    """The manifest has sizes and CRC-32, so that checkpoints of other releases of this project are checked too."""
    listed = json.loads((folder / MANIFEST_NAME).read_text())["files"]
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    del files[MANIFEST_NAME]
    assert listed == {name: {"size": len(content), "crc32": zlib.crc32(content)} for name, content in files.items()}
    assert damage(folder) is None


@pytest.fixture
def events(monkeypatch):
    seen = []

    def noting(name, original):
        def act(*arguments, **keywords):
            returned = original(*arguments, **keywords)
            seen.append((name, os.fspath(arguments[1]) if name == "rename" else os.fstat(arguments[0]).st_ino))
            return returned

        return act

    for name in {"fsync", "rename", "posix_fadvise"} & set(dir(os)):
        monkeypatch.setattr(os, name, noting(name, getattr(os, name)))
    return seen


@pytest.mark.parametrize("background", [False, True])
def test_files_are_flushed_before_the_folder_gets_its_name(tmp_path, events, background):
    make_trainer(tmp_path, max_steps=2, save_steps=2, lightning_config={"async_checkpoint": background}).train()
    folder = tmp_path / "checkpoint-2"
    named = events.index(("rename", str(folder)))
    inside = [folder, *folder.rglob("*")]
    assert len(inside) > 6
    assert {path.name for path in inside if ("fsync", path.stat().st_ino) not in events[:named]} == set()
    assert ("fsync", tmp_path.stat().st_ino) in events[named:]  # the name itself


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system takes no advice on its page cache")
def test_large_files_leave_the_page_cache_once_flushed(tmp_path, events):
    write_files(tmp_path)
    write_manifest(tmp_path)
    large = [(tmp_path / name).stat().st_ino for name in ("model.safetensors", "optimizer.pt")]
    assert sorted(inode for name, inode in events if name == "posix_fadvise") == sorted(large)
    assert all(events.index(("fsync", inode)) < events.index(("posix_fadvise", inode)) for inode in large)


@pytest.mark.parametrize("place", [0, 2**20 - 1, 2**20, LARGE - 1])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt"])
def test_one_changed_bit_is_detected(tmp_path, name, place):
    write_files(tmp_path)
    write_manifest(tmp_path)
    assert_listed(tmp_path)
    flip(tmp_path / name, place, 1)
    assert damage(tmp_path) == f"the contents of {tmp_path / name} have changed since it was written, but not its size"


@pytest.fixture
def small_windows(monkeypatch):
    monkeypatch.setattr(files, "FLUSH_BYTES", 1000)
    monkeypatch.setattr(files, "_LARGE", 0)


def test_streamed_file_is_what_torch_save_writes_and_has_its_checksum(tmp_path, small_windows, monkeypatch):
    """The checksum is known without reading the file again."""
    value = {"a": torch.arange(5_000), "b": [torch.zeros(0), torch.ones(777, dtype=torch.bfloat16)], "c": "text"}
    path = tmp_path / "optimizer.pt"
    (tmp_path / "trainer_state.json").write_text('{"global_step": 2}')
    written = {str(path): files.save(value, str(path))}
    with monkeypatch.context() as patched:
        read = mock.Mock(side_effect=files.crc32_of_file)
        patched.setattr(files, "crc32_of_file", read)
        write_manifest(tmp_path, written)
    assert [call.args[0].name for call in read.mock_calls] == ["trainer_state.json"]
    assert_listed(tmp_path)
    read = torch.load(path)
    assert torch.equal(read["a"], value["a"])
    assert torch.equal(read["b"][1], value["b"][1])
    assert read["c"] == "text"
    assert zipfile.ZipFile(path).testzip() is None


@pytest.mark.parametrize("background", [False, True])
def test_streamed_file_changed_by_an_override_has_a_new_checksum(tmp_path, small_windows, background):
    """The size stays the same."""

    class Own(Trainer):
        def _save_optimizer_and_scheduler(self, output_dir):
            super()._save_optimizer_and_scheduler(output_dir)
            if not background:
                flip(Path(output_dir, "optimizer.pt"))

    make_trainer(tmp_path, trainer_class=Own, lightning_config={"async_checkpoint": background}).train()
    assert damage(tmp_path / "checkpoint-3") is None


@pytest.mark.parametrize("at", [1, 2, 5, "full"])
def test_streamed_file_that_cannot_be_written_raises_and_leaves_no_thread(tmp_path, small_windows, monkeypatch, at):
    """Also if the disk recovers: what a failed flush lost is not written again."""
    path, message = str(tmp_path / "optimizer.pt"), "Input/output error"
    if at == "full":
        path, message = "/dev/full", "No space left on device"
    else:
        FailsOnce(monkeypatch, files, "flush_to_disk", OSError(errno.EIO, message), call=at)
    threads = set(threading.enumerate())
    with pytest.raises(OSError, match=message):
        files.save([torch.zeros(2_000) for _ in range(10)], path)
    assert set(threading.enumerate()) <= threads  # those of other tests may end meanwhile


@pytest.mark.parametrize("background", [False, True])
def test_checkpoints_with_streamed_files_are_whole_and_resume(tmp_path, small_windows, background):
    config = {"lightning_config": {"async_checkpoint": background}}
    found = []
    for resume in (None, tmp_path / "checkpoint-6"):
        train_to_end(make_trainer(tmp_path, **config), resume)
        assert [damage(tmp_path / f"checkpoint-{step}") for step in (3, 6, 9)] == [None] * 3
        found.append(leaves(torch.load(tmp_path / "checkpoint-9" / "optimizer.pt")["state"]))
    assert_same_weights(*found)


def publish_and_kill(folder, flushes):
    child = os.fork()
    if child == 0:
        left, counting, fsync = flushes, threading.Lock(), os.fsync

        def flush(descriptor):
            nonlocal left
            with counting:
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            fsync(descriptor)

        with contextlib.suppress(BaseException):
            checkpoint = CheckpointFolder(folder / "checkpoint-2")
            write_files(checkpoint.staging)
            os.fsync = flush
            checkpoint.publish()
            os._exit(0)
        os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_kill_at_any_flush_leaves_a_complete_checkpoint_or_none(tmp_path):
    """The next run removes what is left."""
    found, killed, flushes = [], True, 0
    while killed:
        flushes += 1
        folder = tmp_path / str(flushes)
        folder.mkdir()
        killed = publish_and_kill(folder, flushes)
        assert not killed or not (folder / "checkpoint-2").exists() or damage(folder / "checkpoint-2") is None
        clear_stale(str(folder))
        assert not list(folder.glob("_tmp_*"))
        last = get_last_checkpoint(str(folder))
        assert names_in(folder) == ([] if last is None else ["checkpoint-2"])
        found.append(last is not None)
    assert flushes > 6  # each file, the manifest, and the folders
    assert found[:6] == [False] * 6
    assert found[-1]
    assert found == sorted(found)  # once it is whole, it stays
