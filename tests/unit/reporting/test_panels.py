"""The axes of panels, and what leaves them."""

import json
import math
import re
import statistics
from dataclasses import replace
from itertools import pairwise

import pytest

from hftrainer.monitoring.journal import append_line
from hftrainer.monitoring.run_facts import RunRecord
from hftrainer.reporting.curves import Curve, read_curves
from hftrainer.reporting.page import _curve_traces, _make_figure
from hftrainer.reporting.panels import (
    clipped_peaks,
    describe_run,
    group_by_panel,
    non_finite_marks,
    title_and_notes,
    vertical_axis,
    vertical_lines,
)
from hftrainer.reporting.plot import draw_picture, plot
from tests.support.run_logs import texts_in_svg, write_log, write_observed_run


def test_first_loss_that_is_not_finite_is_marked(tmp_path):
    log = [{"loss": float("nan") if step > 4 else 1.0, "eval_f1": 0.5, "step": step} for step in range(1, 9)]
    plot([write_log(tmp_path / "run", log)], html=True, out=str(tmp_path / "a.svg"))
    assert {"loss is not finite at step 5", "not finite"} <= {*texts_in_svg(tmp_path / "a.svg")}
    assert "loss is not finite at step 5" in (tmp_path / "a.html").read_text()
    metric = read_curves([str(tmp_path / "run")])[-1]
    assert [line[1:] for line in vertical_lines([metric])] == [(5, "", "red", ":")] and metric.name == "eval_f1"
    plot([write_log(tmp_path / "run", log[4:])], html=True, out=str(tmp_path / "a.svg"))
    assert "Loss (none is finite)" in (texts := texts_in_svg(tmp_path / "a.svg")) and "0.2" not in texts
    assert '"showticklabels":false' in (tmp_path / "a.html").read_text()


def test_all_losses_of_a_run_that_are_not_finite_are_named(tmp_path):
    log = [{"loss": math.nan if step > 6 else 2.0, "step": step} for step in range(3, 13, 3)]
    log[1]["eval_loss"] = math.nan
    log[3]["eval_loss"] = math.nan
    plot([write_log(tmp_path / "run", log)], html=True, out=str(tmp_path / "a.svg"))
    text = "eval_loss is not finite at step 6, loss at step 7-9"
    assert text in texts_in_svg(tmp_path / "a.svg")
    page = (tmp_path / "a.html").read_text()
    heights = re.findall(r'"symbol":"line-ns"[^]]*\][^]]*"y":\[([-.\d]+)', page)
    assert text in page and set(heights) == {"0.02", "0.06"}
    # The losses, all 2, are above the marks.
    assert vertical_axis(read_curves([str(tmp_path / "run")]))[1][0] == pytest.approx(-0.2 - 4.4 * 0.08 / 0.92)


def test_marks_of_a_long_row_that_is_not_finite_do_not_run_together(tmp_path):
    """Of several runs, the entry of the run that diverged says it, and its line has no other."""
    log = [{"loss": math.nan if step > 600 else 1.0, "step": step} for step in range(1, 1201)]
    runs = [write_log(tmp_path / "nan", log), write_log(tmp_path / "good", log[:9])]
    ((_, places, _),) = non_finite_marks(curves := read_curves(runs))
    assert places == [*range(601, 1200, 20)]
    assert [line[1:] for line in vertical_lines(curves)] == [(601, "", curves[0].colour, ":")]
    assert "diverged at step 601" in describe_run("nan", curves)


def test_mean_leaves_out_an_isolated_spike_which_has_one_mark(tmp_path):
    losses = [1 + step % 5 / 10 for step in range(100)]
    usual = Curve("loss", "loss", list(map(float, range(100))), losses).mean
    short = Curve("loss", "loss", list(map(float, range(20))), [*losses[:10], 90.0, *losses[:9]])
    assert max(short.smooth("strong")) < 1.5
    forty = Curve("loss", "loss", list(map(float, range(40))), [1 + step**2 % 11 / 10 for step in range(40)])
    assert statistics.stdev(forty.smooth("strong")[9:-9]) < statistics.stdev(forty.mean[9:-9])
    losses[20] = losses[60] = losses[61] = 90.0
    folder = write_log(tmp_path / "run", [{"step": step, "loss": loss} for step, loss in enumerate(losses)])
    (curve,) = read_curves([folder])
    assert max(curve.mean) < 1.5 and curve.mean[-1] == pytest.approx(usual[-1], abs=0.05)
    plot([folder], out=str(tmp_path / "a.svg"))
    assert "2 spikes, max 90 at step 20" in texts_in_svg(tmp_path / "a.svg")


@pytest.mark.parametrize(("highest", "tops"), [(5.0, [5.2, 5.25]), (9.0, [3.8875, 3.99])])
def test_only_values_far_above_the_others_leave_a_panel(highest, tops):
    values = [*(1 + step / 100 for step in range(100)), 3.5, highest]
    curves = [Curve(name, name, list(map(float, range(102))), values) for name in ("loss", "step_seconds")]
    assert [vertical_axis([curve])[1][1] for curve in curves] == pytest.approx(tops)


def test_spikes_of_a_short_curve_leave_a_panel_before_its_scale_is_chosen(tmp_path):
    """On a page the line to them is faint, and the other one has a gap."""
    losses = [100.0 if step % 10 == 5 else 1 - step / 60 for step in range(40)]
    (curve,) = read_curves([write_log(tmp_path, [{"step": step, "loss": loss} for step, loss in enumerate(losses)])])
    assert (axis := vertical_axis([curve]))[0] == "linear" and axis[1][1] < 1.2
    faint, plain = (each for each in _make_figure([curve]).data if "off" in str(each.meta))
    assert faint.opacity == 0.5 and max(faint.y) == 100 and math.isnan(plain.y[5]) and plain.y[4] == losses[4]


@pytest.mark.parametrize("others", [[], [1.06, 1.0, 1.03, 0.9]])
def test_spike_of_few_values_leaves_a_panel_alone_and_in_a_comparison(others):
    runs = {"a": [1.06, 1.0, 1.03, 547.0], "b": others}
    curves = [Curve("loss", "loss", [1.0, 2.0, 3.0, 4.0], values, run=run) for run, values in runs.items() if values]
    assert (axis := vertical_axis(curves))[0] == "linear" and axis[1][1] < 1.1


def test_single_low_value_stays_in_the_panel():
    losses = [0.5 if step % 2 else 0.52 for step in range(20)]
    losses[12] = 0.1
    assert vertical_axis([Curve("loss", "loss", list(map(float, range(20))), losses)])[1][0] < 0.1


@pytest.mark.parametrize(("other", "scale"), [(1e-3, "linear"), (2e-5, "log")])
def test_learning_rates_that_differ_50_fold_get_a_log_scale(tmp_path, other, scale):
    rates = {"a": [0.0, 1e-3, 1e-5, 0.0], "b": [0.0, other, other / 2, 0.0]}
    for run, values in rates.items():
        write_log(tmp_path / run, [{"step": step, "learning_rate": rate} for step, rate in enumerate(values)])
    plot([str(tmp_path / run) for run in rates], html=True, out=str(tmp_path / "c.png"))
    assert f'"type":"{scale}","range"' in (tmp_path / "c.html").read_text()


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
    marks = page.count('"name":"max 500 at step 0"')
    assert marks == 2 * norms.count(500.0) and f"<title>Training run {tmp_path.name}</title>" in page


def test_run_that_diverged_does_not_squeeze_the_others(tmp_path):
    """Its values beyond the others' are cut off; alone it gets a log scale, though its `eval_loss` has no values."""
    for run, losses in {"good": [2.0, 1.0, 0.5], "other": [1.0, 1.0, 0.9], "bad": [1.0, 7e35, math.nan]}.items():
        write_log(tmp_path / run, [{"step": 1, "loss": loss, "eval_loss": losses[2]} for loss in losses])
    runs = [str(tmp_path / run) for run in ("good", "other", "bad")]
    assert vertical_axis(read_curves(runs)) == ("linear", pytest.approx((0.425 - 1.65 * 0.08 / 0.92, 2.075)))
    assert vertical_axis(read_curves(runs[2:]))[0] == "log"
    plot(runs, out=str(tmp_path / "a.svg"))
    assert "bad: max 7e+35 at step 1" in texts_in_svg(tmp_path / "a.svg")


def test_run_above_the_axis_and_single_zeros_leave_the_others_readable(tmp_path):
    """Of several runs its step and its highest values are named once; alone it has a log scale."""
    losses = {"good": [1.0, 0.5, 0.6, 0.4, 0.5], "bad": [1.0, 0.5, 900.0, 0.0, 2000.0]}
    for run, values in losses.items():
        log = [{"step": step, "loss": loss, "grad_norm": loss} for step, loss in enumerate(values, 1)]
        write_log(tmp_path / run, [*log, {"step": 5, "eval_loss": 2 * values[-1]}])
    runs = [str(tmp_path / run) for run in losses]
    plot(runs, html=True, out=str(tmp_path / "a.svg"))
    text = "bad: above the axis from step 3, max 2,000"
    assert text in " ".join(texts_in_svg(tmp_path / "a.svg")) and text in (tmp_path / "a.html").read_text()
    curves = read_curves(runs)
    panel = [curve for curve in curves if curve.panel == "loss"]
    assert [each[1:] for each in clipped_peaks(panel, 1.1)] == [([5], "bad: max 4,000 at step 5 (loss 2,000)")]
    norms = [curve for curve in read_curves(runs[1:]) if curve.panel == "gradient norm"]
    assert vertical_axis(norms)[0] == "log"


def test_zeros_of_a_log_scale_are_at_its_foot_and_still_hover_as_0(tmp_path):
    log = [{"step": step, "loss": 1.0, "eval_loss": max(0.0, 1 - step / 4) ** 9} for step in range(9)]
    plot([write_log(tmp_path, log)], out=str(tmp_path / "a.svg"))
    assert "5 values of 0: at the foot" in texts_in_svg(tmp_path / "a.svg")
    *_, curve, star, _, _, note = (figure := _make_figure(read_curves([str(tmp_path)]))).data
    assert star.y[0] == curve.y[4] == curve.y[8] and 10 ** figure.layout.yaxis2.range[0] < curve.y[8] < curve.y[3]
    assert (curve.customdata[3:5], star.customdata, note.name) == ((0.25**9, 0), (0,), "5 values of 0: at the foot")


@pytest.fixture
def figures(monkeypatch):
    """What matplotlib and plotly would write."""
    written = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *args, **settings: written.append(figure))
    write_page = "<body>{post_script}".format_map
    to_html = lambda figure, **settings: written.append(figure) or write_page(settings)  # noqa: E731
    monkeypatch.setattr("plotly.graph_objects.Figure.to_html", to_html)
    return written


@pytest.fixture
def picture(figures, tmp_path):
    """The picture of a run with seven panels; its page is the second of `figures`."""
    write_observed_run(tmp_path)
    log = [{"step": step, "loss": loss, "eval_f1": 2 / 3, "eval_auc": 0.5} for step, loss in ((5, 1000.0), (10, 0.1))]
    plot([write_log(tmp_path, log)], html=True)
    return figures[0]


def test_picture_and_page_have_the_same_axes(picture, figures):
    # The first axes of a page, which are not numbered, are not used; the last are for marks.
    axes = zip([*figures[1].select_xaxes()][1:], [*figures[1].select_yaxes()][1:9], strict=True)
    # A picture has no time per step beside samples per second.
    axes = ((x, y) for x, y in axes if y.title.text != "Seconds per step")
    for axis, (x, y) in zip(picture.axes, axes, strict=True):
        limits = [10**limit for limit in y.range] if y.type == "log" else y.range
        assert (axis.get_ylabel(), axis.get_yscale()) == (y.title.text, y.type)
        assert (*axis.get_xlim(), *axis.get_ylim()) == pytest.approx((*x.range, *limits))


def test_first_of_three_rows_has_one_panel_and_the_last_names_the_axis(picture):
    assert len(picture.axes) == 7 and picture.axes[0].get_position().x1 == pytest.approx(1 - 0.25 / 13.5)
    assert [axis.get_xlabel() for axis in picture.axes] == [""] * 4 + ["Optimizer step"] * 3


def test_losses_have_a_log_scale_and_speeds_begin_at_0(picture, tmp_path):
    at_zero = {"Tokens per second", "Samples per second", "Share of time so far", "Model FLOPS utilization"}
    assert {axis.get_ylabel() for axis in picture.axes if axis.get_ylim()[0] == 0} == at_zero
    scales = [(axis.get_ylabel(), axis.get_yscale()) for axis in picture.axes[:2]]
    assert scales == [("Loss (log scale)", "log"), ("eval_f1", "linear")] and picture.axes[0].get_xlim()[0] == 0
    assert "<option>automatic<option>linear<option>log<" in (tmp_path / "training.html").read_text()


def test_ticks_are_values_of_a_constant_metric_and_percents_of_shares(picture):
    labels = [label.get_text() for label in picture.axes[1].get_yticklabels()]
    assert labels == ["0", "0.6667"] and picture.axes[1].get_ylabel() == "eval_f1"
    share = next(axis for axis in picture.axes if axis.get_ylabel() == "Share of time so far")
    assert share.yaxis.get_major_formatter()(0.5) == "50%"


def test_labels_of_a_long_axis_are_apart(figures):
    draw_picture([Curve(f"eval_{n}", "eval_f1", [100, 490_000], [0.0, 1.0]) for n in range(7)], "", "")
    boxes = [label.get_window_extent() for label in figures[-1].axes[1].get_xticklabels()]
    assert all(left.x1 < right.x0 - 5 for left, right in pairwise(boxes))


@pytest.fixture
def resumed(tmp_path):
    """The folder of a run that was resumed after 20 seconds, at step 1 of 2."""
    journal = [(1000, "begin", 0), (1010, "log", 1), (1020, "log", 2), (9000, "begin", 1), (9030, "log", 2)]
    journal += [(9030, "interval", 2), (9040, "interval", 2)]
    for time_of_event, event, step in journal:
        facts = {"max_steps": 9, "host": "", "pid": 1, "resumed_from": "checkpoint-1" if step else None}
        logs = {"loss": 1.0, "epoch": step / 2, "data_wait": 0.25, "eval_share": 0.0, "save_share": 0.0}
        facts |= {"logs": logs, "steps": 0, "seconds": {"steps": 0.0, "data": 0.0, "evaluation": 1.0, "saving": 3.0}}
        append_line(str(tmp_path / "journal.jsonl"), {"time": time_of_event, "event": event, "step": step, **facts})
    return str(tmp_path)


def test_time_axis_has_no_pauses_but_the_time_of_undone_steps(resumed):
    run = RunRecord(resumed)
    assert (run.seconds, run.facts.downtime) == (60, 7980)
    curve = read_curves([resumed], "time")[0]
    done = "killed and resumed at step 1 (at least 1 step done again), 2 h 13 min of downtime, goodput 0%"
    assert curve.state.endswith(f" in 60 s, {done}") and (curve.steps, curve.restarts) == ([10, 50], [(10, 20)])
    # On other axes nothing is lost.
    assert [read_curves([resumed], x)[0].restarts for x in ("step", "epoch")] == [[(1, 1)], [(0.5, 0.5)]]


def test_curves_over_time_break_where_steps_were_undone(resumed):
    """A speed begins at the restart; shares go from the start to after the last log line."""
    curve, *shares = read_curves([resumed], "time")
    saving = next(share for share in shares if share.name == "save_share")
    steps, values = saving.points(saving.values)
    assert steps == [0, 10, 50, 60] and values == pytest.approx([0, 0, 0, 0.75 * 10 / 50])
    steps, values = curve.points(curve.values)
    assert steps == [10, 20, 50] and values == pytest.approx([1.0, math.nan, 1.0], nan_ok=True)
    speed = replace(curve, name="samples_per_second", values=[4.0, 2.0])
    steps, values = speed.points(speed.values)
    assert steps == [0, 10, 20, 20, 50] and values == pytest.approx([4.0, 4.0, math.nan, 2.0, 2.0], nan_ok=True)
    assert speed.marked == [1, 4]  # not where an interval begins


def test_steps_done_again_are_shaded_in_each_panel(resumed, tmp_path):
    plot([resumed], x="time", html=True, out=str(tmp_path / "a.svg"))
    text = "resumed (shaded: steps done again)"
    assert {text, "the time leaves out the pauses before a run resumed"} <= {*texts_in_svg(tmp_path / "a.svg")}
    assert f'"name":"{text}"' in (tmp_path / "a.html").read_text()
    curve, *shares = read_curves([resumed], "time")
    assert [line[:2] for line in vertical_lines(shares)] == [(10, 20)]
    assert [each.line.width for each in _make_figure([curve]).data if each.fill] == [0]  # no second line


def test_what_follows_a_last_log_line_is_in_the_shares_of_the_next_or_of_the_last(tmp_path):
    """Of 4 seconds before the restart, 12 after it and 4 at the end, 1 was an evaluation and 3 saved each."""
    seconds = {"steps": 0.0, "data": 0.0, "evaluation": 1.0, "saving": 3.0}
    logs = {"loss": 1.0, "data_wait": 0.5, "eval_share": 0.0, "save_share": 0.0}
    journal = [(1000, "begin", 0), (1010, "log", 2), (1010, "interval", 2), (1014, "interval", 2), (1014, "end", 2)]
    journal += [(1100, "begin", 2), (1112, "log", 4), (1112, "interval", 4), (1116, "interval", 4), (1116, "end", 4)]
    for time_of_event, event, step in journal:
        facts = {"max_steps": 4, "host": "", "pid": 1, "resumed_from": "checkpoint-2" if step else None}
        facts |= {"steps": 0, "seconds": seconds, "reason": "Ctrl-C"} | ({"logs": logs} if event == "log" else {})
        append_line(str(tmp_path / "journal.jsonl"), {"time": time_of_event, "event": event, "step": step, **facts})
    shares = {curve.name: curve.values for curve in read_curves([str(tmp_path)])}
    assert shares["eval_share"] == [0, 0.1] and shares["save_share"] == [0, 0.3]
    assert shares["data_wait"] == [0.5, 0.3] and shares["step_share"] == pytest.approx([0.5, 0.3])


def test_slow_first_interval_does_not_squeeze_the_others(tmp_path):
    """Each run that leaves the panel has a mark with its highest value at the upper edge."""
    slow = {"a": 12.0, "b": 1612.4, "c": 0.1}
    times = {run: [slow[run], *[0.1] * 28] for run in slow}
    logs = {run: [{"step": step, "step_seconds": time} for step, time in enumerate(times[run], 1)] for run in slow}
    runs = [write_log(tmp_path / run, log) for run, log in logs.items()]
    plot(runs, html=True, out=str(tmp_path / "a.svg"))
    assert {"a: max 12 at step 1", "b: max 1,612 at step 1", "Seconds per step"} <= {*texts_in_svg(tmp_path / "a.svg")}
    page = (tmp_path / "a.html").read_text()
    assert '"Seconds per step"},"type":"linear","range":[0,0.21' in page
    assert page.index('"name":"b: max 1,612 at step 1"') < page.index('"name":"a: max 12 at step 1"')


@pytest.mark.parametrize(("value", "limits"), [(0.8, (-0.05, 1.05)), (-2.0, (-4.2, 0.2)), (0.0, (-0.05, 1.05))])
def test_single_value_has_a_large_mark_and_an_axis_from_0(value, limits):
    curve = Curve("eval_f1", "eval_f1", [40.0], [value])
    assert vertical_axis([curve]) == ("linear", pytest.approx(limits))
    few, more = (replace(curve, steps=[*range(count)], values=[value] * count) for count in (4, 5))
    assert [next(_curve_traces(each, [each]))["marker"]["size"][0] for each in (curve, few, more)] == [9, 9, 4]
    both = replace(more, name="loss", state="killed", best=4)
    star, cross = [*_curve_traces(both, [both])][1:]
    assert star["marker"]["size"] > cross["marker"]["size"] and star["zorder"] < cross["zorder"]


def test_level_that_lasts_remains_in_the_panel():
    values = [1 + step % 5 / 100 for step in range(200)]
    values[-15:] = [12.0] * 15
    curves = [Curve(name, name, list(map(float, range(200))), values) for name in ("loss", "step_seconds")]
    assert all(vertical_axis([curve])[1][1] > 12 for curve in curves)
    noisy = [50.0 if step % 11 == 5 else 10.0 for step in range(200)]  # too many for spikes
    assert vertical_axis([replace(curves[1], values=noisy)])[0] == "log"


def test_what_is_constant_and_equal_in_all_runs_has_a_note_in_place_of_a_panel(tmp_path):
    for name, rate in (("a", 0.001), ("b", 0.001), ("c", 0.002)):
        line = {"loss": 1.0, "learning_rate": rate, "grad_norm": 0.0, "eval_f1": 0.5}
        write_log(tmp_path / name, [{**line, "step": step} for step in (1, 2)])
    shown = {}
    for names in ("a", "ab", "abc"):
        curves = read_curves([str(tmp_path / name) for name in names])
        shown[names] = [*group_by_panel(curves)], title_and_notes("", curves)[-1]
    few = ["loss", "eval_f1"], "constant: learning_rate 0.001, grad_norm 0"
    assert shown == {"a": few, "ab": few, "abc": (["loss", "eval_f1", "learning rate"], "constant: grad_norm 0")}
