"""Nothing in a checkpoint is run by reading it, and what cannot be read is named."""

import json

import pytest
import torch

from hftrainer import Trainer, TrainingArguments
from hftrainer.checkpointing.names import MANIFEST_NAME
from hftrainer.compat.reading import read_torch, read_weights
from hftrainer.errors import DamagedCheckpoint, UnsafeCheckpoint
from tests.support.fuzz import Mischief
from tests.support.tiny import Note, language_data, make_peft, make_plain, plain_data

lightning = pytest.importorskip("lightning.pytorch")


class KeepsState(lightning.Callback):
    def state_dict(self):
        return {"count": 1}

    def load_state_dict(self, state_dict):
        assert state_dict == {"count": 1}


def make_trainer(folder, model="plain", **settings):
    args = TrainingArguments(
        str(folder), max_steps=4, save_steps=2, report_to="none", use_cpu=True, disable_tqdm=True, **settings
    )
    given = (make_peft(), language_data()) if model == "peft" else (make_plain(), plain_data())
    return Trainer(given[0], args, train_dataset=given[1], callbacks=[KeepsState()])


FILES = {
    "optimizer.pt": {},
    "scheduler.pt": {},
    "scaler.pt": {"fp16": True},
    "rng_state.pth": {},
    "lightning_callbacks.pt": {},
    "pytorch_model.bin": {"save_safetensors": False},
    "adapter_model.bin": {"save_safetensors": False, "model": "peft"},
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before torch 1.6"])
def test_a_pickle_is_not_run(tmp_path, name, zipped):
    make_trainer(tmp_path, **FILES[name]).train()
    path = tmp_path / "checkpoint-2" / name
    (tmp_path / "checkpoint-2" / MANIFEST_NAME).unlink()  # somebody who means harm would mend it
    held = torch.load(path, weights_only=name != "rng_state.pth")
    held["more"] = Mischief(tmp_path / "trace")
    torch.save(held, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(UnsafeCheckpoint, match=rf"checkpoint-2/{name} holds a pickled posix.mkdir.*add_safe_globals"):
        make_trainer(tmp_path, **FILES[name]).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert not (tmp_path / "trace").exists()


def test_the_arguments_are_never_read(tmp_path):
    make_trainer(tmp_path).train()
    (tmp_path / "checkpoint-2" / MANIFEST_NAME).unlink()
    torch.save(Mischief(tmp_path / "trace"), tmp_path / "checkpoint-2" / "training_args.bin")
    make_trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert not (tmp_path / "trace").exists()


def test_a_class_that_the_user_allows(tmp_path):
    """By torch's own means: the optimizer's state has an object in it."""
    make_trainer(tmp_path).train()
    path = tmp_path / "checkpoint-2" / "optimizer.pt"
    held = torch.load(path)
    held["param_groups"][0]["note"] = Note()
    torch.save(held, path)
    (path.parent / MANIFEST_NAME).unlink()
    with pytest.raises(UnsafeCheckpoint, match=r"tiny\.Note"):
        make_trainer(tmp_path).train(resume_from_checkpoint=str(path.parent))
    trainer = make_trainer(tmp_path)
    with torch.serialization.safe_globals([Note]):
        trainer.train(resume_from_checkpoint=str(path.parent))
    assert trainer.optimizer.param_groups[0]["note"].text == "kept"


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "model.bin"])
@pytest.mark.parametrize("damage", ["empty", "cut", "other"])
def test_damaged_files(tmp_path, name, damage):
    from safetensors.torch import save_file

    path = tmp_path / name
    weights = {"a": torch.zeros(1000)}
    save_file(weights, path) if name.endswith("safetensors") else torch.save(weights, path)
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "cut": whole[: len(whole) // 2], "other": b"something else entirely"}[damage])
    with pytest.raises(DamagedCheckpoint, match=rf"{name} is damaged"):
        read_torch(str(path)) if name.endswith("pt") else read_weights(str(path))


def test_a_missing_shard_is_named(tmp_path):
    trainer = make_trainer(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(FileNotFoundError, match=r"model-1\.safetensors"):
        trainer._load_from_checkpoint(str(tmp_path))
