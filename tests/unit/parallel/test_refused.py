"""A Trainer refuses what cannot run on a device or in several processes, and says what to do instead."""

import pytest

from hftrainer import Seq2SeqTrainingArguments, TrainingArguments
from hftrainer.errors import InvalidArgument
from tests.support.refusals import assert_refused, plan_of, problems

CPU, TWO = {"use_cpu": True}, {"lightning_config": {"devices": 2}}
START = "start the script with python -m hftrainer run --tpu"
NOT_ON_MPS = "not supported on Apple's GPU"
XLA = {"fsdp": True, "fsdp_config": {"xla": True}}
SPMD = {"fsdp": True, "fsdp_config": {"xla": True, "xla_fsdp_v2": True}}
TWICE = {"activation_checkpointing": True, "fsdp_config": {"activation_checkpointing": True}}


def sharded(**settings):
    return {**CPU, **TWO, "fsdp": True, **settings}


def layout(settings=(), **sizes):
    return {**CPU, "parallelism_config": sizes, **dict(settings)}


#: Fixtures → arguments, each with the message that refuses them, or None.
CASES = {
    "deepspeed_installed": [
        ({**CPU, "fsdp": True}, "fsdp=True shards the model over processes, but there is only one"),
        ({**CPU, "fsdp": True, "deepspeed": True}, "fsdp and deepspeed both shard the model"),
        (sharded(optim="lomo"), "optim='lomo' needs unsharded parameters"),
        (sharded(optim="adamw_bnb_8bit"), "optim='adamw_bnb_8bit' needs unsharded parameters"),
        (sharded(optim="adafactor", fsdp_config={"version": 1}), "FSDP1 flattens them: use FSDP2"),
        (sharded(bf16_full_eval=True), "bf16_full_eval=True would round sharded weights"),
        (sharded(**TWICE), "a third time"),
        (sharded(report_to="wandb"), "WANDB_LOG_MODEL=end saves the model in the main process only"),
        (layout(dp_shard_size=2, dp_replicate_size=2), "needs 4 processes, but there are 1"),
        (layout(tp_sizes=2), "did you mean 'tp_size'?"),
        (layout(dp_shard_size=0), "parallelism_config['dp_shard_size']=0: it must be a positive number of processes"),
        (layout(cp_size=2), "parallelism_config['cp_size'] is not supported"),
        (layout(sp_size=2), "parallelism_config['sp_size'] is not supported"),
        (layout({"fsdp": "no_shard"}, dp_shard_size=2), "parallelism_config needs FSDP2"),
        (layout({"fsdp": True}, tp_size=2), "set dp_shard_size, or remove fsdp"),
        (layout(tp_size=2, dp_replicate_size=2), "set dp_shard_size too"),
        ({**CPU, "ddp_backend": "nccl"}, None),  # one process needs none
        ({**CPU, "ddp_backend": "ncl"}, "did you mean 'nccl'"),
    ],
    "mac": [({}, None), ({"use_mps_device": True}, None), (TWO, NOT_ON_MPS), ({"fsdp": True}, NOT_ON_MPS)],
    "mac two_processes": [
        ({}, "2 processes are not supported on Apple's GPU, a single device on which neither gloo nor nccl"),
        (CPU, None),
    ],
    "xpu two_processes every_backend": [
        ({}, None),
        ({"fsdp": True}, "Sharding needs CUDA or the CPU, but this device is xpu: remove fsdp"),
        ({**CPU, "ddp_backend": "nccl"}, "'nccl' does not connect processes on cpu: use 'gloo', or remove"),
        ({**CPU, "ddp_backend": "mpi"}, None),
        ({"ddp_backend": "xccl"}, None),
        ({"ddp_backend": "gloo"}, "ddp_backend='gloo' does not connect processes on xpu: use 'xccl', or remove"),
    ],
    "two_processes a_backend_called_smoke": [({**CPU, "ddp_backend": "smoke"}, None)],
    "on_xla": [
        ({}, None),
        ({"tpu_num_cores": 1}, None),
        ({"bf16": True}, None),
        (XLA, None),
        ({"tpu_num_cores": 8}, f"this run uses 1 of this machine's cores: {START}"),
        ({"fp16": True}, "TPUs, which compute in bfloat16"),
        ({"checkpoint_format": "dcp"}, "checkpoint_format='dcp' is not supported on TPUs"),
        ({"torch_compile": True}, "XLA already compiles the complete step"),
        ({"fsdp": True}, "uses torch_xla: also set fsdp_config={'xla': True}"),
        ({"fsdp": True, "fsdp_config": {"xla": True, "cpu_offload": True}}, "fsdp_config['cpu_offload']"),
        ({**XLA, "predict_with_generate": True}, "xla_fsdp_v2"),  # generation needs whole weights
    ],
    # torchrun's processes would all take the same core.
    "on_xla two_processes": [({}, "run --tpu"), (SPMD, "controls all cores from one process")],
    "on_torch_tpu": [
        ({}, None),
        ({"bf16": True, "tpu_num_cores": 1}, None),
        ({"torch_compile_backend": "tpu"}, None),
        ({"fp16": True}, "TPUs, which compute in bfloat16"),
        ({"torch_compile": True}, "set torch_compile_backend='tpu'"),
        ({"tpu_num_cores": 4}, f"this run uses 1 of this machine's cores: {START}"),
        ({"fsdp": True}, "this device is tpu: remove fsdp"),
        (TWO, START),
    ],
}
#: Fixtures with which there may be a second problem, such as the number of processes.
SEVERAL = ("deepspeed_installed", "on_xla two_processes")


@pytest.mark.usefixtures("deepspeed_installed")
def test_elastic_with_deepspeed_is_refused():
    with pytest.raises(InvalidArgument, match="elastic=True is not supported with deepspeed"):
        TrainingArguments("x", elastic=True, deepspeed=True, **CPU)


@pytest.mark.parametrize(
    ("fixtures", "settings", "message"), [(name, *case) for name, cases in CASES.items() for case in cases]
)
def test_unsupported_combination_is_refused(request, set_variables, fixtures, settings, message):
    for name in fixtures.split():
        request.getfixturevalue(name)
    set_variables("WANDB_LOG_MODEL=end")
    found = problems(Seq2SeqTrainingArguments, **settings)
    assert_refused(found, message)
    assert len(found) <= 1 or fixtures in SEVERAL, found


@pytest.mark.parametrize("argument", ["ddp_backend", "xpu_backend"])
@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("gloo", None),
        ("GLOO", None),
        ("cpu:gloo", None),
        ("mpi", "has no 'mpi' (it needs torch built from source with MPI): use 'gloo', or remove"),
        ("nccl", "has no 'nccl' (it comes with torch for CUDA or ROCm): use 'gloo'"),
        ("cpu:gloo,cuda:nccl", "has no 'nccl'"),
        ("xccl", "has no 'xccl' (it comes with torch for Intel GPUs)"),
        ("ccl", "has no 'ccl' (the script must import oneccl_bindings_for_pytorch, which Intel has replaced by"),
        ("smddp", "has no 'smddp' (the script must import smdistributed.dataparallel.torch.torch_smddp"),
        ("hccl", "has no 'hccl' (it comes with torch_npu)"),
        ("cncl", "has no 'cncl' (it comes with torch_mlu)"),
        ("mccl", "has no 'mccl' (it comes with torch_musa)"),
        ("glo", "no backend is called 'glo'; did you mean 'gloo'?"),
        ("carrier pigeon", "no backend is called 'carrier pigeon': use 'gloo'"),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_backend_that_torch_lacks_is_refused(two_processes, only_gloo, backend, message, argument):
    settings = {**CPU, argument: backend}
    assert plan_of(**settings).process_group_backend == backend
    found = problems(**settings)
    assert all(sentence.startswith(f"ddp_backend={backend!r}: ") for sentence in found) and len(found) <= 1
    assert_refused(found, message)


def test_hybrid_shard_needs_two_processes(set_variables):
    set_variables("WORLD_SIZE=1 RANK=0 LOCAL_RANK=0 MASTER_ADDR=h MASTER_PORT=1")
    assert not problems(**CPU, fsdp=True)
    assert_refused(problems(**CPU, fsdp="hybrid_shard"), "needs at least two processes")
