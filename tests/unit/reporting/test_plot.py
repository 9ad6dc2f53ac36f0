"""Pictures and pages of runs, and the callback that draws them."""

import json
import math
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from hftrainer import PlotCallback, TrainingArguments
from hftrainer.errors import InvalidArgument, MissingPackage
from hftrainer.reporting.curves import curves_of_run, read_curves
from hftrainer.reporting.metrics import PANELS, SHARES
from hftrainer.reporting.plot import plot
from tests.support.checkpoints import AtStep
from tests.support.run_logs import SPEEDS, runs as runs, texts_in_svg, write_log, write_observed_run
from tests.support.small_models import make_plain


def test_plot_writes_a_picture_and_a_page(runs, tmp_path):
    from matplotlib.image import imread

    written = plot(runs, html=True, out=str(tmp_path / "both.png"))
    assert written == [str(tmp_path / "both.png"), str(tmp_path / "both.html")]
    assert imread(written[0]).shape[:2] == (896, 1440)  # two rows of panels
    page = Path(written[1]).read_text()
    assert all(text in page for text in ('"xaxis4"', '"yaxis4"', "eval_accuracy", *(Path(run).name for run in runs)))
    assert "<script src=" not in page  # nothing to fetch
    assert plot(runs[:1]) == [os.path.join(runs[0], "training.png")]
    assert plot(runs) == [os.path.join(runs[0], "comparison.png")]


def test_plot_of_a_checkpoint_is_written_beside_it(runs):
    checkpoint = os.path.join(runs[0], "checkpoint-10")
    before = sorted(os.listdir(checkpoint))
    assert plot([checkpoint]) == [os.path.join(runs[0], "training-10.png")]
    assert sorted(os.listdir(checkpoint)) == before


def test_folder_without_logs_is_refused(tmp_path):
    with pytest.raises(
        InvalidArgument, match=r"has no logs of a run \(no journal\.jsonl, no checkpoint\): a run writes"
    ):
        plot([str(tmp_path)])
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": 1, "epoch": 1.0}]}))
    with pytest.raises(InvalidArgument, match="has nothing to draw"):
        plot([str(tmp_path)])
    with pytest.raises(InvalidArgument, match=r"^picture\.gif: the file name must end in \.png, \.svg or \.pdf"):
        plot([str(tmp_path)], out="picture.gif")


@pytest.mark.parametrize(("package", "html"), [("matplotlib.figure", False), ("plotly.graph_objects", True)])
def test_missing_plot_package_is_named(runs, tmp_path, monkeypatch, package, html):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackage, match=r"pip install 'hftrainer\[plot\]'"):
        plot(runs, html=html, out=str(tmp_path / "a.png"))


def test_observed_run_has_panels_for_speeds_and_shares(tmp_path):
    drawn = read_curves([write_observed_run(tmp_path)])
    panels = {line.name: line.panel for line in drawn}
    assert panels.keys() == SPEEDS.keys() | {"loss", "step_share"} and len(set(panels.values())) == 7
    assert {name for name, panel in panels.items() if panel == SHARES} == {*PANELS[SHARES]}
    # The parts sum to 1.
    assert next(line.values for line in drawn if line.name == "step_share") == pytest.approx([0.65, 0.65])
    (picture,) = plot([str(tmp_path)], out=str(tmp_path / "a.svg"))
    # A constant memory has no panel.
    labels = {"Tokens per second", "Samples per second", "Share of time so far", "waiting for data"}
    labels |= {"Model FLOPS utilization", "peak memory (MB): 812"}
    assert labels <= {*texts_in_svg(picture)}
    assert "Seconds per step" not in texts_in_svg(picture)
    others = [write_observed_run(tmp_path / "one"), write_observed_run(tmp_path / "two", peak_memory_mb=814.0)]
    plot(others, out=picture)
    # A difference of less than 5 % is noise, and is named once.
    assert [text for text in texts_in_svg(picture) if "memory" in text] == ["peak memory (MB): at most 814"]


def test_journal_knows_the_step_of_the_first_loss_that_is_not_finite(make_trainer, tmp_path):
    """Of a log line it is known that it was since the one before."""
    model = make_plain()
    break_model = AtStep(2, lambda: next(model.parameters()).data.fill_(math.nan))
    trainer = make_trainer(model, max_steps=8, logging_steps=4, observe=True, callbacks=[break_model])
    trainer.train()
    for x in ("step", "epoch", "time"):
        plot([trainer.args.output_dir], x=x, out=str(tmp_path / "a.svg"))
        texts = {*texts_in_svg(tmp_path / "a.svg")}
        assert {"loss is not finite at step 3", "gradient norm is not finite at step 1-4"} <= texts


def test_evaluation_that_the_last_checkpoint_lacks_is_named(make_trainer, tmp_path):
    """As of transformers: the checkpoint of the last step is written before the evaluation of the epoch."""
    settings = {"num_train_epochs": 1, "max_steps": -1, "save_strategy": "steps"}
    trainer = make_trainer(eval_strategy="epoch", logging_steps=1, **settings)
    trainer.train()
    plot([trainer.args.output_dir], out=str(tmp_path / "a.svg"))
    assert "the evaluation after epoch 1 was not saved (observe=True keeps it)" in texts_in_svg(tmp_path / "a.svg")


def test_long_run_is_drawn_with_its_extremes(tmp_path):
    losses = [float(step % 7) for step in range(10_000)]
    losses[1234], losses[8765] = 90.0, -90.0
    path = write_log(tmp_path / "long", [{"step": step, "loss": loss} for step, loss in enumerate(losses)])
    (line,) = read_curves([path])
    assert len(line.drawn_indices) == 2000 and {1234, 8765} <= {*line.drawn_indices}
    assert line.points(line.values)[1].count(0.0) > 900
    plot([path], html=True)
    page = (tmp_path / "long" / "training.html").read_text()
    assert len(page) < 5_500_000 and '"level": "light"' in page


def test_several_runs_show_the_share_of_time_spent_training(tmp_path):
    log = [{"step": 1, "loss": 1.0, "data_wait": 0.2, "eval_share": 0.0, "save_share": 0.1}]
    runs = [write_log(tmp_path / name, log) for name in "ab"]
    assert list(dict.fromkeys(line.panel for line in read_curves(runs))) == [
        "loss",
        "share of time spent training so far",
    ]
    # Areas of different steps cannot be stacked.
    plot([write_log(tmp_path / "uneven", [*log, {"step": 2, "data_wait": 0.1}])], html=True)


def test_callback_draws_when_training_ends(make_trainer, tmp_path):
    trainer = make_trainer(callbacks=[PlotCallback], logging_steps=1)
    trainer.train()
    assert (tmp_path / "out" / "training.png").read_bytes().startswith(b"\x89PNG")
    assert {line.label for line in curves_of_run(trainer.state)} == {"loss", "learning rate", "gradient norm"}


def test_callback_warns_when_nothing_was_logged(make_trainer, tmp_path, caplog):
    make_trainer(callbacks=[PlotCallback], logging_strategy="no").train()
    assert "PlotCallback: the log of the run has nothing" in caplog.text
    assert not (tmp_path / "out" / "training.png").exists()


def test_callback_draws_on_the_main_process_only(make_trainer, tmp_path):
    trainer = make_trainer(callbacks=[PlotCallback], logging_steps=1)
    trainer.is_world_process_zero = lambda: False
    trainer.train()
    assert not (tmp_path / "out" / "training.png").exists()


def test_callback_needs_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackage, match=r"pip install 'hftrainer\[plot\]'"):
        PlotCallback()


def test_panel_with_one_of_several_runs_names_it(tmp_path):
    """Where panels do not fill a grid, the first is wider."""
    log = [{"step": step, "loss": 1.0, "learning_rate": step * 1e-4} for step in (1, 2)]
    runs = [write_log(tmp_path / "a", log), write_log(tmp_path / "b", [{**line, "eval_f1": 0.5} for line in log])]
    owners = {(line.run, line.name): line.owner for line in read_curves(runs)}
    assert {key: owner for key, owner in owners.items() if owner} == {("b", "eval_f1"): "only b"}
    plot(runs, html=True, out=str(tmp_path / "c.svg"))
    assert {"a", "only b", "eval_f1", "1.2e-4", "2.0e-4"} <= {*texts_in_svg(tmp_path / "c.svg")}
    page = (tmp_path / "c.html").read_text()
    assert page.count('"marker":{"size":9,"symbol":"square"}') == 2
    assert '"xaxis2.domain": [0.0, 1.0]' in page and '"xaxis4.domain": [0.56, 1.0]' in page
    assert '<h1>Comparison of a and b</h1>\n<p id="notes">' in page and '<meta name="viewport"' in page


def test_legend_names_runs_and_their_best_values(tmp_path):
    """Arguments without effect on the result are not named."""
    for run, length in (("a", 50), ("b", 3)):
        log = [{"step": step, "loss": 1.0, "eval_f1": 0.5, "eval_loss": 1.0} for step in (1, 2)]
        write_log(tmp_path / run, log, global_step=2 * length, epoch=2.0)
        args = TrainingArguments(str(tmp_path / run), logging_steps=1 + (run == "b"), observe=run == "b", use_cpu=True)
        torch.save(args, tmp_path / run / "training_args.bin")
    path = tmp_path / "c.svg"
    plot([str(tmp_path / "a"), str(tmp_path / "b")], out=str(path), html=True)
    runs = {"a": 50, "b (equal to a)": 3}
    described = {f"{run} · steps per epoch {length} · ★ best eval_loss 1 at step 1" for run, length in runs.items()}
    assert described <= {*texts_in_svg(path)}
    shown = re.findall(r'"name":"([^"]*)"', path.with_suffix(".html").read_text().split("Plotly.newPlot")[-1])
    assert {json.loads(f'"{name}"').replace("\xa0", " ") for name in shown} == described | {
        *("loss", "eval_loss", *(f"best {run}: {name}" for run in "ab" for name in ("eval_loss", "eval_f1"))),
        *(f"{run}: {name}" for run in "ab" for name in ("loss", "eval_loss", "eval_f1")),
    }


def test_picture_has_twelve_metrics_and_page_has_all(tmp_path):
    metrics = {f"eval_f{number}": 0.5 for number in range(20)}
    folder = write_log(tmp_path / "run", [{"step": 1, "loss": 1.0, **metrics}])
    args = TrainingArguments(folder, metric_for_best_model="f19", use_cpu=True)
    torch.save(args, tmp_path / "run" / "training_args.bin")
    plot([folder], html=True, out=str(tmp_path / "a.svg"))
    drawn = [name for name in metrics if name in texts_in_svg(tmp_path / "a.svg")]
    assert drawn == [f"eval_f{number}" for number in (*range(11), 19)]
    assert any("without 8 of 20 metrics" in text for text in texts_in_svg(tmp_path / "a.svg"))
    page = (tmp_path / "a.html").read_text()
    assert all(f'"text":"{name}"' in page for name in metrics)
