"""What is uploaded of an output folder, and that an upload keeps the files of its moment."""

import errno
import os
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from hftrainer.hub import snapshots


def refuse_links(*_, **__):
    raise OSError(errno.EPERM, "not here")


def test_model_files_include_shards_and_adapters(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    for name in ("model-1.safetensors", "optimizer.pt", "training_args.bin", "adapter_config.json", "own.txt"):
        (tmp_path / name).touch()
    expected = ["adapter_config.json", "model.safetensors.index.json", "model-1.safetensors", "training_args.bin"]
    assert snapshots.model_files(str(tmp_path)) == expected


@pytest.mark.parametrize("links", [True, False])
def test_snapshot_keeps_files_as_they_were(tmp_path, links, monkeypatch):
    """A snapshot does not change with the files, and takes no disk space for files that are written once.

    Symbolic links are followed, pipes left out, and files of the checkpoint not overwritten.
    """

    def save_pretrained(folder):
        Path(folder, "config.json").write_text("of the processing class")

    if not links:
        monkeypatch.setattr(snapshots.os, "link", refuse_links)
    left_out = ("_elsewhere", ".git/HEAD", "run-0/checkpoint-2/x")
    of_checkpoint = ("checkpoint-1/config.json", "checkpoint-1/model.safetensors")
    for name in (*of_checkpoint, "best.pt", "log.txt", "old.txt", *left_out):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("before")
    (tmp_path / "link.txt").symlink_to("_elsewhere")
    (tmp_path / "to-nothing").symlink_to("nothing")
    os.mkfifo(tmp_path / "pipe")
    gone = socket.gethostname().replace("-", "~")
    (tmp_path / f"_tmp_{gone}.999999999.1_uploads-0" / "0").mkdir(parents=True)  # of a process that was killed
    made = snapshots.UploadSnapshots(str(tmp_path), SimpleNamespace(save_pretrained=save_pretrained))
    with open(tmp_path / "log.txt", "a") as log:
        snapshot = Path(made.create(snapshots.PendingCommit(0, str(tmp_path / "checkpoint-1"), "", "message")))
        log.write("after")
    assert (tmp_path / "checkpoint-1" / "config.json").read_text() == "before"
    shutil.rmtree(tmp_path / "checkpoint-1")
    found = {path.relative_to(snapshot).as_posix(): path for path in snapshot.rglob("*") if path.is_file()}
    expected = ("config.json", "model.safetensors", "best.pt", "link.txt", "log.txt", "old.txt")
    assert {name: path.read_text() for name, path in found.items()} == dict.fromkeys(expected, "before")
    assert not found["link.txt"].is_symlink()
    linked = {name for name in ("best.pt", "log.txt", "old.txt") if found[name].samefile(tmp_path / name)}
    assert linked == ({"best.pt"} if links else set())
    made.delete(str(snapshot))
    assert not list(tmp_path.glob("_tmp_*"))
