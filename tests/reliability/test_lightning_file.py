"""Lightning checkpoints of a run, written and read: the way on when there is nothing else."""

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

from hftrainer import TrainerCallback
from hftrainer.errors import CheckpointNotFound, InvalidArgument
from tests.support.checkpoints import make_trainer


class Saves(TrainerCallback):
    def __init__(self, path, step):
        self.path, self.step = path, step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.trainer.save_lightning_checkpoint(self.path)


def undisturbed(folder, model, callbacks=(), **settings):
    trainer = make_trainer(folder, model, callbacks, **settings)
    trainer.train()
    return trainer


@pytest.mark.parametrize("model", ["plain", "bert", "peft"])
@pytest.mark.parametrize("step", [4, 10])
def test_written_within_a_run(tmp_path, model, step):
    settings = {"max_steps": 14, "save_strategy": "no"}
    saves = Saves(str(tmp_path / "x.ckpt"), step)
    whole = make_trainer(tmp_path / "a", model, [saves], **settings)
    saves.trainer = whole
    whole.train()
    resumed = make_trainer(tmp_path / "b", model, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "x.ckpt"))
    assert resumed.state.global_step == 14
    for (name, ours), theirs in zip(resumed.model.state_dict().items(), whole.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("averaging", [False, True])
def test_of_model_checkpoint(tmp_path, averaging):
    """What Lightning's own callback wrote is as good; averaged weights and those in training are both in it."""

    def callbacks():
        return [EMAWeightAveraging(decay=0.5)] if averaging else []

    settings = {"max_steps": 9, "save_strategy": "no"}
    checkpoint = ModelCheckpoint(dirpath=tmp_path / "lightning", every_n_train_steps=5, filename="five")
    whole = undisturbed(tmp_path / "a", "plain", [*callbacks(), checkpoint], **settings)
    resumed = make_trainer(tmp_path / "b", "plain", callbacks(), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "lightning" / "five.ckpt"))
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_after_training(tmp_path):
    trainer = undisturbed(tmp_path / "a", "plain", max_steps=9)
    trainer.save_lightning_checkpoint(str(tmp_path / "end.ckpt"))
    further = make_trainer(tmp_path / "b", "plain", max_steps=12)
    assert further.train(resume_from_checkpoint=str(tmp_path / "end.ckpt")).global_step == 12


def test_bad_files(tmp_path):
    trainer = make_trainer(tmp_path / "a", "plain")
    with pytest.raises(InvalidArgument, match="needs a run"):
        trainer.save_lightning_checkpoint(str(tmp_path / "x.ckpt"))
    trainer.evaluate()
    with pytest.raises(InvalidArgument, match="needs a run"):
        trainer.save_lightning_checkpoint(str(tmp_path / "x.ckpt"))
    with pytest.raises(InvalidArgument, match=r"ends in \.ckpt"):
        trainer.save_lightning_checkpoint(str(tmp_path / "x.pt"))
    with pytest.raises(CheckpointNotFound, match="file does not exist"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "absent.ckpt"))
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    with pytest.raises(CheckpointNotFound, match="is not a Lightning checkpoint of this Trainer"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "other.ckpt"))
