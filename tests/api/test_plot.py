"""`python -m hftrainer plot`: a picture and a page of one run or several."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hftrainer import PlotCallback, Trainer, TrainingArguments
from hftrainer.errors import InvalidArgument, MissingPackage
from hftrainer.reporting.plot import curves, lines_of, plot, read_run
from tests import warm
from tests.parity.support import accuracy, build
from tests.tiny import make_plain, plain_data


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folders = []
    for rate in (0.01, 0.1):
        folder = tmp_path_factory.mktemp(f"rate-{rate}")
        trainer, _ = build(
            "hftrainer",
            "plain",
            folder,
            learning_rate=rate,
            max_steps=20,
            logging_steps=2,
            eval_strategy="steps",
            eval_steps=5,
            save_strategy="steps",
            save_steps=10,
            trainer={"compute_metrics": accuracy},
        )
        trainer.train()
        folders.append(str(folder))
    return folders


def test_curves(runs):
    found = curves(read_run(runs[0]))
    assert {panel: sorted(lines) for panel, lines in found.items()} == {
        "loss": ["eval_loss", "loss"],
        "metrics": ["eval_accuracy"],
        "learning rate": ["learning_rate"],
        "gradient norm": ["grad_norm"],
    }
    steps, values = found["loss"]["loss"]
    assert steps == list(range(2, 21, 2)) and len(values) == 10
    assert found["metrics"]["eval_accuracy"][0] == [5, 10, 15, 20]


def test_picture_and_page(runs, tmp_path):
    from matplotlib.image import imread

    written = plot(runs, html=True, out=str(tmp_path / "both.png"))
    assert written == [str(tmp_path / "both.png"), str(tmp_path / "both.html")]
    assert imread(written[0]).shape[:2] == (840, 1320)
    page = Path(written[1]).read_text()
    assert "eval_accuracy" in page and "<script src=" not in page  # nothing to fetch
    assert all(Path(run).name in page for run in runs)
    assert plot(runs[:1]) == [os.path.join(runs[0], "training.png")]


def command(*words):
    env = {**warm.environment(), **warm.LIBRARIES}
    return subprocess.run([warm.PYTHON, "-m", "hftrainer", "plot", *words], env=env, capture_output=True, text=True)


def test_command_line(runs, tmp_path):
    done = command(*runs, "--out", str(tmp_path / "a.png"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "a.png")
    failed = command(str(tmp_path / "none"))
    assert failed.returncode == 2
    assert "the folder does not exist; give the output_dir of a run" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_nothing_to_draw(tmp_path):
    with pytest.raises(InvalidArgument, match=r"neither it nor a checkpoint-xxx in it holds trainer_state\.json"):
        plot([str(tmp_path)])
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": 1, "epoch": 1.0}]}))
    with pytest.raises(InvalidArgument, match="has nothing to draw"):
        plot([str(tmp_path)])
    with pytest.raises(InvalidArgument, match=r"ends in \.png"):
        plot([str(tmp_path)], out="picture.gif")


@pytest.mark.parametrize(("package", "html"), [("matplotlib.figure", False), ("plotly.subplots", True)])
def test_missing_packages(runs, tmp_path, monkeypatch, package, html):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackage, match=r"pip install 'hftrainer\[plot\]'"):
        plot(runs, html=html, out=str(tmp_path / "a.png"))


def test_values_that_are_no_numbers(runs):
    state = read_run(runs[0])
    state.log_history = [
        {"loss": float("nan"), "note": "text", "flag": True, "step": 1},
        {"loss": 1.0, "eval_matrix": [[1]], "eval_runtime": 3.0, "step": 2},
    ]
    assert curves(state)["loss"] == {"loss": ([2], [1.0])}
    assert curves(state)["metrics"] == {}


def make_plotted(tmp_path, **settings):
    args = TrainingArguments(
        str(tmp_path / "out"), max_steps=4, use_cpu=True, save_strategy="no", disable_tqdm=True, **settings
    )
    return Trainer(make_plain(), args, train_dataset=plain_data(), callbacks=[PlotCallback])


def test_callback_draws_when_training_ends(tmp_path):
    trainer = make_plotted(tmp_path, logging_steps=1)
    trainer.train()
    assert (tmp_path / "out" / "training.png").read_bytes().startswith(b"\x89PNG")
    assert {line.label for line in lines_of(trainer.state)} == {"loss", "learning_rate", "grad_norm"}


def test_callback_of_a_run_that_logged_nothing(tmp_path, caplog):
    make_plotted(tmp_path, logging_strategy="no").train()
    assert "PlotCallback: the log of the run has nothing" in caplog.text
    assert not (tmp_path / "out" / "training.png").exists()


def test_callback_draws_on_the_main_process_only(tmp_path):
    trainer = make_plotted(tmp_path, logging_steps=1)
    trainer.is_world_process_zero = lambda: False
    trainer.train()
    assert not (tmp_path / "out" / "training.png").exists()


def test_callback_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackage, match=r"pip install 'hftrainer\[plot\]'"):
        PlotCallback()
