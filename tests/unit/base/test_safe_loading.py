"""Reading a checkpoint runs no code in it, and a file that cannot be read is named."""

import functools
import json

import pytest
import torch
from safetensors.torch import save_file

from hftrainer.base.safe_loading import load_torch_file, read_weights
from hftrainer.errors import DamagedCheckpoint, UnsafeCheckpoint
from tests.support.checkpoints import KeepsState, MaliciousPickle, copy_without_manifest, make_trainer, train_to_end
from tests.support.small_models import Note

make = functools.partial(make_trainer, callbacks=[KeepsState()], max_steps=4, save_steps=2)
FILES = {
    **{name: {} for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "lightning_callbacks.pt")},
    "scaler.pt": {"fp16": True},
    "pytorch_model.bin": {"save_safetensors": False},
    "adapter_model.bin": {"save_safetensors": False, "model": "peft"},
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    @functools.cache
    def source(settings):
        folder = tmp_path_factory.mktemp("source")
        make(folder, **json.loads(settings)).train()
        return folder / "checkpoint-2"

    return source


@pytest.fixture
def checkpoint(sources, tmp_path):
    return lambda **settings: copy_without_manifest(sources(json.dumps(settings)), tmp_path / "out" / "checkpoint-2")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before torch 1.6"])
def test_pickle_in_a_checkpoint_is_not_executed(tmp_path, checkpoint, name, zipped):
    folder = checkpoint(**FILES[name])
    held = torch.load(folder / name, weights_only=name != "rng_state.pth")
    held["more"] = MaliciousPickle(tmp_path / "trace")
    torch.save(held, folder / name, _use_new_zipfile_serialization=zipped)
    with pytest.raises(UnsafeCheckpoint, match=rf"checkpoint-2/{name} holds a pickled posix.mkdir.*add_safe_globals"):
        train_to_end(make(folder.parent, **FILES[name]), folder)
    assert not (tmp_path / "trace").exists()


def test_training_args_file_is_never_read(tmp_path, checkpoint):
    folder = checkpoint()
    torch.save(MaliciousPickle(tmp_path / "trace"), folder / "training_args.bin")
    train_to_end(make(folder.parent), folder)
    assert not (tmp_path / "trace").exists()


def test_class_allowed_by_the_user_is_loaded(checkpoint):
    """By torch's `safe_globals`; the state of the optimizer has an object in it."""
    folder = checkpoint()
    held = torch.load(folder / "optimizer.pt")
    held["param_groups"][0]["note"] = Note()
    torch.save(held, folder / "optimizer.pt")
    with pytest.raises(UnsafeCheckpoint, match=r"small_models\.Note"):
        train_to_end(make(folder.parent), folder)
    with torch.serialization.safe_globals([Note]):
        trainer = train_to_end(make(folder.parent), folder)
    assert trainer.optimizer.param_groups[0]["note"].text == "kept"


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "model.bin"])
def test_damaged_file_is_named(tmp_path, name):
    path = tmp_path / name
    weights = {"a": torch.zeros(1000)}
    save_file(weights, path) if name.endswith("safetensors") else torch.save(weights, path)
    whole = path.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], b"something else entirely"):
        path.write_bytes(damaged)
        with pytest.raises(DamagedCheckpoint, match=rf"{name} is damaged"):
            load_torch_file(str(path)) if name.endswith("pt") else read_weights(str(path))


def test_missing_weight_shard_is_named(tmp_path):
    trainer = make(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(FileNotFoundError, match=r"model-1\.safetensors"):
        trainer._load_from_checkpoint(str(tmp_path))
