"""Several threads write, flush and check a checkpoint: errors reach the caller, and a kill leaves nothing half."""

import contextlib
import errno
import json
import os
import random
import signal
import threading
import time
import zipfile
import zlib

import pytest
import torch

from hftrainer import Trainer
from hftrainer.checkpointing import manifest, staging, streamed
from hftrainer.checkpointing.folders import get_last_checkpoint
from hftrainer.checkpointing.manifest import damage, write_manifest
from tests.support.checkpoints import make_trainer
from tests.support.jobs import names

LARGE = 5 * 2**20 + 12_345  # more than a part that is read at once, and no multiple of it


def write_files(folder):
    """A folder with files of several sizes, as a checkpoint has."""
    (folder / "part").mkdir(parents=True)
    contents = {"model.safetensors": LARGE, "optimizer.pt": LARGE, "part/0.distcp": 1 << 20, "empty": 0}
    for name, size in contents.items():
        (folder / name).write_bytes(random.Random(name).randbytes(size))
    (folder / "trainer_state.json").write_text('{"global_step": 2}')


def test_the_manifest_is_as_before(tmp_path):
    """Sizes and CRC-32, so that checkpoints of other releases of this project are checked too."""
    write_files(tmp_path)
    write_manifest(tmp_path)
    listed = json.loads((tmp_path / "hftrainer_manifest.json").read_text())["files"]
    files = {path.relative_to(tmp_path).as_posix(): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    del files["hftrainer_manifest.json"]
    assert listed == {name: {"size": len(content), "crc32": zlib.crc32(content)} for name, content in files.items()}
    assert damage(tmp_path) is None


@pytest.mark.parametrize("place", [0, 2**20 - 1, 2**20, LARGE - 1])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt"])
def test_one_bit_after_the_writing(tmp_path, name, place):
    write_files(tmp_path)
    write_manifest(tmp_path)
    with open(tmp_path / name, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    assert damage(tmp_path) == f"the contents of {tmp_path / name} have changed since it was written"


def test_large_files_leave_the_cache_once_they_are_flushed(tmp_path, monkeypatch):
    if not hasattr(os, "posix_fadvise"):
        pytest.skip("this system takes no advice on its page cache")
    events, fsync, advise = [], os.fsync, os.posix_fadvise

    def flush(descriptor):
        fsync(descriptor)
        events.append(("flushed", os.fstat(descriptor).st_ino))

    def advice(descriptor, *arguments):
        events.append(("dropped", os.fstat(descriptor).st_ino))
        advise(descriptor, *arguments)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "posix_fadvise", advice)
    write_files(tmp_path)
    write_manifest(tmp_path)
    large = [(tmp_path / name).stat().st_ino for name in ("model.safetensors", "optimizer.pt")]
    assert sorted(inode for event, inode in events if event == "dropped") == sorted(large)
    assert all(events.index(("flushed", inode)) < events.index(("dropped", inode)) for inode in large)


@pytest.fixture
def small_windows(monkeypatch):
    """The optimizer's state of a tiny model is streamed."""
    monkeypatch.setattr(streamed, "WINDOW", 1000)
    monkeypatch.setattr(manifest, "_LARGE", 0)


def test_a_streamed_file(tmp_path, small_windows, monkeypatch):
    """It holds what `torch.save` writes, and its checksum is known without reading it again."""
    value = {"a": torch.arange(5_000), "b": [torch.zeros(0), torch.ones(777, dtype=torch.bfloat16)], "c": "text"}
    path = tmp_path / "optimizer.pt"
    streamed.save(value, str(path))
    monkeypatch.setattr(manifest, "_crc32", lambda path: pytest.fail(f"{path} is read again"))
    write_manifest(tmp_path)
    listed = json.loads((tmp_path / "hftrainer_manifest.json").read_text())["files"]
    assert listed == {"optimizer.pt": {"size": path.stat().st_size, "crc32": zlib.crc32(path.read_bytes())}}
    read = torch.load(path)
    assert torch.equal(read["a"], value["a"])
    assert torch.equal(read["b"][1], value["b"][1])
    assert read["c"] == "text"
    assert zipfile.ZipFile(path).testzip() is None


@pytest.mark.parametrize("change", ["patched", "replaced", "written again"])
def test_a_streamed_file_that_is_changed_before_the_manifest(tmp_path, small_windows, change):
    """The manifest lists what is there, however soon after, and although the size is the same."""
    path = tmp_path / "optimizer.pt"
    streamed.save(torch.zeros(5_000), str(path))
    if change == "patched":
        with open(path, "r+b") as file:
            file.seek(path.stat().st_size // 2)
            file.write(b"x")
    elif change == "replaced":
        torch.save(torch.ones(5_000), tmp_path / "other")
        os.replace(tmp_path / "other", path)
    else:
        streamed.save(torch.ones(5_000), str(path))
    write_manifest(tmp_path)
    listed = json.loads((tmp_path / "hftrainer_manifest.json").read_text())["files"]
    assert listed["optimizer.pt"] == {"size": path.stat().st_size, "crc32": zlib.crc32(path.read_bytes())}
    assert damage(tmp_path) is None


@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_flush_of_a_streamed_file_fails(tmp_path, small_windows, monkeypatch, at):
    """Also when the disk recovers: what it has lost then is not written again."""
    calls, flush = [], manifest.flush_to_disk

    def fail_once(path):
        calls.append(path)
        if len(calls) == at:
            raise OSError(errno.EIO, "Input/output error")
        flush(path)

    monkeypatch.setattr(manifest, "flush_to_disk", fail_once)
    threads = set(threading.enumerate())
    with pytest.raises(OSError, match="Input/output error"):
        streamed.save([torch.zeros(2_000) for _ in range(10)], str(tmp_path / "optimizer.pt"))
    assert set(threading.enumerate()) <= threads  # those of other tests may end meanwhile


def test_a_streamed_file_on_a_full_disk(small_windows):
    threads = set(threading.enumerate())
    with pytest.raises(OSError, match="No space left on device"):
        streamed.save(torch.zeros(5_000), "/dev/full")
    assert set(threading.enumerate()) <= threads  # those of other tests may end meanwhile


@pytest.mark.parametrize("background", [False, True])
def test_checkpoints_with_streamed_files(tmp_path, small_windows, background):
    """The same contents as with files that torch writes at once, and a run resumes from them."""
    config = {"async_checkpoint": background}
    make_trainer(tmp_path / "streamed", lightning_config=config).train()
    for step in (3, 6, 9):
        assert damage(tmp_path / "streamed" / f"checkpoint-{step}") is None
    expected = torch.load(tmp_path / "streamed" / "checkpoint-9" / "optimizer.pt")
    trainer = make_trainer(tmp_path / "streamed", lightning_config=config)
    trainer.train(resume_from_checkpoint=str(tmp_path / "streamed" / "checkpoint-6"))
    again = torch.load(tmp_path / "streamed" / "checkpoint-9" / "optimizer.pt")
    assert again["state"].keys() == expected["state"].keys()
    for key, state in expected["state"].items():
        assert all(torch.equal(tensor, again["state"][key][name]) for name, tensor in state.items())


class Fails:
    """Fails in the place of a function for a file of some name, once."""

    def __init__(self, original, name, error):
        self.original, self.name, self.error, self.threads = original, name, error, []

    def __call__(self, *arguments):
        if not self.threads and self.name in map(os.path.basename, map(str, arguments)):
            self.threads.append(threading.current_thread())
            raise self.error
        return self.original(*arguments)


PLACES = {
    "writing": (streamed, "save", "optimizer.pt"),
    "flushing": (manifest, "flush_to_disk", "model.safetensors"),
    "checksum": (manifest, "_crc32", "optimizer.pt"),
}


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_an_error_of_the_storage_in_a_thread(tmp_path, monkeypatch, caplog, place, background):
    module, function, name = PLACES[place]
    fails = Fails(getattr(module, function), name, OSError(errno.EIO, "Input/output error"))
    monkeypatch.setattr(module, function, fails)
    make_trainer(tmp_path, lightning_config={"async_checkpoint": background}).train()
    assert fails.threads[0] is not threading.main_thread()
    assert "checkpoint-3 could not be written (Input/output error); its partial files were removed" in caplog.text
    assert names(tmp_path) == ["checkpoint-6", "checkpoint-9"]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_another_error_in_a_thread(tmp_path, monkeypatch, place, background):
    module, function, name = PLACES[place]
    monkeypatch.setattr(module, function, Fails(getattr(module, function), name, ZeroDivisionError("my own bug")))
    with pytest.raises(ZeroDivisionError, match="my own bug"):
        make_trainer(tmp_path, lightning_config={"async_checkpoint": background}).train()
    assert "checkpoint-3" not in names(tmp_path)
    assert not list(tmp_path.glob("tmp-*"))


def test_a_failed_checkpoint_waits_for_its_other_thread(tmp_path, monkeypatch, caplog):
    """Otherwise that thread would go on writing into a folder that is removed, or belongs to the next checkpoint."""
    original, written = streamed.save, []

    def slow(values, path):
        if "checkpoint-3" in path and path.endswith("optimizer.pt"):
            time.sleep(0.3)
            original(values, path)
            written.append(path)
        else:
            original(values, path)

    failing = Fails(staging.final_folder, "checkpoint-3", OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(streamed, "save", slow)
    monkeypatch.setattr(staging, "final_folder", failing)  # called as the weights are about to be written
    make_trainer(tmp_path).train()
    assert failing.threads == [threading.main_thread()]
    assert len(written) == 1
    assert "checkpoint-3 could not be written (No space left on device)" in caplog.text
    assert names(tmp_path) == ["checkpoint-6", "checkpoint-9"]


def test_overrides_find_the_files_that_transformers_has_written_before(tmp_path):
    found = {}

    class Own(Trainer):
        def _save_optimizer_and_scheduler(self, output_dir):
            found[self.state.global_step] = os.path.getsize(f"{output_dir}/model.safetensors")
            super()._save_optimizer_and_scheduler(output_dir)
            state = torch.load(f"{output_dir}/optimizer.pt")  # it is there when super() returns
            torch.save({**state, "mine": self.state.global_step}, f"{output_dir}/optimizer.pt")

    trainer = make_trainer(tmp_path)
    trainer.__class__ = Own
    trainer.train()
    assert list(found) == [3, 6, 9]
    for step in found:
        assert torch.load(tmp_path / f"checkpoint-{step}" / "optimizer.pt")["mine"] == step
        assert damage(tmp_path / f"checkpoint-{step}") is None


def publish_and_kill(folder, flushes):
    """Publish checkpoint-2 in a process that dies at a flush; whether it did."""
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
            os.fsync = flush
            staging.publish(str(folder / "checkpoint-2"))
            os._exit(0)
        os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_killed_while_files_are_flushed(tmp_path):
    """At each flush in turn: the checkpoint is whole, or the next run removes what is left of it."""
    found, killed, flushes = [], True, 0
    while killed:
        flushes += 1
        folder = tmp_path / str(flushes)
        staged = staging.staging_folder(str(folder / "checkpoint-2"))
        write_files(staged)
        killed = publish_and_kill(folder, flushes)
        assert not killed or not (folder / "checkpoint-2").exists() or damage(folder / "checkpoint-2") is None
        staging.clear_stale(str(folder))
        assert not list(folder.glob("tmp-*"))
        last = get_last_checkpoint(str(folder))
        assert names(folder) == ([] if last is None else ["checkpoint-2"])
        found.append(last is not None)
    assert flushes > 6  # each file, the manifest, and the folders
    assert found[:6] == [False] * 6
    assert found[-1]
    assert found == sorted(found)  # once it is whole, it stays
