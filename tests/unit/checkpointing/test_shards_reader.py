"""torch's distributed checkpoints, of a part from each process, are read as data too."""

import dataclasses
import pickle

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from hftrainer.checkpointing import sharded
from hftrainer.checkpointing.names import DCP_FOLDER, SHARD_FOLDERS
from hftrainer.checkpointing.sharded import check_unread_states, load_model_shards, save_dcp
from hftrainer.errors import DamagedCheckpoint, UnsafeCheckpoint, UnsupportedArgument
from tests.support.checkpoints import Mischief
from tests.support.parity import assert_same_weights
from tests.support.parts import stepped, write
from tests.support.tiny import Note, make_plain

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def load_optimizer(folder, **more):
    model, optimizer = stepped()
    optimizer.param_groups[0].update(dict.fromkeys(more))
    sharded.load_optimizer(model, optimizer, str(folder), read_unsharded=dict)
    return optimizer


def change_list(folder, change):
    path = folder / SHARD_FOLDERS["model"] / ".metadata"
    parts = pickle.loads(path.read_bytes())
    replaced = change(parts)
    path.write_bytes(pickle.dumps(parts if replaced is None else replaced))


def test_what_was_written_is_read(tmp_path):
    model = write(tmp_path)
    fresh = make_plain()
    load_model_shards(fresh, str(tmp_path))
    assert_same_weights(fresh.state_dict(), model.state_dict())
    assert load_optimizer(tmp_path).state_dict()["state"][0]["step"] == 1


def test_the_list_of_parts_runs_no_code(tmp_path):
    write(tmp_path)
    change_list(tmp_path, lambda parts: parts.planner_data.update(more=Mischief(tmp_path / "trace")))
    with pytest.raises(UnsafeCheckpoint, match=r"pytorch_model_fsdp_0/\.metadata holds a pickled posix\.mkdir"):
        load_model_shards(make_plain(), str(tmp_path))
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("variable", [None, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"])
def test_values_in_parts_run_no_code(tmp_path, variable, monkeypatch):
    if variable:
        monkeypatch.setenv(variable, "1")
    write(tmp_path, note=Mischief(tmp_path / "trace"))
    with pytest.raises(UnsafeCheckpoint, match=r"optimizer_0 holds a pickled posix\.mkdir"):
        load_optimizer(tmp_path, note=None)
    assert not (tmp_path / "trace").exists()


def test_a_class_that_the_user_allows(tmp_path):
    write(tmp_path, note=Note())
    change_list(tmp_path, lambda parts: parts.planner_data.update(note=Note()))
    with torch.serialization.safe_globals([Note]):
        load_model_shards(make_plain(), str(tmp_path))
        assert load_optimizer(tmp_path, note=None).param_groups[0]["note"].text == "kept"


def test_a_folder_of_both_states(tmp_path):
    """Read as data too; one that another program wrote may lack the optimizer."""
    model, optimizer = stepped()
    for folder, given in (("both", optimizer), ("weights", None)):
        sharded.save_dcp(sharded.states_for_dcp(model, given), str(tmp_path / folder), is_only_writer=True)
        assert sharded.holds_optimizer(str(tmp_path / folder / DCP_FOLDER)) == (given is not None)
    assert load_optimizer(tmp_path / "both").state_dict()["state"][0]["step"] == 1
    optimizer.param_groups[0]["note"] = Mischief(tmp_path / "trace")
    sharded.save_dcp(sharded.states_for_dcp(model, optimizer), str(tmp_path / "harm"), is_only_writer=True)
    with pytest.raises(UnsafeCheckpoint, match=r"dcp holds a pickled posix\.mkdir"):
        load_optimizer(tmp_path / "harm", note=None)
    assert not (tmp_path / "trace").exists()


def renamed(name):
    def change(parts):
        for stored in parts.storage_data.values():
            stored.relative_path = name

    return change


def moved(by):
    def change(parts):
        for path, stored in parts.storage_data.items():
            parts.storage_data[path] = dataclasses.replace(stored, offset=stored.offset + by)

    return change


def resized(parts):
    for described in parts.state_dict_metadata.values():
        described.size = torch.Size([1])


WRONG = {
    "up": (renamed("../pytorch_model_fsdp_0/__0_0.distcp"), "is not in this folder"),
    "absolute": (renamed("/etc/hostname"), "is not in this folder"),
    "no name": (renamed(7), "does not hold what"),
    "no list": (lambda parts: {"a": 1}, "it is a dict"),
    "other names": (lambda parts: parts.state_dict_metadata.clear(), "does not hold what"),
    "a number as name": (lambda parts: parts.state_dict_metadata.update({3: None}), "no dict of names"),
    "no names": (lambda parts: vars(parts).pop("state_dict_metadata") and None, "does not hold what"),
    "before the file": (moved(-(10**6)), "too few for"),
    "after the file": (moved(10**6), "too few for"),
    "other sizes": (resized, "does not hold what"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_list_that_does_not_fit(tmp_path, name):
    write(tmp_path)
    change_list(tmp_path, WRONG[name][0])
    with pytest.raises(DamagedCheckpoint, match=rf"pytorch_model_fsdp_0.*{WRONG[name][1]}"):
        load_model_shards(make_plain(), str(tmp_path))


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("length", [None, 0, 100])
def test_a_cut_file(tmp_path, name, length):
    write(tmp_path)
    path = tmp_path / SHARD_FOLDERS["model"] / name
    path.unlink() if length is None else path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(DamagedCheckpoint, match="pytorch_model_fsdp_0"):
        load_model_shards(make_plain(), str(tmp_path))


def test_torch_itself_reads_the_same_list(tmp_path):
    """Nothing that torch writes is missing among the classes."""
    write(tmp_path)
    assert FileSystemReader(tmp_path / SHARD_FOLDERS["model"]).read_metadata().state_dict_metadata.keys() == {
        f"model.{name}" for name in make_plain().state_dict()
    }


def test_a_state_that_would_be_left_out_is_refused(tmp_path):
    """torch reads what an optimizer holds before its first step, and nothing else that is stored."""
    stored = {"state.w.exp_avg": torch.zeros(2), "state.w.projector.scale": torch.zeros(1), "state.other.x": 1}
    save_dcp({"w": torch.zeros(2), "optimizer": stored}, str(tmp_path), is_only_writer=True)
    path = str(tmp_path / "dcp")
    check_unread_states({"w": {"exp_avg": torch.zeros(2), "projector": None}}, path)
    with pytest.raises(UnsupportedArgument, match="'projector' of w, which this optimizer cannot read"):
        check_unread_states({"w": {"exp_avg": torch.zeros(2)}}, path)
