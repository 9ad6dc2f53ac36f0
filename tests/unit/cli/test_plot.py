"""The command `python -m hftrainer plot`."""

import json
import math
import re
import sys
from pathlib import Path

import pytest

from hftrainer.__main__ import main
from hftrainer.cli.plot import _compare, align, describe_curves
from hftrainer.monitoring import journal
from hftrainer.monitoring.journal import read_events
from hftrainer.reporting.curves import Curve, read_curves
from hftrainer.reporting.metrics import SHARES, sort_pattern
from hftrainer.reporting.panels import describe_run
from tests.support.run_logs import runs as runs, texts_in_svg, write_log, write_observed_run


def test_command_prints_a_table_of_several_runs(runs, tmp_path, capsys):
    end = {"train_loss": 1.0, "train_runtime": 9.0, "train_samples_per_second": 8}
    log = [{"step": 20, "loss": 1.0}, {"step": 20, **end}]
    main(["plot", *runs, write_log(tmp_path / "saved", log, global_step=20), "--output", str(tmp_path / "a.png")])
    path, empty, header, *rows, saved, _, best, note, missing = capsys.readouterr().out.splitlines()
    values = "- 20 unknown 1 - - - 8 9 s"
    assert path == str(tmp_path / "a.png") and not empty and saved.split() == ["saved", *values.split()]
    titles = ["learning_rate", "steps", "state", "last loss", "last eval_loss", "best eval_loss", "best eval_accuracy"]
    assert re.split("  +", header.strip()) == [*titles, "samples per second", "time"]
    assert all(" at step 20" in row or " at step 10" in row for row in rows)
    assert best == "(best): by eval_loss" and note.startswith("saved: train_runtime and the speed")
    both = ", ".join(Path(run).name for run in runs)
    assert missing == f"{both}: without observe=True no speed, time or goodput"
    assert all(row.split()[-2:] == ["-", "-"] for row in rows)
    names = [Path(runs[0]).name, f"{Path(runs[1]).name} (best)"]
    assert [re.split("  +", row)[:4] for row in rows] == [
        [name, rate, "20", "complete"] for name, rate in zip(names, ("0.01", "0.1"), strict=True)
    ]
    main(["plot", runs[0], "--output", str(tmp_path / "a.png")])
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'a.png'}\n  ")


def test_folder_without_logs_is_left_out_of_a_comparison(tmp_path, capsys):
    runs = [write_log(tmp_path / run, [{"step": 1, "loss": 1.0}] * (run != "empty")) for run in ("empty", "a", "b")]
    main(["plot", *runs])
    shown = capsys.readouterr()
    assert shown.out.startswith(str(tmp_path / "a" / "comparison.png"))
    assert shown.err.startswith(f"python -m hftrainer plot: left out: {runs[0]}: the log has nothing to draw")
    main(["plot", *runs, "--json"])
    shown = capsys.readouterr()
    assert f"left out: {runs[0]}" in json.loads(shown.out)["note"] and not shown.err
    for folders, error in (
        (runs[:1], f"error: {runs[0]}: the log has nothing"),
        ([*runs, "none"], "left out: none does"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["plot", *folders])
        assert error in capsys.readouterr().err


def test_run_that_stopped_before_its_first_log_line_is_named(tmp_path, capsys):
    written = journal.Journal(str(tmp_path))
    written.write("begin", 0, max_steps=40, logging_steps=10, pid=1, host="there", resumed_from=None)
    written.write("end", 2, reason="Ctrl-C")
    with pytest.raises(SystemExit):
        main(["plot", str(tmp_path)])
    assert "stopped at step 2, before its first log line at step 10" in " ".join(capsys.readouterr().err.split())


def test_table_of_observed_runs_shows_speed_and_goodput(tmp_path, capsys, monkeypatch):
    runs, read = [write_observed_run(tmp_path / "a"), write_observed_run(tmp_path / "b")], []
    monkeypatch.setattr(journal, "read_events", lambda folder: [read.append(folder), read_events(folder)][1])
    main(["plot", *runs, "--output", str(tmp_path / "a.png")])
    _, _, header, *rows, _, explanation, arguments = capsys.readouterr().out.splitlines()
    assert arguments == "arguments unknown: only checkpoints and observe=True save them"
    titles = ["steps", "state", "last loss", "best loss", "samples per second", "tokens per second", "time"]
    assert re.split("  +", header.strip()) == [*titles, "goodput"] and read == runs  # once
    assert (
        explanation == "time: without pauses and preparation; goodput: steps that were kept / time; "
        "speeds: means without evaluations and saving"
    )  # only the columns that it has
    assert [row.split()[:7] for row in rows] == [[name, "20", "running", "2", "1", "23.33", "9,000"] for name in "ab"]
    main(["plot", *runs, "--output", str(tmp_path / "a.png"), "--json"])
    shown = json.loads(capsys.readouterr().out)["runs"]
    keys = {title.replace(" ", "_") for title in titles}
    assert [run["run"] for run in shown] == ["a", "b"] and keys | {"downtime", "goodput"} <= shown[0].keys()
    assert shown[0]["samples_per_second"] == pytest.approx(70 / 3) and shown[0]["differs_in"] == {}
    main(["plot", write_observed_run(tmp_path / "c", loss=math.nan), "--json"])
    assert json.loads(capsys.readouterr().out)["runs"][0]["goodput"] is None


def test_table_has_the_shares_of_the_time_of_a_run(tmp_path, capsys, monkeypatch, opened_urls, show_plot):
    runs = [write_observed_run(tmp_path / "a"), write_log(tmp_path / "b", [{"step": 20, "loss": 1.0}])]
    seconds = {"steps": 5.0, "data": 2.0, "evaluation": 3.0, "saving": 0.0}
    journal.Journal(runs[0]).write("interval", 20, steps=20, seconds=seconds)
    main(["plot", *runs, "--output", str(tmp_path / "a.png")])
    _, _, header, *rows, _, _, _, shares, _ = capsys.readouterr().out.splitlines()
    assert shares == "data wait, evaluation, saving: shares of the time"
    assert header.split()[-4:] == ["data", "wait", "evaluation", "saving"]
    assert [row.split()[-3:] for row in rows] == [["20%", "30%", "0%"], ["-"] * 3]
    assert [row.split()[2] for row in rows] == ["running", "unknown"]
    monkeypatch.setenv("COLUMNS", "50")
    assert re.match(" +a +b\nsteps +20 +0\n(.+\n)*saving +0% +-\n", show_plot(*runs).split("\n\n", 1)[1])
    main(["plot", *runs, "--output", str(tmp_path / "a.png")])
    assert re.search("\nsaving +0% +-\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("values", "best"), [((1, 2, None), "b"), ((1, math.nan, math.nan), "a"), ((2, 2, 1), "ab"), ((2, 2.00001, 2), "")]
)
def test_best_runs_are_those_with_the_best_value_as_it_reads(tmp_path, values, best):
    logs = {run: {"eval_f1": value} if value else {"loss": 9.0} for run, value in zip("abc", values, strict=True)}
    curves = read_curves([write_log(tmp_path / run, [{"step": 1, **log}]) for run, log in logs.items()])
    assert "".join(curve.run for curve in curves if curve.is_best) == best
    assert ["(best)" in describe_run(run, curves) for run in "abc"] == [run in best for run in "abc"]


def test_axis_of_epochs_is_suggested_for_runs_of_very_different_steps(tmp_path, capsys):
    runs = [write_log(tmp_path / str(n), [{"step": n, "epoch": 3.0, "loss": 1.0}], global_step=n) for n in (9, 90)]
    for axis, count in (("step", 1), ("epoch", 0)):
        main(["plot", *runs, "--x", axis])
        assert capsys.readouterr().out.count("from 9 to 90 steps, but similar epochs: --x epoch") == count


def test_values_that_are_not_numbers_are_left_out(tmp_path):
    log = [{"loss": 2.0, "note": "text", "flag": True, "step": 1}, {"loss": float("inf"), "step": 3}]
    log.insert(1, {"loss": float("nan"), "eval_matrix": [[1]], "eval_runtime": 3.0, "step": 2})
    (line,) = read_curves([write_log(tmp_path, log)])
    assert (line.name, line.steps, line.finite) == ("loss", [1, 2, 3], [2.0])
    header, row, _, *_, note = describe_curves([line]).splitlines()
    assert header.endswith("highest") and row.endswith("nan       2        2")
    assert note == "loss: 2 values are not finite, first at step 2"


def test_evaluation_sets_share_a_panel_in_their_order(tmp_path, capsys):
    log = [{"step": 1, f"eval_{data}_f1": 0.5, f"eval_{data}_loss": 1.0} for data in ("val", "train")]
    runs = [write_log(tmp_path / run, log) for run in "ab"]
    assert [line.panel for line in read_curves(runs[:1])] == ["loss", "loss", "eval_f1", "eval_f1"]
    main(["plot", *runs, "--output", str(tmp_path / "a.svg")])
    titles = "best eval_val_loss  best eval_train_loss  best eval_val_f1  best eval_train_f1"
    assert titles in capsys.readouterr().out
    texts = {text.replace("\xa0", " ") for text in texts_in_svg(tmp_path / "a.svg")}
    assert {"Comparison of a and b", "eval_f1", "a · ★ best eval_val_loss 1 at step 1"} <= texts


def test_cdn_page_loads_plotly_from_the_network(runs, tmp_path, capsys):
    main(["plot", runs[0], "--cdn", "--html", "--output", str(tmp_path / "a.png")])
    assert re.match(r"\S+a\.png\n\S+a\.html \(\d+\.?\d* kB\)\n", capsys.readouterr().out)
    page, told = (tmp_path / "a.html").read_text().split("<script>window.Plotly || ")
    assert '<script charset="utf-8" src="https://cdn.plot.ly' in page and "The plot needs https://cdn.plot.ly" in told


def test_json_lists_the_written_files(runs, tmp_path, capsys):
    main(["plot", runs[0], "--html", "--json", "--output", str(tmp_path / "a.png")])
    shown = json.loads(capsys.readouterr().out)
    assert shown["files"] == [str(tmp_path / "a.png"), str(tmp_path / "a.html")]
    main(["plot", *runs, "--json", "--output", str(tmp_path / "b.png")])
    first, other = json.loads(capsys.readouterr().out)["runs"]
    assert shown["runs"] == [first | {"differs_in": {}, "is_best": None}] and not first["is_best"] and other["is_best"]
    assert first["best_eval_accuracy"] > 0 and first["steps"] == 20
    assert first["diverged_at"] is None and first["resumed_at"] == []
    accuracy = first["curves"]["eval_accuracy"]
    assert accuracy["best"] == accuracy["highest"] and accuracy["best_step"] <= 20 and accuracy["not_finite"] == 0


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
    assert "eval_accuracy " in show_plot(runs[0], terminal=False) and len(opened_urls) == 2


def test_notebook_shows_the_picture(runs, tmp_path, monkeypatch, opened_urls, show_plot):
    shown = []
    monkeypatch.setattr("hftrainer.callbacks.progress_bar.is_in_notebook", lambda: True)
    monkeypatch.setattr("hftrainer.callbacks.progress_bar.show_in_notebook", shown.append)
    show_plot(runs[0], "--html")
    assert shown == [str(tmp_path / "a.png")] and opened_urls == []


def test_curves_are_described_in_a_text_table():
    rising = Curve("loss", "a", [1.0, 2.0, 3.0, 4.0], [0.0, 1.0, 2.0, 7.0], best=3, state="stopped at step 4 of 9")
    share = Curve(SHARES, "data_wait", [2000.0, 4000.0], [0.5, 0.0])
    assert describe_curves([rising, share]).splitlines() == [
        "                           steps  first   last  lowest  highest",
        "a                         1 to 4      0      7       0        7",
        "waiting for data  2,000 to 4,000  50.0%  25.0%   25.0%    50.0%",
        "",
        "stopped at step 4 of 9",
        "best a: 7 at step 4",
        "a: max 7 at step 4",
    ]


def test_arguments_that_differ_read_differently():
    rows = [{"run": str(rate), "differs in": {"learning_rate": rate}} for rate in (1e-05, 1.00001e-05, 0.3 / 7)]
    assert [line.split()[-1] for line in _compare(rows).splitlines()[1:]] == ["1e-05", "1.00001e-05", "0.04286"]


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


def test_odd_folder_names_are_refused(tmp_path, capsys):
    (tmp_path / "loop").symlink_to("loop")
    for name in ("x" * 5000, str(tmp_path / "loop")):
        with pytest.raises(SystemExit) as ended:
            main(["plot", name])
        assert ended.value.code == 2 and "plot: error: " in capsys.readouterr().err


def test_horizontal_axis_may_be_epochs_or_time(runs, tmp_path, capsys):
    write_observed_run(tmp_path)
    events = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    seconds = [event["time"] - events[0]["time"] for event in events if event["event"] == "log"]
    for x, label, steps in (("epoch", "Epoch", [0.1, 0.2]), ("time", "Time (seconds)", seconds)):
        assert read_curves([str(tmp_path)], x)[0].steps == steps
        main(["plot", str(tmp_path), "--x", x, "--output", str(tmp_path / "a.svg")])
        assert label in texts_in_svg(tmp_path / "a.svg")
        assert re.search(rf"\n +{ {'epoch': 'epochs', 'time': 'seconds'}[x] } +first", capsys.readouterr().out)
    with pytest.raises(SystemExit):
        main(["plot", runs[0], "--x", "time"])
    assert "has no times (it ran without observe=True): leave out --x time or that run." in capsys.readouterr().err


def test_runs_and_metrics_are_sorted_by_number(tmp_path, capsys):
    log = [{"step": step, "loss": 1.0, **dict.fromkeys(("eval_k10", "eval_k2"), 0.1)} for step in (1, 2)]
    runs = [write_log(tmp_path / f"run-{number}", log) for number in (10, 2)]
    main(["plot", *runs, "--json", "--output", str(tmp_path / "a.png")])
    assert [run["run"] for run in json.loads(capsys.readouterr().out)["runs"]] == ["run-2", "run-10"]
    for order in (["b", "a-10", "a-2"], ["lr-0.003", "lr-0.01"]):
        assert sort_pattern(order) == order
    assert [line.name for line in read_curves(runs[:1])] == ["loss", "eval_k2", "eval_k10"]
