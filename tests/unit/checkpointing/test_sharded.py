"""torch's distributed checkpoints, with a shard from each process, are read without running code in them."""

import dataclasses
import pickle

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from hftrainer.checkpointing import sharded
from hftrainer.checkpointing.layout import DCP_FOLDER, SHARD_FOLDERS
from hftrainer.checkpointing.sharded import check_unread_states, load_model_shards, save_dcp
from hftrainer.errors import DamagedCheckpoint, UnsafeCheckpoint, UnsupportedArgument
from tests.support.checkpoints import MaliciousPickle
from tests.support.parity import assert_same_weights
from tests.support.sharded_checkpoints import make_stepped, write_shards
from tests.support.small_models import Note, make_plain

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def load_optimizer(folder, **kwargs):
    model, optimizer = make_stepped()
    optimizer.param_groups[0].update(dict.fromkeys(kwargs))
    sharded.load_optimizer(model, optimizer, str(folder), read_unsharded=dict)
    return optimizer


def change_metadata(folder, change):
    path = folder / SHARD_FOLDERS["model"] / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    replaced = change(metadata)
    path.write_bytes(pickle.dumps(metadata if replaced is None else replaced))


def test_written_shards_are_read_back(tmp_path):
    model = write_shards(tmp_path)
    fresh = make_plain()
    load_model_shards(fresh, str(tmp_path))
    assert_same_weights(fresh.state_dict(), model.state_dict())
    assert load_optimizer(tmp_path).state_dict()["state"][0]["step"] == 1


def test_metadata_runs_no_code(tmp_path):
    write_shards(tmp_path)
    change_metadata(tmp_path, lambda metadata: metadata.planner_data.update(more=MaliciousPickle(tmp_path / "trace")))
    with pytest.raises(UnsafeCheckpoint, match=r"pytorch_model_fsdp_0/\.metadata holds a pickled posix\.mkdir"):
        load_model_shards(make_plain(), str(tmp_path))
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("variable", [None, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"])
def test_values_in_shards_run_no_code(tmp_path, variable, monkeypatch):
    if variable:
        monkeypatch.setenv(variable, "1")
    write_shards(tmp_path, note=MaliciousPickle(tmp_path / "trace"))
    with pytest.raises(UnsafeCheckpoint, match=r"optimizer_0 holds a pickled posix\.mkdir"):
        load_optimizer(tmp_path, note=None)
    assert not (tmp_path / "trace").exists()


def test_class_allowed_by_the_user_is_loaded(tmp_path):
    write_shards(tmp_path, note=Note())
    change_metadata(tmp_path, lambda metadata: metadata.planner_data.update(note=Note()))
    with torch.serialization.safe_globals([Note]):
        load_model_shards(make_plain(), str(tmp_path))
        assert load_optimizer(tmp_path, note=None).param_groups[0]["note"].text == "kept"


def test_dcp_folder_of_model_and_optimizer_is_read(tmp_path):
    """It is read without running code; one that another program wrote may lack the optimizer."""
    model, optimizer = make_stepped()
    for folder, given in (("both", optimizer), ("weights", None)):
        sharded.save_dcp(sharded.states_for_dcp(model, given), str(tmp_path / folder), is_only_writer=True)
        assert sharded.holds_optimizer(str(tmp_path / folder / DCP_FOLDER)) == (given is not None)
    assert load_optimizer(tmp_path / "both").state_dict()["state"][0]["step"] == 1
    optimizer.param_groups[0]["note"] = MaliciousPickle(tmp_path / "trace")
    sharded.save_dcp(sharded.states_for_dcp(model, optimizer), str(tmp_path / "harm"), is_only_writer=True)
    with pytest.raises(UnsafeCheckpoint, match=r"dcp holds a pickled posix\.mkdir"):
        load_optimizer(tmp_path / "harm", note=None)
    assert not (tmp_path / "trace").exists()


def rename_files(name):
    def change(metadata):
        for stored in metadata.storage_data.values():
            stored.relative_path = name

    return change


def move_values(by):
    def change(metadata):
        for path, stored in metadata.storage_data.items():
            metadata.storage_data[path] = dataclasses.replace(stored, offset=stored.offset + by)

    return change


def resize_tensors(metadata):
    for described in metadata.state_dict_metadata.values():
        described.size = torch.Size([1])


WRONG = {
    "parent folder": (rename_files("../pytorch_model_fsdp_0/__0_0.distcp"), "is not in this folder"),
    "absolute path": (rename_files("/etc/hostname"), "is not in this folder"),
    "no name": (rename_files(7), "does not hold what"),
    "no metadata": (lambda metadata: {"a": 1}, "it is of type dict"),
    "other names": (lambda metadata: metadata.state_dict_metadata.clear(), "does not hold what"),
    "a number as name": (lambda metadata: metadata.state_dict_metadata.update({3: None}), "no dict of names"),
    "no names": (lambda metadata: vars(metadata).pop("state_dict_metadata") and None, "does not hold what"),
    "before the file": (move_values(-(10**6)), "too few for"),
    "after the file": (move_values(10**6), "too few for"),
    "other sizes": (resize_tensors, "does not hold what"),
}


@pytest.mark.parametrize("name", WRONG)
def test_metadata_that_does_not_fit_is_refused(tmp_path, name):
    write_shards(tmp_path)
    change_metadata(tmp_path, WRONG[name][0])
    with pytest.raises(DamagedCheckpoint, match=rf"pytorch_model_fsdp_0.*{WRONG[name][1]}"):
        load_model_shards(make_plain(), str(tmp_path))


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("length", [None, 0, 100])
def test_missing_or_truncated_file_is_refused(tmp_path, name, length):
    write_shards(tmp_path)
    path = tmp_path / SHARD_FOLDERS["model"] / name
    path.unlink() if length is None else path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(DamagedCheckpoint, match="pytorch_model_fsdp_0"):
        load_model_shards(make_plain(), str(tmp_path))


def test_torch_reads_the_same_metadata(tmp_path):
    """No class that torch writes is missing among those that we allow."""
    write_shards(tmp_path)
    assert FileSystemReader(tmp_path / SHARD_FOLDERS["model"]).read_metadata().state_dict_metadata.keys() == {
        f"model.{name}" for name in make_plain().state_dict()
    }


def test_optimizer_state_that_torch_would_skip_is_refused(tmp_path):
    """torch reads what an optimizer holds before its first step, and nothing else that is stored."""
    stored = {"state.w.exp_avg": torch.zeros(2), "state.w.projector.scale": torch.zeros(1), "state.other.x": 1}
    save_dcp({"w": torch.zeros(2), "optimizer": stored}, str(tmp_path), is_only_writer=True)
    path = str(tmp_path / "dcp")
    check_unread_states({"w": {"exp_avg": torch.zeros(2), "projector": None}}, path)
    with pytest.raises(UnsupportedArgument, match="'projector' of w, which this optimizer cannot read"):
        check_unread_states({"w": {"exp_avg": torch.zeros(2)}}, path)
