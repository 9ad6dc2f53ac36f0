"""Runs resume from Lightning's checkpoint files, written within a run or by ModelCheckpoint."""

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

from hftrainer import Trainer
from hftrainer.errors import CheckpointNotFound, InvalidArgument
from tests.support.checkpoints import AtStep, assert_same_end, make_trainer, train_to_end
from tests.support.small_models import make_plain


@pytest.mark.parametrize("model", ["plain", "bert", "peft"])
def test_file_written_within_a_run_resumes_exactly(tmp_path, model):
    settings = {"max_steps": 14, "save_strategy": "no"}
    files = {step: tmp_path / f"{step}.ckpt" for step in (4, 10)}
    saves = [AtStep(step, lambda file=file: whole.save_lightning_checkpoint(str(file))) for step, file in files.items()]
    whole = make_trainer(tmp_path / "a", model, saves, **settings)
    whole.train()
    for file in files.values():
        resumed = train_to_end(make_trainer(tmp_path / "b", model, **settings), file)
        assert resumed.state.global_step == 14
        assert_same_end(resumed, whole)


@pytest.mark.parametrize("averaging", [False, True])
def test_file_of_model_checkpoint_resumes_exactly(tmp_path, averaging):
    """It holds averaged weights beside those in training."""

    def make(name, *more):
        callbacks = [EMAWeightAveraging(decay=0.5)] * averaging
        return make_trainer(tmp_path / name, callbacks=[*callbacks, *more], save_strategy="no")

    whole = train_to_end(make("a", ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=5, filename="five")))
    assert_same_end(train_to_end(make("b"), tmp_path / "five.ckpt"), whole)


class CountsCalls(Trainer):
    calls = 0

    def train(self, *args, **kwargs):
        self.calls += 1
        return super().train(*args, **kwargs)


def test_file_written_after_training_continues(tmp_path):
    train_to_end(make_trainer(tmp_path / "a")).save_lightning_checkpoint(str(tmp_path / "end.ckpt"))
    further = make_trainer(tmp_path / "b", trainer_class=CountsCalls, max_steps=12)
    train_to_end(further, tmp_path / "end.ckpt")
    assert further.calls == 1
    assert further.state.global_step == 12


class Lit(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = make_plain()


def test_lightning_loads_its_weights(tmp_path):
    trainer = train_to_end(make_trainer(tmp_path / "a"))
    trainer.save_lightning_checkpoint(str(tmp_path / "end.ckpt"))
    loaded = Lit.load_from_checkpoint(tmp_path / "end.ckpt", weights_only=True)
    for ours, theirs in zip(trainer.model.parameters(), loaded.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_wrong_files_are_refused(tmp_path):
    trainer = make_trainer(tmp_path / "a")
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="needs a run"):
            trainer.save_lightning_checkpoint(str(tmp_path / "x.ckpt"))
        trainer.evaluate()  # which is no run
    with pytest.raises(InvalidArgument, match=r"ends in \.ckpt"):
        trainer.save_lightning_checkpoint(str(tmp_path / "x.pt"))
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    for name, words in (("absent", "file does not exist"), ("other", "is not a Lightning checkpoint of this Trainer")):
        with pytest.raises(CheckpointNotFound, match=words):
            train_to_end(trainer, tmp_path / f"{name}.ckpt")
