"""What a reviewer with fresh eyes found to lose a run, each as a test."""

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from hftrainer import Trainer, TrainerCallback, TrainingArguments
from hftrainer.checkpointing import staging
from hftrainer.checkpointing import weights as weights_module
from hftrainer.checkpointing.folders import rotate_checkpoints
from hftrainer.trainer_utils import get_last_checkpoint
from tests.reliability.test_background import BACKGROUND, make_trainer
from tests.tiny import Plain, plain_data


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def test_memory_runs_out_after_a_resume(tmp_path):
    """Starting again with smaller batches needs the checkpoint that the run goes on from."""

    class Hungry(Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            if self.state.global_step >= 5 and len(inputs["labels"]) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().compute_loss(model, inputs, *args, **kwargs)

    make_trainer(tmp_path, max_steps=3).train()
    trainer = make_trainer(tmp_path, auto_find_batch_size=True, save_total_limit=1, save_steps=4)
    trainer.__class__ = Hungry
    assert trainer.train(resume_from_checkpoint=True).global_step == 9
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-9"]


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("fails", [4, 5, 6, 7])
def test_place_after_an_error(tmp_path, accumulation, fails):
    """Without random numbers of the model, a run that goes on after an error is the undisturbed one."""

    class Fails(Plain):
        calls, fails = 0, None

        def forward(self, x, labels=None):
            if self.training:
                Fails.calls += 1
                if Fails.calls == Fails.fails:
                    raise RuntimeError("my own bug")
            return super().forward(x, labels)

    def train(folder, number=None, **options):
        torch.manual_seed(1)
        Fails.calls, Fails.fails = 0, number
        model = Fails()
        model.layers[3].p = 0.0  # the dropout
        args = TrainingArguments(
            str(folder),
            num_train_epochs=2,
            per_device_train_batch_size=4,
            use_cpu=True,
            disable_tqdm=True,
            gradient_accumulation_steps=accumulation,
            learning_rate=1e-2,
        )
        trainer = Trainer(model, args, train_dataset=plain_data())
        trainer.train(**options)
        return trainer

    whole = train(tmp_path / "whole")
    with pytest.raises(RuntimeError, match="my own bug"):
        train(tmp_path / "out", fails)
    resumed = train(tmp_path / "out", resume_from_checkpoint=True)
    assert resumed.state.global_step == whole.state.global_step
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_adapters_in_the_background(tmp_path, monkeypatch):
    """However slow the writing is, they are those of their step."""
    original = weights_module.save_weights

    def slow(*args, **kwargs):
        time.sleep(0.3)
        original(*args, **kwargs)

    make_trainer(tmp_path / "now", "peft").train()
    monkeypatch.setattr("hftrainer.trainer.save_weights", slow)
    make_trainer(tmp_path / "later", "peft", lightning_config=BACKGROUND).train()
    from safetensors.torch import load_file

    for step in (3, 6, 9):
        now, later = (
            load_file(tmp_path / name / f"checkpoint-{step}/adapter_model.safetensors") for name in ("now", "later")
        )
        assert all(torch.equal(tensor, later[name]) for name, tensor in now.items())


@pytest.mark.parametrize("max_steps", [8, 14])
def test_more_steps_after_an_end_in_mid_epoch(tmp_path, max_steps):
    settings = {"save_strategy": "epoch"}
    make_trainer(tmp_path, max_steps=6, **settings).train()
    further = make_trainer(tmp_path, max_steps=max_steps, **settings)
    assert further.train(resume_from_checkpoint=True).global_step == max_steps
    assert further.state.epoch == pytest.approx(max_steps / 10)


def test_training_again_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    original = staging.publish

    def slow(folder):
        time.sleep(0.5)
        original(folder)

    class Fails(TrainerCallback):
        failed = False

        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            if state.global_step == 4 and not Fails.failed:
                Fails.failed = True
                raise RuntimeError("my own bug")

    monkeypatch.setattr(staging, "publish", slow)
    trainer = make_trainer(tmp_path, callbacks=[Fails()], lightning_config=BACKGROUND)
    with pytest.raises(RuntimeError, match="my own bug"):
        trainer.train()
    assert names(tmp_path) == ["checkpoint-3"]
    assert trainer.train(resume_from_checkpoint=True).global_step == 9


def test_rotation_keeps_what_was_just_written(tmp_path):
    make_trainer(tmp_path).train()
    os.utime(tmp_path / "checkpoint-3", (time.time() + 60,) * 2)  # somebody wrote into the older one
    rotate_checkpoints(str(tmp_path), 1, None, [str(tmp_path / "checkpoint-9")])
    assert "checkpoint-9" in names(tmp_path)


@pytest.mark.parametrize("renames", [True, False])
@pytest.mark.parametrize("moment", range(4))
def test_interrupted_while_one_is_replaced(tmp_path, monkeypatch, renames, moment):
    """A second Ctrl-C between two renamings leaves one of the two checkpoints of the step in its place."""
    make_trainer(tmp_path, max_steps=3).train()
    left, original = [moment], Path.rename
    copy = shutil.copyfile

    def rename(self, target):
        if not renames:
            raise OSError(18, "Invalid cross-device link")
        if left[0] == 0:
            left[0] -= 1
            raise KeyboardInterrupt
        left[0] -= 1
        return original(self, target)

    def copyfile(source, target):
        if not renames and left[0] == 0:
            left[0] -= 1
            raise KeyboardInterrupt
        left[0] -= 1
        return copy(source, target)

    monkeypatch.setattr(Path, "rename", rename)
    monkeypatch.setattr(shutil, "copyfile", copyfile)
    with contextlib.suppress(KeyboardInterrupt):
        make_trainer(tmp_path, max_steps=3).train()
    monkeypatch.undo()
    staging.clear_stale(str(tmp_path))
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-3")
    assert names(tmp_path) == ["checkpoint-3"]


def test_a_half_copied_one_does_not_hide_the_whole(tmp_path):
    """Where folders cannot be renamed, a process may die with half of the target there."""
    make_trainer(tmp_path, max_steps=3).train()
    outer = tmp_path / "tmp-checkpoint-3"
    outer.mkdir()
    shutil.copytree(tmp_path / "checkpoint-3", outer / "checkpoint-3")
    (tmp_path / "checkpoint-3" / "trainer_state.json").unlink()
    staging.clear_stale(str(tmp_path))
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-3")


def test_a_signal_after_the_last_step(tmp_path):
    class Late(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit) as left:
        make_trainer(tmp_path, callbacks=[Late()]).train()
    assert left.value.code == 143


def test_a_signal_in_a_step_whose_save_failed(tmp_path, monkeypatch):
    original, tries = staging.publish, []

    def once(folder):
        tries.append(folder)
        if len(tries) == 1:
            raise OSError(28, "No space left on device")
        original(folder)

    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(staging, "publish", once)
    with pytest.raises(SystemExit):
        make_trainer(tmp_path, callbacks=[Stops()]).train()
    assert names(tmp_path) == ["checkpoint-3"]


@pytest.mark.parametrize("error", [FileNotFoundError(2, "No such file or directory", "/vocab"), ConnectionError("hub")])
def test_errors_of_the_users_own_are_not_the_storages(tmp_path, error):
    class Own(Trainer):
        def _save(self, output_dir=None, state_dict=None):
            raise error

    trainer = make_trainer(tmp_path)
    trainer.__class__ = Own
    with pytest.raises(type(error)):
        trainer.train()


def test_a_best_model_without_its_optimizer(tmp_path):
    """Callbacks that delete what they do not need keep the weights."""

    class Thrifty(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            os.remove(f"{args.output_dir}/checkpoint-{state.global_step}/optimizer.pt")

    settings = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True, "learning_rate": 0.5}
    trainer = make_trainer(tmp_path, callbacks=[Thrifty()], **settings)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric)


@pytest.mark.parametrize("stopped_by", ["signal", "error"])
@pytest.mark.parametrize("step", [3, 10])
def test_an_evaluation_that_was_left_is_made_up(tmp_path, stopped_by, step):
    """Else the log and the best metric would lack it."""

    class Stops(TrainerCallback):
        def on_prediction_step(self, args, state, control, **kwargs):
            if state.global_step == step:
                if stopped_by == "error":
                    raise RuntimeError("my own bug")
                signal.raise_signal(signal.SIGTERM)

    settings = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "max_steps": 14,
        "load_best_model_at_end": True,
        "save_steps": 1,
    }
    whole = make_trainer(tmp_path / "a", **settings)
    whole.train()
    with pytest.raises(SystemExit if stopped_by == "signal" else RuntimeError):
        make_trainer(tmp_path / "b", callbacks=[Stops()], **settings).train()
    resumed = make_trainer(tmp_path / "b", **settings)
    resumed.train(resume_from_checkpoint=True)

    def losses(trainer):
        return [(line["step"], line["eval_loss"]) for line in trainer.state.log_history if "eval_loss" in line]

    assert losses(resumed) == losses(whole)
    assert resumed.state.best_global_step == whole.state.best_global_step
    assert resumed.state.best_metric == whole.state.best_metric


def test_links_and_foreign_manifests(tmp_path):
    class Own(Trainer):
        def _save(self, output_dir=None, state_dict=None):
            super()._save(output_dir, state_dict)
            Path(output_dir, "manifest.json").write_text("mine")

    trainer = make_trainer(tmp_path / "out", save_total_limit=1)
    trainer.__class__ = Own
    trainer.train()
    assert get_last_checkpoint(str(tmp_path / "out")) == str(tmp_path / "out" / "checkpoint-9")
    shutil.move(tmp_path / "out" / "checkpoint-9", tmp_path / "elsewhere")
    (tmp_path / "out" / "checkpoint-9").symlink_to(tmp_path / "elsewhere")
    staging.remove(tmp_path / "out" / "checkpoint-9")
    assert names(tmp_path / "out") == []
    assert (tmp_path / "elsewhere" / "trainer_state.json").is_file()
