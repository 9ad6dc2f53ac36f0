"""A checkpoint at a URL is complete if its manifest is there; requests are repeated unless they are refused."""

import errno

import pytest

from hftrainer.checkpointing.writing.files import write_manifest
from hftrainer.errors import StorageError
from hftrainer.storage import remote
from hftrainer.storage.remote import RemoteFolder
from tests.support.storages import FaultyStorage, files_at

URL = "faulty://bucket/run"
FILES, MANIFEST = ["adapter_model.safetensors", "nested/optimizer.pt"], "hftrainer_manifest.json"


@pytest.fixture
def folder(monkeypatch):
    monkeypatch.setattr(remote, "WAITS", (0.0, 0.0))
    FaultyStorage.reset()
    yield RemoteFolder(URL)
    FaultyStorage.reset()


@pytest.fixture
def local(tmp_path):
    """A checkpoint in a folder."""
    for name in FILES:
        (tmp_path / "checkpoint-3" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "checkpoint-3" / name).write_text(f"the contents of {name}")
    write_manifest(tmp_path / "checkpoint-3")
    return tmp_path / "checkpoint-3"


def requests_for(request):
    return [path.rpartition("checkpoint-3/")[2] for kind, path in FaultyStorage.requests if kind == request]


def test_manifest_is_uploaded_last_and_deleted_first(folder, local):
    folder.upload(local, "checkpoint-3")
    assert requests_for("put") == [*FILES, MANIFEST]
    assert folder.checkpoints() == ["checkpoint-3"]
    folder.delete_checkpoint("checkpoint-3")
    assert requests_for("rm")[0] == MANIFEST
    assert files_at(URL) == []


@pytest.mark.parametrize(
    ("error", "raised", "requests"),
    [
        (ConnectionResetError("gone"), StorageError, 3),
        (PermissionError("no"), StorageError, 1),
        (FileNotFoundError("no bucket"), StorageError, 1),
        (OSError(errno.ENOSPC, "full"), OSError, 1),
    ],
)
def test_request_is_repeated_unless_it_is_refused(folder, local, error, raised, requests):
    def fail(request, path):
        raise error

    FaultyStorage.fault = fail
    with pytest.raises(raised):
        folder.upload_file(local / FILES[0], "checkpoint-3/model")
    assert requests_for("put") == ["model"] * requests
