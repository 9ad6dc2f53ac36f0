"""Models sharded by torch_xla: over the devices of one process, or in a wrapper; each trains as on one device."""

import os

import pytest
import torch
from safetensors.torch import load_file

from hftrainer import TrainingArguments
from hftrainer.errors import InvalidConfig, UnsupportedArgument
from tests.adapters.xla.support import TOLERANCE, assert_close, make_trainer, numbers, run_script, weights

EVALUATED = {"eval_strategy": "steps", "eval_steps": 6}


@pytest.fixture(scope="module")
def cpu_run(tmp_path_factory):
    trainer = make_trainer(tmp_path_factory.mktemp("cpu"), "llama", use_cpu=True, **EVALUATED)
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def spmd_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spmd")
    done = run_script("-m", "tests.adapters.xla.spmd", str(folder), CPU_NUM_DEVICES="2")
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, torch.load(folder / "found.pt", weights_only=False)


@pytest.mark.parametrize("kind", ["plain", "checkpointed"])
def test_spmd_trains_as_the_cpu(spmd_runs, cpu_run, kind):
    found = spmd_runs[1][kind]
    assert len(found["numbers"]) == len(numbers(cpu_run))
    for line, expected in zip(found["numbers"], numbers(cpu_run), strict=True):
        assert line == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)
    for name, value in weights(cpu_run).items():
        torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=5 * TOLERANCE, msg=name)
        assert torch.equal(found["weights"][name], found["resumed"][name])
    predictions = torch.tensor(cpu_run.predict(cpu_run.eval_dataset).predictions)
    torch.testing.assert_close(found["predictions"], predictions, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["layout", "layout_resumed", "layout_moments"])
def test_spmd_gives_each_device_a_shard_of_weights_and_moments(spmd_runs, kind):
    """Along the longest dimension, on two devices."""
    layout = spmd_runs[1]["plain"][kind]
    assert layout["model.layers.0.self_attn.q_proj.weight"] == "{devices=[2,1]0,1}"
    assert layout["model.layers.0.mlp.down_proj.weight"] == "{devices=[1,2]0,1}"
    assert layout["model.norm.weight"] == "{devices=[2]0,1}"
    assert layout["lm_head.weight"] == "{devices=[2,1]0,1}"
    assert all(spec.startswith("{devices=[") for spec in layout.values())


def test_spmd_compiles_nothing_twice(spmd_runs):
    compiled = spmd_runs[1]["plain"]["compiled"]
    # Two shapes of batches, the last of an epoch is a ragged one; a log line; and what evaluating leaves behind.
    assert compiled[30] == compiled[13], compiled


def test_spmd_checkpoints_are_ordinary(spmd_runs, cpu_run, tmp_path):
    folder = os.path.join(spmd_runs[0], "plain", "checkpoint-6")
    assert load_file(os.path.join(folder, "model.safetensors")).keys() == cpu_run.model.state_dict().keys()
    resumed = make_trainer(tmp_path, "llama", use_cpu=True, **EVALUATED)
    resumed.train(resume_from_checkpoint=folder)
    assert_close(resumed, cpu_run, compared=slice(-3, -1))


def make_wrapped(output_dir, name="llama", *, of_xla=None, **settings):
    config = {"xla": True, "min_num_params": 200, **(of_xla or {})}
    return make_trainer(output_dir, name, fsdp=True, fsdp_config=config, **EVALUATED, **settings)


@pytest.mark.parametrize(
    "of_xla",
    [
        {},
        {"xla_fsdp_grad_ckpt": True},
        {"xla_fsdp_settings": {"compute_dtype": "float32", "shard_param_on_dim_0": True}},
    ],
)
def test_xla_fsdp_trains_as_the_cpu(tmp_path, cpu_run, of_xla):
    trainer = make_wrapped(tmp_path, of_xla=of_xla)
    trainer.train()
    assert type(trainer.lightning_trainer.strategy).__name__ == "ShardedXla"
    assert type(trainer.model).__name__ == "XlaFullyShardedDataParallel"
    assert (trainer.is_fsdp_xla_enabled, trainer.is_fsdp_xla_v1_enabled, trainer.is_fsdp_enabled) == (True, True, False)
    assert [len(group["params"]) for group in trainer.optimizer.param_groups] == [16, 5]
    full = trainer.accelerator.get_state_dict(trainer.model)
    for name, value in weights(cpu_run).items():
        torch.testing.assert_close(full[name], value, rtol=0, atol=5 * TOLERANCE, msg=name)
    for line, expected in zip(numbers(trainer)[:-1], numbers(cpu_run)[:-1], strict=True):
        assert line == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)


def test_xla_fsdp_saves_shards_and_full_weights_and_resumes(tmp_path):
    """A file of each process, as transformers names them, and the full weights for everybody else."""
    saved = {"save_strategy": "steps", "save_steps": 6, "load_best_model_at_end": True}
    trainer = make_wrapped(tmp_path, **saved)
    trainer.train()
    folder = tmp_path / "checkpoint-6"
    shards = {name for name in os.listdir(folder) if name.startswith("rank")}
    assert shards == {"rank0-of-1-optimizer.pt", "rank0-of-1-pytorch_model.bin"}
    assert not (folder / "optimizer.pt").exists()
    resumed = make_wrapped(tmp_path, **saved)
    resumed.train(resume_from_checkpoint=str(folder))
    assert all(torch.equal(value, weights(trainer)[name]) for name, value in weights(resumed).items())
    from transformers import LlamaForCausalLM

    again = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-12")
    full = trainer.accelerator.get_state_dict(trainer.model)
    assert all(torch.equal(value, full[name]) for name, value in again.state_dict().items())


def test_xla_fsdp_in_bfloat16_is_close_to_float32(tmp_path):
    trainer = make_wrapped(tmp_path, of_xla={"xla_fsdp_settings": {"compute_dtype": "bfloat16"}}, max_steps=6)
    full = make_wrapped(tmp_path, max_steps=6)
    losses = [each.train().training_loss for each in (trainer, full)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2) and losses[0] != losses[1]


@pytest.mark.parametrize(
    ("of_xla", "message"),
    [
        ({"xla_fsdp_settings": {"compute_type": "bfloat16"}}, "did you mean 'compute_dtype'"),
        ({"xla_fsdp_settings": {"compute_dtype": "bfloat17"}}, "torch has no such type"),
        ({"transformer_layer_cls_to_wrap": ["LlamaLayer"], "min_num_params": 0}, "the model has no LlamaLayer"),
    ],
)
def test_wrong_xla_fsdp_settings_are_refused(tmp_path, of_xla, message):
    trainer = make_wrapped(tmp_path, of_xla=of_xla)
    with pytest.raises(InvalidConfig, match=message):
        trainer.train()


@pytest.mark.parametrize(
    ("of_xla", "message"),
    [
        ({"cpu_offload": True}, r"fsdp_config\['cpu_offload'\] has no effect with 'xla'"),
        ({"activation_checkpointing": True}, "xla_fsdp_grad_ckpt"),
        ({"reshard_after_forward": "hybrid_shard"}, "reshard_after_forward"),
    ],
)
def test_settings_of_torch_fsdp_are_refused_with_xla(tmp_path, of_xla, message):
    with pytest.raises(UnsupportedArgument, match=message):
        make_wrapped(tmp_path, of_xla=of_xla)


def test_xla_fsdp_on_another_device_is_refused(tmp_path):
    from hftrainer.arguments.checks.unsupported import check_supported
    from hftrainer.arguments.resolved import ResolvedArguments

    args = TrainingArguments(str(tmp_path), fsdp=True, fsdp_config={"xla": True}, use_cpu=True)
    assert "training is on another device" in "\n".join(check_supported(ResolvedArguments(args)))
