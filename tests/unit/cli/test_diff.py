"""`python -m hftrainer diff` names the step from which two runs differ, and in what."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

from hftrainer import TrainingArguments
from hftrainer.__main__ import main
from hftrainer.checkpointing.saved_arguments import read_arguments
from hftrainer.cli.diff import _pair, compare
from hftrainer.errors import DamagedCheckpoint
from hftrainer.monitoring.journal import Journal
from tests.support.checkpoints import MaliciousPickle
from tests.support.parity import accuracy, build

SETTINGS = {"learning_rate": 0.01, "max_steps": 12, "logging_steps": 2, "save_strategy": "steps", "save_steps": 6}
SETTINGS |= {"eval_strategy": "steps", "eval_steps": 4, "trainer": {"compute_metrics": accuracy}}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    made = {}

    def train(name, **settings):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            build("hftrainer", "plain", folder, **{**SETTINGS, **settings})[0].train()
            made[name] = str(folder)
        return made[name]

    return train


def run_diff(capsys, *words):
    capsys.readouterr()  # log lines of the runs
    with pytest.raises(SystemExit) as ended:
        main(["diff", *words])
    return ended.value.code, capsys.readouterr()


def test_equal_runs_are_reported_equal(folder_of, capsys):
    found = compare(folder_of("a"), folder_of("again"))
    assert found.is_equal and found.arguments == {} and all(found.compared.values())
    status, shown = run_diff(capsys, folder_of("a"), folder_of("again"))
    assert status == 0 and shown.out.startswith("The runs are equal.\n")


def test_different_learning_rate_is_found_at_its_step(folder_of, capsys):
    found = compare(folder_of("a"), folder_of("rate", learning_rate=0.1))
    assert not found.is_equal and found.arguments == {"learning_rate": (0.01, 0.1)}
    steps = {subject: parting.step for subject, parting in found.partings.items()}
    # The learning rate of the first step is 0, so the losses of the first two are equal.
    assert steps == {"loss": 4, "gradient norm": 4, "learning rate": 2, "metrics": 4, "weights": 12}
    status, shown = run_diff(capsys, folder_of("a"), folder_of("rate"))
    a, rate = Path(folder_of("a")).name, Path(folder_of("rate")).name
    first, _, names = shown.out.splitlines()[:3]
    assert status == 1 and names.strip() == f"{a} | {rate}"
    assert first == f"{a} and {rate} differ from step 2 in learning rate; the arguments differ in learning_rate."
    assert "  learning_rate: 0.01 | 0.1" in shown.out and "step 2, learning_rate: 0.0" in shown.out


def test_different_order_of_the_data_is_found(folder_of):
    found = compare(folder_of("a"), folder_of("seed", data_seed=7))
    assert found.partings["loss"].step == 2 and "learning rate" not in found.partings
    assert (found.partings["data"].step, found.partings["data"].name) == (6, "data_seed")
    assert found.arguments == {"data_seed": (None, 7)}


@pytest.mark.parametrize("elastic", [True, False])
def test_same_samples_split_differently_are_equal_data_of_elastic_runs(folder_of, elastic):
    whole = folder_of(f"whole{elastic}", elastic=elastic, per_device_train_batch_size=4)
    split = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    found = compare(whole, folder_of(f"split{elastic}", elastic=elastic, **split))
    assert ("data" in found.partings) is not elastic
    assert found.arguments == {"per_device_train_batch_size": (4, 2), "gradient_accumulation_steps": (1, 2)}


@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
def test_weights_are_compared_without_log_lines(tmp_path, capsys, kind):
    """The state of both runs has no log lines, as of a run that was shorter than logging_steps."""
    runs = [str(tmp_path / name) for name in "abcd"]
    weights = {"a": torch.ones(3), "b": torch.full((3,), float("nan"))}
    kinds = weights, dict(weights), {**weights, "a": torch.tensor([1, 1.25, 1.125])}, {"a": weights["a"]}
    for path, values in zip(runs, kinds, strict=True):
        folder = Path(path, "checkpoint-4")
        folder.mkdir(parents=True)
        (folder / "trainer_state.json").write_text('{"global_step": 4}')
        (save_file if kind == "model.safetensors" else torch.save)(values, folder / kind)
    status, shown = run_diff(capsys, *runs[:2])
    assert status == 0 and shown.out.startswith("The runs are equal in what was recorded: weights.\n")
    assert "weights        equal, 2 tensors compared" in shown.out
    status, shown = run_diff(capsys, "--json", runs[0], runs[2])
    text = "2 of 3 elements differ by up to 0.25, relatively 0.2"
    assert status == 1 and json.loads(shown.out)["partings"]["weights"] == {"step": 4, "name": "a", "values": text}
    status, shown = run_diff(capsys, runs[0], runs[3])
    assert status == 1 and "a and d differ from step 4 in weights." in shown.out
    assert "step 4, b: only in the first run" in shown.out
    Path(runs[1], "checkpoint-4", kind).unlink()
    status, shown = run_diff(capsys, *runs[:2])
    assert status == 2 and "Nothing to compare" in shown.err


def test_json_has_first_different_step_of_two_checkpoints(folder_of, tmp_path, capsys):
    folder = shutil.copytree(folder_of("a"), tmp_path / "changed")
    for state in folder.glob("checkpoint-*/trainer_state.json"):
        content = json.loads(state.read_text())
        for line in content["log_history"]:
            if line["step"] >= 8 and "grad_norm" in line:
                line["grad_norm"] *= 2
        state.write_text(json.dumps(content))
    status, shown = run_diff(capsys, "--json", f"{folder_of('a')}/checkpoint-12", f"{folder}/checkpoint-12")
    found = json.loads(shown.out)
    assert status == 1 and found["equal"] is False
    assert list(found["partings"]) == ["gradient norm"] and found["partings"]["gradient norm"]["step"] == 8


def test_shorter_run_is_compared_by_common_steps(folder_of):
    found = compare(folder_of("a"), folder_of("a") + "/checkpoint-6")
    assert found.steps == (12, 6) and not found.partings and not found.is_equal
    text = f"The runs are equal in all 6 common steps; {Path(folder_of('a')).name} continues to step 12.\n"
    assert str(found).startswith(text) and "versions" not in str(found)


def test_values_recorded_by_one_run_only_are_named(folder_of, tmp_path):
    folder = tmp_path / "bare"
    folder.mkdir()
    lines = [{"step": 2, "loss": float("nan")}, {"step": 2, "eval_f1": 1.0}]
    state = {"global_step": 12, "log_history": lines, "epoch": 1.0}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    found = compare(folder_of("a"), str(folder))
    assert found.arguments is None and found.only_in_one["eval_f1"] == "bare"
    assert found.partings["loss"].step == 2
    assert "arguments      not recorded" in str(found)
    assert compare(str(folder), str(folder)).is_equal  # NaN too


def test_arguments_without_a_checkpoint_are_those_of_the_journal(tmp_path):
    for run in "ab":
        journal = Journal(str(tmp_path / run))
        journal.write("begin", 0, max_steps=1, pid=1, host="there", resumed_from=None, arguments={"optim": run})
        journal.write("log", 1, logs={"loss": 1.0, "step": 1})
    assert compare(str(tmp_path / "a"), str(tmp_path / "b")).arguments == {"optim": ("a", "b")}


@pytest.mark.newest_peer
def test_run_of_transformers_equals_ours(folder_of, tmp_path):
    build("transformers", "plain", tmp_path, **SETTINGS)[0].train()
    found = compare(folder_of("a"), str(tmp_path))
    assert found.arguments == {} and found.partings == {} and found.is_equal


def test_values_differing_in_the_last_digits_are_shown_in_full():
    assert _pair((1.23456789, 2.0)) == "1.23457 | 2" and _pair((1.0000000001, 1.0)) == "1.0000000001 | 1.0"


def test_errors_say_what_to_do(folder_of, tmp_path, capsys):
    status, shown = run_diff(capsys, folder_of("a"), str(tmp_path / "none"))
    assert status == 2 and f"{tmp_path / 'none'} does not exist: pass a run's output_dir" in shown.err
    missing = [str(tmp_path / name) for name in ("one", "two")]
    status, shown = run_diff(capsys, *missing)
    assert status == 2 and f"{missing[0]} and {missing[1]} do not exist" in shown.err
    folder = shutil.copytree(folder_of("a"), tmp_path / "damaged")
    (folder / "checkpoint-12" / "training_args.bin").write_bytes(b"x")
    status, shown = run_diff(capsys, folder_of("a"), str(folder))
    assert status == 2 and "save the arguments again with trainer.save_model()" in shown.err
    (folder / "trainer_state.json").write_text("{")
    status, shown = run_diff(capsys, folder_of("a"), str(folder))
    assert (
        status == 2 and "trainer_state.json cannot be read" in shown.err and "Pass a complete checkpoint" in shown.err
    )


def test_saved_arguments_are_read_as_values(tmp_path):
    args = TrainingArguments(str(tmp_path), lr_scheduler_type="cosine", hub_token="secret", optim_args={"a": 1})
    torch.save(args, tmp_path / "training_args.bin")
    found = read_arguments(tmp_path / "training_args.bin")
    assert (found["lr_scheduler_type"], found["optim_args"], found["output_dir"]) == ("cosine", {"a": 1}, str(tmp_path))
    assert "secret" not in str(found)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_saved_arguments_of_transformers_are_read(tmp_path):
    args = transformers.TrainingArguments(str(tmp_path), learning_rate=3e-4, use_cpu=True, report_to="none")
    torch.save(args, tmp_path / "training_args.bin")
    found = read_arguments(tmp_path / "training_args.bin")
    assert (found["learning_rate"], found["lr_scheduler_type"], found["save_strategy"]) == (3e-4, "linear", "steps")


def test_saved_arguments_run_no_code(tmp_path):
    trace = tmp_path / "trace"
    torch.save(MaliciousPickle(trace), tmp_path / "training_args.bin")
    with pytest.raises(DamagedCheckpoint, match="cannot be read"):
        read_arguments(tmp_path / "training_args.bin")
    assert not trace.exists()


@pytest.mark.parametrize("state", [None, 3, [], "x", {"log_history": [{"step": [1], "loss": 1.0}]}])
def test_invalid_trainer_state_is_refused(folder_of, capsys, tmp_path, state):
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    status, shown = run_diff(capsys, folder_of("a"), str(tmp_path))
    if isinstance(state, dict):
        assert status == 2 and "Nothing to compare" in shown.err and "(logged: 2-12 and 0): set" in shown.err
    else:
        assert status == 2 and "trainer_state.json does not hold what a checkpoint" in shown.err
