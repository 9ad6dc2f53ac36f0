"""The examples and notebooks of the gallery run as a new user runs them, but for six steps.

Most use hftrainer in one import line only: with transformers in that line they leave the same logs and weights.
"""

import re

import pytest
from torch.distributed import TCPStore

from tests.support.gallery import EXAMPLES, SHORT, assert_same, comparable_logs, files

#: Examples of what only hftrainer does; each has its own test below.
ALONE = {"digits_vit", "killed_and_resumed", "lightning_callbacks", "multi_task"}
#: plain_torch is run by tests/install, the others by tests/adapters.
ELSEWHERE = {"plain_torch", "tf_trainer", "dpo", "embeddings"}
SAME = sorted({path.stem for path in EXAMPLES.glob("*.py")} - ALONE - ELSEWHERE)


def run(processes, script, folder, *words, count=1):
    folder.mkdir(exist_ok=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    places = processes.ranks(count, store) if count > 1 else [{}]
    envs = [{**processes.environment(), **place} for place in places]
    started = [processes.start(script, *words, cwd=folder, env=env, merge=True) for env in envs]
    printed = [one.communicate()[1] for one in started]
    assert not any(one.returncode for one in started), "\n".join(printed)[-8000:]
    return printed[0]


@pytest.mark.parametrize("name", SAME)
def test_example_matches_transformers(name, tmp_path, processes):
    """FSDP runs in two processes; without a GPU transformers trains replicas, which add up in another order."""
    text = (EXAMPLES / f"{name}.py").read_text()
    assert text.split('"""', 2)[2].count("hftrainer") == 1, "one line is all that a transformers user would change"
    of_transformers = tmp_path / f"{name}.py"
    of_transformers.write_text(text.replace("\nfrom hftrainer import ", "\nfrom transformers import "))
    count, tolerance = (2, 5e-7) if name == "fsdp" else (1, 0.0)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    run(processes, EXAMPLES / f"{name}.py", ours, *SHORT, count=count)
    run(processes, of_transformers, theirs, *SHORT, count=count)
    assert_same(ours, theirs, tolerance)


def test_digits_vit_trains_and_resumes(tmp_path, processes):
    """What `make demo` runs, for two epochs, then resumed."""
    words = EXAMPLES / "digits_vit.py", tmp_path, "--output-dir", "here"
    printed = run(processes, *words, "--epochs", "1")
    assert re.search(r"Test accuracy: +0\.\d+ on 270 images", printed)
    assert "checkpoint-40/" in printed
    assert "'epoch': '1'" in printed
    assert "checkpoint-80/" in run(processes, *words, "--epochs", "2", "--resume")


def run_example(processes, name, folder, *words):
    printed = run(processes, EXAMPLES / f"{name}.py", folder, *SHORT, *words)
    return printed, folder / "demo_output" / name


def test_multi_task_logs_the_loss_of_each_task(tmp_path, processes):
    printed, output = run_example(processes, "multi_task", tmp_path)
    lines = [line for line in comparable_logs(output / "trainer_state.json") if "digit_loss" in line]
    assert len(lines) == 3
    for line in lines:
        assert line["loss"] == pytest.approx(line["digit_loss"] + line["parity_loss"] + line["ink_loss"], rel=1e-5)
    assert "eval_ink_error: 0." in printed


def test_lightning_callbacks_example_runs_its_callbacks(tmp_path, processes):
    words = ("--max_steps", "-1", "--num_train_epochs", "3", "--eval_strategy", "epoch", "--save_strategy", "epoch")
    printed, output = run_example(processes, "lightning_callbacks", tmp_path, *words)
    assert "Parameters that learn, by epoch: [5130, 5130, 14698]" in printed
    assert "optimizer_step" in printed, "the profiler's table"
    assert files(output, "tables/**/metrics.csv")
    assert files(output, "checkpoint-*/lightning_callbacks.pt")


def test_killed_run_resumes_to_same_weights(tmp_path, processes):
    """The run is long enough to be killed in the middle, by its first save."""
    words = ("--max_steps", "40", "--save_steps", "5", "--eval_strategy", "no")
    printed, output = run_example(processes, "killed_and_resumed", tmp_path, *words)
    assert "It had ended before" not in printed
    assert "Killed; there is" in printed
    assert "The weights of both are the same, to the last bit." in printed
    killed, undisturbed = (comparable_logs(output / name / "trainer_state.json") for name in ("killed", "undisturbed"))
    assert killed[:-1] == undisturbed[:-1]


#: Notebook → what its last outputs say.
CLAIMS = {"quickstart": "checkpoint-1128", "callbacks_and_plots": "best accuracy 0."}
CLAIMS["resume"] = "the same weights: True"


@pytest.mark.parametrize("path", sorted((EXAMPLES / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_runs_from_first_to_last_cell(path, tmp_path, processes):
    """An error in a cell fails the test."""
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(notebook, timeout=None, kernel_name="python3", resources=resources)
    client.execute(env=processes.environment())
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert CLAIMS[path.stem] in "".join(output.get("text", "") for output in outputs)
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == (path.stem == "callbacks_and_plots")
