"""Damaged checkpoints: each either gives way to an older whole one or is refused by the file's name, never believed."""

import contextlib
import logging
import os
import shutil

import pytest
import torch

from hftrainer import Trainer, TrainerCallback, TrainingArguments
from hftrainer.errors import CheckpointNotFound
from hftrainer.trainer_utils import get_last_checkpoint
from tests.support.checkpoints import empty, flip, grow, truncate
from tests.support.tiny import make_bert, make_plain, plain_data, text_data


def make_trainer(folder, model="plain", **settings):
    defaults = {
        "max_steps": 9,
        "per_device_train_batch_size": 4,
        "save_steps": 3,
        "logging_steps": 3,
        "disable_tqdm": True,
        "use_cpu": True,
    }
    args = TrainingArguments(str(folder), **{**defaults, **settings})
    made, data = (make_plain(), plain_data()) if model == "plain" else (make_bert(), text_data())
    return Trainer(made, args, train_dataset=data, eval_dataset=data[:9])


@pytest.fixture(scope="module", params=["plain", "bert"])
def run(request, tmp_path_factory):
    """A finished run of nine steps, whose weights every resumed one must reach."""
    folder = tmp_path_factory.mktemp("run")
    trainer = make_trainer(folder, request.param)
    trainer.train()
    return request.param, folder, {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


HARM = {"truncated": truncate, "flipped": flip, "deleted": os.remove, "empty": empty, "grown": grow}


def files_of(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("harm", HARM)
def test_every_file(run, tmp_path, harm, caplog):
    """Of the newest checkpoint, each file in turn."""
    model, source, expected = run
    for name in files_of(source / "checkpoint-6"):
        folder = tmp_path / "copy"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        shutil.rmtree(folder / "checkpoint-9")
        HARM[harm](folder / "checkpoint-6" / name)
        caplog.clear()
        resumed = make_trainer(folder, model)
        with caplog.at_level(logging.WARNING):
            resumed.train(resume_from_checkpoint=True)
        if name.name == "hftrainer_manifest.json" and harm == "deleted":  # then the folder is like one of transformers
            assert not caplog.text
        else:
            assert str(folder / "checkpoint-6" / name) in caplog.text, name
            shutil.rmtree(folder / "checkpoint-6")
            shutil.copytree(source / "checkpoint-6", folder / "checkpoint-6")
            HARM[harm](folder / "checkpoint-6" / name)
            by_name = make_trainer(folder, model)
            if harm == "deleted" and str(name) not in ("model.safetensors", "trainer_state.json"):  # can be meant
                by_name.train(resume_from_checkpoint=str(folder / "checkpoint-6"))
                assert f"was changed since it was written (removed: {name}). It is used" in caplog.text
                continue
            with pytest.raises(CheckpointNotFound, match="(damaged|lacks).*" + str(name).replace(".", r"\.")):
                by_name.train(resume_from_checkpoint=str(folder / "checkpoint-6"))
        for key, tensor in resumed.model.state_dict().items():
            assert torch.equal(tensor, expected[key]), name


@pytest.mark.parametrize("harm", ["truncated", "empty", "deleted"])
def test_folders_of_transformers(run, tmp_path, harm, caplog):
    """Without a manifest damage is known from the files themselves."""
    model, source, expected = run
    needed = {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"}
    for name in sorted(needed):
        folder = tmp_path / "copy"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        shutil.rmtree(folder / "checkpoint-9")
        for checkpoint in folder.glob("checkpoint-*"):
            (checkpoint / "hftrainer_manifest.json").unlink()
        HARM[harm](folder / "checkpoint-6" / name)
        caplog.clear()
        resumed = make_trainer(folder, model)
        with caplog.at_level(logging.WARNING):
            resumed.train(resume_from_checkpoint=True)
        assert name in caplog.text or "holds no weights" in caplog.text or "lacks the optimizer" in caplog.text
        same = all(torch.equal(tensor, expected[key]) for key, tensor in resumed.model.state_dict().items())
        # What save_only_model leaves out may be missing; that is said, and is another run.
        assert same or (harm == "deleted" and name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"))


def test_nothing_whole_is_left(run, tmp_path):
    model, source, _ = run
    folder = tmp_path / "copy"
    shutil.copytree(source, folder)
    for checkpoint in folder.glob("checkpoint-*"):
        truncate(checkpoint / "optimizer.pt")
    with pytest.raises(CheckpointNotFound, match="no whole checkpoint-xxx folder"):
        make_trainer(folder, model).train(resume_from_checkpoint=True)
    assert get_last_checkpoint(str(folder)) is None


def test_auto(tmp_path):
    """From the beginning where there is nothing; then from the newest whole one."""
    trainer = make_trainer(tmp_path, max_steps=3)
    trainer.train(resume_from_checkpoint="auto")
    assert trainer.state.global_step == 3
    truncate(tmp_path / "checkpoint-3" / "optimizer.pt")
    make_trainer(tmp_path, max_steps=6).train(resume_from_checkpoint="auto")
    begun = []

    class Notes(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            begun.append(state.global_step)

    last = make_trainer(tmp_path, max_steps=9)
    truncate(tmp_path / "checkpoint-6" / "optimizer.pt")
    last.add_callback(Notes)
    last.train(resume_from_checkpoint="auto")
    assert begun == [3]  # checkpoint-3 was written anew


def test_rotation_spares_the_last_whole_one(tmp_path):
    """Two newer ones were damaged by something else; the last whole one stays until there is another."""
    make_trainer(tmp_path).train()
    for step in (6, 9):
        truncate(tmp_path / f"checkpoint-{step}" / "optimizer.pt")

    class Looks(Trainer):
        def _save_checkpoint(self, model, trial):
            super()._save_checkpoint(model, trial)
            assert get_last_checkpoint(str(tmp_path)) is not None

    from hftrainer.checkpointing.folders import rotate_checkpoints

    rotate_checkpoints(str(tmp_path), 1, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3", "checkpoint-9"]
    resumed = make_trainer(tmp_path, save_total_limit=1)
    resumed.__class__ = Looks
    resumed.train(resume_from_checkpoint=True)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-9"]


def test_rotation_deletes_nothing_of_others(tmp_path):
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "notes.txt").write_text("mine")
    (tmp_path / "tmp-checkpoint").mkdir()
    (tmp_path / "checkpoint-best").mkdir()
    make_trainer(tmp_path, save_total_limit=1).train()
    left = {"checkpoint-1", "tmp-checkpoint", "checkpoint-best", "checkpoint-9"}
    assert {path.name for path in tmp_path.iterdir()} == left


def test_a_best_model_that_was_moved(tmp_path, caplog):
    settings = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True}
    make_trainer(tmp_path / "a", **settings).train()
    shutil.move(tmp_path / "a", tmp_path / "b")
    resumed = make_trainer(tmp_path / "b", max_steps=12, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert "is missing: " in caplog.text
    assert resumed.state.best_model_checkpoint.startswith(str(tmp_path / "b"))
    damaged = make_trainer(tmp_path / "c", learning_rate=1.0, **settings)

    class Harms(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if "train_loss" in logs:
                truncate(tmp_path / "c" / os.path.basename(state.best_model_checkpoint) / "model.safetensors")

    damaged.add_callback(Harms)
    damaged.train()  # hours of training are not lost for it
    assert "The best model cannot be loaded, and the last one is kept" in caplog.text


# ---- Storage that fails ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(folder, size):
    """A file system of a size, or a skipped test where this process may not mount one."""
    folder.mkdir()
    if os.system(f"mount -t tmpfs -o size={size} tmpfs {folder} 2>/dev/null"):
        pytest.skip("this process may not mount a file system")
    try:
        yield
    finally:
        os.system(f"umount {folder}")


@pytest.mark.parametrize("background", [False, True])
def test_full_disk(tmp_path, caplog, background):
    folder = tmp_path / "disk"
    config = {"async_checkpoint": background}
    with small_disk(folder, "200k"):
        filler = folder / "filler"

        class Fills(TrainerCallback):
            def on_save(self, args, state, control, **kwargs):
                if state.global_step == 3:
                    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                        while True:
                            file.write(b"x" * 1000)

            def on_step_begin(self, args, state, control, **kwargs):
                if state.global_step == 8:
                    trainer._hftrainer.checkpoint_writer.wait()
                    filler.unlink()

        trainer = make_trainer(folder, lightning_config=config)
        trainer.add_callback(Fills)
        assert trainer.train().global_step == 9
        assert {path.name for path in folder.iterdir()} == {"checkpoint-3", "checkpoint-9"}
        assert "checkpoint-6 could not be written (No space left on device)" in caplog.text
        assert "Training continues" in caplog.text
        assert get_last_checkpoint(str(folder)) == str(folder / "checkpoint-9")


def test_full_disk_at_the_end_of_a_run_that_keeps_one_checkpoint(tmp_path):
    """The best stays alone when a run ends, but not when the end could not be saved: the newest is worth more."""
    folder = tmp_path / "disk"
    with small_disk(folder, "500k"):

        class Fills(TrainerCallback):
            def on_save(self, args, state, control, **kwargs):
                if state.global_step == 6:
                    with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
                        while True:
                            file.write(b"x" * 1000)

        best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 3, "greater_is_better": True}
        trainer = make_trainer(folder, save_total_limit=1, **best)
        trainer.add_callback(Fills)
        trainer.train()
        (folder / "filler").unlink()
        assert trainer.state.best_global_step == 3
        assert {path.name for path in folder.iterdir()} == {"checkpoint-3", "checkpoint-6"}
        make_trainer(folder, save_total_limit=1, **best).train(resume_from_checkpoint="auto")
        assert {path.name for path in folder.iterdir()} == {"checkpoint-3"}


@pytest.mark.parametrize("kind", ["readonly", "limit"])
def test_other_failures_of_the_storage(tmp_path, caplog, kind, monkeypatch):
    """A folder that became read-only, and a file that may not grow, as under a quota."""
    import resource
    import signal

    trainer = make_trainer(tmp_path / "out")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Hinders(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            on = state.global_step == 4
            if kind == "limit" and state.global_step in (4, 7):
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000 if on else soft, hard))
            elif kind == "readonly" and state.global_step in (4, 7):
                os.rename(args.output_dir, tmp_path / "away") if on else os.remove(args.output_dir)
                (tmp_path / "out").touch() if on else os.rename(tmp_path / "away", args.output_dir)

    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        trainer.add_callback(Hinders)
        assert trainer.train().global_step == 9
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert "checkpoint-6 could not be written" in caplog.text
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"checkpoint-3", "checkpoint-9"}


def test_stop_when_asked(tmp_path):
    from hftrainer.errors import CheckpointNotWritten

    trainer = make_trainer(tmp_path / "out", lightning_config={"on_save_error": "stop"})
    (tmp_path / "out").rmdir()
    (tmp_path / "out").touch()
    with pytest.raises(CheckpointNotWritten, match="checkpoint-3 could not be written"):
        trainer.train()
    assert trainer.state.global_step == 3


def test_without_renaming_folders(tmp_path, monkeypatch, caplog):
    """As on some network file systems: files are copied, `trainer_state.json` last."""
    import pathlib

    def refuse(self, target):
        raise OSError(18, "Invalid cross-device link")

    order = []
    original = shutil.copyfile

    def copy(source, target):
        order.append(os.path.basename(target))
        return original(source, target)

    monkeypatch.setattr(pathlib.Path, "rename", refuse)
    monkeypatch.setattr(shutil, "copyfile", copy)
    make_trainer(tmp_path, save_total_limit=1).train()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-9"]
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-9")
    assert order[-2:] == ["hftrainer_manifest.json", "trainer_state.json"]
    assert "copying its files one by one" in caplog.text
