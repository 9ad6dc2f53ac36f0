"""The blocks of the Trainer's documentation of v4.48, by number; those of DeepSpeed are in tests/adapters/deepspeed."""

import json

import pytest
import torch
from safetensors.torch import load_file

from hftrainer import TrainingArguments
from hftrainer.arguments.resolved import ResolvedArguments
from hftrainer.parallel.fsdp.settings import FsdpSettings, XlaSettings
from tests.docs.documents import shell
from tests.docs.documents.support import losses

# ---- Launchers ------------------------------------------------------------------------------------------------------

#: Block → the option, and what it becomes.
FSDP = {
    20: ("full_shard", {}),
    21: ("shard_grad_op", {"strategy": "shard_grad_op"}),
    22: ("no_shard", {"version": 1, "strategy": "no_shard"}),
    23: ("hybrid_shard", {"version": 1, "strategy": "hybrid_shard"}),
    24: ("hybrid_shard_zero2", {"version": 1, "strategy": "hybrid_shard_zero2"}),
    25: ("full_shard offload", {"cpu_offload": True}),
    26: ("shard_grad_op offload", {"strategy": "shard_grad_op", "cpu_offload": True}),
    27: ("full_shard auto_wrap", {}),
    28: ("shard_grad_op auto_wrap", {"strategy": "shard_grad_op"}),
    29: ("full_shard offload auto_wrap", {"cpu_offload": True}),
    30: ("shard_grad_op offload auto_wrap", {"strategy": "shard_grad_op", "cpu_offload": True}),
    33: ("full shard", {}),
}
#: The keys of `--fsdp_config` that the text names, and what they become.
KEYS = {
    "transformer_layer_cls_to_wrap": ["Linear"],
    "backward_prefetch": "backward_pos",
    "forward_prefetch": "True",
    "limit_all_gathers": "True",
    "activation_checkpointing": "True",
    "use_orig_params": True,
}
READ = FsdpSettings(
    version=1,
    wrap_classes=("Linear",),
    backward_prefetch="BACKWARD_POST",
    forward_prefetch=True,
    limit_all_gathers=True,
    activation_checkpointing=True,
    use_orig_params=True,
)
GENERATES = (
    "--output_dir out --learning_rate 0.3 --model_name_or_path t5 --predict_with_generate --generation_max_length 6"
)
LINES = {
    **{number: f'{shell.NORMAL} --fsdp "{words}"' for number, (words, _) in FSDP.items()},
    31: f"{shell.NORMAL} --fsdp full_shard --fsdp_config fsdp_config.json",
    "size": f"""{shell.NORMAL} --fsdp "full_shard auto_wrap" --fsdp_config '{{"min_num_params":9}}'""",
    18: f"""{shell.NORMAL} --fsdp full_shard --fsdp_config '{{"state_dict_type":"SHARDED_STATE_DICT"}}'"""
    " --final_model final",
    32: f"{GENERATES} --fsdp full_shard",
    "whole": GENERATES,
    1: shell.NORMAL,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("v4.48")
    (made / "fsdp_config.json").write_text(json.dumps(KEYS))
    return made


@pytest.fixture(scope="module")
def found(folder):
    """By rank and block; the last is what the release itself logs for block 1."""
    block = "torchrun --nproc_per_node=2 trainer-program.py " + shell.several(*LINES.values())
    ranks = shell.run(folder, block, "trainer-program.py", RELEASE=shell.several(shell.NORMAL))
    return [dict(zip([*LINES, "release"], runs, strict=True)) for runs in ranks]


def test_line_1(found):
    shell.assert_as_release([[runs[1], runs["release"]] for runs in found])


def test_line_2(tmp_path):
    """On a machine without GPUs it would start one process: it is told that there are two."""
    block = f"accelerate launch --num_processes 2 trainer-program.py {shell.several(shell.NORMAL)}"
    found = shell.run(tmp_path, block, "trainer-program.py", RELEASE=shell.several(shell.NORMAL))
    assert len(found) == 2
    shell.assert_as_release(found)


def settings_of(run):
    found = {
        **run["sharding"],
        "wrap_classes": run["sharding"]["wrap_classes"] and tuple(run["sharding"]["wrap_classes"]),
    }
    return FsdpSettings(**found)


@pytest.mark.parametrize("line", FSDP)
def test_fsdp(line, found):
    """Sharded as the option says, with the losses of replicas."""
    for runs in found:
        assert runs[line]["kind"] == "FSDP"
        assert settings_of(runs[line]) == FsdpSettings(**FSDP[line][1])
        assert losses(runs[line]["logs"]) == pytest.approx(losses(runs[1]["logs"]), rel=5e-7)
    assert found[0][line]["weights"] == pytest.approx(found[0][1]["weights"], abs=1e-5)


def test_line_31(found, folder):
    """The keys in a file, and as a dict; layers are wrapped by class, or by size."""
    for runs in found:
        assert settings_of(runs[31]) == READ
        assert settings_of(runs["size"]) == FsdpSettings(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=9)
        for name in (31, "size"):
            assert losses(runs[name]["logs"]) == pytest.approx(losses(runs[1]["logs"]), rel=5e-7)
    args = TrainingArguments("o", use_cpu=True, fsdp="full_shard", fsdp_config=KEYS)
    assert ResolvedArguments(args).fsdp == READ


def test_line_18(found, folder):
    """The whole model, though checkpoints are in parts."""
    written = load_file(folder / "final" / "model.safetensors")
    for runs in found:
        assert runs[18]["sharding"]["state_dict_type"] == "SHARDED_STATE_DICT"
        sums = {name: value.sum().item() for name, value in written.items()}
        assert sums == pytest.approx(runs[18]["weights"], abs=1e-6)


def test_line_32(found):
    """Sharded models generate what whole ones do."""
    for runs in found:
        assert runs[32]["kind"] == "FSDP"
        assert runs[32]["tokens"] == runs["whole"]["tokens"]
        assert any(any(line) for line in runs[32]["tokens"])


def test_line_33():
    """With what is to be in `--fsdp_config` for torch_xla; training is in the lane of XLA."""
    of_xla = {"xla": True, "xla_fsdp_settings": {"flatten_parameters": False}, "xla_fsdp_grad_ckpt": True}
    args = TrainingArguments("o", use_cpu=True, fsdp="full shard", fsdp_config={**of_xla, "min_num_params": 9})
    settings = ResolvedArguments(args).fsdp
    assert settings.xla == XlaSettings(grad_ckpt=True, settings=(("flatten_parameters", False),))
    assert (settings.strategy, settings.min_num_params) == ("full_shard", 9)


# ---- Which GPUs -----------------------------------------------------------------------------------------------------

#: Block → its lines, without the script's arguments.
VISIBLE = {
    4: "CUDA_VISIBLE_DEVICES=0,2 torchrun trainer-program.py",
    5: "CUDA_VISIBLE_DEVICES=2,0 torchrun trainer-program.py",
    6: "CUDA_VISIBLE_DEVICES=2,0 python trainer-program.py",
    7: "CUDA_VISIBLE_DEVICES= python trainer-program.py",
    8: "export CUDA_VISIBLE_DEVICES=0,2\ntorchrun trainer-program.py",
    9: "export CUDA_DEVICE_ORDER=PCI_BUS_ID\npython trainer-program.py",
    10: "export CUDA_DEVICE_ORDER=FASTEST_FIRST\npython trainer-program.py",
    11: "export CUDA_VISIBLE_DEVICES=1,0\npython trainer-program.py",
}
#: Block → the physical GPU of each process that it starts on a machine with four, which says nothing of the order.
TAKEN = {4: [0, 2], 5: [2, 0], 6: [2, 0], 7: [], 8: [0, 2], 11: [1, 0]}


@pytest.mark.parametrize("line", VISIBLE)
def test_visible_gpus(line, tmp_path):
    """Without a GPU the block trains on the CPU; the variables reach the script as they are."""
    block = f"{VISIBLE[line]} {shell.several(shell.NORMAL)}"
    ((run,),) = shell.run(tmp_path, block, "trainer-program.py")
    shell.assert_as_release_alone(run)
    given = dict(word.split("=") for word in block.split() if word.startswith("CUDA_"))
    assert run["environment"] == [given.get("CUDA_VISIBLE_DEVICES"), given.get("CUDA_DEVICE_ORDER")]


@pytest.mark.parametrize("line", TAKEN)
def test_order_of_gpus(line, monkeypatch):
    """As if there were four: process N takes the Nth of the visible ones, and `python` starts one for each of them."""
    (visible,) = [word.split("=")[1] for word in VISIBLE[line].split() if "VISIBLE" in word]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    physical = torch.cuda._parse_visible_devices()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(physical))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(physical))
    monkeypatch.setattr(TrainingArguments, "_connect_launched", lambda self: None)  # the processes are made up
    if "torchrun" not in VISIBLE[line]:
        args = TrainingArguments("o")
        assert (args.world_size, args.n_gpu) == (max(len(physical), 1), min(len(physical), 1))
        assert args.device.type == ("cuda" if physical else "cpu")
    taken = []
    for rank in range(len(physical)):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": len(physical), "LOCAL_WORLD_SIZE": len(physical)}
        for name, value in {**place, "MASTER_ADDR": "localhost", "MASTER_PORT": 29501}.items():
            monkeypatch.setenv(name, str(value))
        taken.append(physical[TrainingArguments("o").device.index])
    assert taken == TAKEN[line]
