"""Checkpoints in torch's distributed format: torch reads ours, we torch's, and any number of processes any."""

import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

from hftrainer.checkpointing.inspection import inspect_checkpoint
from hftrainer.checkpointing.run_checkpoints import get_last_checkpoint
from hftrainer.errors import InvalidArgument
from tests.distributed.cases_dcp import (
    DCP,
    OTHERS,
    PLACES,
    adapt,
    count_steps,
    die,
    fail,
    late,
    read_all,
    read_given,
    write_all,
)
from tests.distributed.cases_sharding import run
from tests.support.jobs import names_in
from tests.support.parity import assert_same_weights
from tests.support.processes import RanksFailed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("dcp")


@pytest.fixture(scope="module")
def written(processes, folder):
    return {count: processes.run_ranks(write_all, count, folder)[0] for count in PLACES}


@pytest.fixture(scope="module")
def checkpoint(written, folder):
    """Of FSDP2 in two processes."""
    return folder / "2 fsdp2" / "checkpoint-2"


@pytest.mark.parametrize("count", OTHERS)
def test_any_number_of_processes_reads_checkpoints_of_any_other(processes, folder, written, count):
    found = processes.run_ranks(read_all, count, folder)[0]
    for (of, writer, reader, steps), read in found.items():
        if steps == 2:
            assert_same_weights(read["weights"], written[of][writer]["weights"])
        else:  # with the optimizer's state, but for the order of summation
            for name, value in found[of, writer, reader, 3]["weights"].items():
                expected = found[of, PLACES[of][0], PLACES[count][0], 3]["weights"][name]
                assert torch.allclose(value, expected, rtol=0, atol=1e-6)
                assert not torch.equal(value, written[of][writer]["weights"][name])


@pytest.mark.parametrize("name", ["1 replicas", "2 replicas", "2 fsdp1", "2 fsdp2", "4 fsdp2"])
def test_torch_reads_our_checkpoints(written, folder, tmp_path, name):
    shards, (count, way) = folder / name / "checkpoint-2" / "dcp", name.split()
    expected = written[int(count)][way]["weights"]
    dcp_to_torch_save(shards, tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt")
    optimizer = found.pop("optimizer")
    assert_same_weights(found, expected)
    assert optimizer["state.layers.0.weight.exp_avg"].shape == expected["layers.0.weight"].shape
    assert optimizer["param_groups.layers.0.weight.betas"] == (0.9, 0.999)
    loaded = {key: torch.zeros_like(value) for key, value in expected.items()}
    dcp.load(loaded, checkpoint_id=shards)
    assert_same_weights(loaded, expected)
    assert not (shards.parent / "model.safetensors").exists() and (shards.parent / "training_args.bin").exists()


def test_checkpoints_written_by_torch_are_read(processes, written, checkpoint, tmp_path):
    """They replace the folder of shards in ours, and have weights alone."""
    weights = {name: value + 1 for name, value in written[2]["fsdp2"]["weights"].items()}
    given = []
    for name, content in {"nested": {"model": weights}, "flat": weights, "converted": {"model": weights}}.items():
        given.append(tmp_path / name / "checkpoint-2")
        shutil.copytree(checkpoint, given[-1])
        shutil.rmtree(given[-1] / "dcp")
        if name == "converted":
            torch.save(content, tmp_path / "all.pt")
            torch_save_to_dcp(tmp_path / "all.pt", given[-1] / "dcp")
        else:
            dcp.save(content, checkpoint_id=given[-1] / "dcp")
    for count, way in ((1, "replicas"), (2, "replicas"), (2, "fsdp2")):
        for read in processes.run_ranks(read_given, count, tmp_path, way, given)[0]:
            assert_same_weights(read, weights)


def test_adapters_resume_exactly(processes, tmp_path):
    for name, (whole, resumed) in processes.run_ranks(adapt, 2, tmp_path)[0].items():
        assert_same_weights(resumed["weights"], whole["weights"])
        assert names_in(tmp_path / name / "checkpoint-2" / "dcp")
        assert not list((tmp_path / name / "checkpoint-2").glob("adapter_model*"))


LOW_RANK = {"optim_target_modules": ["layers.0"], "optim_args": "rank=2,update_proj_gap=3"}


@pytest.mark.parametrize("name", "adamw_torch sgd adafactor apollo_adamw galore_adamw schedule_free_adamw lomo".split())
def test_optimizer_resumes_exactly(tmp_path, name):
    settings = {**DCP, "optim": name, "max_steps": 4, **(LOW_RANK if name.startswith(("apollo", "galore")) else {})}
    whole = run("plain", settings, tmp_path)
    resumed = run("plain", settings, tmp_path / "resumed", tmp_path / "checkpoint-2")
    assert_same_weights(resumed["weights"], whole["weights"])
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-4")


def test_group_setting_made_of_parameters_is_left_out(tmp_path):
    """Parameters that print alike would get the same key."""
    run("plain", {**DCP, "optim": "grokadamw"}, tmp_path, max_steps=2)
    stored = dcp.FileSystemReader(tmp_path / "checkpoint-2" / "dcp").read_metadata().state_dict_metadata
    assert "optimizer.param_groups.layers.0.weight.lamb" in stored
    assert not [key for key in stored if "tensor(" in key]


@pytest.mark.parametrize("kind", ["by layer", "foreign parameter"])
def test_optimizer_that_cannot_be_stored_is_refused_at_the_start(tmp_path, kind):
    settings = {**DCP, "optim": "galore_adamw_layerwise", **LOW_RANK}
    if kind == "foreign parameter":
        settings = {**DCP, "trainer": {"optimizers": (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1), None)}}
    with pytest.raises(InvalidArgument, match=r"checkpoint_format='dcp' .* remove checkpoint_format") as raised:
        run("plain", settings, tmp_path)
    assert "optimizer steps" not in "".join(getattr(raised.value, "__notes__", []))
    # Without the optimizer's state there is nothing to refuse.
    run("plain", {**settings, "save_only_model": True, "max_steps": 2}, tmp_path)


@pytest.mark.parametrize(("count", "way"), [(1, "replicas"), (2, "replicas"), (2, "fsdp2")])
def test_parameter_without_optimizer_state_resumes_without(processes, tmp_path, count, way):
    whole, resumed = processes.run_ranks(late, count, tmp_path, way)[0]
    assert_same_weights(resumed, whole)


@pytest.mark.parametrize(("way", "collecting"), [("replicas", [2, 0]), ("fsdp2", [2, 2])])
def test_saving_takes_no_step_and_only_writers_collect_states(processes, tmp_path, way, collecting):
    found = processes.run_ranks(count_steps, 2, tmp_path, way)
    assert [steps for steps, _ in found] == [4, 4]
    assert [collected for _, collected in found] == collecting


def test_folder_called_dcp_beside_ordinary_files_is_not_read(tmp_path):
    ordinary = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole = run("plain", ordinary, tmp_path)
    checkpoint = tmp_path / "checkpoint-2"
    dcp.save({"model": {name: value + 1 for name, value in whole["weights"].items()}}, checkpoint_id=checkpoint / "dcp")
    resumed = run("plain", ordinary, tmp_path / "resumed", checkpoint)
    assert_same_weights(resumed["weights"], whole["weights"])


def test_damaged_or_missing_part_is_detected(checkpoint, tmp_path):
    shutil.copytree(checkpoint.parent, tmp_path / "run")
    damaged = tmp_path / "run" / "checkpoint-2"
    part = damaged / "dcp" / "__1_0.distcp"
    content = part.read_bytes()
    assert get_last_checkpoint(str(tmp_path / "run")) == str(damaged)
    part.write_bytes(content[::-1])
    for only_weights in (False, True):
        assert "__1_0.distcp have changed" in inspect_checkpoint(damaged, only_weights=only_weights).refusal_reason
    part.unlink()
    for only_weights in (False, True):
        assert "__1_0.distcp is missing" in inspect_checkpoint(damaged, only_weights=only_weights).refusal_reason
    assert get_last_checkpoint(str(tmp_path / "run")) is None
    part.write_bytes(content)
    (damaged / "dcp" / ".metadata").unlink()
    assert "dcp/.metadata is missing" in inspect_checkpoint(damaged).fault


def test_rank_that_cannot_write_skips_the_checkpoint_in_all_ranks(processes, tmp_path):
    """Training continues, and does not wait for shards written in the background."""
    for found in processes.run_ranks(fail, 2, tmp_path):
        assert found["now"] == (["checkpoint-4"], True)
        assert found["later"] == (["checkpoint-4"], False)
        assert found["held"] == ["checkpoint-2", "checkpoint-4"]


def test_rank_killed_while_it_writes_leaves_no_checkpoint(processes, tmp_path):
    with pytest.raises(RanksFailed, match="status -9"):
        processes.run_ranks(die, 2, tmp_path)
    assert not [name for name in names_in(tmp_path) if name.startswith("checkpoint")]
    assert get_last_checkpoint(str(tmp_path)) is None
