"""What overrides and callbacks write into `checkpoint-N` themselves is in the checkpoint, as with transformers."""

import importlib
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest

from hftrainer.checkpointing.inspection import inspect_checkpoint
from hftrainer.checkpointing.writing import folder as folder_module, writer
from hftrainer.checkpointing.writing.files import read_manifest
from hftrainer.checkpointing.writing.folder import staging_folder
from tests.support.checkpoints import BACKGROUND, OnSave, SetFlag, train_to_end
from tests.support.known_differences import files_in
from tests.support.parity import assert_agree, assert_same_weights, build
from tests.support.small_models import make_plain


def make_class(before=None, after=lambda folder: None, asks=False):
    def make_class(library):
        class Own(library.Trainer):
            def _save_checkpoint(self, model, trial):
                folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
                if before:
                    folder.mkdir(parents=True, exist_ok=True)
                    before(folder)
                super()._save_checkpoint(model, trial)
                after(folder)

        if asks:
            Own._get_output_dir = lambda self, trial=None: super(Own, self)._get_output_dir(trial)
        return Own

    return make_class


def write_before(folder):
    (folder / "deeper").mkdir(exist_ok=True)
    (folder / "before.txt").write_text(f"before {folder.name}")
    (folder / "deeper" / "before.txt").write_text("deeper")
    (folder / "config.json").write_text("the Trainer's own takes its place if it writes one")


def write_after(folder):
    (folder / "after.txt").write_text(f"after {folder.name}")


WRITING, BEFORE = make_class(write_before, write_after), make_class(write_before)


def write_on_save(folder):
    (folder / "on_save.txt").write_text("there")


def make(folder, library="hftrainer", trainer_class=WRITING, model="plain", **settings):
    defaults = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "logging_steps": 1}
    return build(library, model, folder, trainer_class=trainer_class, **{**defaults, **settings})[0]


def in_manifest(folder):
    return set(read_manifest(folder))


def skip_reason(folder):
    return inspect_checkpoint(folder).skip_reason


@pytest.mark.parametrize("settings", [{}, {"save_only_model": True}, {"save_total_limit": 1}, BACKGROUND], ids=str)
@pytest.mark.parametrize("model", ["plain", "bert"])
def test_same_files_as_transformers(tmp_path, model, settings):
    def run(name):
        arguments = {} if name == "transformers" and settings is BACKGROUND else settings
        trainer = make(tmp_path / name, name, model=model, **arguments)
        trainer.add_callback(type("Saves", (OnSave, importlib.import_module(name).TrainerCallback), {})(write_on_save))
        trainer.train()
        return {folder.name: files_in(folder) for folder in (tmp_path / name).iterdir()}

    assert_agree(run)
    for folder in (tmp_path / "hftrainer").iterdir():
        for name in ("before", "after"):
            assert (folder / f"{name}.txt").read_text() == f"{name} {folder.name}"
        assert {"before.txt", "deeper/before.txt"} <= in_manifest(folder)
        assert not {"after.txt", "on_save.txt"} & in_manifest(folder)
        assert skip_reason(folder) is None


@pytest.mark.parametrize("asks", [False, True])
def test_file_copied_with_old_times_is_in_the_checkpoint(tmp_path, asks):
    source = tmp_path / "code.py"
    source.write_text("print(1)")
    os.utime(source, (10**9, 10**9))
    for _ in range(2):  # the second run finds the copies of the first
        make(tmp_path / "out", trainer_class=make_class(lambda folder: shutil.copy2(source, folder), asks=asks)).train()
        for folder in (tmp_path / "out").iterdir():
            assert (folder / "code.py").read_text() == "print(1)"
            assert "code.py" in in_manifest(folder)


@pytest.mark.parametrize("settings", [{}, BACKGROUND], ids=str)
def test_checkpoint_with_added_files_resumes(tmp_path, settings):
    whole = train_to_end(make(tmp_path / "whole", **settings))
    resumed = train_to_end(make(tmp_path / "resumed", **settings), tmp_path / "whole" / "checkpoint-2")
    assert_same_weights(resumed.model.state_dict(), whole.model.state_dict())
    again = train_to_end(make(tmp_path / "whole", max_steps=8, **settings), True)
    assert again.state.global_step == 8
    assert (tmp_path / "whole" / "checkpoint-8" / "before.txt").is_file()


def test_leftovers_of_a_killed_run_are_left_out(tmp_path):
    """Half a checkpoint looks like files that an override has begun to write."""
    half, stale = tmp_path / "checkpoint-4", {"optimizer.pt", "rng_state.pth", "stale.txt", "deeper.txt"}
    half.mkdir()
    for name in ("before.txt", *stale):
        (half / name).write_text("of a run that was killed")
    make(tmp_path, trainer_class=BEFORE, save_only_model=True).train()
    assert (half / "before.txt").read_text() == "before checkpoint-4"
    assert {*files_in(half)} >= {"before.txt", "deeper/before.txt", "model.safetensors"}
    assert not {*files_in(half)} & stale
    assert skip_reason(half) is None


def test_files_of_a_replaced_checkpoint_are_left_out(tmp_path):
    """Before, damage to the script's files is found."""
    make(tmp_path).train()
    (tmp_path / "checkpoint-4" / "before.txt").write_text("broken!!")
    assert "before.txt" in str(skip_reason(tmp_path / "checkpoint-4"))
    (tmp_path / "checkpoint-4" / "old.txt").write_text("old")
    make(tmp_path, trainer_class=make_class()).train()
    assert not {"old.txt", "before.txt", "after.txt"} & {*files_in(tmp_path / "checkpoint-4")}


def test_saving_a_step_twice_keeps_added_files(tmp_path):
    """Files of callbacks too, and files rewritten with the same contents."""
    saves = []

    trainer = make(tmp_path, max_steps=10, save_steps=10)
    for callback in (SetFlag("should_save", 10, "on_epoch_end"), OnSave(write_on_save), OnSave(saves.append)):
        trainer.add_callback(callback)
    trainer.train()
    assert saves == [tmp_path / "checkpoint-10"] * 2
    assert {*files_in(tmp_path / "checkpoint-10")} >= {"before.txt", "after.txt", "on_save.txt"}
    assert "on_save.txt" in in_manifest(tmp_path / "checkpoint-10")


def test_checkpoints_of_trials_keep_added_files(tmp_path):
    pytest.importorskip("optuna")
    trainer = make(tmp_path, trainer={"model_init": make_plain}, eval_strategy="steps", eval_steps=2)
    trainer.hyperparameter_search(lambda trial: {"seed": trial.suggest_int("seed", 1, 3)}, n_trials=2)
    for number in (0, 1):
        folder = tmp_path / f"run-{number}" / "checkpoint-4"
        assert (folder / "before.txt").read_text() == "before checkpoint-4"
        assert skip_reason(folder) is None


def test_added_files_are_copied_where_links_fail(tmp_path, monkeypatch):
    monkeypatch.setattr(writer.os, "link", mock.Mock(side_effect=OSError("no links here")))
    make(tmp_path).train()
    assert (tmp_path / "checkpoint-4" / "deeper" / "before.txt").read_text() == "deeper"
    assert skip_reason(tmp_path / "checkpoint-4") is None


def test_added_symbolic_links_stay_links(tmp_path):
    target = tmp_path / "base"
    target.write_text("the base model")
    links = make_class(lambda folder: (folder / "base").symlink_to(target))
    make(tmp_path / "out", trainer_class=links).train()
    link = tmp_path / "out" / "checkpoint-4" / "base"
    assert link.is_symlink() and link.read_text() == "the base model"


def test_failed_save_leaves_the_files_of_the_script(tmp_path, monkeypatch, caplog):
    original, staged = Path.rename, staging_folder(tmp_path / "checkpoint-4")

    def full(self, target):
        if self == staged:
            raise OSError(28, "No space left on device", str(self))
        return original(self, target)

    monkeypatch.setattr(Path, "rename", full)
    monkeypatch.setattr(folder_module, "_copy_in_order", lambda source, target: full(source, target))
    make(tmp_path, trainer_class=BEFORE).train()
    assert "could not be written" in caplog.text
    assert files_in(tmp_path / "checkpoint-4") == ["before.txt", "config.json", "deeper/before.txt"]
    assert skip_reason(tmp_path / "checkpoint-6") is None


def test_save_checkpoint_outside_a_run_leaves_old_files_out(tmp_path):
    """`_save_checkpoint` by itself, where no run says what is left over: only what the Trainer writes."""
    trainer = make(tmp_path, trainer_class=make_class())
    trainer.create_optimizer_and_scheduler(10)
    (tmp_path / "checkpoint-0").mkdir()
    (tmp_path / "checkpoint-0" / "stale.txt").write_text("?")
    trainer._save_checkpoint(trainer.model, None)
    assert "stale.txt" not in files_in(tmp_path / "checkpoint-0")
