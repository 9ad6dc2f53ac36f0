"""Damaged checkpoints are skipped or refused; those changed on purpose are used."""

import functools
import json
import logging
import math
import os
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from hftrainer.__main__ import main
from hftrainer.base.messages import command_name
from hftrainer.checkpointing.file_checks import unreadable_reason
from hftrainer.checkpointing.inspection import Inspection, inspect_checkpoint
from hftrainer.checkpointing.layout import MANIFEST_NAME
from hftrainer.errors import CheckpointNotFound, DamagedCheckpoint
from hftrainer.trainer_utils import get_last_checkpoint
from tests.support.checkpoints import BEST, HARM, OnSave, flip, grow, make_trainer, train_to_end, truncate, weights_of
from tests.support.jobs import names_in
from tests.support.parity import assert_same_weights
from tests.support.small_models import make_bert

CHANGED = "has changed since it was written"
NEEDED = ("model.safetensors", "trainer_state.json")
FILES_OF_TRANSFORMERS = (*NEEDED, "optimizer.pt", "rng_state.pth", "scheduler.pt")
FILES = tuple(sorted((*FILES_OF_TRANSFORMERS, "config.json", MANIFEST_NAME, "progress.pt", "training_args.bin")))
HARMED = [(harm, name) for harm in HARM for name in FILES if (harm, name) != ("deleted", MANIFEST_NAME)]


@pytest.fixture(scope="module")
def finished_runs(tmp_path_factory):
    """Model → a finished run of nine steps: its folder, and the weights that every resumed one must reach."""

    @functools.cache
    def run(model):
        folder = tmp_path_factory.mktemp(model)
        return folder, weights_of(train_to_end(make_trainer(folder, model)))

    return run


@pytest.fixture
def checkpoint(finished_runs, tmp_path):
    shutil.copytree(finished_runs("bert")[0] / "checkpoint-6", tmp_path / "out" / "checkpoint-6")
    return tmp_path / "out" / "checkpoint-6"


def copy_checkpoints(source, folder):
    shutil.rmtree(folder, ignore_errors=True)
    for step in (3, 6):
        shutil.copytree(source / f"checkpoint-{step}", folder / f"checkpoint-{step}")
    return folder / "checkpoint-6"


def resume_run(checkpoint, resume=None, model="bert"):
    return train_to_end(make_trainer(checkpoint.parent, model), resume or checkpoint).model.state_dict()


def test_checkpoint_has_the_files_that_are_harmed_here(finished_runs):
    assert tuple(names_in(finished_runs("bert")[0] / "checkpoint-6")) == FILES


@pytest.mark.parametrize(("harm", "name"), HARMED)
def test_resume_skips_a_harmed_checkpoint_for_an_older_one(finished_runs, tmp_path, harm, name, caplog):
    caplog.set_level(logging.WARNING)
    source, expected = finished_runs("bert")
    harmed = copy_checkpoints(source, tmp_path / "out") / name
    HARM[harm](harmed)
    assert_same_weights(resume_run(harmed.parent, True), expected)
    assert f"{harmed.parent} is damaged and is skipped" in caplog.text and name in caplog.text


@pytest.mark.parametrize(("harm", "name"), HARMED)
def test_harmed_checkpoint_is_refused_by_name(checkpoint, harm, name, caplog):
    HARM[harm](checkpoint / name)
    if harm == "deleted" and name not in NEEDED:  # can be meant
        resume_run(checkpoint)
        assert f"{CHANGED} (removed: {name}). It is used" in caplog.text
    else:
        error = CheckpointNotFound if (harm, name) == ("deleted", "trainer_state.json") else DamagedCheckpoint
        with pytest.raises(error, match="(damaged|lacks).*" + name.replace(".", r"\.")):
            resume_run(checkpoint)


def test_checkpoint_without_a_manifest_resumes_without_warning(finished_runs, checkpoint, caplog):
    caplog.set_level(logging.WARNING)
    (checkpoint / MANIFEST_NAME).unlink()
    assert_same_weights(resume_run(checkpoint, True), finished_runs("bert")[1])
    assert not caplog.text


@pytest.mark.parametrize("harm", ["truncated", "empty", "deleted"])
@pytest.mark.parametrize("name", FILES_OF_TRANSFORMERS)
def test_harm_is_found_without_a_manifest(finished_runs, tmp_path, harm, name, caplog):
    caplog.set_level(logging.WARNING)
    source, expected = finished_runs("plain")
    folder = copy_checkpoints(source, tmp_path / "out")
    for manifest in folder.parent.glob(f"*/{MANIFEST_NAME}"):
        manifest.unlink()
    HARM[harm](folder / name)
    end = resume_run(folder, True, model="plain")
    assert name in caplog.text or "holds no weights" in caplog.text or "lacks the optimizer" in caplog.text
    if harm != "deleted" or name in NEEDED:
        assert_same_weights(end, expected)  # what save_only_model leaves out may be missing, and is another run


def test_resume_fails_when_no_checkpoint_is_whole(finished_runs, tmp_path):
    folder = copy_checkpoints(finished_runs("plain")[0], tmp_path / "out")
    for optimizer in folder.parent.glob("*/optimizer.pt"):
        truncate(optimizer)
    with pytest.raises(CheckpointNotFound, match="No valid checkpoint found"):
        resume_run(folder, True, model="plain")
    assert get_last_checkpoint(str(folder.parent)) is None


def test_resume_auto_skips_harmed_checkpoints(tmp_path, caplog):
    saved = []
    for steps in (3, 6, 9):
        saves = OnSave(lambda folder: saved.append(folder.name))
        train_to_end(make_trainer(tmp_path, callbacks=[saves], max_steps=steps), "auto")
        truncate(tmp_path / f"checkpoint-{steps}" / "optimizer.pt")
    # the second run has found checkpoint-3 damaged, and wrote it again; the third did so with checkpoint-6
    assert saved == [f"checkpoint-{step}" for step in (3, 3, 6, 6, 9)]
    assert caplog.text.count("can be used: training starts from scratch") == 1


def test_best_model_is_found_in_a_moved_folder(tmp_path, caplog):
    make_trainer(tmp_path / "a", **BEST).train()
    shutil.move(tmp_path / "a", tmp_path / "b")
    moved = train_to_end(make_trainer(tmp_path / "b", max_steps=12, **BEST), True)
    assert "is missing: " in caplog.text
    assert moved.state.best_model_checkpoint.startswith(str(tmp_path / "b"))


def to_bin_beside(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")


def to_bin(folder):
    to_bin_beside(folder)
    (folder / "model.safetensors").unlink()


def to_shards(folder):
    model = make_bert()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="4KB")


def change_weights(folder, change):
    weights = {name: change(tensor) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def to_shards_and_back(folder):
    """Shards are made, then one file again: the index stays, and lists shards that are gone."""
    to_shards(folder)
    type(make_bert()).from_pretrained(folder).save_pretrained(folder, max_shard_size="1GB")
    assert (folder / "model.safetensors.index.json").is_file()
    assert not list(folder.glob("model-*.safetensors"))


def edit_config(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "note": "mine"}))


def unlink(name):
    return lambda folder: (folder / name).unlink()


def write_file(name, text):
    return lambda folder: (folder / name).write_bytes(text)


def harm_file(harm, name):
    return lambda folder: harm(folder / name)


PURPOSES = {
    "bin": (to_bin, ["added: pytorch_model.bin", "removed: model.safetensors"]),
    "bin beside": (to_bin_beside, ["added: pytorch_model.bin"]),
    "shards": (to_shards, ["model-00001-of-", "removed: model.safetensors"]),
    "other types": (lambda folder: change_weights(folder, torch.Tensor.double), ["different size: model.safetensors"]),
    "there and back": (to_shards_and_back, ["added: model.safetensors.index.json"]),
    "config": (edit_config, ["different size: config.json"]),
    "removed": (unlink("progress.pt"), ["removed: progress.pt"]),
    "added": (write_file("notes.bin", b"\xff mine"), ["added: notes.bin"]),
}


@pytest.mark.parametrize("purpose", PURPOSES)
def test_checkpoint_changed_on_purpose_is_used_by_name_with_a_warning(finished_runs, checkpoint, purpose, caplog):
    """`True` chooses an unchanged one instead, unless files were only added."""
    caplog.set_level(logging.WARNING)
    change, named = PURPOSES[purpose]
    change(checkpoint)
    older = checkpoint.with_name("checkpoint-3")
    shutil.copytree(finished_runs("bert")[0] / "checkpoint-3", older)
    newest = checkpoint if purpose in ("added", "bin beside") else older
    assert get_last_checkpoint(str(checkpoint.parent)) == str(newest)
    caplog.clear()
    assert_same_weights(resume_run(checkpoint), finished_runs("bert")[1])
    (warning,) = [record.getMessage() for record in caplog.records if CHANGED in record.getMessage()]
    assert all(part in warning for part in named)
    assert f"{command_name()} checkpoint --accept {checkpoint}" in warning
    flip(checkpoint / "optimizer.pt")
    assert get_last_checkpoint(str(checkpoint.parent)) != str(checkpoint)


def write_half(folder):
    to_bin(folder)
    truncate(folder / "pytorch_model.bin")


def harm_shard(folder, harm):
    to_shards(folder)
    harm(next(folder.glob("model-00002-*")))


DAMAGE = {
    "half written": (write_half, "pytorch_model.bin is truncated"),
    "shard lost": (lambda folder: harm_shard(folder, os.remove), "model-00002-.* is missing"),
    "shard cut": (lambda folder: harm_shard(folder, truncate), "model-00002-.* cannot be read"),
    "no weights": (unlink("model.safetensors"), "model.safetensors is missing, and no weights replace it"),
    "other bytes": (harm_file(flip, "model.safetensors"), "contents of .*model.safetensors have changed"),
    "more bytes": (harm_file(grow, "optimizer.pt"), "optimizer.pt has extra bytes at its end"),
    "no pickle": (harm_file(truncate, "training_args.bin"), "training_args.bin is truncated"),
    "state": (write_file("trainer_state.json", b"[]"), "trainer_state.json does not contain a state"),
    "manifest": (harm_file(flip, MANIFEST_NAME), f"{MANIFEST_NAME} cannot be read"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_each_kind_of_damage_is_refused_with_its_reason(checkpoint, kind):
    harm, reason = DAMAGE[kind]
    harm(checkpoint)
    with pytest.raises(DamagedCheckpoint, match=f"is damaged: .*{reason}") as refused:
        resume_run(checkpoint)
    assert ("checkpoint --accept" in str(refused.value)) == (kind in ("other bytes", "manifest"))


def test_changed_byte_of_the_manifest_is_damage(checkpoint):
    """It is not taken for a change of the listed files."""
    manifest = checkpoint / MANIFEST_NAME
    whole, unreadable = manifest.read_bytes(), Inspection(checkpoint, fault=f"{manifest} cannot be read")
    for place in range(0, whole.index(b'"crc32"', whole.rindex(b"}\n },")), 7):
        flip(manifest, place, 0x01)
        assert inspect_checkpoint(checkpoint) == unreadable, place
        manifest.write_bytes(whole)
    earlier = json.loads(whole)
    del earlier["crc32"]  # as it was written before
    manifest.write_text(json.dumps(earlier))
    assert inspect_checkpoint(checkpoint) == Inspection(checkpoint)


def test_files_of_unknown_format_are_checked_as_text(tmp_path):
    """Legacy pickles of torch are read too."""
    torch.save({"a": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "vocab.txt").write_text("wörter\n")
    for name in ("old.pt", "vocab.txt"):
        assert unreadable_reason(tmp_path / name) is None
    # Not in the middle: where that is depends on an address, and a class's name that is cut off is another class's.
    (tmp_path / "old.pt").write_bytes((tmp_path / "old.pt").read_bytes()[:-4])
    (tmp_path / "vocab.txt").write_bytes("wörter".encode()[:2])
    (tmp_path / "part.distcp").write_bytes(b"\xff\x00")
    (tmp_path / "empty.txt").touch()
    reasons = {path.name: unreadable_reason(path) for path in tmp_path.iterdir()}
    assert "cannot be read" in reasons.pop("old.pt")
    assert reasons.pop("empty.txt") == "is empty"
    assert set(reasons.values()) == {"is not text, and its format cannot be checked"}


def test_best_model_changed_in_on_save_is_loaded_unless_damaged(tmp_path, caplog):
    """As callbacks for adapters do; if it is damaged, the last weights are kept."""
    loaded = {}
    for name, change in (("plain", lambda folder: None), ("converted", to_bin), ("cut", write_half)):
        settings = {**BEST, "learning_rate": 1.0, "save_total_limit": 1}
        trainer = train_to_end(make_trainer(tmp_path / name, callbacks=[OnSave(change)], **settings))
        assert trainer.state.best_global_step < 9
        assert ("The best model cannot be loaded, so the Trainer keeps the last one" in caplog.text) == (name == "cut")
        loaded[name] = weights_of(trainer)
    assert_same_weights(loaded["converted"], loaded["plain"])
    with pytest.raises(AssertionError):
        assert_same_weights(loaded["cut"], loaded["plain"])
    assert len(list((tmp_path / "converted").glob("checkpoint-*"))) == 1


@pytest.fixture
def run_command(capsys):
    def run(*words):
        capsys.readouterr()
        try:
            main(["checkpoint", *map(str, words)])
        except SystemExit as ended:
            return ended.code or 0, *capsys.readouterr()
        return 0, *capsys.readouterr()

    return run


def test_checkpoint_command_describes_the_run(checkpoint, run_command):
    status, printed, _ = run_command(checkpoint, "--json")
    found = json.loads(printed)
    assert status == 0 and found["complete"]
    assert (found["damage"], found["step"], found["max_steps"], found["lacks"]) == (None, 6, 9, None)
    assert (found["processes"], found["global_batch"], found["samples_read_in_epoch"]) == (1, 4, 24)
    assert found["resumes_on"] == "any number of processes, with DDP, FSDP or neither"
    assert (found["folder"], found["loss"]) == (str(checkpoint), None)
    assert re.search("^optimizer step +6 of 9$", run_command(checkpoint)[1], re.MULTILINE)
    state = checkpoint / "trainer_state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"log_history": [{"step": 6, "loss": math.nan}]}))
    assert re.search("^loss +NaN since step 1-6$", run_command(checkpoint)[1], re.MULTILINE)
    truncate(checkpoint / "optimizer.pt")
    status, printed, _ = run_command(checkpoint)
    assert status == 1
    assert f"no: {checkpoint / 'optimizer.pt'} has changed size since it was written" in printed
    assert run_command(checkpoint.parent)[:2] == (1, printed)  # the newest of the run


def test_accept_updates_the_manifest_or_names_the_damage(finished_runs, checkpoint, run_command, caplog):
    to_bin(checkpoint)
    flip(checkpoint / "config.json")  # no JSON any more
    status, _, errors = run_command("--accept", checkpoint)
    assert status == 1
    assert f"error: {checkpoint / 'config.json'} cannot be read" in errors
    shutil.copy(finished_runs("bert")[0] / "checkpoint-6" / "config.json", checkpoint)
    manifest = (checkpoint / MANIFEST_NAME).read_text()
    status, printed, errors = run_command("--accept", checkpoint)
    assert (status, errors) == (0, "")
    assert "is accepted (added: pytorch_model.bin; removed: model.safetensors)." in printed
    assert (checkpoint / MANIFEST_NAME).read_text() != manifest
    assert get_last_checkpoint(str(checkpoint.parent)) == str(checkpoint)
    assert_same_weights(resume_run(checkpoint), finished_runs("bert")[1])
    assert CHANGED not in caplog.text


def test_accept_allows_weights_edited_in_place(checkpoint, run_command):
    """They have their old size, so only the command says that the edit was meant."""
    change_weights(checkpoint, lambda tensor: tensor * 2)
    with pytest.raises(DamagedCheckpoint, match="have changed since it was written, but not its size"):
        resume_run(checkpoint)
    status, printed, errors = run_command("--accept", checkpoint)
    assert (status, errors) == (0, "")
    assert "(same size, different contents: model.safetensors)" in printed
    resume_run(checkpoint, True)


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("missing", "does not exist: pass a checkpoint-xxx folder"),
        ("../checkpoint-9", "does not exist: the nearest in"),
        ("..", "is not a checkpoint: it lacks trainer_state.json"),
    ],
)
def test_accept_refuses_a_folder_without_checkpoint(checkpoint, run_command, folder, said):
    status, _, errors = run_command("--accept", checkpoint / folder)
    assert (status, f" {said}" in errors) == (2, True), errors


def test_accept_writes_a_missing_manifest(checkpoint, run_command):
    (checkpoint / MANIFEST_NAME).unlink()
    assert run_command("--accept", checkpoint)[0] == 0
    assert (checkpoint / MANIFEST_NAME).is_file()
    (checkpoint / "model.safetensors").unlink()
    status, _, errors = run_command("--accept", checkpoint)
    assert status == 1
    assert "model.safetensors is missing, and no weights replace it: a run cannot resume from the checkpoint" in errors
