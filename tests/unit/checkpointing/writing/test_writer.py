"""`CheckpointWriter` publishes, announces or discards a checkpoint."""

import contextlib
import errno
import threading

import pytest
import torch

from hftrainer.checkpointing.writing import writer as writer_module
from hftrainer.checkpointing.writing.folder import CheckpointFolder
from hftrainer.checkpointing.writing.writer import CheckpointWriter, is_storage_error
from hftrainer.errors import CheckpointNotWritten
from tests.support.jobs import names_in

DISK_FULL = OSError(errno.ENOSPC, "No space left")


class ObservedWriter:
    """A writer of checkpoints in `folder`, and the events that it reports, in order."""

    def __init__(self, folder, **settings):
        self.writer, self.folder, self.events = CheckpointWriter(**settings), folder, []

    def checkpoint(self, step):
        name = f"checkpoint-{step}"

        def on_complete():
            assert name in names_in(self.folder), "older checkpoints are deleted only when the new one has its name"
            self.events.append(f"{name} is published")

        def on_failure():
            assert threading.current_thread() is threading.main_thread()
            self.events.append(f"{name} has failed")

        return self.writer.checkpoint(str(self.folder / name), on_complete=on_complete, on_failure=on_failure)

    def write(self, step, write=lambda _: None):
        """Write a checkpoint with one call of `write`, and ask to be told when it is complete."""
        with self.checkpoint(step) as staging:
            self.writer.call_or_defer(write, staging)
        self.announce_when_complete(step)

    def announce_when_complete(self, step):
        def announce():
            assert threading.current_thread() is threading.main_thread()
            self.events.append(f"checkpoint-{step} is announced")

        self.writer.call_when_complete(announce)

    def write_and_wait(self, step, write=lambda _: None):
        self.write(step, write)
        self.writer.wait()


@pytest.fixture
def make_observed(tmp_path):
    with contextlib.ExitStack() as stack:

        def make(**settings):
            observed = ObservedWriter(tmp_path, **settings)
            stack.callback(observed.writer.close_ignoring_errors)
            return observed

        yield make


def raise_error(error):
    raise error


def test_checkpoint_is_published_when_its_block_ends(make_observed, tmp_path):
    observed = make_observed()
    with observed.checkpoint(1) as staging:
        observed.writer.save({"x": 1}, f"{staging}/optimizer.pt")
        assert "checkpoint-1" not in names_in(tmp_path) and not observed.writer.defers_writes
    assert observed.events == ["checkpoint-1 is published"] and names_in(tmp_path) == ["checkpoint-1"]
    assert torch.load(tmp_path / "checkpoint-1" / "optimizer.pt") == {"x": 1}


def test_background_checkpoint_has_the_values_of_its_step_and_is_announced_by_poll(make_observed, tmp_path):
    observed, weights, is_allowed = make_observed(is_async=True), torch.zeros(2), threading.Event()
    writer = observed.writer
    with observed.checkpoint(1) as staging:
        assert writer.defers_writes
        writer.call_or_defer(lambda _: is_allowed.wait(timeout=120), None)
        writer.save(weights, f"{staging}/weights.pt")
    observed.announce_when_complete(1)
    weights += 1
    writer.poll()
    assert observed.events == [] and not writer.defers_writes
    is_allowed.set()
    while "checkpoint-1 is announced" not in observed.events:
        writer.poll()
    writer.poll()
    assert observed.events == ["checkpoint-1 is published", "checkpoint-1 is announced"]
    assert torch.equal(torch.load(tmp_path / "checkpoint-1" / "weights.pt"), torch.zeros(2))


@pytest.mark.parametrize("is_async", [False, True])
def test_storage_error_skips_one_checkpoint(make_observed, tmp_path, caplog, is_async):
    """In the background, the error is kept until the next checkpoint begins."""
    observed = make_observed(is_async=is_async)
    observed.write(1, lambda _: raise_error(DISK_FULL))
    assert observed.events == ([] if is_async else ["checkpoint-1 has failed"])
    observed.write_and_wait(2)
    assert observed.events == ["checkpoint-1 has failed", "checkpoint-2 is published", "checkpoint-2 is announced"]
    assert names_in(tmp_path) == ["checkpoint-2"] and not observed.writer.has_failed
    assert "checkpoint-1 could not be written (No space left); its partial files were removed." in caplog.text


def test_checkpoint_whose_folder_cannot_be_made_is_skipped(make_observed, tmp_path, monkeypatch):
    observed = make_observed()
    monkeypatch.setattr(CheckpointFolder, "begin", lambda folder: raise_error(DISK_FULL))
    with observed.checkpoint(1) as staging:
        assert staging is None
    assert observed.events == ["checkpoint-1 has failed"] and observed.writer.has_failed


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("error", "stop_on_error", "raised", "failures"),
    [
        (DISK_FULL, True, CheckpointNotWritten, ["checkpoint-2 has failed"]),
        (ZeroDivisionError(), False, ZeroDivisionError, []),
    ],
)
def test_error_that_stops_training_leaves_no_partial_checkpoint(
    make_observed, tmp_path, error, stop_on_error, raised, failures, is_async
):
    observed = make_observed(is_async=is_async, stop_on_error=stop_on_error)
    observed.write(1)
    with pytest.raises(raised):
        observed.write_and_wait(2, lambda _: raise_error(error))
    assert names_in(tmp_path) == ["checkpoint-1"]
    assert observed.events == ["checkpoint-1 is published", "checkpoint-1 is announced", *failures]


@pytest.mark.parametrize("fails", [False, True])
def test_checkpoint_waits_for_its_other_thread(make_observed, monkeypatch, fails):
    """Otherwise that thread would write into a folder that is removed, or belongs to the next checkpoint."""
    observed, is_awaited, wait = make_observed(), threading.Event(), writer_module.wait
    monkeypatch.setattr(writer_module, "wait", lambda futures: is_awaited.set() or wait(futures))

    def write(path):
        if is_awaited.wait(timeout=120):
            torch.save(1, path)
            observed.events.append("optimizer.pt is written")

    with observed.checkpoint(1) as staging:
        with observed.writer.write_in_thread():
            observed.writer.call_or_defer(write, f"{staging}/optimizer.pt")
        if fails:
            raise DISK_FULL
    assert observed.events == ["optimizer.pt is written", f"checkpoint-1 {'has failed' if fails else 'is published'}"]


def test_error_of_the_other_thread_is_that_of_the_checkpoint(make_observed, tmp_path):
    observed = make_observed()
    with observed.checkpoint(1), observed.writer.write_in_thread():
        observed.writer.call_or_defer(raise_error, DISK_FULL)
    assert observed.events == ["checkpoint-1 has failed"] and names_in(tmp_path) == []


def test_checkpoint_stays_if_older_ones_cannot_be_deleted(make_observed, tmp_path, caplog):
    writer = make_observed().writer
    path = tmp_path / "checkpoint-1"
    with writer.checkpoint(str(path), on_complete=lambda: raise_error(DISK_FULL), on_failure=pytest.fail):
        pass
    assert path.is_dir() and not writer.has_failed
    assert "Older checkpoints could not be deleted" in caplog.text


def test_closed_writer_logs_its_error_and_writes_again(make_observed, caplog):
    observed = make_observed(is_async=True)
    observed.write(1, lambda _: raise_error(ZeroDivisionError("my own bug")))
    observed.writer.close_ignoring_errors()
    assert "Writing the current checkpoint failed too." in caplog.text and "my own bug" in caplog.text
    observed.write(2)
    observed.writer.close()
    assert observed.events == ["checkpoint-2 is published", "checkpoint-2 is announced"]


@pytest.mark.parametrize(
    ("error", "is_of_storage"),
    [
        (OSError(errno.ENOSPC, "full"), True),
        (FileNotFoundError(errno.ENOENT, "missing", "/out/checkpoint-1/a"), True),
        (FileNotFoundError(errno.ENOENT, "missing", "/out2/vocab"), False),
        (FileNotFoundError(errno.ENOENT, "missing"), False),
        (ConnectionError("hub"), False),
        (Exception("No space left on device (os error 28)"), True),
        (Exception("something else"), False),
        (RuntimeError("PytorchStreamWriter failed writing file"), True),
        (RuntimeError("size mismatch"), False),
    ],
)
def test_storage_errors_are_told_from_others(error, is_of_storage):
    assert is_storage_error(error, "/out") is is_of_storage
