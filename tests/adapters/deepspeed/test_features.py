"""DeepSpeed besides training: loading, evaluating, generating, full disks, launchers and fewer processes."""

import json
import pickle
from pathlib import Path

import pytest
from safetensors.torch import load_file

from hftrainer import TrainingArguments
from tests.adapters.deepspeed.feature_cases import CASES
from tests.adapters.deepspeed.training_cases import AUTO, STAGES, TOLERANCE
from tests.support.jobs import assert_same
from tests.support.launchers import TORCHRUN, accelerate, free_port, read, run_python, start as start_script

HERE = Path(__file__).parent
RANKS = (0, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("features")


@pytest.fixture(scope="module")
def found(folder):
    run = run_python(*TORCHRUN, str(HERE / "feature_cases.py"), str(folder))
    assert run.returncode == 0, run.stderr[-3000:]
    names = [case.__name__ for case in CASES]
    return {name: [pickle.loads((folder / f"{name}-{rank}.pkl").read_bytes()) for rank in RANKS] for name in names}


@pytest.mark.parametrize("rank", RANKS)
def test_from_pretrained_partitions_and_trains_the_same(found, rank):
    loaded = found["load_pretrained"][rank]
    full, partitioned = loaded["full"], loaded["partitioned"]
    assert partitioned["is_partitioned"]
    assert partitioned["count"] == 0
    assert not full["is_partitioned"]
    assert partitioned["losses"] == full["losses"]
    assert partitioned["files"] == full["files"]
    assert "model.safetensors" in full["files"]
    assert loaded["is_full_again"]


@pytest.mark.parametrize("attempt", range(3))
def test_search_over_configurations_trains_as_each_alone(tmp_path, attempt):
    """Processes must exit cleanly: they were aborted at exit in two of five attempts."""
    run = run_python(*TORCHRUN, str(HERE / "feature_cases.py"), str(tmp_path), "search_configurations")
    assert run.returncode == 0, run.stderr[-3000:]
    for rank in RANKS:
        searched = pickle.loads((tmp_path / f"search_configurations-{rank}.pkl").read_bytes())
        assert searched["stages"] == [2, 3, 0]
        assert searched["trials"] == searched["alone"]
        assert searched["trials"][0] != searched["trials"][1]


def test_weights_that_are_not_gathered_stay_in_shards(found):
    saved = found["save_shards"][0]
    for name in ("final", "checkpoint-2"):
        assert {"config.json", "latest", "zero_to_fp32.py", "training_args.bin"} <= set(saved[name])
        assert not any(file.endswith((".safetensors", ".bin")) and "args" not in file for file in saved[name])
    assert saved["same"]


@pytest.mark.parametrize("rank", RANKS)
def test_evaluation_before_and_after_training_is_that_of_ddp(found, rank):
    evaluated = found["evaluate_and_train"][rank]
    until_second = 6  # which begins with a new optimizer here, and with the old one without DeepSpeed
    assert evaluated["stage_2"][:until_second] == pytest.approx(evaluated["none"][:until_second], rel=TOLERANCE)
    assert evaluated["stage_3"] == pytest.approx(evaluated["stage_2"], rel=1e-6)  # the sum is of 5,400 numbers
    assert len(evaluated["none"]) == 10


@pytest.mark.parametrize("rank", RANKS)
def test_partitioned_models_generate(found, rank):
    generated = found["generate"][rank]
    assert [line[:8] for line in generated["partitioned"]] == generated["full"]
    assert len({tuple(line) for line in generated["full"]}) > 1


@pytest.mark.parametrize("rank", RANKS)
def test_generation_waits_for_the_longest_sequence_of_all_ranks(found, rank):
    """Ranks take samples in turn: those of rank 0 get seven tokens, those of rank 1 two."""
    assert found["generate_unequal_lengths"][rank] == [7, 2, 7, 2]


@pytest.mark.parametrize("rank", RANKS)
def test_full_disk_of_one_rank_skips_the_checkpoint(found, rank):
    assert found["fill_one_disk"][rank] == {"folders": ["checkpoint-1", "checkpoint-3", "checkpoint-4"], "steps": 4}


def test_deepspeed_names_of_the_trainer_and_accelerator(found):
    names = found["use_deepspeed_names"][0]
    assert "pass optimizer_cls_and_kwargs" in names.pop("refused")
    losses = names.pop("losses")
    assert len(losses) == 3
    assert len(set(losses)) == 3
    assert names == (
        {"enabled": True, "type": "DEEPSPEED", "stage": 2, "clipping": 1.0, "unwrapped": True}
        | {"engine": "DeepSpeedEngine", "strategy": True, "shown": True}
    )


@pytest.mark.parametrize("rank", RANKS)
def test_propagate_args_to_deepspeed_changes_the_batch_size(found, rank):
    propagated = found["propagate_arguments"][rank]
    assert propagated["changed"] == propagated["made"]
    assert propagated["changed"][-1] == 2
    assert "set per_device_train_batch_size" in propagated["refused"]


@pytest.mark.parametrize("rank", RANKS)
def test_given_schedules_callbacks_and_types_work(found, rank):
    given = found["use_given_objects"][rank]
    assert given["learning_rates_stage_2"] == given["learning_rates_stage_0"] == [0.1, 0.05, 0.025]
    assert given["monitor"]
    assert len(set(given["types"])) == 2  # before training and after it, in one type throughout
    assert given["gathered"] == given["sharded"] == 6800  # parameters


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("own_adam", "the optimizer is Own"),
        ("two_optimizers", "optimizers=(...) and the optimizer and scheduler of the deepspeed configuration"),
        ("wrong_key", "stge"),
        ("accumulation", "set gradient_accumulation_steps instead"),
        ("another_stage", "model, stage and optimizer must be those of the checkpoint"),
    ],
)
def test_unsupported_setting_is_refused(found, name, words):
    assert words in found["use_given_objects"][0][name]


def test_fewer_processes_resume_only_from_a_universal_checkpoint(tmp_path):
    for launcher, script, words in (
        (TORCHRUN, "training_cases.py", ("hftrainer", str(tmp_path), "stage 2")),
        ((), "feature_cases.py", (str(tmp_path), "resume_alone")),
    ):
        run = run_python(*launcher, str(HERE / script), *words)
        assert run.returncode == 0, run.stderr[-3000:]
    (both,) = (pickle.loads(path.read_bytes())["stage 2"]["logs"] for path in tmp_path.glob("hftrainer-0.pkl"))
    one = pickle.loads((tmp_path / "resume_alone-0.pkl").read_bytes())
    assert "holds shards of 2 processes, but this run has 1" in one["shards"]
    assert "ds_to_universal" in one["shards"]
    written = load_file(tmp_path / "hftrainer" / "stage 2" / "checkpoint-4" / "model.safetensors")
    assert_same(one["loaded_weights"], written)
    assert [line["step"] for line in one["universal"]] == [line["step"] for line in both]
    for line, other in zip(one["universal"][:-1], both[:-1], strict=True):
        assert line["learning_rate"] == other["learning_rate"]
        assert line["loss"] == pytest.approx(other["loss"], rel=0.2)  # dropout of one process, not of two


CONFIG = {**AUTO, "zero_optimization": {"stage": 2}}


def launch(folder, before, after=(), **environment):
    process = start_script(folder, before, after, script=str(HERE / "launched_script.py"), **environment)
    printed = process.communicate(timeout=200)[0]
    assert process.returncode == 0, printed[-3000:]
    return read(folder)


def test_every_launcher_trains_the_same_weights(tmp_path):
    """torchrun, DeepSpeed's own, ours, and accelerate's with a file and with options: the same weights."""
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(CONFIG))
    given, at_port = ["--deepspeed", str(path)], lambda: f"--main_process_port={free_port()}"
    by_accelerate = accelerate("--use_deepspeed", "--num_processes=2", "--num_machines=1", "--mixed_precision=no")
    runner = ["-m", "deepspeed.launcher.runner", "--num_gpus=2", f"--master_port={free_port()}"]
    started = {
        "torchrun": (TORCHRUN, given),
        "deepspeed": (runner, given),
        "hftrainer": (["-m", "hftrainer", "run", "--nproc", "2"], given),
        "accelerate, a file": ([*by_accelerate, at_port(), f"--deepspeed_config_file={path}"], []),
        "accelerate, options": ([*by_accelerate, at_port(), "--zero_stage=2", "--gradient_clipping=1.0"], []),
        "its own devices": ([], [*given, "--lightning_config", '{"devices": 2}']),
    }
    found = {}
    for name, (before, after) in started.items():
        found[name] = launch(tmp_path / name.replace(", ", "-"), before, after)
        for rank, one in enumerate(found[name]):
            assert one["place"] == one["still"] == [2, rank, rank], name
            assert (one["kind"], one["step"]) == ("DEEPSPEED", 3), name
            assert one["weights"] == found["torchrun"][rank]["weights"], name


def test_mismatch_of_deepspeed_and_trainer_device_is_named(tmp_path):
    text = "from hftrainer_deepspeed import start as deepspeed_start\nimport datetime, torch\n"
    text += "from hftrainer.parallel.processes import Processes\n"
    text += "deepspeed_start.connect(Processes(), torch.device('cuda'), datetime.timedelta(1), None)\n"
    script = tmp_path / "script.py"
    script.write_text(text)
    run = run_python(str(script))
    assert run.returncode != 0
    assert "DeepSpeed uses 'cpu' but the Trainer uses 'cuda': set DS_ACCELERATOR=cuda" in run.stderr


def test_explain_names_the_strategy(tmp_path):
    config = {"zero_optimization": {"stage": 1}}
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", deepspeed=config)
    assert "strategy=DeepSpeedStrategy()" in str(args.explain())


def test_killed_run_resumes_to_the_undisturbed_weights(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(STAGES[3]))
    script = [str(HERE / "killed_run.py"), str(path)]
    undisturbed = run_python(*TORCHRUN, *script, str(tmp_path / "undisturbed"), "-1")
    assert undisturbed.returncode == 0, undisturbed.stderr[-3000:]
    for step in (3, 5):
        killed = run_python(*TORCHRUN, *script, str(tmp_path / "killed"), str(step))
        assert killed.returncode != 0
    finished = run_python(*TORCHRUN, *script, str(tmp_path / "killed"), "-1")
    assert finished.returncode == 0, finished.stderr[-3000:]
    weights = [(tmp_path / name / "final/model.safetensors").read_bytes() for name in ("undisturbed", "killed")]
    assert weights[0] == weights[1]
