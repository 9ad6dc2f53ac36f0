"""What overrides and callbacks write into `checkpoint-N` themselves is in the checkpoint, as with transformers."""

import importlib
import os
import shutil
from pathlib import Path

import pytest

import hftrainer
from hftrainer.checkpointing import added, staging
from hftrainer.checkpointing.manifest import read_manifest, why_unusable
from tests.support.differences import OWN_FILES
from tests.support.parity import LIBRARIES, assert_same_weights, build
from tests.support.tiny import make_plain, plain_data

ASYNC = {"lightning_config": {"async_checkpoint": True}}


def writing(library, before=True, after=True):
    """A Trainer that writes into its checkpoints, before super() makes them and after."""

    class Own(library.Trainer):
        def _save_checkpoint(self, model, trial):
            folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
            if before:
                (folder / "deeper").mkdir(parents=True, exist_ok=True)
                (folder / "before.txt").write_text(f"before {self.state.global_step}")
                (folder / "deeper" / "before.txt").write_text("deeper")
                (folder / "config.json").write_text("the Trainer's own takes its place if it writes one")
            super()._save_checkpoint(model, trial)
            if after:
                (folder / "after.txt").write_text(f"after {self.state.global_step}")

    return Own


class OnSave(hftrainer.TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        (Path(args.output_dir) / f"checkpoint-{state.global_step}" / "on_save.txt").write_text("there")


def make(folder, library="hftrainer", trainer_class=writing, model="plain", **settings):
    defaults = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "logging_steps": 1}
    return build(library, model, folder, trainer_class=trainer_class, **{**defaults, **settings})[0]


def files(folder):
    """Folder → its files, as they are named in it."""
    return {
        path.name: sorted(
            {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()} - set(OWN_FILES)
        )
        for path in Path(folder).iterdir()
    }


@pytest.mark.parametrize("settings", [{}, {"save_only_model": True}, {"save_total_limit": 1}, ASYNC], ids=str)
@pytest.mark.parametrize("model", ["plain", "bert"])
def test_same_files_as_transformers(tmp_path, model, settings):
    for library in LIBRARIES:
        given = {} if library == "transformers" and settings is ASYNC else settings
        trainer = make(tmp_path / library, library, model=model, **given)
        trainer.add_callback(type("Saves", (OnSave, importlib.import_module(library).TrainerCallback), {}))
        trainer.train()
    ours, theirs = (files(tmp_path / library) for library in ("hftrainer", "transformers"))
    assert ours == theirs
    for folder in (tmp_path / "hftrainer").iterdir():
        step = folder.name.removeprefix("checkpoint-")
        assert (folder / "before.txt").read_text() == f"before {step}"
        assert (folder / "after.txt").read_text() == f"after {step}"
        listed = {path.relative_to(folder).as_posix() for path in read_manifest(folder) or ()}
        assert {"before.txt", "deeper/before.txt"} <= listed
        assert not {"after.txt", "on_save.txt"} & listed
        assert why_unusable(folder) is None


def copying(source, asks_later):
    """A Trainer that copies a file with its old times into its checkpoints."""

    def make_class(library):
        class Own(library.Trainer):
            def _save_checkpoint(self, model, trial):
                folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, folder)
                super()._save_checkpoint(model, trial)

        if asks_later:
            Own._get_output_dir = lambda self, trial=None: super(Own, self)._get_output_dir(trial)
        return Own

    return make_class


@pytest.mark.parametrize("asks_later", [False, True])
def test_an_old_file_that_is_copied_with_its_times(tmp_path, asks_later):
    source = tmp_path / "code.py"
    source.write_text("print(1)")
    os.utime(source, (10**9, 10**9))
    for _ in range(2):  # the second run finds the copies of the first
        make(tmp_path / "out", trainer_class=copying(source, asks_later)).train()
        for folder in (tmp_path / "out").iterdir():
            assert (folder / "code.py").read_text() == "print(1)"
            assert Path("code.py") in {path.relative_to(folder) for path in read_manifest(folder)}


@pytest.mark.parametrize("settings", [{}, ASYNC], ids=str)
def test_resumed_from_such_a_checkpoint(tmp_path, settings):
    whole = make(tmp_path / "whole", **settings)
    whole.train()
    resumed = make(tmp_path / "resumed", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert_same_weights(resumed.model.state_dict(), whole.model.state_dict())
    again = make(tmp_path / "whole", max_steps=8, **settings)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 8
    assert (tmp_path / "whole" / "checkpoint-8" / "before.txt").is_file()


def test_damage_to_a_file_of_the_script_is_found(tmp_path):
    make(tmp_path).train()
    (tmp_path / "checkpoint-4" / "before.txt").write_text("broken!!")
    assert "before.txt" in str(why_unusable(tmp_path / "checkpoint-4"))


def test_leftovers_of_a_killed_run_are_not_taken(tmp_path):
    """Half a checkpoint looks like what an override has begun; what was there before the run stays out."""
    half = tmp_path / "checkpoint-4"
    half.mkdir()
    for name in ("before.txt", "optimizer.pt", "rng_state.pth", "stale.txt", "deeper.txt"):
        (half / name).write_text("of a run that was killed")
    trainer = make(tmp_path, trainer_class=lambda library: writing(library, after=False), save_only_model=True)
    trainer.train()
    assert (half / "before.txt").read_text() == "before 4"
    found = set(files(tmp_path)["checkpoint-4"])
    assert found >= {"before.txt", "deeper/before.txt", "model.safetensors"}
    assert not found & {"optimizer.pt", "rng_state.pth", "stale.txt", "deeper.txt"}
    assert why_unusable(half) is None


def test_files_of_an_earlier_whole_checkpoint_are_not_taken(tmp_path):
    """A run in a used folder replaces its checkpoints."""
    make(tmp_path).train()
    (tmp_path / "checkpoint-4" / "old.txt").write_text("old")
    make(tmp_path, trainer_class=lambda library: library.Trainer).train()
    assert not {"old.txt", "before.txt", "after.txt"} & set(files(tmp_path)["checkpoint-4"])


def test_same_step_saved_twice(tmp_path):
    """A file that is written again with the same contents is still the script's; what a callback added stays."""

    class Twice(hftrainer.TrainerCallback):
        def on_epoch_end(self, args, state, control, **kwargs):
            control.should_save = True

    trainer = make(tmp_path, max_steps=10, save_steps=10)
    trainer.add_callback(Twice)
    trainer.add_callback(OnSave)
    saves = []
    trainer.add_callback(type("Counts", (hftrainer.TrainerCallback,), {"on_save": lambda *_, **__: saves.append(1)}))
    trainer.train()
    assert len(saves) == 2
    assert {"before.txt", "after.txt", "on_save.txt"} <= set(files(tmp_path)["checkpoint-10"])
    assert "on_save.txt" in {path.name for path in read_manifest(tmp_path / "checkpoint-10")}


def test_hyperparameter_trials(tmp_path):
    """Each trial has a folder of its own."""
    pytest.importorskip("optuna")
    trainer = make(tmp_path, trainer={"model_init": make_plain}, eval_strategy="steps", eval_steps=2)
    trainer.hyperparameter_search(lambda trial: {"seed": trial.suggest_int("seed", 1, 3)}, n_trials=2)
    for number in (0, 1):
        folder = tmp_path / f"run-{number}" / "checkpoint-4"
        assert (folder / "before.txt").read_text() == "before 4"
        assert why_unusable(folder) is None


def test_copied_where_files_cannot_be_linked(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("no links here")

    monkeypatch.setattr(added.os, "link", refuse)
    make(tmp_path).train()
    assert (tmp_path / "checkpoint-4" / "deeper" / "before.txt").read_text() == "deeper"
    assert why_unusable(tmp_path / "checkpoint-4") is None


def test_links_are_taken_as_links(tmp_path):
    target = tmp_path / "base"
    target.write_text("the base model")

    class Links(hftrainer.Trainer):
        def _save_checkpoint(self, model, trial):
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            folder.mkdir(parents=True, exist_ok=True)
            os.symlink(target, folder / "base")
            super()._save_checkpoint(model, trial)

    make(tmp_path / "out", trainer_class=lambda _: Links).train()
    link = tmp_path / "out" / "checkpoint-4" / "base"
    assert link.is_symlink() and link.read_text() == "the base model"


def test_storage_that_fails_leaves_the_files_of_the_script(tmp_path, monkeypatch, caplog):
    original = Path.rename

    def full(self, target):
        if self.parent.name.startswith("tmp-checkpoint-4") and self.name == "checkpoint-4":
            raise OSError(28, "No space left on device", str(self))
        return original(self, target)

    monkeypatch.setattr(Path, "rename", full)
    monkeypatch.setattr(staging, "_copy_in_order", lambda source, target: full(source, target))
    make(tmp_path, trainer_class=lambda library: writing(library, after=False)).train()
    assert "could not be written" in caplog.text
    assert set(files(tmp_path)["checkpoint-4"]) == {"before.txt", "config.json", "deeper/before.txt"}
    assert why_unusable(tmp_path / "checkpoint-6") is None


def test_outside_a_run(tmp_path):
    """`_save_checkpoint` by itself, where no run says what is left over: only what the Trainer writes."""
    args = hftrainer.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    trainer = hftrainer.Trainer(make_plain(), args, train_dataset=plain_data())
    trainer.create_optimizer_and_scheduler(10)
    (tmp_path / "checkpoint-0").mkdir()
    (tmp_path / "checkpoint-0" / "stale.txt").write_text("?")
    trainer._save_checkpoint(trainer.model, None)
    assert "stale.txt" not in files(tmp_path)["checkpoint-0"]
