"""`python -m hftrainer plot` draws a picture and a page of one run or several."""

import json
import math
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hftrainer import PlotCallback, Trainer, TrainerCallback, TrainingArguments
from hftrainer.__main__ import main
from hftrainer.callbacks.state import TrainerState
from hftrainer.checkpointing.saved_arguments import differing_arguments
from hftrainer.cli.plot import align, describe_curves
from hftrainer.errors import InvalidArgument, MissingPackage
from hftrainer.monitoring import journal
from hftrainer.monitoring.journal import ACTIVITIES, Journal, append_line, read_events
from hftrainer.monitoring.run_page import RunRecord
from hftrainer.reporting.curves import Curve, curves_of_run, read_curves
from hftrainer.reporting.metrics import PANELS, SHARES, logged, logged_curves, sort_pattern
from hftrainer.reporting.plot import _vertical_axis, plot
from tests.support.parity import accuracy, train
from tests.support.tiny import make_plain, plain_data


def test_logs_without_weights_are_drawn(tmp_path):
    """As kept in git: checkpoint folders with the log alone, and lines that scripts have added."""
    log = [{"epoch": 1, "loss": 3.0, "step": 4}, {"predict_loss": 0.5}, {"epoch": 2, "loss": 2.0, "step": 8}]
    for step in (8, 10):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": log}))
    drawn = logged_curves(RunRecord(str(tmp_path)).state)["loss"]
    assert drawn == {"loss": ([4, 8], [3.0, 2.0]), "predict_loss": ([4], [0.5])}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    settings = {"max_steps": 20, "save_strategy": "steps", "save_steps": 10, "eval_strategy": "steps", "eval_steps": 5}
    folders = [tmp_path_factory.mktemp(f"rate-{rate}") for rate in (0.01, 0.1)]
    for rate, folder in zip((0.01, 0.1), folders, strict=True):
        train("hftrainer", "plain", folder, learning_rate=rate, trainer={"compute_metrics": accuracy}, **settings)
    return list(map(str, folders))


def test_run_has_curves_of_loss_metrics_rate_and_norm(runs):
    found = logged_curves(RunRecord(runs[0]).state)
    panels = {panel: sorted(lines) for panel, lines in found.items() if lines}
    others = {"metrics": ["eval_accuracy"], "learning rate": ["learning_rate"], "gradient norm": ["grad_norm"]}
    assert panels == {"loss": ["eval_loss", "loss"], **others}
    steps, values = found["loss"]["loss"]
    assert steps == list(range(2, 21, 2)) and len(values) == 10
    assert found["metrics"]["eval_accuracy"][0] == [5, 10, 15, 20]


def test_plot_writes_a_picture_and_a_page(runs, tmp_path):
    from matplotlib.image import imread

    written = plot(runs, html=True, out=str(tmp_path / "both.png"))
    assert written == [str(tmp_path / "both.png"), str(tmp_path / "both.html")]
    assert imread(written[0]).shape[:2] == (949, 1440)  # two rows of panels
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


def test_curves_have_colours_dashes_and_a_best_value(tmp_path):
    """One run has a colour for each curve; of several each has one, and a curve the same dash in all."""
    logs = {"a": ["loss", "eval_loss", "eval_f1"], "b": ["eval_loss", "loss"]}
    for run, names in logs.items():
        history = [{name: 3.0 - step % 3, "step": step} for step in (2, 4, 6) for name in names]
        (tmp_path / run).mkdir()
        # The value of eval_f1 at step 4; eval_loss is the same.
        state = {"log_history": history, "best_metric": 2.0 if run == "a" else None}
        (tmp_path / run / "trainer_state.json").write_text(json.dumps(state))
    alone = {line.label: line for line in read_curves([str(tmp_path / "a")])}
    assert alone["loss"].colour != alone["eval_loss"].colour
    assert {name: line.best for name, line in alone.items()} == {"loss": None, "eval_loss": 1, "eval_f1": 1}
    both = read_curves([str(tmp_path / "a"), str(tmp_path / "b")])
    dashes = {line.label: line.dash for line in both}
    assert dashes == {"a: loss": 0, "a: eval_loss": 1, "a: eval_f1": 0, "b: eval_loss": 1, "b: loss": 0}
    assert {line.run: line.best for line in both if line.name == "eval_loss"} == {"a": 1, "b": 0}  # b: the lowest
    assert {(line.run, line.mark) for line in both} == {("a", "o"), ("b", "s")}
    # The first of curves that coincide is wider.
    wider = {line.label for line in both if line.width > 1.5}
    assert wider == {"a: loss", "a: eval_loss"} and {line.width for line in read_curves([str(tmp_path / "a")])} == {1.5}


def test_marks_separate_coinciding_curves_of_runs():
    """Each has about ten marks, at other points than the other; one run has marks only where points are few."""
    steps = [float(step) for step in range(100)]
    first, second = (Curve("loss", "loss", steps, steps, run=mark, mark=mark).marked for mark in "os")
    assert len(first) == len(second) == 10 and not set(first) & set(second)
    assert [len(Curve("loss", "loss", steps[:count], steps[:count]).marked) for count in (29, 30)] == [29, 0]


def test_command_prints_a_table_of_several_runs(runs, tmp_path, capsys):
    end = {"train_loss": 1.0, "train_runtime": 9.0, "train_samples_per_second": 8}
    log = [{"step": 20, "loss": 1.0}, {"step": 20, **end}]
    main(["plot", *runs, write_log(tmp_path / "saved", log, global_step=20), "--output", str(tmp_path / "a.png")])
    path, empty, header, *rows, saved, _, note, missing = capsys.readouterr().out.splitlines()
    assert path == str(tmp_path / "a.png") and not empty and saved.split() == ["saved", *"20 1 - - 8 9 s".split()]
    titles = ["differs in", "steps", "last loss", "best eval_loss", "best eval_accuracy", "mean samples per second"]
    assert re.split("  +", header.strip()) == [*titles, "time"] and note.startswith(
        "saved: train_runtime and the speed"
    )
    both = ", ".join(Path(run).name for run in runs)
    assert missing == f"{both}: without observe=True no speed, time or goodput"
    assert all(row.split()[-2:] == ["-", "-"] for row in rows)
    values = zip(runs, ("0.01", "0.1"), strict=True)
    assert [row.split()[:4] for row in rows] == [[Path(run).name, "learning_rate", rate, "20"] for run, rate in values]
    main(["plot", runs[0], "--output", str(tmp_path / "a.png")])
    assert capsys.readouterr().out == f"{tmp_path / 'a.png'}\n"


def test_folder_without_logs_is_refused(tmp_path):
    with pytest.raises(InvalidArgument, match=r"has no logs of a run \(no journal\.jsonl, no checkpoint\)"):
        plot([str(tmp_path)])
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": 1, "epoch": 1.0}]}))
    with pytest.raises(InvalidArgument, match="has nothing to draw"):
        plot([str(tmp_path)])
    with pytest.raises(InvalidArgument, match=r"^picture\.gif: the file name must end in \.png, \.svg or \.pdf"):
        plot([str(tmp_path)], out="picture.gif")


def test_folder_without_logs_is_left_out_of_a_comparison(tmp_path, capsys):
    runs = [write_log(tmp_path / run, [{"step": 1, "loss": 1.0}] * (run != "empty")) for run in ("empty", "a", "b")]
    main(["plot", *runs])
    shown = capsys.readouterr()
    assert shown.out.startswith(str(tmp_path / "a" / "comparison.png"))
    assert shown.err.startswith(f"python -m hftrainer plot: left out: {runs[0]}: the log has nothing to draw")
    main(["plot", *runs, "--json"])
    shown = capsys.readouterr()
    assert f"left out: {runs[0]}" in json.loads(shown.out)["note"] and not shown.err
    with pytest.raises(SystemExit):
        main(["plot", runs[0], str(tmp_path)])
    assert f"error: {runs[0]}: the log has nothing to draw" in capsys.readouterr().err


@pytest.mark.parametrize(("package", "html"), [("matplotlib.figure", False), ("plotly.graph_objects", True)])
def test_missing_plot_package_is_named(runs, tmp_path, monkeypatch, package, html):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackage, match=r"pip install 'hftrainer\[plot\]'"):
        plot(runs, html=html, out=str(tmp_path / "a.png"))


SPEEDS = {"tokens_per_second": 9000.5, "samples_per_second": 17.5, "step_seconds": 0.25, "data_wait": 0.1}
SPEEDS |= {"eval_share": 0.2, "save_share": 0.05, "peak_memory_mb": 812.0, "mfu": 0.4}


def write_observed_run(folder, **values):
    written = Journal(str(folder))
    written.write("begin", 0, max_steps=30, world_size=1, device="cpu", pid=1, host="there", resumed_from=None)
    for step, speed in ((10, 17.5), (20, 35.0)):
        speeds = SPEEDS | {"samples_per_second": speed} | values
        written.write("log", step, logs={"loss": step / 10, "step": step, "epoch": step / 100, **speeds})
    time.sleep(0.002)  # times are in milliseconds; without any time there is no goodput
    written.write("interval", 20, steps=20, seconds=dict.fromkeys(ACTIVITIES, 0.0))
    return str(folder)


def test_observed_run_has_panels_for_speeds_and_shares(tmp_path):
    drawn = read_curves([write_observed_run(tmp_path)])
    panels = {line.name: line.panel for line in drawn}
    assert panels.keys() == SPEEDS.keys() | {"loss", "step_share"} and len(set(panels.values())) == 7
    assert {name for name, panel in panels.items() if panel == SHARES} == {*PANELS[SHARES]}
    # The parts sum to 1.
    assert next(line.values for line in drawn if line.name == "step_share") == pytest.approx([0.65, 0.65])
    (picture,) = plot([str(tmp_path)], out=str(tmp_path / "a.svg"))
    # A constant memory has no panel.
    labels = {"Tokens per second", "Share of time", "Model FLOPS utilization", "waiting for data"}
    assert labels | {"peak memory (MB): 812"} <= {*texts_in_svg(picture)}
    others = [write_observed_run(tmp_path / "one"), write_observed_run(tmp_path / "two", peak_memory_mb=814.0)]
    plot(others, out=picture)
    texts = texts_in_svg(picture)
    for run, memory in (("one", 812), ("two", 814)):
        assert any(text.startswith(run) and f"peak memory (MB): {memory}" in text for text in texts)


def test_speeds_are_left_out_of_compared_values(tmp_path):
    """For `diff`, which compares what is computed."""
    state = TrainerState(log_history=[{"loss": 1.0, "step": 1, **SPEEDS}])
    assert [name for _, name, _ in logged(state)] == ["loss"]


def test_journal_continues_the_log_of_the_checkpoint(tmp_path):
    (tmp_path / "checkpoint-10").mkdir()
    write_log(tmp_path / "checkpoint-10", [{"loss": 7.0, "step": 10}])
    loss = next(line for line in read_curves([write_observed_run(tmp_path)]) if line.name == "loss")
    assert (loss.steps, loss.values) == ([10, 20], [7.0, 2.0])


@pytest.mark.parametrize(("loss", "evaluated"), [(2.0, [10, 20]), (9.0, [])])
def test_evaluations_after_the_last_save_come_from_the_journal(tmp_path, loss, evaluated):
    """The journal alone has them, before a resume too. A journal of an earlier run, with other losses, is not shown."""
    write_log(tmp_path / "checkpoint-20", [{"loss": loss, "step": step, "epoch": 1.0} for step in (10, 20)])
    written = Journal(str(tmp_path))
    for start, step in ((0, 10), (10, 20)):
        written.write("begin", start, resumed_from=f"checkpoint-{start}" if start else None)
        for name, value in (("loss", 2.0), ("eval_loss", 1.0)):
            written.write("log", step, logs={name: value, "epoch": 1.0})
    found = logged_curves(RunRecord(str(tmp_path)).state)["loss"]
    assert found["loss"] == ([10, 20], [loss] * 2) and found.get("eval_loss", ([],))[0] == evaluated


def test_table_of_observed_runs_shows_speed_and_goodput(tmp_path, capsys, monkeypatch):
    runs, read = [write_observed_run(tmp_path / "a"), write_observed_run(tmp_path / "b")], []
    monkeypatch.setattr(journal, "read_events", lambda folder: [read.append(folder), read_events(folder)][1])
    main(["plot", *runs, "--output", str(tmp_path / "a.png")])
    _, _, header, *rows, _, explanation = capsys.readouterr().out.splitlines()
    titles = ["steps", "state", "last loss", "best loss", "mean samples per second", "mean tokens per second", "time"]
    assert re.split("  +", header.strip()) == [*titles, "goodput"] and read == runs  # once
    assert explanation.startswith(
        "time: without pauses; downtime: pauses after failures; goodput: kept steps / (time +"
    )
    # 10 steps at 17.5 samples per second and 10 at 35.
    assert [row.split()[:7] for row in rows] == [[name, "20", "running", "2", "1", "23.33", "9,000"] for name in "ab"]
    main(["plot", *runs, "--output", str(tmp_path / "a.png"), "--json"])
    shown = json.loads(capsys.readouterr().out)["runs"]
    keys = {title.replace(" ", "_") for title in titles}
    assert [run["run"] for run in shown] == ["a", "b"] and keys | {"downtime", "goodput"} <= shown[0].keys()
    assert shown[0]["mean_samples_per_second"] == pytest.approx(70 / 3) and shown[0]["differs_in"] == {}


def write_log(folder, log, **state):
    folder.mkdir(exist_ok=True)
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": log, **state}))
    return str(folder)


def test_values_that_are_not_numbers_are_left_out(tmp_path):
    log = [{"loss": 2.0, "note": "text", "flag": True, "step": 1}, {"loss": float("inf"), "step": 3}]
    log.insert(1, {"loss": float("nan"), "eval_matrix": [[1]], "eval_runtime": 3.0, "step": 2})
    (line,) = read_curves([write_log(tmp_path, log)])
    assert (line.name, line.steps, line.finite) == ("loss", [1, 2, 3], [2.0])
    header, row, _, note = describe_curves([line]).splitlines()
    assert header.endswith("highest") and row.endswith("nan       2        2")
    assert note == "loss: 2 values are not finite, first by step 2"


def texts_in_svg(path):
    return [" ".join(text.split()) for text in re.findall(r"<!-- (.*?) -->", Path(path).read_text(), re.DOTALL)]


def test_loss_hidden_by_the_nan_filter_is_not_drawn():
    lines = [{"loss": 1.0, "grad_norm": 2.0, "step": 1}, {"loss": 0.0, "grad_norm": math.nan, "step": 2}]
    steps, values = logged_curves(TrainerState(log_history=lines))["loss"]["loss"]
    assert steps == [1, 2] and values[0] == 1.0 and math.isnan(values[1])


def test_first_loss_that_is_not_finite_is_marked(tmp_path):
    log = [{"loss": float("nan") if step > 4 else 1.0, "step": step} for step in range(1, 9)]
    plot([write_log(tmp_path / "run", log)], html=True, out=str(tmp_path / "a.svg"))
    assert "loss is not finite by step 5" in texts_in_svg(tmp_path / "a.svg")
    assert "loss is not finite by step 5" in (tmp_path / "a.html").read_text()


def test_journal_knows_the_step_of_the_first_loss_that_is_not_finite(tmp_path):
    """Of a log line it is known that it was by then."""
    settings = {"max_steps": 8, "logging_steps": 4, "observe": True, "save_strategy": "no", "use_cpu": True}
    model = make_plain()

    def break_model(args, state, control, **kwargs):
        if state.global_step == 2:
            next(model.parameters()).data.fill_(math.nan)

    callback = TrainerCallback()
    callback.on_step_end = break_model
    args = TrainingArguments(str(tmp_path), disable_tqdm=True, report_to="none", **settings)
    Trainer(model, args, train_dataset=plain_data(), callbacks=[callback]).train()
    for x in ("step", "epoch", "time"):
        plot([str(tmp_path)], x=x, out=str(tmp_path / "a.svg"))
        texts = {*texts_in_svg(tmp_path / "a.svg")}
        assert {"loss is not finite at step 3", "gradient norm is not finite by step 4"} <= texts


def test_mean_leaves_out_an_isolated_spike_which_has_one_mark(tmp_path):
    losses = [1 + step % 5 / 10 for step in range(100)]
    usual = Curve("loss", "loss", list(map(float, range(100))), losses).mean
    losses[20] = losses[60] = losses[61] = 90.0
    folder = write_log(tmp_path / "run", [{"step": step, "loss": loss} for step, loss in enumerate(losses)])
    (curve,) = read_curves([folder])
    assert max(curve.mean) < 1.5 and curve.mean[-1] == pytest.approx(usual[-1], abs=0.05)
    plot([folder], out=str(tmp_path / "a.svg"))
    assert "2 spikes, max 90" in texts_in_svg(tmp_path / "a.svg")


@pytest.mark.parametrize(("highest", "tops"), [(4.4, [4.57, 4.62]), (6.0, [3.8875, 4.095])])
def test_only_values_far_above_the_others_leave_a_panel(highest, tops):
    values = [*(1 + step / 100 for step in range(100)), 3.5, highest]
    curves = [Curve(name, name, list(map(float, range(102))), values) for name in ("loss", "step_seconds")]
    assert [_vertical_axis([curve])[1][1] for curve in curves] == pytest.approx(tops)


def test_evaluation_that_the_last_checkpoint_lacks_is_named(tmp_path):
    """As of transformers: the checkpoint of the last step is written before the evaluation of the epoch."""
    settings = {"num_train_epochs": 1, "eval_strategy": "epoch", "logging_steps": 1, "use_cpu": True}
    args = TrainingArguments(str(tmp_path), disable_tqdm=True, report_to="none", **settings)
    Trainer(make_plain(), args, train_dataset=plain_data(), eval_dataset=plain_data()).train()
    plot([str(tmp_path)], out=str(tmp_path / "a.svg"))
    assert "the evaluation after epoch 1 was not saved (observe=True keeps it)" in texts_in_svg(tmp_path / "a.svg")


def test_each_metric_has_a_panel(tmp_path):
    metrics = {"eval_f1": 0.5, "eval_tokens": 54_321}
    one = write_log(tmp_path / "one", [{"step": 1, "loss": 1.0, "grad_norm": 1.0, **metrics}])
    panels = ["loss", "eval_f1", "eval_tokens", "gradient norm"]
    assert [line.panel for line in read_curves([one])] == panels
    # The loss stays first; other panels that lack a run are last.
    other = write_log(tmp_path / "other", [{"step": 1, "eval_tokens": 1e300}])
    order = ["loss", "eval_tokens", "eval_f1", "gradient norm"]
    assert list(dict.fromkeys(line.panel for line in read_curves([one, other]))) == order


def test_evaluation_sets_share_a_panel_in_their_order(tmp_path, capsys):
    log = [{"step": 1, f"eval_{data}_f1": 0.5, f"eval_{data}_loss": 1.0} for data in ("val", "train")]
    runs = [write_log(tmp_path / run, log) for run in "ab"]
    assert [line.panel for line in read_curves(runs[:1])] == ["loss", "loss", "f1", "f1"]
    main(["plot", *runs, "--output", str(tmp_path / "a.svg")])
    assert "best eval_val_loss  best eval_train_loss" in capsys.readouterr().out
    texts = {text.replace("\xa0", " ") for text in texts_in_svg(tmp_path / "a.svg")}
    assert {"Comparison of a and b", "F1", "a · ★ best eval_val_loss 1"} <= texts


def test_curves_and_runs_differ_in_black_and_white(tmp_path):
    """Where colours repeat, losses differ in their dash and runs in their mark."""
    losses = {f"{name}_loss": 1.0 for name in "abcdefghijkl"}
    runs = [write_log(tmp_path / str(number), [{"step": 1, "loss": 1.0, **losses}]) for number in range(9)]
    assert len({(line.colour, line.dash) for line in read_curves(runs[:1])}) == 13
    assert len({(line.colour, line.mark) for line in read_curves(runs)}) == 9


def test_long_run_is_drawn_with_its_extremes(tmp_path):
    losses = [float(step % 7) for step in range(10_000)]
    losses[1234], losses[8765] = 90.0, -90.0
    path = write_log(tmp_path / "long", [{"step": step, "loss": loss} for step, loss in enumerate(losses)])
    (line,) = read_curves([path])
    assert len(line.drawn_indices) == 2000 and {1234, 8765} <= {*line.drawn_indices}
    assert line.points(line.values)[1].count(0.0) > 900
    plot([path], html=True)
    page = (tmp_path / "long" / "training.html").read_text()
    assert len(page) < 5_500_000 and "faint: logged values; strong: their exponential mean" in page


def test_several_runs_show_the_share_of_time_spent_training(tmp_path):
    log = [{"step": 1, "loss": 1.0, "data_wait": 0.2, "eval_share": 0.0, "save_share": 0.1}]
    runs = [write_log(tmp_path / name, log) for name in "ab"]
    assert list(dict.fromkeys(line.panel for line in read_curves(runs))) == ["loss", "share of time spent training"]
    # A share is of an interval.
    assert '"shape":"vh"' in Path(plot(runs, html=True)[1]).read_text()
    # Areas of different steps cannot be stacked.
    plot([write_log(tmp_path / "uneven", [*log, {"step": 2, "data_wait": 0.1}])], html=True)


@pytest.mark.parametrize(("other", "scale"), [(1e-3, "linear"), (2e-5, "log")])
def test_learning_rates_that_differ_50_fold_get_a_log_scale(tmp_path, other, scale):
    rates = {"a": [0.0, 1e-3, 1e-5, 0.0], "b": [0.0, other, other / 2, 0.0]}
    for run, values in rates.items():
        write_log(tmp_path / run, [{"step": step, "learning_rate": rate} for step, rate in enumerate(values)])
    plot([str(tmp_path / run) for run in rates], html=True, out=str(tmp_path / "c.png"))
    assert f'"type":"{scale}","range"' in (tmp_path / "c.html").read_text()


@pytest.mark.parametrize(("span", "unit", "last"), [(100, "seconds", 100), (120, "minutes", 2), (9000, "hours", 2.5)])
def test_time_axis_unit_follows_the_span(tmp_path, span, unit, last):
    begin = {"time": 1000.0, "event": "begin", "step": 0, "max_steps": 1, "host": "there", "pid": 1}
    log = {"time": 1000.0 + span, "event": "log", "step": 1, "logs": {"loss": 1.0}}
    (tmp_path / "journal.jsonl").write_text(f"{json.dumps(begin)}\n{json.dumps(log)}\n")
    assert [(line.x, line.steps) for line in read_curves([str(tmp_path)], "time")] == [(unit, [last])]


def test_cdn_page_loads_plotly_from_the_network(runs, tmp_path, capsys):
    main(["plot", runs[0], "--cdn", "--output", str(tmp_path / "a.png")])
    assert re.fullmatch(r"\S+a\.png\n\S+a\.html \(\d+\.?\d* kB\)\n", capsys.readouterr().out)
    page, told = (tmp_path / "a.html").read_text().split("<script>window.Plotly || ")
    assert '<script charset="utf-8" src="https://cdn.plot.ly' in page and "The plot needs https://cdn.plot.ly" in told


def make_trainer(tmp_path, **settings):
    settings |= {"max_steps": 4, "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
    args = TrainingArguments(str(tmp_path / "out"), **settings)
    return Trainer(make_plain(), args, train_dataset=plain_data(), callbacks=[PlotCallback])


def test_callback_draws_when_training_ends(tmp_path):
    trainer = make_trainer(tmp_path, logging_steps=1)
    trainer.train()
    assert (tmp_path / "out" / "training.png").read_bytes().startswith(b"\x89PNG")
    assert {line.label for line in curves_of_run(trainer.state)} == {"loss", "learning rate", "gradient norm"}


def test_callback_warns_when_nothing_was_logged(tmp_path, caplog):
    make_trainer(tmp_path, logging_strategy="no").train()
    assert "PlotCallback: the log of the run has nothing" in caplog.text
    assert not (tmp_path / "out" / "training.png").exists()


def test_callback_draws_on_the_main_process_only(tmp_path):
    trainer = make_trainer(tmp_path, logging_steps=1)
    trainer.is_world_process_zero = lambda: False
    trainer.train()
    assert not (tmp_path / "out" / "training.png").exists()


def test_callback_needs_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackage, match=r"pip install 'hftrainer\[plot\]'"):
        PlotCallback()


def test_json_lists_the_written_files(runs, tmp_path, capsys):
    main(["plot", runs[0], "--html", "--json", "--output", str(tmp_path / "a.png")])
    shown = json.loads(capsys.readouterr().out)
    assert shown["files"] == [str(tmp_path / "a.png"), str(tmp_path / "a.html")]
    main(["plot", *runs, "--json", "--output", str(tmp_path / "b.png")])
    first = json.loads(capsys.readouterr().out)["runs"][0]
    assert shown["runs"] == [first | {"differs_in": {}}] and first["best_eval_accuracy"] > 0 and first["steps"] == 20


@pytest.fixture
def opened_urls(monkeypatch):
    found = []
    monkeypatch.setattr("webbrowser.open", found.append)
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    return found


@pytest.fixture
def show_plot(tmp_path, monkeypatch, capsys):
    def plot_and_read(*words, terminal=True):
        monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
        main(["plot", *words, "--output", str(tmp_path / "a.png")])
        return capsys.readouterr().out

    return plot_and_read


def test_terminal_without_a_desktop_shows_text(runs, tmp_path, monkeypatch, opened_urls, show_plot):
    monkeypatch.setattr("sys.platform", "linux")
    text = show_plot(runs[0])
    picture, _, first, *_ = text.splitlines()
    assert picture == str(tmp_path / "a.png") and first.startswith("loss ")
    assert "eval_accuracy " in text and " lowest " in text and opened_urls == []


def test_desktop_opens_the_file(runs, tmp_path, monkeypatch, opened_urls, show_plot):
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("DISPLAY", ":0")
    assert show_plot(runs[0]) == f"{tmp_path / 'a.png'}\n"
    show_plot(runs[0], "--html")
    assert opened_urls == [(tmp_path / "a.png").as_uri(), (tmp_path / "a.html").as_uri()]
    show_plot(runs[0], terminal=False)
    assert len(opened_urls) == 2


def test_notebook_shows_the_picture(runs, tmp_path, monkeypatch, opened_urls, show_plot):
    shown = []
    monkeypatch.setattr("hftrainer.callbacks.progress_bar.is_in_notebook", lambda: True)
    monkeypatch.setattr("hftrainer.callbacks.progress_bar.show_in_notebook", shown.append)
    show_plot(runs[0], "--html")
    assert shown == [str(tmp_path / "a.png")] and opened_urls == []


@pytest.mark.parametrize(
    ("norms", "scale"),
    [([1.0, 1.2, 2.0, 0.8], "linear"), ([1.0, 1.2, 2.0, 0.01], "log"), ([500.0, *[1.0] * 9, *[0.8] * 9], "linear")],
)
def test_losses_and_norms_that_span_decades_get_a_log_scale(tmp_path, norms, scale):
    """A few high ones leave the panel instead."""
    log = [{"step": step, "grad_norm": norm, "loss": norm} for step, norm in enumerate(norms)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    plot([str(tmp_path)], html=True)
    page = (tmp_path / "training.html").read_text()
    assert re.findall(r'"yaxis\d?":\{[^}]*"title":\{"text":"([\w ()]+)"[^}]*\},"type":"(\w+)"', page) == [
        (label + " (log scale)" * (scale == "log"), scale) for label in ("Loss", "Gradient norm")
    ]
    marks = page.count('"text":"500"')
    assert marks == 2 * norms.count(500.0) and f"<title>Training run {tmp_path.name}</title>" in page


def test_run_that_diverged_does_not_squeeze_the_others(tmp_path):
    """Its values beyond the others' are cut off; alone it gets a log scale, though its `eval_loss` has no values."""
    for run, losses in {"good": [2.0, 1.0, 0.5], "other": [1.0, 1.0, 0.9], "bad": [1.0, 7e35, math.nan]}.items():
        write_log(tmp_path / run, [{"step": 1, "loss": loss, "eval_loss": losses[2]} for loss in losses])
    runs = [str(tmp_path / run) for run in ("good", "other", "bad")]
    assert _vertical_axis(read_curves(runs)) == ("linear", pytest.approx((0.425, 2.075)))
    assert _vertical_axis(read_curves(runs[2:]))[0] == "log"
    plot(runs, out=str(tmp_path / "a.svg"))
    assert "7e+35" in texts_in_svg(tmp_path / "a.svg")


def test_curves_are_described_in_a_text_table():
    rising = Curve("loss", "a", [1.0, 2.0, 3.0, 4.0], [0.0, 1.0, 2.0, 7.0])
    share = Curve(SHARES, "data_wait", [2.0, 4000.0], [0.5, 0.5])
    assert describe_curves([rising, share]).splitlines() == [
        "                       steps  first   last  lowest  highest",
        "a                     1 to 4      0      7       0        7",
        "waiting for data  2 to 4,000  50.0%  50.0%   50.0%    50.0%",
    ]


@pytest.mark.parametrize("width", [12, 5])
def test_table_columns_that_do_not_fit_follow_below(width):
    rows = [("", "loss", "f1"), ("run a", "0.5", "1")]
    whole, parts = "       loss  f1\nrun a   0.5   1", "       loss\nrun a   0.5\n\n       f1\nrun a   1"
    assert (align(rows), align(rows, len("run a   0.5   1")), align(rows, width)) == (whole, whole, parts)


@pytest.mark.parametrize("losses", [{1: 10**400, 2: 1}, {(1,): 1}, {"a": 1}, {1: -1e308, 2: 1e308}, {1: 1, 2: 1e308}])
def test_odd_log_values_still_give_a_picture(tmp_path, losses):
    lines = [{"step": step, "loss": loss} for step, loss in losses.items()]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": lines}))
    main(["plot", str(tmp_path)])
    assert (tmp_path / "training.png").is_file()


def test_panel_with_one_of_several_runs_names_it(tmp_path):
    """Where panels do not fill a grid, the first is wider."""
    log = [{"step": step, "loss": 1.0, "learning_rate": step * 1e-4} for step in (1, 2)]
    runs = [write_log(tmp_path / "a", log), write_log(tmp_path / "b", [{**line, "eval_f1": 0.5} for line in log])]
    owners = {(line.run, line.name): line.owner for line in read_curves(runs)}
    assert {key: owner for key, owner in owners.items() if owner} == {("b", "eval_f1"): "b"}
    plot(runs, html=True, out=str(tmp_path / "c.svg"))
    assert {"a", "b", "eval_f1", "1e-4", "2e-4"} <= {*texts_in_svg(tmp_path / "c.svg")}
    page = (tmp_path / "c.html").read_text()
    assert page.count('"marker":{"size":9,"symbol":"square"}') == 2
    assert '"xaxis2.domain": [0.0, 1.0]' in page and '"xaxis4.domain": [0.56, 1.0]' in page
    assert "<body><h1>Comparison of a and b</h1><small" in page and '<meta name="viewport"' in page


def test_odd_folder_names_are_refused(tmp_path, capsys):
    (tmp_path / "loop").symlink_to("loop")
    for name in ("x" * 5000, str(tmp_path / "loop")):
        with pytest.raises(SystemExit) as ended:
            main(["plot", name])
        assert ended.value.code == 2 and "plot: error: " in capsys.readouterr().err


@pytest.mark.parametrize(("metric", "is_greater", "best"), [("f1", None, 1), ("eval_f1", False, 2), ("loss", None, 0)])
def test_star_marks_the_best_value_of_metric_for_best_model(tmp_path, metric, is_greater, best):
    log = [{"step": step, "loss": 1.0, "eval_loss": step, "eval_f1": f1} for step, f1 in ((1, 0.5), (2, 0.7), (3, 0.2))]
    write_log(tmp_path, log)
    args = TrainingArguments(str(tmp_path), metric_for_best_model=metric, greater_is_better=is_greater, use_cpu=True)
    torch.save(args, tmp_path / "training_args.bin")
    marked = {line.name: line.best for line in read_curves([str(tmp_path)]) if line.best is not None}
    assert marked == {f"eval_{metric.removeprefix('eval_')}": best}


def test_git_lfs_pointer_in_place_of_training_args_is_ignored(runs, tmp_path):
    write_log(tmp_path, [{"step": 1, "loss": 1.0}])
    (tmp_path / "training_args.bin").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert not any(line.settings for line in read_curves([runs[0], str(tmp_path)]))


def test_picture_and_page_have_the_same_axes(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *args, **settings: figures.append(figure))

    def to_html(figure, **settings):
        figures.append(figure)
        return "<body>{post_script}".format_map(settings)

    monkeypatch.setattr("plotly.graph_objects.Figure.to_html", to_html)
    write_observed_run(tmp_path)
    losses = [{"step": step, "loss": loss, "eval_f1": 0.5} for step, loss in ((5, 1000.0), (10, 0.1))]
    write_log(tmp_path, losses)
    plot([str(tmp_path)], html=True)
    picture, page = figures
    # The first of three rows has one panel, which fills it.
    assert len(picture.axes) == 7 and picture.axes[0].get_position().x1 == pytest.approx(1 - 0.25 / 13.5)
    # The first axes of a page, which are not numbered, are not used.
    for axis, x, y in zip(picture.axes, [*page.select_xaxes()][1:], [*page.select_yaxes()][1:], strict=True):
        limits = [10**limit for limit in y.range] if y.type == "log" else y.range
        assert (axis.get_ylabel(), axis.get_yscale()) == (y.title.text, y.type)
        assert (*axis.get_xlim(), *axis.get_ylim()) == pytest.approx((*x.range, *limits))
    at_zero = {"Tokens per second", "Samples per second", "Seconds per step", "Share of time"}
    at_zero |= {"Model FLOPS utilization"}
    assert {axis.get_ylabel() for axis in picture.axes if axis.get_ylim()[0] == 0} == at_zero
    scales = [(axis.get_ylabel(), axis.get_yscale()) for axis in picture.axes[:2]]
    assert scales == [("Loss (log scale)", "log"), ("eval_f1", "linear")]
    assert '<input type="checkbox" checked>losses on a log scale' in (tmp_path / "training.html").read_text()
    share = next(axis for axis in picture.axes if axis.get_ylabel() == "Share of time")
    assert picture.axes[0].get_xlim()[0] == 0 and share.yaxis.get_major_formatter()(0.5) == "50%"


def test_time_axis_breaks_at_restarts_without_their_pauses(tmp_path):
    """The time of steps that a resume undid counts: they took it."""
    journal = [(1000, "begin", 0), (1010, "log", 1), (1020, "log", 2), (9000, "begin", 1), (9030, "log", 2)]
    journal += [(9030, "interval", 2), (9040, "interval", 2)]
    for time_of_event, event, step in journal:
        facts = {"max_steps": 9, "host": "", "pid": 1, "resumed_from": "checkpoint-1" if step else None}
        logs = {"loss": 1.0, "epoch": step / 2, "data_wait": 0.25, "eval_share": 0.0, "save_share": 0.0}
        facts |= {"logs": logs, "steps": 0, "seconds": {"steps": 0.0, "data": 0.0, "evaluation": 1.0, "saving": 3.0}}
        append_line(str(tmp_path / "journal.jsonl"), {"time": time_of_event, "event": event, "step": step, **facts})
    # On other axes nothing is lost.
    assert [read_curves([str(tmp_path)], x)[0].restarts for x in ("step", "epoch")] == [[(1, 1)], [(0.5, 0.5)]]
    curve, *shares = read_curves([str(tmp_path)], "time")
    run = RunRecord(str(tmp_path))
    assert (run.seconds, run.downtime) == (60, 7980)
    # After the last log line too, and from the start and the restart on.
    saving = next(share for share in shares if share.name == "save_share")
    assert saving.points(saving.values) == ([0, 10, 20, 50, 60], [0, 0, 0, 0, 0.75])
    assert (curve.steps, curve.restarts) == ([10, 50], [(10, 20)])
    # Not broken at the restart, as over steps; a speed of the time since then begins there.
    assert curve.points(curve.values) == ([10, 50], [1.0, 1.0])
    speed = replace(curve, name="samples_per_second", values=[4.0, 2.0])
    assert speed.points(speed.values) == ([0, 10, 20, 50], [4.0, 4.0, 2.0, 2.0])
    plot([str(tmp_path)], x="time", html=True, out=str(tmp_path / "a.svg"))
    resumed = "resumed (shaded: steps done again)"
    assert {resumed, "the time leaves out the pauses before a run resumed"} <= {*texts_in_svg(tmp_path / "a.svg")}
    assert f'"name":"{resumed}"' in (tmp_path / "a.html").read_text()


def test_short_steps_are_in_milliseconds(tmp_path):
    """All runs have the same unit."""
    runs = [write_log(tmp_path / str(time), [{"step": 1, "loss": 1.0, "step_seconds": time}]) for time in (0.002, 0.2)]
    assert [(line.label, line.values) for line in read_curves(runs[:1])[1:]] == [("milliseconds per step", [2.0])]
    curves = [line for line in read_curves(runs) if line.panel == "seconds per step"]
    assert [line.values for line in curves] == [[0.002], [0.2]] and _vertical_axis(curves)[0] == "log"
    # The value is of the interval since the start, which has no mark.
    assert (curves[0].points(curves[0].values), curves[0].marked[:1]) == (([0, 1], [0.002, 0.002]), [1])


def test_horizontal_axis_may_be_epochs_or_time(runs, tmp_path, capsys):
    write_observed_run(tmp_path)
    events = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    seconds = [event["time"] - events[0]["time"] for event in events if event["event"] == "log"]
    for x, label, steps in (("epoch", "Epoch", [0.1, 0.2]), ("time", "Time (seconds)", seconds)):
        assert read_curves([str(tmp_path)], x)[0].steps == steps
        main(["plot", str(tmp_path), "--x", x, "--output", str(tmp_path / "a.svg")])
        assert label in texts_in_svg(tmp_path / "a.svg")
    with pytest.raises(SystemExit):
        main(["plot", runs[0], "--x", "time"])
    assert "has no times (it ran without observe=True): leave out --x time or that run." in capsys.readouterr().err


def test_100_losses_or_more_get_a_running_mean():
    values = [float(step % 2) for step in range(100)]
    values[50] = math.nan
    steps = list(map(float, range(100)))
    assert Curve("loss", "loss", steps[1:], values[1:]).mean is None
    for panel, name in (("learning rate", "learning_rate"), (SHARES, "data_wait"), ("loss", "eval_loss")):
        assert Curve(panel, name, steps, values).mean is None
    mean = Curve("loss", "loss", steps, values).mean
    # The weights are 1, 3/4, 3/5, ..., and at least 2 / (100 / 30 + 1).
    assert mean[:4] == pytest.approx([0, 3 / 4, 3 / 10, 13 / 20])
    assert math.isnan(mean[50]) and mean[51] == pytest.approx(mean[49] + 6 / 13 * (1 - mean[49]))


def test_legend_names_runs_and_their_best_values(tmp_path):
    """Arguments without effect on the result are not named."""
    for run, length in (("a", 50), ("b", 3)):
        log = [{"step": step, "loss": 1.0, "eval_f1": 0.5, "eval_loss": 1.0} for step in (1, 2)]
        write_log(tmp_path / run, log, global_step=2 * length, epoch=2.0)
        args = TrainingArguments(str(tmp_path / run), logging_steps=1 + (run == "b"), observe=run == "b", use_cpu=True)
        torch.save(args, tmp_path / run / "training_args.bin")
    path = tmp_path / "c.svg"
    plot([str(tmp_path / "a"), str(tmp_path / "b")], out=str(path), html=True)
    described = {f"{run} · steps per epoch {length} · ★ best eval_loss 1" for run, length in (("a", 50), ("b", 3))}
    assert described <= {*texts_in_svg(path)}
    shown = re.findall(r'"name":"([^"]*)"', path.with_suffix(".html").read_text().split("Plotly.newPlot")[-1])
    assert {json.loads(f'"{name}"').replace("\xa0", " ") for name in shown} == described | {
        *("loss", "eval_loss", *(f"best {run}: {name}" for run in "ab" for name in ("eval_loss", "eval_f1"))),
        *(f"{run}: {name}" for run in "ab" for name in ("loss", "eval_loss", "eval_f1")),
    }


@pytest.mark.parametrize("loss", [1.0, 2.0])
def test_last_of_several_runs_in_a_folder_is_read(tmp_path, loss):
    """The times of files do not count for a copy, whose log begins like the other's."""
    for step, value in ((20, 1.0), (10, loss)):
        folder = tmp_path / f"checkpoint-{step}"
        write_log(folder, [{"step": each, "loss": value} for each in range(step)])
        os.utime(folder / "trainer_state.json", (0, 1000 - step))
    assert len(RunRecord(str(tmp_path)).state.log_history) == (20 if loss == 1.0 else 10)


def test_runs_and_metrics_are_sorted_by_number(tmp_path, capsys):
    log = [{"step": step, "loss": 1.0, **dict.fromkeys(("eval_k10", "eval_k2"), 0.1)} for step in (1, 2)]
    runs = [write_log(tmp_path / f"run-{number}", log) for number in (10, 2)]
    main(["plot", *runs, "--json", "--output", str(tmp_path / "a.png")])
    assert [run["run"] for run in json.loads(capsys.readouterr().out)["runs"]] == ["run-2", "run-10"]
    for order in (["b", "a-10", "a-2"], ["lr-0.003", "lr-0.01"]):
        assert sort_pattern(order) == order
    assert [line.name for line in read_curves(runs[:1])] == ["loss", "eval_k2", "eval_k10"]


def test_runs_without_speeds_are_named_and_the_mean_of_a_page_can_be_chosen(tmp_path):
    log = [{"step": step, "loss": 0.01 ** (step / 99)} for step in range(100)]
    runs = [write_log(tmp_path / run, log) for run in "bcd"] + [write_observed_run(tmp_path / "a")]
    plot(runs, html=True)
    page = (tmp_path / "b" / "comparison.html").read_text()
    assert "b, c, d ran without observe=True: no speed, time or memory" in page and '"opacity":0.12' in page
    assert "<option>off<option selected>light<option>strong" in page
    assert [page.count(f'"meta":"{choice}"') for choice in ("off", "light", "strong", "light strong")] == [3] * 4
    plot(runs[:3], html=True)
    page = (tmp_path / "b" / "comparison.html").read_text()
    assert '"opacity":0.3' in page and "no speed, time" not in page


def test_argument_in_the_names_of_runs_is_not_repeated():
    """It is not repeated, unless it is only a part of a number, or not in the names of all. Nor are unset steps."""
    lengths = differing_arguments([{"max_steps": -1, "num_train_epochs": 3}, {"max_steps": 50}], ["a", "b"])
    assert lengths == [{"num_train_epochs": 3}, {"max_steps": 50}]
    rates = [{"learning_rate": rate} for rate in (0.01, 0.001)]
    assert differing_arguments(rates, ["lr-0.01", "lr-0.001"]) == [{}, {}]
    assert differing_arguments(rates, ["lr-0.01", "lr-0.0013"]) == rates


def test_slow_first_interval_does_not_squeeze_the_others(tmp_path):
    """Each run that leaves the panel has a mark with its highest value at the upper edge."""
    slow = {"a": 12.0, "b": 1612.4, "c": 0.1}
    times = {run: [slow[run], *[0.1] * 28] for run in slow}
    logs = {run: [{"step": step, "step_seconds": time} for step, time in enumerate(times[run], 1)] for run in slow}
    runs = [write_log(tmp_path / run, log) for run, log in logs.items()]
    plot(runs, html=True, out=str(tmp_path / "a.svg"))
    assert {"12", "1,612", "Seconds per step"} <= {*texts_in_svg(tmp_path / "a.svg")}
    page = (tmp_path / "a.html").read_text()
    assert '"Seconds per step"},"type":"linear","range":[0,0.21' in page
    marks = re.findall(r'"color":"(.{7})"},"showarrow":false,"text":"([\d,]+)"', page)
    assert marks == [(line.colour, mark) for line, mark in zip(read_curves(runs)[1::-1], ("1,612", "12"), strict=True)]


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


def test_page_in_a_narrow_window_has_one_column(tmp_path):
    plot([write_log(tmp_path / "run", [{"step": 1, "loss": 1.0, "eval_f1": 0.5}])], html=True)
    script = (tmp_path / "run" / "training.html").read_text().split("layouts = ")[1]
    ((_, wide), (_, narrow)), _ = json.JSONDecoder().raw_decode(script)
    assert [layout["xaxis3.domain"] for layout in (wide, narrow)] == [[pytest.approx(0.56), 1.0], [0.0, 1.0]]
    assert narrow["yaxis3.domain"][1] < narrow["yaxis2.domain"][0] and narrow["height"] > wide["height"]
