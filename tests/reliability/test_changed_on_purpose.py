"""Checkpoints whose files were replaced on purpose: a folder that is named is used, with a warning that names them."""

import json
import logging
import shutil
import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file

from hftrainer import TrainerCallback
from hftrainer.checkpointing import readable
from hftrainer.checkpointing.manifest import changes
from hftrainer.errors import CheckpointNotFound
from hftrainer.trainer_utils import get_last_checkpoint
from tests.support import warm
from tests.support.checkpoints import flip, grow, make_trainer, truncate
from tests.support.tiny import make_bert

WARNING = "was changed since it was written"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of nine steps, and its weights."""
    folder = tmp_path_factory.mktemp("run")
    trainer = make_trainer(folder, "bert")
    trainer.train()
    return folder, {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


@pytest.fixture
def checkpoint(run, tmp_path):
    shutil.copytree(run[0] / "checkpoint-6", tmp_path / "out" / "checkpoint-6")
    return tmp_path / "out" / "checkpoint-6"


def to_bin(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def to_bin_beside(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")


def to_shards(folder):
    model = make_bert()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="4KB")


def to_half(folder):
    """Another size under the same name."""
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: tensor.double() for name, tensor in weights.items()}, folder / "model.safetensors", {"format": "pt"}
    )


def and_back(folder):
    """Shards are made, then one file again: the index stays, and lists shards that are gone."""
    to_shards(folder)
    model = type(make_bert()).from_pretrained(folder)
    model.save_pretrained(folder, max_shard_size="1GB")
    assert (folder / "model.safetensors.index.json").is_file()
    assert not list(folder.glob("model-*.safetensors"))


def edit_config(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "note": "mine"}))


def without_progress(folder):
    (folder / "progress.pt").unlink()


def add_notes(folder):
    (folder / "notes.bin").write_bytes(b"\xff mine")


PURPOSES = {
    "bin": (to_bin, ["added: pytorch_model.bin", "removed: model.safetensors"]),
    "bin beside": (to_bin_beside, ["added: pytorch_model.bin"]),
    "shards": (to_shards, ["model-00001-of-", "removed: model.safetensors"]),
    "other types": (to_half, ["different size: model.safetensors"]),
    "there and back": (and_back, ["added: model.safetensors.index.json"]),
    "config": (edit_config, ["different size: config.json"]),
    "removed": (without_progress, ["removed: progress.pt"]),
    "added": (add_notes, ["added: notes.bin"]),
}


@pytest.mark.parametrize("purpose", PURPOSES)
def test_named_folder(run, checkpoint, purpose, caplog):
    change, named = PURPOSES[purpose]
    change(checkpoint)
    resumed = make_trainer(checkpoint.parent, "bert")
    with caplog.at_level(logging.WARNING):
        resumed.train(resume_from_checkpoint=str(checkpoint))
    warnings = [record.getMessage() for record in caplog.records if WARNING in record.getMessage()]
    assert len(warnings) == 1
    assert all(part in warnings[0] for part in named)
    assert f"python -m hftrainer checkpoint --accept {checkpoint}" in warnings[0]
    for name, tensor in resumed.model.state_dict().items():
        assert torch.equal(tensor, run[1][name])


@pytest.mark.parametrize("purpose", sorted(PURPOSES.keys() - {"added", "bin beside"}))
def test_newest_goes_on_to_the_next(run, checkpoint, purpose, caplog):
    """`True` means one that is whole; what is only added changes nothing that was written."""
    PURPOSES[purpose][0](checkpoint)
    shutil.copytree(run[0] / "checkpoint-3", checkpoint.with_name("checkpoint-3"))
    assert get_last_checkpoint(str(checkpoint.parent)) == str(checkpoint.with_name("checkpoint-3"))
    flip(checkpoint / "optimizer.pt")
    assert get_last_checkpoint(str(checkpoint.parent)) == str(checkpoint.with_name("checkpoint-3"))


def half_written(folder):
    to_bin(folder)
    truncate(folder / "pytorch_model.bin")


def shard_lost(folder):
    to_shards(folder)
    next(folder.glob("model-00002-*")).unlink()


def shard_cut(folder):
    to_shards(folder)
    truncate(next(folder.glob("model-00002-*")))


def no_weights(folder):
    (folder / "model.safetensors").unlink()


def broken_state(folder):
    (folder / "trainer_state.json").write_text("[]")


DAMAGE = {
    "half written": (half_written, "pytorch_model.bin is truncated"),
    "shard lost": (shard_lost, "model-00002-.* is missing"),
    "shard cut": (shard_cut, "model-00002-.* cannot be read"),
    "no weights": (no_weights, "model.safetensors is missing, and no weights replace it"),
    "other bytes": (lambda folder: flip(folder / "model.safetensors"), "contents of .*model.safetensors have changed"),
    "more bytes": (lambda folder: grow(folder / "optimizer.pt"), "optimizer.pt has extra bytes at its end"),
    "no pickle": (lambda folder: truncate(folder / "training_args.bin"), "training_args.bin is truncated"),
    "state": (broken_state, "trainer_state.json does not contain a state"),
    "manifest": (lambda folder: flip(folder / "hftrainer_manifest.json"), "hftrainer_manifest.json cannot be read"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_refused(checkpoint, kind):
    harm, reason = DAMAGE[kind]
    harm(checkpoint)
    with pytest.raises(CheckpointNotFound, match=f"is damaged: .*{reason}") as refused:
        make_trainer(checkpoint.parent, "bert").train(resume_from_checkpoint=str(checkpoint))
    assert ("checkpoint --accept" in str(refused.value)) == (kind in ("other bytes", "manifest"))


def test_every_byte_of_the_manifest(checkpoint):
    """Damage to the list of files is never taken for a change of the files."""
    manifest = checkpoint / "hftrainer_manifest.json"
    whole = manifest.read_bytes()
    for place in range(0, whole.index(b'"crc32"', whole.rindex(b"}\n },")), 7):
        manifest.write_bytes(whole[:place] + bytes([whole[place] ^ 0x01]) + whole[place + 1 :])
        found = changes(checkpoint)
        assert not found, place
        assert found.damage(checkpoint) == f"{manifest} cannot be read", place
    earlier = json.loads(whole)
    del earlier["crc32"]  # as it was written before
    manifest.write_text(json.dumps(earlier))
    assert changes(checkpoint).damage(checkpoint) is None


def test_forms(tmp_path):
    """What has no form of its own is read as a text; legacy pickles of torch are read too."""
    torch.save({"a": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "vocab.txt").write_text("wörter\n")
    for name in ("old.pt", "vocab.txt"):
        assert readable.why_unreadable(tmp_path / name) is None
    truncate(tmp_path / "old.pt")
    (tmp_path / "vocab.txt").write_bytes("wörter".encode()[:2])
    (tmp_path / "part.distcp").write_bytes(b"\xff\x00")
    (tmp_path / "empty.txt").touch()
    reasons = {path.name: readable.why_unreadable(path) for path in tmp_path.iterdir()}
    assert "cannot be read" in reasons.pop("old.pt")
    assert reasons.pop("empty.txt") == "is empty"
    assert set(reasons.values()) == {"is not text, and its format cannot be checked"}


def test_best_model_that_a_callback_converts(tmp_path, caplog):
    """As callbacks for adapters do in on_save."""
    settings = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True, "learning_rate": 1.0}
    loaded = {}
    for folder in ("plain", "converted", "cut"):
        trainer = make_trainer(tmp_path / folder, save_total_limit=1, **settings)

        class Converts(TrainerCallback):
            def on_save(self, args, state, control, folder=folder, **kwargs):
                if folder != "plain":
                    to_bin(tmp_path / folder / f"checkpoint-{state.global_step}")
                if folder == "cut":
                    truncate(tmp_path / folder / f"checkpoint-{state.global_step}" / "pytorch_model.bin")

        trainer.add_callback(Converts)
        trainer.train()
        assert trainer.state.best_global_step < 9
        loaded[folder] = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    for name, tensor in loaded["plain"].items():
        assert torch.equal(loaded["converted"][name], tensor)
    assert any(not torch.equal(loaded["cut"][name], tensor) for name, tensor in loaded["plain"].items())
    assert "The best model cannot be loaded, and the last one is kept" in caplog.text
    assert len(list((tmp_path / "converted").glob("checkpoint-*"))) == 1


# ---- The command -----------------------------------------------------------------------------------------------------


def command(*words):
    line = [warm.PYTHON, "-m", "hftrainer", "checkpoint", *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, env={**warm.environment(), **warm.LIBRARIES})


def test_accept(run, checkpoint, caplog):
    to_bin(checkpoint)
    flip(checkpoint / "config.json")  # no JSON any more
    refused = command("--accept", checkpoint)
    assert refused.returncode == 1
    assert f"error: {checkpoint / 'config.json'} cannot be read" in refused.stderr
    assert WARNING not in caplog.text
    shutil.copy(run[0] / "checkpoint-6" / "config.json", checkpoint)
    manifest = (checkpoint / "hftrainer_manifest.json").read_text()
    done = command("--accept", checkpoint)
    assert (done.returncode, done.stderr) == (0, "")
    assert "is accepted (added: pytorch_model.bin; removed: model.safetensors)." in done.stdout
    assert (checkpoint / "hftrainer_manifest.json").read_text() != manifest
    assert get_last_checkpoint(str(checkpoint.parent)) == str(checkpoint)
    resumed = make_trainer(checkpoint.parent, "bert")
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert WARNING not in caplog.text
    for name, tensor in resumed.model.state_dict().items():
        assert torch.equal(tensor, run[1][name])


def test_accept_other_bytes(checkpoint):
    """Weights that were edited in place have their old size: the command is how to say that it was meant."""
    weights = load_file(checkpoint / "model.safetensors")
    save_file(
        {name: tensor * 2 for name, tensor in weights.items()}, checkpoint / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(CheckpointNotFound, match="have changed since it was written, not its size"):
        make_trainer(checkpoint.parent, "bert").train(resume_from_checkpoint=str(checkpoint))
    done = command("--accept", checkpoint)
    assert (done.returncode, done.stderr) == (0, "")
    assert "(same size, different contents: model.safetensors)" in done.stdout
    make_trainer(checkpoint.parent, "bert").train(resume_from_checkpoint=True)


def test_accept_what_is_none(run, checkpoint):
    for words, code, said in (
        (["--accept", checkpoint / "missing"], 1, "is not a checkpoint: the folder does not exist"),
        (["--accept", checkpoint.parent], 1, "is not a checkpoint: it lacks trainer_state.json"),
        ([], 2, "the following arguments are required: --accept"),
        (["--accept", checkpoint, "--fast"], 2, "unrecognized arguments: --fast"),
        (["--help"], 0, ""),
    ):
        done = command(*words)
        assert (done.returncode, said in done.stderr) == (code, True), done
    (checkpoint / "hftrainer_manifest.json").unlink()  # as transformers writes it
    assert command("--accept", checkpoint).returncode == 0
    assert (checkpoint / "hftrainer_manifest.json").is_file()
    (checkpoint / "model.safetensors").unlink()
    refused = command("--accept", checkpoint)
    assert refused.returncode == 1
    assert "model.safetensors is missing, and no weights replace it: a run cannot resume from it" in refused.stderr
