"""Rank, world size and address of a process follow from the variables that each launcher sets."""

import logging
import os
import sys

import pytest
import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.plugins.environments import SLURMEnvironment

from hftrainer import Trainer, TrainingArguments
from hftrainer.arguments.checks.unsupported import find_unused_settings
from hftrainer.arguments.resolved import ResolvedArguments
from hftrainer.errors import UnsupportedArgument
from hftrainer.model.apply_arguments import compile_model
from hftrainer.parallel.environment import LAUNCHERS, first_host, tasks_per_node
from tests.support.refusals import assert_refused, plan_of, problems
from tests.support.small_models import make_plain

PREFIXES = ("SLURM_", "OMPI_", "PMI_", "MV2_", "MPI_", "MASTER_", "ACCELERATE_", "HFTRAINER_", "LOCAL_", "CROSS_")
NAMES = ("RANK", "WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE")
MEET = "MASTER_ADDR=a MASTER_PORT=7"
TWO = "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0"
TORCHRUN = f"RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_WORLD_SIZE=2 {MEET}"
JOB = "SLURM_JOB_ID=12345678 SLURM_NTASKS=5 SLURM_JOB_NODELIST=gpu-[03-04,7] SLURM_JOB_NAME=train"
TASK = f"{JOB} SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0"
BATCH = f"{TASK} SLURM_TASKS_PER_NODE=2(x2),1"
STEP = f"{BATCH} SLURM_STEP_ID=1 SLURM_STEP_NUM_TASKS=5 SLURM_STEP_TASKS_PER_NODE=2(x2),1"
PER_NODE = "SLURM_STEP_ID=1 SLURM_STEP_NUM_TASKS=5 SLURM_STEP_NUM_NODES=1 SLURM_NTASKS_PER_NODE=5"
MPI = "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2"
PMI = "PMI_RANK=1 PMI_SIZE=2"
ALONE = "lightning 1 0 0 1 1 None"
#: What is set → launcher, world size, rank, local rank, local world size, nodes, address.
PLACES = {
    "nothing": ("", ALONE),
    "torchrun": (TORCHRUN, "torchrun 8 5 1 4 2 a"),
    "deepspeed": (f"RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_SIZE=2 CROSS_SIZE=2 {MEET}", "torchrun 4 3 1 2 2 a"),
    "by hand": (f"RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 {MEET}", "torchrun 2 1 1 2 1 a"),
    "kubeflow": (f"RANK=2 WORLD_SIZE=3 {MEET}", "kubeflow 3 2 0 1 3 a"),
    "lightning": (f"WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 NODE_RANK=1 LOCAL_RANK=1 {MEET}", "lightning 4 3 1 2 2 a"),
    "srun": (f"{STEP} SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NODEID=1", "slurm 5 3 1 2 3 gpu-03"),
    "srun, a smaller node": (f"{STEP} SLURM_PROCID=4 SLURM_NODEID=2 MASTER_ADDR=b", "slurm 5 4 0 1 3 b"),
    "srun --mpi=pmi2": (f"{STEP} {PMI} SLURM_PROCID=1 SLURM_LOCALID=1", "slurm 5 1 1 2 3 gpu-03"),
    "srun --ntasks-per-node": (f"{TASK} {PER_NODE}", "slurm 5 0 0 5 1 gpu-03"),
    "sbatch, without srun": (BATCH, ALONE),
    "a shell by srun --pty": (f"{STEP} SLURM_STEP_NUM_TASKS=1", ALONE),
    "a shell of several tasks": (f"{STEP} SLURM_JOB_NAME=bash", ALONE),
    "torchrun by srun": (f"{STEP} {TORCHRUN}", "torchrun 8 5 1 4 2 a"),
    "Open MPI": (f"{MPI} MASTER_ADDR=b", "mpi 4 3 1 2 2 b"),
    "Open MPI in a job": (f"{STEP} {MPI} MASTER_ADDR=b", "mpi 4 3 1 2 2 b"),
    "Intel MPI": (f"{PMI} MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2", "mpi 2 1 1 2 1 127.0.0.1"),
    "chosen in the environment": (f"{TORCHRUN} {STEP} HFTRAINER_ENVIRONMENT=slurm", "slurm 5 0 0 2 3 a"),
}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in list(os.environ):
        if name.startswith(PREFIXES) or name in NAMES:
            monkeypatch.delenv(name)


@pytest.fixture
def make(tmp_path, set_variables):
    def make(variables="", config=None, **settings):
        set_variables(variables)
        settings = {"use_cpu": True, "report_to": "none", **settings}
        return TrainingArguments(str(tmp_path), lightning_config=config, **settings)

    return make


@pytest.mark.parametrize("name", PLACES)
def test_launcher_variables_give_the_place_of_the_process(make, name):
    variables, expected = PLACES[name]
    plan = plan_of(args := make(variables))
    found, keywords = plan.processes, plan.trainer_keywords()
    place = (found.launcher, args.world_size, args.process_index, args.local_process_index)
    assert " ".join(map(str, (*place, found.local_world_size, found.nodes, found.address))) == expected
    assert (keywords["devices"], keywords["num_nodes"]) == (found.local_world_size, found.nodes)


def test_every_launcher_has_a_case():
    # Only torch_xla knows the place of its processes: tests/adapters/xla has those.
    assert {expected.split()[0] for _, expected in PLACES.values()} == set(LAUNCHERS) - {"xla"}


HOSTS = {"a": "a", "a,b": "a", "gpu-[03-07,9],cpu1": "gpu-03", "n[1,3]x,m": "n1x", "cpu1,gpu-[1-2]": "cpu1", "": ""}


def test_slurm_lists_of_hosts_and_tasks_are_read():
    assert {hosts: first_host(hosts) for hosts in HOSTS} == HOSTS
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert tasks_per_node("8") == [8]


def test_two_slurm_steps_of_a_job_use_different_ports(make):
    assert [plan_of(make(f"{STEP} SLURM_STEP_ID={step}")).processes.port for step in (1, 2)] == [20679, 20680]


class OwnEnvironment(ClusterEnvironment):
    creates_processes_externally, main_address, main_port = True, "c", 9
    detect, world_size, global_rank = staticmethod(lambda: False), lambda self: 6, lambda self: 4
    local_rank, node_rank = lambda self: 1, lambda self: 1
    set_world_size, set_global_rank = None, None  # are not called


def test_lightning_config_chooses_the_environment(make):
    assert make(STEP, {"environment": "lightning"}).world_size == 1
    chosen = SLURMEnvironment.__new__(SLURMEnvironment)  # its constructor looks for srun
    for config in ({"environment": "slurm"}, {"plugins": chosen}):
        args = make(TORCHRUN, config)
        assert (args.world_size, args.process_index) == (5, 0)
    found = plan_of(make(TORCHRUN, {"plugins": [OwnEnvironment()], "num_nodes": 2})).processes
    assert (found.world_size, found.rank, found.local_rank, found.local_world_size) == (6, 4, 1, 3)
    assert (found.address, found.port) == ("c", 9)


def test_lightnings_trainer_gets_our_environment(make):
    trainer = Trainer(make_plain(), make(f"WORLD_SIZE=1 RANK=0 LOCAL_RANK=0 {MEET}"))
    environment = trainer._hftrainer.engine._make_pl_trainer(max_epochs=1)._accelerator_connector.cluster_environment
    assert type(environment).__name__ == "LaunchedEnvironment"
    environment.teardown()
    assert os.environ["WORLD_SIZE"] == "1"


@pytest.fixture
def set_gpu_count(monkeypatch):
    def make(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return make


@pytest.mark.parametrize(
    ("config", "variables", "expected"),
    [
        (None, "", 4),
        *(({"devices": given}, "", count) for given, count in (("auto", 4), (-1, 4), (2, 2), ("1", 1))),
        (None, "ACCELERATE_MIXED_PRECISION=no", 1),
        (None, "ACCELERATE_USE_CPU=true", 1),
    ],
)
def test_world_size_is_the_number_of_visible_gpus(make, set_gpu_count, config, variables, expected):
    set_gpu_count(4)
    args = make(variables, config, use_cpu=False)
    assert args.world_size == expected
    assert plan_of(args).processes.started == (expected == 1)
    assert args.device == torch.device("cpu" if "USE_CPU" in variables else "cuda:0")
    with args.main_process_first():
        assert not torch.distributed.is_initialized()


def test_notebooks_use_one_gpu(make, set_gpu_count, monkeypatch):
    set_gpu_count(4)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    args = make(use_cpu=False)
    assert args.world_size == 1
    assert "Only one of 4 GPUs is used" in find_unused_settings(ResolvedArguments(args))[0]
    several = problems(lightning_config={"devices": 2}, use_cpu=True)
    assert_refused(several, "['devices']=2 needs a script that can be started once per device")


@pytest.mark.parametrize(
    ("count", "variables", "device", "devices"),
    [
        (1, f"{STEP} SLURM_PROCID=1 SLURM_LOCALID=1", "cuda:0", 1),  # as by `srun --gpus-per-task=1`
        (4, TORCHRUN, "cuda:1", 4),
    ],
)
def test_each_rank_uses_the_gpu_of_its_local_rank(make, set_gpu_count, count, variables, device, devices):
    set_gpu_count(count)
    args = make(variables, use_cpu=False)
    assert args.device == torch.device(device)
    assert plan_of(args).trainer_keywords()["devices"] == devices


WRONG = {
    "no address": (TWO, {}, "MASTER_ADDR and MASTER_PORT are not set"),
    "no rank": ("WORLD_SIZE=2", {}, "MASTER_ADDR and MASTER_PORT and RANK are not set.*torchrun"),
    "rank": (f"{TORCHRUN} RANK=8", {}, "sets rank 8 of 8, and local rank 1 of 4"),
    "local rank": (f"{TORCHRUN} LOCAL_RANK=4", {}, "sets rank 5 of 8, and local rank 4 of 4"),
    "MPI on two nodes": (MPI, {}, "'mpi' asks for several processes, but MASTER_ADDR is not set.*mpirun"),
    "not by srun": ("", {"environment": "slurm"}, "SLURM_PROCID and SLURM_LOCALID are not set.*srun"),
    "devices": (TORCHRUN, {"devices": 2}, r"\['devices'\]=2, but the launcher has started 4"),
    "nodes": (TORCHRUN, {"num_nodes": 3}, r"\['num_nodes'\]=3, but the launcher has started 2"),
    "nodes alone": ("", {"num_nodes": 2}, r"\['num_nodes'\]=2 needs a launcher on each node: use torchrun"),
    "no devices": ("", {"devices": 0}, r"\['devices'\]=0: it must be a positive integer, -1 or 'auto'"),
    "devices without cores": ("", {"devices": 10**12}, r"\['devices'\]=10+ asks for as many .* use at most \d+\."),
    "devices by name": ("", {"devices": [0, 2]}, "use a number, and select devices with CUDA_VISIBLE_DEVICES"),
    "no nodes": ("", {"num_nodes": 0}, r"\['num_nodes'\]=0: it must be a positive integer"),
    "launcher": (
        "",
        {"environment": "slrum"},
        r"\['environment'\]='slrum' is not supported: it must be 'torchrun' or 'slurm' or",
    ),
    "launcher in the environment": ("HFTRAINER_ENVIRONMENT=x", {}, "HFTRAINER_ENVIRONMENT='x': it must be"),
    "number": (f"{TORCHRUN} RANK=one", {}, "RANK='one' is not a non-negative integer"),
    "precision": ("ACCELERATE_MIXED_PRECISION=fp8", {}, "ACCELERATE_MIXED_PRECISION=fp8"),
    "shards": ("ACCELERATE_USE_FSDP=true", {}, "ACCELERATE_USE_FSDP=true"),
    "regions": ("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=True", {}, "REGIONAL_COMPILATION=True"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_launcher_settings_are_refused(make, name):
    variables, config, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        Trainer(make_plain(), make(variables, config))


def test_main_process_first_needs_an_address(make):
    with pytest.raises(UnsupportedArgument, match="MASTER_ADDR"), make(TWO).main_process_first():
        pass


DEFAULTS = {"mode": None, "fullgraph": False, "dynamic": None}


@pytest.mark.parametrize(
    ("variables", "settings", "expected"),
    [
        ("", {}, None),
        ("BACKEND=NO MODE=default", {}, None),
        ("BACKEND=EAGER", {}, {"backend": "eager"}),
        (
            "BACKEND=INDUCTOR MODE=max-autotune USE_FULLGRAPH=True USE_DYNAMIC=False",
            {},
            {"backend": "inductor", "mode": "max-autotune", "fullgraph": True, "dynamic": False},
        ),
        (
            "BACKEND=NO MODE=reduce-overhead USE_DYNAMIC=True",
            {"torch_compile_backend": "eager"},
            {"backend": "eager", "mode": "reduce-overhead", "dynamic": True},
        ),
    ],
)
def test_launcher_dynamo_variables_reach_compile(make, monkeypatch, variables, settings, expected):
    model, calls = make_plain(), []
    monkeypatch.setattr(model, "compile", lambda **keywords: calls.append(keywords))
    compile_model(model, make(" ".join(f"ACCELERATE_DYNAMO_{word}" for word in variables.split()), **settings))
    assert calls == ([] if expected is None else [{**DEFAULTS, **expected}])


def test_accumulation_argument_overrides_the_launcher(make, caplog):
    args = make("ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4", gradient_accumulation_steps=2)
    with caplog.at_level(logging.WARNING):
        Trainer(make_plain(), args)
    assert plan_of(args).accumulate_grad_batches == 2
    assert "gradient_accumulation_steps=2 overrides the launcher's" in caplog.text
