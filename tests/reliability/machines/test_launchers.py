"""One script, started in every way: two processes find each other and train the same weights."""

import pytest

from tests.support.launchers import DEVICES, FSDP_FILE, LAUNCHERS, SCRIPT, accelerate, free_port, launch, read, settings

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("torchrun"), TORCHRUN)


def check(found, expected):
    for rank, (one, wanted) in enumerate(zip(found, expected, strict=True)):
        assert one["place"] == one["still"] == [2, rank, rank]
        assert one["weights"] == wanted["weights"]
        assert one["step"] == 3
        assert one["environment"] == "LaunchedEnvironment"


def test_torchrun_ranks_train_and_take_turns(expected):
    check(expected, expected)
    assert [one["order"] for one in expected] == [[[], []], [["first-True-0"], ["first-False-0"]]]


@pytest.mark.parametrize("name", LAUNCHERS)
def test_launcher_trains_the_weights_of_torchrun(name, expected, tmp_path):
    if name == "accelerate":
        pytest.importorskip("accelerate")
    found = launch(tmp_path, LAUNCHERS[name]())
    check(found, expected)
    assert [one["order"] for one in found] == [one["order"] for one in expected]
    assert not any(one["compiled"] for one in found)


def test_accelerate_config_sets_compilation_and_bf16(expected, tmp_path):
    """The YAML of `accelerate config`: dynamo and mixed precision."""
    pytest.importorskip("accelerate")
    path = tmp_path / "accelerate.yaml"
    path.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_machines: 1\n"
        f"num_processes: 2\nmachine_rank: 0\nmain_process_port: {free_port()}\n"
        "dynamo_config:\n  dynamo_backend: EAGER\n"
    )
    found = launch(tmp_path / "out", accelerate("--config_file", str(path)))
    assert all(one["compiled"] for one in found)
    assert found[0]["weights"] == found[1]["weights"] != expected[0]["weights"]


def test_accelerate_config_shards_as_arguments_do(tmp_path):
    """By the documentation's file, and by arguments with `hftrainer run`: the same weights."""
    pytest.importorskip("accelerate")
    path = tmp_path / "accelerate.yaml"
    path.write_text(FSDP_FILE)
    before = accelerate("--config_file", str(path), f"--main_process_port={free_port()}")
    launched = launch(tmp_path / "a", before, MODEL="bert")
    config = '{"version": 1, "transformer_layer_cls_to_wrap": "BertLayer"}'
    words = ["--fsdp", "full_shard auto_wrap", "--fsdp_config", config, "--bf16", "True"]
    by_arguments = launch(tmp_path / "b", LAUNCHERS["hftrainer"](), words, MODEL="bert")
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
def test_variables_of_other_launchers_are_understood(variables, expected, tmp_path, processes):
    """Two processes started by hand, with what the launcher gives to each."""
    shared, jobs = free_port(), []
    for rank in (0, 1):
        words = [f"--local_rank={rank}"] if variables is deepspeed else []
        rank_variables = {name: str(value) for name, value in variables(rank).items()}
        env = {**processes.environment(), "MASTER_PORT": shared, **rank_variables}
        jobs.append(processes.start(SCRIPT, *settings(tmp_path), *words, env=env, merge=True))
    for job in jobs:
        assert job.wait() == 0, job.stderr[-3000:]
    found = read(tmp_path)
    check(found, expected)
    assert [one["order"] for one in found] == [one["order"] for one in expected]
    assert [one["local_rank"] for one in found] == ([0, 1] if variables is deepspeed else [-1, -1])


@pytest.mark.parametrize("before", [[], ["-m", "hftrainer", "run"]], ids=["python", "hftrainer run"])
def test_script_with_two_devices_starts_its_second_process(before, expected, tmp_path):
    found = launch(tmp_path, before, DEVICES)
    check(found, expected)
    assert found[0]["arguments"] == found[1]["arguments"]
    assert found[0]["order"] == [[], []]  # nobody has waited
