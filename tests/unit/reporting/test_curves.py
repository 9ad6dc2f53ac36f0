"""The curves of logs, and their colours, marks and best values."""

import json
import math
import os
import re
from dataclasses import replace

import pytest
import torch

from hftrainer import TrainingArguments
from hftrainer.__main__ import main
from hftrainer.callbacks.state import TrainerState
from hftrainer.checkpointing.saved_arguments import describe, differing_arguments
from hftrainer.monitoring.journal import Journal
from hftrainer.monitoring.run_facts import RunRecord
from hftrainer.reporting.curves import Curve, _with_styles, read_curves
from hftrainer.reporting.metrics import SHARES, choose_best, logged, logged_curves
from hftrainer.reporting.page import _scales_of_losses
from hftrainer.reporting.panels import describe_run, vertical_axis
from hftrainer.reporting.plot import plot
from tests.support.run_logs import SPEEDS, runs as runs, texts_in_svg, write_log, write_observed_run


def test_logs_without_weights_are_drawn(tmp_path):
    """As kept in git: checkpoint folders with the log alone, and lines that scripts have added."""
    log = [{"epoch": 1, "loss": 3.0, "step": 4}, {"predict_loss": 0.5}, {"epoch": 2, "loss": 2.0, "step": 8}]
    for step in (8, 10):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": log}))
    drawn = logged_curves(RunRecord(str(tmp_path)).state)["loss"]
    assert drawn == {"loss": ([4, 8], [3.0, 2.0]), "predict_loss": ([4], [0.5])}


@pytest.mark.parametrize("x", ["step", "time"])
def test_loss_that_leaves_out_some_is_a_gap_and_not_the_best(tmp_path, x, capsys):
    """Also of a saved log, which does not say so; a single one is no divergence."""
    journal = Journal(write_observed_run(tmp_path))
    journal.write("log", 30, logs={"loss": 0.1, "grad_norm": 1.0}, is_partial=True)
    write_log(tmp_path, [{"step": 30, "loss": 0.1, "grad_norm": 1.0}])
    loss = read_curves([str(tmp_path)], x)[0]
    assert loss.finite == [1.0, 2.0] and loss.gaps == [2] and loss.non_finite[2] == "at step 21-30"
    facts = RunRecord(str(tmp_path)).facts
    assert facts.metrics["loss"]["best"] == 1.0
    main(["plot", "--json", str(tmp_path)])
    (row,) = json.loads(capsys.readouterr().out)["runs"]
    assert row["state"] != "diverged" and row["last_loss"] is None


def test_run_whose_last_losses_are_nan_has_diverged(tmp_path):
    journal = Journal(write_observed_run(tmp_path / "a"))
    for step in (30, 40):
        journal.write("log", step, logs={"loss": math.nan, "grad_norm": math.nan})
    curves = read_curves([str(tmp_path / "a")])
    assert curves[0].state.startswith("diverged at step 21-30, but ran on to step 40 of 30 in ")
    assert [(curve.name, curve.end) for curve in curves if curve.end is not None] == [("loss", 1)]  # of step 20
    plot([str(tmp_path / "a"), write_observed_run(tmp_path / "b")], html=True, out=str(tmp_path / "a.svg"))
    assert any("a · ✖ diverged at step 21-30 of 30" in text for text in texts_in_svg(tmp_path / "a.svg"))
    assert re.search(r'"name":"last a: loss"[^{]*"x":\[20\.?0?\]', (tmp_path / "a.html").read_text())


def test_complete_run_has_its_steps_and_time(tmp_path):
    Journal(folder := write_observed_run(tmp_path)).write("end", 20, reason="complete")
    assert read_curves([folder])[0].state.startswith("complete: 20 steps in ")


def test_run_has_curves_of_loss_metrics_rate_and_norm(runs):
    found = logged_curves(RunRecord(runs[0]).state)
    panels = {panel: sorted(lines) for panel, lines in found.items() if lines}
    others = {"metrics": ["eval_accuracy"], "learning rate": ["learning_rate"], "gradient norm": ["grad_norm"]}
    assert panels == {"loss": ["eval_loss", "loss"], **others}
    steps, values = found["loss"]["loss"]
    assert steps == list(range(2, 21, 2)) and len(values) == 10
    assert found["metrics"]["eval_accuracy"][0] == [5, 10, 15, 20]


def test_curves_have_colours_dashes_and_a_best_value(tmp_path):
    """One run has a colour for each curve; of several each has one, and a curve the same dash in all."""
    logs = {"a": ["loss", "eval_loss", "eval_f1"], "b": ["eval_loss", "loss"]}
    for run, names in logs.items():
        last = 6 if run == "a" else 7
        history = [{name: 3.0 - step % 3, "step": step} for step in (2, 4, last) for name in names]
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
    # The first of curves that begin equally is wider there.
    wider = {line.label for line in both if line.width == 2.25 and line.shared == 2}
    assert wider == {"a: loss", "a: eval_loss"} and {line.width for line in read_curves([str(tmp_path / "a")])} == {1.5}
    others = (Curve("loss", "loss", [2.0, 4.0, last, 9.0, 10.0], [1.0] * 5, run=f"{last}") for last in (4.5, 6.0))
    assert [line.shared for line in _with_styles(others)] == [2, 0]


def test_runs_that_differ_in_seeds_alone_are_one_with_their_mean(tmp_path):
    for number, (rate, seed) in enumerate([(0.1, 1), (0.1, 2), (0.1, 3), (0.2, 1), (0.2, 1)]):
        lines = [{"step": step, "eval_loss": step % 3 + number} for step in range(1, 4 + (number == 1))]
        folder = write_log(tmp_path / str(number), lines)
        torch.save(TrainingArguments(folder, learning_rate=rate, seed=seed), f"{folder}/training_args.bin")
    write_log(tmp_path / "5", [{"step": 1, "eval_loss": 9.0}])
    curves = read_curves([str(tmp_path / str(number)) for number in range(6)], join_seeds=True)
    thin, (mean, *others) = [c for c in curves if c.member], [c for c in curves if not c.member]
    assert (mean.run, mean.settings, mean.is_best) == ("0 … (3 seeds)", {"learning_rate": 0.1}, True)
    assert (mean.steps, mean.values, mean.best) == ([1, 2, 3], [2.0, 3.0, 1.0], 2)
    assert [(c.member, c.run, c.colour, c.best) for c in thin] == [(n, mean.run, mean.colour, None) for n in "012"]
    assert [curve.run for curve in others] == ["3", "4", "5"] and len({c.colour for c in curves}) == 4


def test_mean_does_not_widen_a_spike_which_is_drawn_at_its_height():
    values = [1 + step % 3 / 100 + 4 * (step == 2501) for step in range(6000)]
    curve = Curve("entropy", "entropy", [float(step) for step in range(6000)], values)
    assert max(curve.mean) < 1.02 and max(curve.points(values)[1]) == values[2501]
    assert replace(curve, values=[float(step % 10 == 0) for step in range(6000)]).mean[3000] > 0.05


def test_learning_rate_breaks_where_a_restart_changed_its_schedule():
    """A computed epoch of a restart may be below the logged one."""
    start = 4 - 1e-12
    rate = Curve("learning rate", "learning_rate", [2.0, 4.0, 6.0], [2.0, 0.0, 1.0], restarts=[(start, start)])
    assert rate.points(rate.values)[0] == [2, 4, start, 6] and math.isnan(rate.points(rate.values)[1][2])
    assert replace(rate, name="loss").points(rate.values) == (rate.steps, rate.values)
    for values in ([2.0, 1.0, 0.1], [0.0, 1.0, 1.0]):
        assert rate.points(values) == (rate.steps, values)
    constant = replace(rate, steps=[2.0, 3.0, 6.0], restarts=[(4, 4)])
    assert constant.points([1.0, 1.0, 0.5])[0] == [2, 3, 4, 6]


def test_marks_separate_coinciding_curves_of_runs():
    """Each has about ten marks, at other points than the other; one run has marks only where points are few."""
    steps = [float(step) for step in range(100)]
    first, second = (Curve("loss", "loss", steps, steps, run=mark, mark=mark).marked for mark in "os")
    assert len(first) == len(second) == 10 and not set(first) & set(second)
    assert [len(Curve("loss", "loss", steps[:count], steps[:count]).marked) for count in (29, 30)] == [29, 0]
    # Each of few evaluations has one.
    assert len(Curve("loss", "eval_loss", steps[:29], steps[:29], run="a").marked) == 29


def test_speeds_are_left_out_of_compared_values(tmp_path):
    """For `diff`, which compares what is computed."""
    state = TrainerState(log_history=[{"loss": 1.0, "step": 1, **SPEEDS}])
    assert [name for _, name, _ in logged(state.log_history)] == ["loss"]


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


def test_loss_hidden_by_the_nan_filter_is_not_drawn():
    lines = [{"loss": 1.0, "grad_norm": 2.0, "step": 1}, {"loss": 0.0, "grad_norm": math.nan, "step": 2}]
    steps, values = logged_curves(TrainerState(log_history=lines))["loss"]["loss"]
    assert steps == [1, 2] and values[0] == 1.0 and math.isnan(values[1])


def test_each_metric_has_a_panel(tmp_path):
    metrics = {"eval_f1": 0.5, "eval_tokens": 54_321}
    one = write_log(tmp_path / "one", [{"step": 1, "loss": 1.0, "grad_norm": 1.0, **metrics}])
    panels = ["loss", "eval_f1", "eval_tokens", "gradient norm"]
    assert [line.panel for line in read_curves([one])] == panels
    # They have the same order when a run lacks some, but a metric that a run has alone is last.
    other = write_log(tmp_path / "other", [{"step": 1, "eval_tokens": 1e300}])
    assert list(dict.fromkeys(line.panel for line in read_curves([one, other]))) == [
        *panels[:1],
        *panels[2:],
        "eval_f1",
    ]


def test_evaluation_losses_of_five_runs_have_a_panel_and_eleven_runs_a_colour_each(tmp_path):
    """Both scales of the panel can be chosen; its own is logarithmic from one decade on."""
    runs = [write_log(tmp_path / str(run), [{"step": 1, "loss": 1.0, "eval_loss": 1.0 + run}]) for run in range(11)]
    panels = [[curve.panel for curve in read_curves(runs[:count])][-1] for count in (4, 5)]
    assert panels == ["loss", "evaluation loss"] and len({curve.colour for curve in read_curves(runs)}) == 11
    scales = _scales_of_losses(read_curves(runs))
    kinds = {scale: [axis["type"] for axis in axes.values()] for scale, axes in scales.items()}
    assert kinds == {"automatic": ["linear", "log"], "linear": ["linear"] * 2, "log": ["log"] * 2}


@pytest.mark.parametrize(
    ("last", "panel"), [(0.4, "evaluation loss"), (0.7, "evaluation loss"), (0.38, "loss"), (0.9, "loss")]
)
def test_evaluation_loss_that_rises_again_is_not_flattened(tmp_path, last, panel):
    """Beside a loss from 2 to 0.01, which has a logarithmic scale."""
    log = [{"step": step, "loss": 2.0 / step**2} for step in range(1, 15)]
    log += [{"step": step, "eval_loss": value} for step, value in ((5, 0.5), (10, 0.37), (14, last))]
    loss, evaluation = read_curves([write_log(tmp_path, [*log, {"step": 14, "eval_worst": "digit 1"}])])
    assert (loss.panel, evaluation.panel) == ("loss", panel)
    assert evaluation.state == "no curve, since it is text: eval_worst (last 'digit 1')"


def test_stars_of_runs_with_other_metrics_are_of_losses_and_known_metrics(tmp_path):
    """A run with its own `metric_for_best_model` has the stars of the others, also of the best value in its state."""
    folders = []
    for name, metric, loss in (("a", "accuracy", 0.3), ("b", None, 0.6)):
        log = [{"step": step, "loss": 1.0, "eval_loss": loss, "eval_accuracy": 0.8} for step in (1, 2)]
        folders.append(write_log(tmp_path / name, log, best_metric=metric and 0.8))
        args = TrainingArguments(str(tmp_path / name), metric_for_best_model=metric, use_cpu=True)
        torch.save(args, tmp_path / name / "training_args.bin")
    stars = {(c.run, c.name): c.is_best for c in read_curves(folders) if c.best is not None}
    assert stars == {(run, f"eval_{name}"): run == "a" for run in "ab" for name in ("loss", "accuracy")}


@pytest.mark.parametrize(
    ("end", "state"),
    [
        ({"reason": "stopped", "message": "EarlyStoppingCallback"}, "ended by EarlyStoppingCallback at step 20 of 30"),
        ({"reason": "SIGTERM"}, "stopped at step 20 of 30 (SIGTERM)"),
        ({"reason": "TrialPruned", "message": "at step 20"}, "pruned at step 20 of 30"),
        ({"reason": "RuntimeError", "message": "out of luck"}, "failed at step 20 of 30 (RuntimeError: out of luck)"),
    ],
)
def test_state_says_what_ended_the_run(tmp_path, end, state):
    Journal(write_observed_run(tmp_path)).write("end", 20, **end)
    loss = read_curves([str(tmp_path)])[0]
    assert loss.state.startswith(state) and (loss.end is None) == state.startswith(("ended", "pruned"))


@pytest.mark.parametrize(
    ("counter", "state"), [(2, "ended by EarlyStoppingCallback at step 1 of 9"), (1, "state unknown after step 1 of 9")]
)
def test_saved_counter_says_that_early_stopping_ended_the_run(tmp_path, capsys, counter, state):
    saved = {"args": {"early_stopping_patience": 2}, "attributes": {"early_stopping_patience_counter": counter}}
    more = {"global_step": 1, "max_steps": 9, "stateful_callbacks": {"EarlyStoppingCallback": saved}}
    run = write_log(tmp_path, [{"step": 1, "loss": 1.0}], **more)
    assert read_curves([run])[0].state == state + " (observe=True would tell)" * (counter < 2)
    main(["plot", "--json", run])
    assert json.loads(capsys.readouterr().out)["runs"][0]["state"] == ("stopped" if counter == 2 else "unknown")


def test_metric_of_a_model_of_nans_has_no_star(tmp_path):
    log = [{"step": step, "loss": math.nan if step > 2 else 1.0, "eval_accuracy": step / 9} for step in range(1, 6)]
    curves = read_curves([write_log(tmp_path, log)])
    assert [curve.best for curve in curves if curve.name == "eval_accuracy"] == [
        0
    ]  # the weights after step 2 may have been NaN


def test_curves_and_runs_differ_in_black_and_white(tmp_path):
    """Where colours repeat, losses differ in their dash and runs in their mark."""
    losses = {f"{name}_loss": 1.0 for name in "abcdefghijkl"}
    runs = [write_log(tmp_path / str(number), [{"step": 1, "loss": 1.0, **losses}]) for number in range(9)]
    assert len({(line.colour, line.dash) for line in read_curves(runs[:1])}) == 13
    assert len({(line.colour, line.mark) for line in read_curves(runs)}) == 9


@pytest.mark.parametrize(("span", "unit", "last"), [(100, "seconds", 100), (120, "minutes", 2), (9000, "hours", 2.5)])
def test_time_axis_unit_follows_the_span(tmp_path, span, unit, last):
    begin = {"time": 1000.0, "event": "begin", "step": 0, "max_steps": 1, "host": "there", "pid": 1}
    log = {"time": 1000.0 + span, "event": "log", "step": 1, "logs": {"loss": 1.0}}
    (tmp_path / "journal.jsonl").write_text(f"{json.dumps(begin)}\n{json.dumps(log)}\n")
    assert [(line.x, line.steps) for line in read_curves([str(tmp_path)], "time")] == [(unit, [last])]


@pytest.mark.parametrize(("metric", "is_greater", "best"), [("f1", None, 1), ("eval_f1", False, 2), ("loss", None, 0)])
def test_star_marks_the_best_value_of_metric_for_best_model(tmp_path, metric, is_greater, best):
    log = [{"step": step, "loss": 1.0, "eval_loss": step, "eval_f1": f1} for step, f1 in ((1, 0.5), (2, 0.7), (3, 0.2))]
    write_log(tmp_path, log)
    args = TrainingArguments(str(tmp_path), metric_for_best_model=metric, greater_is_better=is_greater, use_cpu=True)
    torch.save(args, tmp_path / "training_args.bin")
    marked = {line.name: line.best for line in read_curves([str(tmp_path)]) if line.best is not None}
    assert marked == {f"eval_{metric.removeprefix('eval_')}": best}
    names = ("eval_mcc", "eval_ece", "eval_p95_latency", "eval_tokens")
    assert [choose_best(name, {}) for name in names] == [max, min, min, None]


def test_git_lfs_pointer_in_place_of_training_args_is_ignored(runs, tmp_path):
    write_log(tmp_path, [{"step": 1, "loss": 1.0}])
    (tmp_path / "training_args.bin").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert not any(line.settings for line in read_curves([runs[0], str(tmp_path)]))


def test_short_steps_are_in_milliseconds(tmp_path):
    """All runs have the same unit."""
    runs = [write_log(tmp_path / str(time), [{"step": 1, "loss": 1.0, "step_seconds": time}]) for time in (0.002, 0.2)]
    assert [(line.label, line.values) for line in read_curves(runs[:1])[1:]] == [("milliseconds per step", [2.0])]
    curves = [line for line in read_curves(runs) if line.panel == "seconds per step"]
    assert [line.values for line in curves] == [[0.002], [0.2]] and vertical_axis(curves)[0] == "log"
    # The value is of the interval since the start, which has no mark.
    assert (curves[0].points(curves[0].values), curves[0].marked[:1]) == (([0, 1], [0.002, 0.002]), [1])


def test_30_losses_or_more_get_a_running_mean():
    """Those that are not finite do not count."""
    values = [float(step % 2) for step in range(31)]
    values[15] = math.nan
    steps = list(map(float, range(31)))
    assert Curve("loss", "loss", steps[1:], values[1:]).mean is None
    for panel, name in (("learning rate", "learning_rate"), (SHARES, "data_wait"), ("loss", "eval_loss")):
        assert Curve(panel, name, steps, values).mean is None
    mean = Curve("loss", "loss", steps, values).mean
    # Of five values, at first of one and at the end of three.
    assert mean[:3] == pytest.approx([0, 1 / 3, 2 / 5]) and mean[-1] == pytest.approx(1 / 3)
    assert math.isnan(mean[15]) and mean[16] == pytest.approx(2 / 5)
    # It does not lag, and the mean of speeds is that of all steps, here of 1, 9 and 10, over their time.
    assert Curve("loss", "loss", steps, steps).mean[:-2] == pytest.approx(steps[:-2])
    speeds = Curve("samples per second", "samples_per_second", [1.0, *range(10, 300, 10)], [20.0] + [200.0] * 29)
    assert speeds.mean[1] == pytest.approx(20 / (1 / 20 + 9 / 200 + 10 / 200))


@pytest.mark.parametrize("loss", [1.0, 2.0])
def test_last_of_several_runs_in_a_folder_is_read(tmp_path, loss):
    """The times of files do not count for a copy, whose log begins like the other's."""
    for step, value in ((20, 1.0), (10, loss)):
        folder = tmp_path / f"checkpoint-{step}"
        write_log(folder, [{"step": each, "loss": value} for each in range(step)])
        os.utime(folder / "trainer_state.json", (0, 1000 - step))
    assert len(RunRecord(str(tmp_path)).state.log_history) == (20 if loss == 1.0 else 10)


def test_arguments_that_do_not_tell_runs_apart_are_left_out():
    """Such as unset steps, or the argument for a device that all runs have."""
    lengths = differing_arguments([{"max_steps": -1, "num_train_epochs": 3}, {"max_steps": 50}])
    assert lengths == [{"num_train_epochs": 3}, {"max_steps": 50}]
    steps = [{"max_steps": 9, "num_train_epochs": 3}, {"max_steps": 9, "num_train_epochs": 1}]
    assert differing_arguments(steps) == [{}, {}]
    places = [{"use_cpu": False, "device": "cpu"}, {"use_cpu": True}, {"use_cpu": False}]
    assert differing_arguments(places[:2]) == [{}, {}]
    assert differing_arguments(places[1:]) == places[1:]


def test_processes_and_device_are_compared_if_known(tmp_path):
    for run, count, device in (("a", 1, "cpu"), ("b", 2, "cuda:1")):
        written = Journal(str(tmp_path / run))
        written.write("begin", 0, max_steps=9, world_size=count, device=device, pid=1, host="there", resumed_from=None)
        written.write("log", 1, logs={"loss": 1.0, "step": 1})
    write_log(tmp_path / "c", [{"step": 1, "loss": 2.0}])
    curves = read_curves([str(tmp_path / run) for run in "abc"])
    texts = [describe_run(run, curves).split(" · ", 1)[1] for run in "abc"]
    state = "running at step 1 of 9 · processes"
    assert texts == [f"{state} 1, device cpu", f"{state} 2, device cuda", "arguments unknown"]


def test_arguments_are_named_that_most_runs_do_not_share():
    """What has the most values is first, then the learning rate; and none that tells runs apart is left out."""
    pairs = [(0.1, 0), (0.1, 5), (4.0, 9)]
    runs = differing_arguments([{"learning_rate": rate, "warmup_steps": steps} for rate, steps in pairs])
    assert [describe(run, runs)[13:] for run in runs] == ["0", "5", "9, learning_rate 4"]
    runs = [{"learning_rate": rate} for rate in (0.05623413, 0.05623414, 10**-1.5, 1.0)]
    read = ["0.05623413", "0.05623414", "0.03162", "1"]
    assert [describe(run, runs).split()[1] for run in runs] == read
    runs = [{f"argument_{number}": run * (number > 19) for number in range(22)} for run in (1, 2)]
    ends = [describe(run, [*runs, {}, {}]).split(", ")[20:] for run in runs]
    assert ends == [["argument_20 1", "…"], ["argument_20 2", "…"]]


def test_shares_are_of_the_time_so_far(tmp_path):
    """Each tenth step evaluates for as long as nine steps and itself take."""
    log = [{"step": step, "step_seconds": 1.0, "eval_share": 0.9 * (step % 10 == 0)} for step in range(1, 2001)]
    share = next(curve for curve in read_curves([write_log(tmp_path, log)]) if curve.name == "eval_share")
    steps, values = share.points(share.values)
    # The last of each part of the curve.
    assert steps == [0, *range(2, 2001, 2)] and values[5::5] == pytest.approx([9 / 19] * 200)
    assert values[:6] == pytest.approx([0, 0, 0, 0, 0, 9 / 19]) and values[6] == pytest.approx(9 / 21)
    # Over time, the interval of a value begins at the one before or at a restart.
    share = replace(share, steps=[1.0, 60.0, 61.0, 300.0], values=[0, 1, 0, 1], pace=(), x="seconds")
    steps, values = replace(share, restarts=[(61.0, 90.0)]).points([0, 1, 0, 1])
    assert steps == [0, 1, 60, 61, 300] and values == pytest.approx([0, 0, 59 / 60, 59 / 61, 269 / 271])
