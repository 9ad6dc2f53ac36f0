"""One script, started in every way: two processes find each other and train the same weights."""

import json
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests import warm

SCRIPT = str(Path(__file__).with_name("launched.py"))
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
DEVICES = ["--lightning_config", '{"devices": 2}']


def start(folder, before, after=(), script=SCRIPT, **environment):
    """The script in a folder, by a launcher's words, with further arguments."""
    folder.mkdir(exist_ok=True)
    settings = ["--output_dir", str(folder), "--max_steps", "3", "--learning_rate", "0.1", "--use_cpu", "True"]
    settings += ["--disable_tqdm", "True", "--save_strategy", "no", "--report_to", "none"]
    return subprocess.Popen(
        [warm.PYTHON, *before, script, *settings, *after],
        env={**warm.environment(), **warm.AGAIN, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # A shell that runs the tests in the background has them ignore Ctrl-C, which Python then leaves so.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def launch(folder, *args, **environment):
    """What each of the two processes found."""
    process = start(folder, *args, **environment)
    printed = process.communicate(timeout=120)[0]
    assert process.returncode == 0, printed[-3000:]
    return read(folder)


def read(folder):
    assert (folder / "final" / "model.safetensors").is_file()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("torchrun"), TORCHRUN)


def check(found, expected):
    for rank, (one, wanted) in enumerate(zip(found, expected, strict=True)):
        assert one["place"] == one["still"] == [2, rank, rank]
        assert one["weights"] == wanted["weights"]
        assert one["step"] == 3
        assert one["environment"] == "Launched"


def test_torchrun(expected):
    check(expected, expected)
    assert [one["order"] for one in expected] == [[[], []], [["first-True-0"], ["first-False-0"]]]


def accelerate(*options):
    return ["-m", "accelerate.commands.launch", *options]


#: Name → what stands before the script.
LAUNCHERS = {
    "torch.distributed.launch": lambda: [
        "-m",
        "torch.distributed.launch",
        "--nproc_per_node=2",
        f"--master_port={port()}",
    ],
    "accelerate": lambda: accelerate(
        *("--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"),
        f"--main_process_port={port()}",
    ),
    "hftrainer": lambda: ["-m", "hftrainer", "run", "--nproc", "2"],
}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_launchers(name, expected, tmp_path):
    if name == "accelerate":
        pytest.importorskip("accelerate")
    found = launch(tmp_path, LAUNCHERS[name]())
    check(found, expected)
    assert [one["order"] for one in found] == [one["order"] for one in expected]
    assert not any(one["compiled"] for one in found)


def test_accelerate_compiles_and_rounds(expected, tmp_path):
    """The YAML of `accelerate config`: dynamo and mixed precision."""
    pytest.importorskip("accelerate")
    path = tmp_path / "accelerate.yaml"
    path.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_machines: 1\n"
        f"num_processes: 2\nmachine_rank: 0\nmain_process_port: {port()}\n"
        "dynamo_config:\n  dynamo_backend: EAGER\n"
    )
    found = launch(tmp_path / "out", accelerate("--config_file", str(path)))
    assert all(one["compiled"] for one in found)
    assert found[0]["weights"] == found[1]["weights"] != expected[0]["weights"]


#: The file with FSDP in the documentation of `accelerate launch`.
FSDP_FILE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_forward_prefetch: true
  fsdp_offload_params: false
  fsdp_sharding_strategy: 1
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""


def test_accelerate_shards(tmp_path):
    """By the documentation's file, and by arguments with torchrun and with `hftrainer run`: the same weights."""
    pytest.importorskip("accelerate")
    path = tmp_path / "accelerate.yaml"
    path.write_text(FSDP_FILE)
    before = accelerate("--config_file", str(path), f"--main_process_port={port()}")
    launched = launch(tmp_path / "a", before, MODEL="bert")
    words = [
        "--fsdp",
        "full_shard auto_wrap",
        "--fsdp_config",
        '{"version": 1, "transformer_layer_cls_to_wrap": "BertLayer"}',
        "--bf16",
        "True",
    ]
    for name, starter in {"b": TORCHRUN, "c": LAUNCHERS["hftrainer"]()}.items():
        by_arguments = launch(tmp_path / name, starter, words, MODEL="bert")
        assert [one["kind"] for one in launched] == [one["kind"] for one in by_arguments] == ["FSDP", "FSDP"]
        assert launched[0]["weights"] == by_arguments[0]["weights"]


def deepspeed(rank):
    place = {"RANK": rank, "LOCAL_RANK": rank, "LOCAL_SIZE": 2, "CROSS_RANK": 0, "CROSS_SIZE": 1, "WORLD_SIZE": 2}
    return {**place, "MASTER_ADDR": "127.0.0.1"}


def srun(rank):
    job = {"SLURM_JOB_ID": 4711, "SLURM_STEP_ID": 0, "SLURM_NTASKS": 2, "SLURM_STEP_NUM_TASKS": 2}
    nodes = {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NUM_NODES": 1, "SLURM_STEP_NODELIST": "localhost"}
    return {**job, **nodes, "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": 0, "SLURM_JOB_NAME": "train"}


def mpirun(rank):
    names = ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE")
    return {f"OMPI_COMM_WORLD_{name}": value for name, value in zip(names, (rank, rank, 2, 2), strict=True)}


@pytest.mark.parametrize("variables", [deepspeed, srun, mpirun], ids=lambda variables: variables.__name__)
def test_variables_of_launchers_that_are_not_here(variables, expected, tmp_path):
    """Two processes started by hand, with what the launcher gives to each."""
    shared, jobs = port(), []
    for rank in (0, 1):
        words = [f"--local_rank={rank}"] if variables is deepspeed else []
        given = {name: str(value) for name, value in variables(rank).items()}
        jobs.append(start(tmp_path, [], words, MASTER_PORT=shared, **given))
    for job in jobs:
        printed = job.communicate(timeout=120)[0]
        assert job.returncode == 0, printed[-3000:]
    found = read(tmp_path)
    check(found, expected)
    assert [one["order"] for one in found] == [one["order"] for one in expected]
    assert [one["local_rank"] for one in found] == ([0, 1] if variables is deepspeed else [-1, -1])


@pytest.mark.parametrize("before", [[], ["-m", "hftrainer", "run"]], ids=["python", "hftrainer run"])
def test_a_script_that_starts_itself_again(before, expected, tmp_path):
    found = launch(tmp_path, before, DEVICES)
    check(found, expected)
    assert found[0]["arguments"] == found[1]["arguments"]
    assert found[0]["order"] == [[], []]  # nobody has waited
