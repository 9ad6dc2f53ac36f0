"""Missing and damaged files of checkpoints are found, shards by the names of files, without DeepSpeed."""

import pytest
import torch

from hftrainer.checkpointing import layout
from hftrainer.checkpointing.inspection import Inspection, accept_checkpoint, inspect_checkpoint
from hftrainer.checkpointing.writing.files import write_manifest
from hftrainer.errors import CheckpointNotFound

ZERO_3 = [f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt" for rank in (0, 1) for kind in ("model", "optim")]
ZERO_2 = ["mp_rank_00_model_states.pt", *(f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1))]
EXPERTS = ["mp_rank_00_model_states.pt", "layer_0_expert_0_mp_rank_00_model_states.pt", "expp_rank_0_optim_states.pt"]


def write(folder, names, tag="global_step4", latest="latest"):
    (folder / "global_step4").mkdir(parents=True)
    (folder / "trainer_state.json").write_text('{"global_step": 4}')
    (folder / latest).write_text(tag)
    for name in names:
        torch.save({}, folder / "global_step4" / name)
    return folder


@pytest.mark.parametrize(
    ("names", "damage"),
    [
        (ZERO_3, None),
        (ZERO_2, None),
        (EXPERTS, None),
        (ZERO_3[:1] + ZERO_3[2:], "global_step4/zero_pp_rank_0_mp_rank_00_optim_states.pt is missing"),
        (ZERO_3[1:], "global_step4/zero_pp_rank_0_mp_rank_00_model_states.pt is missing"),
        (ZERO_2[:1] + ZERO_2[2:], "global_step4/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt is missing"),
        (ZERO_2[1:], "global_step4/mp_rank_00_model_states.pt is missing"),
        ([], "holds no weights"),
    ],
)
def test_missing_shard_is_named_without_a_manifest(tmp_path, names, damage):
    found = inspect_checkpoint(write(tmp_path / "run", names))
    assert found.fault is None if damage is None else found.fault.endswith(damage)
    assert found.skip_reason == found.refusal_reason == found.fault


@pytest.mark.parametrize("latest", ["latest", "latest_universal"])
@pytest.mark.parametrize("tag", ["global_step4", "../run/global_step4"])
def test_latest_must_name_a_folder_of_the_checkpoint(tmp_path, latest, tag):
    """A checkpoint with another name in it is not used."""
    found = inspect_checkpoint(write(tmp_path / "run", EXPERTS, tag, latest)).fault
    assert found is None if tag == "global_step4" else f"{latest} does not hold what" in str(found)


def test_changed_or_removed_shard_is_named(tmp_path):
    folder = write(tmp_path / "run", ZERO_3)
    write_manifest(folder)
    part = folder / "global_step4" / ZERO_3[0]
    part.write_bytes(part.read_bytes()[::-1])
    assert f"{ZERO_3[0]} have changed" in str(inspect_checkpoint(folder, only_weights=True).refusal_reason)
    part.unlink()
    assert f"{ZERO_3[0]} is missing" in str(inspect_checkpoint(folder).refusal_reason)
    with pytest.raises(CheckpointNotFound, match=f"{ZERO_3[0]} is missing"):
        accept_checkpoint(folder)


def test_truncated_shard_is_named(tmp_path):
    """The reason is the same for a checkpoint that is found and one that is named."""
    folder = write(tmp_path / "run", ZERO_3)
    (folder / layout.DCP_FOLDER).mkdir()
    for name in ("__0_0.distcp", layout.LIST_OF_SHARDS):
        (folder / layout.DCP_FOLDER / name).write_bytes(b"0")
    write_manifest(folder)
    (folder / layout.DCP_FOLDER / "__0_0.distcp").write_bytes(b"")
    reason = f"{folder}/dcp/__0_0.distcp has changed size since it was written"
    assert inspect_checkpoint(folder).skip_reason == inspect_checkpoint(folder).fault == reason


@pytest.mark.parametrize("kind", ["pytorch_model_fsdp_0", "optimizer_0"])
def test_fsdp_shards_need_their_metadata(tmp_path, kind):
    folder = write(tmp_path / "run", [])
    (folder / "latest").unlink()
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        (folder / name).mkdir()
        for file in ("__0_0.distcp", ".metadata"):
            (folder / name / file).write_bytes(b"0")
    assert inspect_checkpoint(folder).fault is None
    (folder / kind / ".metadata").unlink()
    assert str(inspect_checkpoint(folder).fault).endswith(f"{kind}/.metadata is missing")


def test_weights_may_be_converted_and_shards_without_a_list_deleted(tmp_path):
    folder = write(tmp_path / "run", [])
    (folder / "latest").unlink()
    for name in ("model.safetensors", "__0_0.distcp"):
        (folder / name).write_bytes(b"0")
    write_manifest(folder)
    (folder / "__0_0.distcp").unlink()
    (folder / "model.safetensors").rename(folder / "model.saved")
    assert inspect_checkpoint(folder).fault == f"{folder}/model.safetensors is missing, and no weights replace it"
    torch.save({}, folder / "pytorch_model.bin")
    assert inspect_checkpoint(folder).fault is None


@pytest.mark.parametrize(
    ("altered", "fault", "is_accepted"),
    [((), None, False), (("a",), None, True), (("a",), "b is missing", False), ((), layout.MANIFEST_NAME, True)],
)
def test_altered_files_and_a_damaged_manifest_can_be_accepted(tmp_path, altered, fault, is_accepted):
    assert Inspection(tmp_path, altered=altered, fault=fault).can_be_accepted is is_accepted
