"""Another process writes large checkpoints in the background: the same files, and no harm if it is killed."""

import errno
import functools
import os
import signal
import sys
import types

import pytest
import torch
from transformers import BertForSequenceClassification

from hftrainer.checkpointing.writing import files, writer
from hftrainer.checkpointing.writing.writer_process import CannotUnpack, SharedCopies, WriterProcess
from tests.support.checkpoints import BACKGROUND, AtStep, make_trainer, train_to_end
from tests.support.jobs import names_in
from tests.support.small_models import MODELS


@pytest.fixture
def use_process_for_any_size(monkeypatch):
    monkeypatch.setattr(writer, "_MIN_BYTES_FOR_PROCESS", 0)


@pytest.fixture
def process():
    copies = SharedCopies()
    started = WriterProcess(copies)
    yield started, copies
    started.close()
    copies.close()


def process_of(trainer):
    return trainer._hftrainer.checkpoint_writer._process


@pytest.mark.usefixtures("use_process_for_any_size")
@pytest.mark.parametrize("model", ["plain", "bert"])
def test_process_writes_the_same_files(tmp_path, model):
    used = []
    train_to_end(make_trainer(tmp_path / "at once", model))
    trainer = make_trainer(tmp_path / "process", model, **BACKGROUND)
    trainer.add_callback(AtStep(9, lambda: used.append(process_of(trainer)._process is not None)))
    train_to_end(trainer)
    assert used == [True]
    for step in (3, 6, 9):
        ours, theirs = (tmp_path / kind / f"checkpoint-{step}" for kind in ("process", "at once"))
        assert names_in(ours) == names_in(theirs)
        for name in set(names_in(ours)) - {"hftrainer_manifest.json", "training_args.bin", "progress.pt"}:
            assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name


@pytest.mark.usefixtures("use_process_for_any_size")
def test_killed_process_costs_one_checkpoint_and_is_started_again(tmp_path, caplog):
    trainer = make_trainer(tmp_path, **BACKGROUND)

    def kill():
        trainer._hftrainer.checkpoint_writer.wait()
        os.kill(process_of(trainer)._process.pid, signal.SIGKILL)
        process_of(trainer)._process.wait()

    trainer.add_callback(AtStep(5, kill))
    assert train_to_end(trainer).state.global_step == 9
    assert names_in(tmp_path) == ["checkpoint-3", "checkpoint-9"]
    assert (
        "checkpoint-6 could not be written (the process that writes checkpoints has ended by signal 9)" in caplog.text
    )


def test_errors_reach_the_trainer_and_signals_are_ignored(process, tmp_path):
    started, copies = process
    state = copies.copy({"x": torch.arange(5.0), "y": 3})
    full = functools.partial(files.save, path="/dev/full")
    with pytest.raises(OSError, match="No space left on device") as raised:
        started.run([started.pack(full, state)], tmp_path)
    assert raised.value.errno == errno.ENOSPC
    pid = started._process.pid
    for number in (signal.SIGINT, signal.SIGTERM):  # of a launcher, to all its processes
        os.kill(pid, number)
    assert (
        started.run([started.pack(functools.partial(files.save, path=str(tmp_path / "x.pt")), state)], tmp_path) == {}
    )
    assert torch.equal(torch.load(tmp_path / "x.pt")["x"], torch.arange(5.0))
    assert started._process.pid == pid


def test_memory_is_reused_and_written_files_are_described(process, tmp_path):
    started, copies = process
    path = str(tmp_path / "state.pt")
    for round_ in range(3):
        copies.begin()
        whole = torch.full((5 << 20,), float(round_))
        state = copies.copy({"whole": whole, "half": whole[: 5 << 19], "empty": torch.empty(0), "bits": whole.bool()})
        assert copies.size == 25 << 20
        entries = started.run([started.pack(functools.partial(files.save, path=path), state)], tmp_path)
        assert entries == {path: files.Entry(os.path.getsize(path), files.crc32_of_file(path))}
        loaded = torch.load(path)
        assert all(torch.equal(loaded[name], value) for name, value in state.items())
        assert loaded["half"].untyped_storage().data_ptr() == loaded["whole"].untyped_storage().data_ptr()
    assert copies.size <= os.fstat(copies.descriptor).st_size <= copies.size + 8192


class Own(BertForSequenceClassification):
    def save_pretrained(self, *args, **kwargs):
        kwargs["max_shard_size"] = "5KB"
        super().save_pretrained(*args, **kwargs)


def test_class_that_the_process_cannot_import_is_reported(process, tmp_path):
    started, _ = process
    module = types.ModuleType("only_here")
    exec("class Kept:\n    pass", vars(module))
    sys.modules["only_here"] = module
    call = started.pack(functools.partial(files.save, path=str(tmp_path / "x.pt")), {"x": module.Kept()})
    del sys.modules["only_here"]
    with pytest.raises(CannotUnpack, match="ModuleNotFoundError: No module named 'only_here'"):
        started.run([call], tmp_path)
    assert not (tmp_path / "x.pt").exists()


@pytest.mark.usefixtures("use_process_for_any_size")
def test_model_with_its_own_save_pretrained_is_written_in_a_thread(tmp_path):
    """A thread writes it, since its `save_pretrained` may depend on what is in this process."""
    make_model, _ = MODELS["bert"]
    trainer = make_trainer(tmp_path, "bert", trainer={"model": Own(make_model().config)}, **BACKGROUND)
    used = []
    trainer.add_callback(AtStep(8, lambda: used.append(process_of(trainer))))
    train_to_end(trainer)
    assert used == [None]
    assert "model.safetensors.index.json" in names_in(tmp_path / "checkpoint-9")
