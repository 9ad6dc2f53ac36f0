"""`python -m hftrainer watch` shows a page of runs, from their journals or checkpoints."""

import functools
import io
import json
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
from rich.console import Console

from hftrainer.__main__ import main
from hftrainer.cli import watch
from hftrainer.monitoring.journal import JOURNAL_NAME, SILENCE, Journal, read_events, remove_undone_steps
from hftrainer.monitoring.run_facts import WatchedRun
from hftrainer.reporting.metrics import NanSpan
from tests.support.checkpoints import make_trainer

SECONDS = {"steps": 6.0, "data": 2.0, "evaluation": 1.0, "saving": 1.0}


def begin(folder, step=0, **facts):
    """A journal with a start in this process."""
    journal = Journal(str(folder))
    known = {"max_steps": 100, "world_size": 2, "device": "cuda", "pid": os.getpid(), "host": socket.gethostname()}
    journal.write("begin", step, **known | {"resumed_from": f"checkpoint-{step}" if step else None} | facts)
    return journal


def train(journal, *steps, loss=2.0, seconds=SECONDS):
    for step in steps:
        logs = {"loss": loss, "learning_rate": 3e-4, "tokens_per_second": 12_345.6, "data_wait": 0.2, "step": step}
        journal.write("log", step, logs=logs)
        journal.write("interval", step, steps=10, seconds=seconds)


def evaluate(journal, step, **metrics):
    journal.write("phase", step, phase="evaluation")
    journal.write("log", step, logs={f"eval_{name}": value for name, value in metrics.items()} | {"eval_runtime": 3.0})
    journal.write("phase", step, phase="training")


def make_older(folder, seconds):
    """Make the journal older."""
    path = folder / JOURNAL_NAME
    events = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(each | {"time": each["time"] - seconds}) + "\n" for each in events))


def show(capsys, monkeypatch, *folders, width=80):
    monkeypatch.setenv("COLUMNS", str(width))
    main(["watch", "--once", *map(str, folders)])
    return capsys.readouterr().out


def test_page_shows_progress_metrics_and_checkpoints(tmp_path, capsys, monkeypatch):
    journal = begin(tmp_path, metric_for_best_model="gap", greater_is_better=False)
    train(journal, 10, 20, 30, loss=2.5)
    evaluate(journal, 20, wer=0.1, gap=1)
    evaluate(journal, 30, loss=2.25, accuracy=0.5, wer=0.2, gap=2, fid=3)
    for step in (20, 30):
        journal.write("checkpoint", step, folder=f"checkpoint-{step}")
    (tmp_path / "checkpoint-30").mkdir()  # the other was rotated away
    journal.write("warning", 30, text="Step 30 took 9 s, [red]\x1b[31m12 times\nthe median.")
    page = show(capsys, monkeypatch, tmp_path)
    first, *_ = lines = page.splitlines()
    assert tmp_path.name in first and f"running on {socket.gethostname()}" in first
    assert "step 30 of 100 ━" in page and "30%, 70 s left" in page  # a step takes a second
    assert "2 x cuda · started" in page and "training for" not in page
    names = re.findall(r"│ (\w+) +[\d.]+ +[\d.]* +\d* ", page)
    assert names == ["loss", "eval_loss", "eval_wer", "eval_gap", "eval_accuracy", "eval_fid"]
    assert "eval_loss      2.25  2.25       30" in page and "eval_accuracy   0.5   0.5       30" in page
    assert "eval_wer        0.2   0.1       20" in page and "eval_gap          2     1       20" in page
    assert "lr 3.00e-04 · 12,346 tokens/s" in page and re.search(r"total +30 s  60.0%  20.0%       10.0%   10.0%", page)
    assert "checkpoint-30 0 s ago" in page and "checkpoint-20" not in page
    assert " ago: Step 30 took 9 s, [red][31m12 times the median." in page and "\x1b" not in page
    assert any(re.search("loss  +eval_wer", line) for line in lines) and "⠉" in page and "step 30 " in page


@pytest.mark.parametrize(("width", "beside"), [(50, False), (80, False), (160, True), (320, True)])
def test_two_runs_fit_the_terminal(tmp_path, capsys, monkeypatch, width, beside):
    for name in ("first", "second"):
        journal = begin(tmp_path / name)
        train(journal, *range(10, 60, 10))
        evaluate(journal, 50, loss=1.0, **{f"a_metric_with_a_rather_long_name_{number}": 0.1 for number in range(9)})
        journal.write("warning", 50, text="long " * 99)
    lines = show(capsys, monkeypatch, tmp_path / "first", tmp_path / "second", width=width).splitlines()
    assert max(map(len, lines)) == width and not any(re.fullmatch("[│ ]+", line) for line in lines)
    assert ("second" in lines[0]) is beside


@pytest.mark.parametrize(
    ("reason", "state", "text"),
    [
        ("complete", "complete", "complete"),
        ("stopped", "stopped", "stopped"),
        ("Ctrl-C", "stopped", "stopped by Ctrl-C"),
        ("SIGTERM", "stopped", "stopped by SIGTERM"),
        ("KeyError", "failed", "ended with KeyError"),
        ("TrainingDiverged", "failed", "diverged at step 11"),
    ],
)
def test_ended_run_says_how_it_ended(tmp_path, capsys, monkeypatch, reason, state, text):
    error = {"message": "why " * 30} if state == "failed" else {}
    journal = begin(tmp_path)
    train(journal, 10)
    journal.write("end", 10, reason=reason, **error)
    facts = WatchedRun(str(tmp_path)).read()
    assert facts.state == state and facts.seconds_left is facts.phase is None
    shown = show(capsys, monkeypatch, tmp_path)
    assert text in shown.splitlines()[0] and shown.count("why") == 30 * len(error)


def test_page_shows_the_last_events_and_json_all(tmp_path, capsys, monkeypatch):
    journal = begin(tmp_path)
    for step in range(1, 6):
        (tmp_path / f"checkpoint-{step}").mkdir()
        journal.write("checkpoint", step, folder=f"checkpoint-{step}")
        journal.write("warning", step, text="long " * 50 + "advice")
    page = show(capsys, monkeypatch, tmp_path)
    assert re.findall(r"checkpoint-\d", page) == ["checkpoint-5", "checkpoint-4", "checkpoint-3"]
    assert re.findall(r"after step (\d)", page) == ["3", "4", "5"] and page.count("advice") == 3
    assert " earlier warnings: 2, in --json " in page
    main(["watch", "--json", str(tmp_path)])
    (found,) = json.loads(capsys.readouterr().out)["runs"]
    assert [len(found[name]) for name in ("checkpoints", "warnings")] == [5, 5]


def test_killed_process_is_reported(tmp_path, capsys, monkeypatch):
    process = subprocess.Popen(["true"])
    process.wait()
    train(begin(tmp_path, pid=process.pid), 10)
    make_older(tmp_path, 200)
    page = show(capsys, monkeypatch, tmp_path, width=160)
    assert f"killed: process {process.pid} on " in page and "no checkpoint: start it again" in page
    assert WatchedRun(str(tmp_path)).read().seconds_left is None


def test_run_without_new_lines_is_reported_silent(tmp_path):
    """On another machine only silence tells, and a process that exists here may hang."""
    for name, host in (("here", socket.gethostname()), ("there", "another-machine")):
        train(begin(tmp_path / name, host=host, pid=os.getpid()), 10)
        assert WatchedRun(str(tmp_path / name)).read().state == "running"
        make_older(tmp_path / name, SILENCE + 1)
        assert WatchedRun(str(tmp_path / name)).read().state == "silent"


def test_restart_removes_the_undone_steps(tmp_path):
    journal = begin(tmp_path)
    train(journal, 10, 20, 30, loss=3.0)
    journal.write("checkpoint", 20, folder="checkpoint-20")
    journal.write("checkpoint", 30, folder="checkpoint-30")
    with open(tmp_path / JOURNAL_NAME, "a") as file:
        file.write('{"time": 1, "event": "log", "step": 40, "logs": {"lo')  # and then it was killed
    for step in (20, 30):
        (tmp_path / f"checkpoint-{step}").mkdir()
    train(begin(tmp_path, 20), 30, loss=2.0)
    facts = WatchedRun(str(tmp_path)).read()
    assert facts.curves["loss"] == {"steps": [10, 20, 30], "values": [3.0, 3.0, 2.0]}
    assert facts.seconds["all"] == {name: 4 * spent for name, spent in SECONDS.items()}
    assert [made["step"] for made in facts.checkpoints] == [20]
    assert facts.state == "running" and facts.resumed_from == "checkpoint-20"
    assert facts.seconds_left == 70.0


def test_restart_from_the_beginning_removes_all_steps(tmp_path, capsys, monkeypatch):
    journal = begin(tmp_path)
    train(journal, 10, 20)
    evaluate(journal, 20, loss=1.0)
    assert "eval_loss" in show(capsys, monkeypatch, tmp_path)
    journal = begin(tmp_path)  # the process was killed before its first checkpoint
    assert "loss" not in show(capsys, monkeypatch, tmp_path)
    train(journal, 10)
    page = show(capsys, monkeypatch, tmp_path)
    assert "step 10 of 100" in page and "eval_loss" not in page
    assert WatchedRun(str(tmp_path)).read().seconds["all"] == SECONDS


@pytest.mark.parametrize("is_overwritten", [False, True])
def test_resume_of_an_earlier_run_continues_its_curve(tmp_path, is_overwritten):
    """It continues the run that has written its checkpoint last."""
    journal = begin(tmp_path)
    train(journal, 10, 20, 30)
    journal.write("checkpoint", 20, folder="checkpoint-20")
    journal = begin(tmp_path)
    train(journal, 10, 20, loss=4.0)
    if is_overwritten:
        journal.write("checkpoint", 20, folder="checkpoint-20")
    watched = WatchedRun(str(tmp_path))
    assert watched.read().curves["loss"]["values"] == [4.0, 4.0]
    train(begin(tmp_path, 20, resumed_from=f"{tmp_path}/checkpoint-20/"), 30, loss=1.0)
    losses = [4.0, 4.0, 1.0] if is_overwritten else [2.0, 2.0, 1.0]
    for run in (watched, WatchedRun(str(tmp_path))):
        assert run.read().curves["loss"] == {"steps": [10, 20, 30], "values": losses}
    logs = [event.get("logs") for event in remove_undone_steps(read_events(str(tmp_path)))]
    assert [each["loss"] for each in logs if each] == losses


def test_goodput_is_kept_steps_by_all_time(tmp_path, capsys, monkeypatch):
    train(journal := begin(tmp_path), 10, 20)
    path = tmp_path / JOURNAL_NAME
    events = [json.loads(line) for line in path.read_text().splitlines()]
    for event, at in zip(events, (0, 10, 10, 20, 20), strict=True):
        event["time"] = 1e9 + at
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert WatchedRun(str(tmp_path)).read().goodput == 0.8
    assert "goodput 80% (steps that were kept)" in show(capsys, monkeypatch, tmp_path)
    journal = begin(tmp_path, 20)
    assert re.search(r"downtime [\d,]+ h .*\(pauses after failures\)", show(capsys, monkeypatch, tmp_path, width=160))
    # A run that ends early without a checkpoint has kept no steps.
    journal.write("end", 20, reason="Ctrl-C")
    assert "steps that were kept" not in show(capsys, monkeypatch, tmp_path)


def test_missing_run_does_not_hide_another(tmp_path, capsys, monkeypatch):
    train(begin(tmp_path / "there"), 10)
    with pytest.raises(SystemExit) as ended:
        main(["watch", "--once", str(tmp_path / "there"), str(tmp_path / "elsewhere")])
    shown = capsys.readouterr()
    assert ended.value.code == 2 and "step 10 of 100" in shown.out and "elsewhere does not exist" in shown.err


def test_only_appended_lines_are_read(tmp_path):
    journal, path = begin(tmp_path), tmp_path / JOURNAL_NAME
    train(journal, 10)
    run = WatchedRun(str(tmp_path))
    run.read()
    with open(path, "r+b") as file:  # what was read may be anything now
        file.write(b"x" * 100)
    train(journal, 20)
    with open(path, "ab") as file:
        file.write(b'{"time": 1, "event": "log", "step": 30, ')
    assert run.read().curves["loss"]["steps"] == [10, 20]
    with open(path, "ab") as file:
        file.write(b'"logs": {"loss": 1.0}}\n')
    assert run.read().curves["loss"]["steps"] == [10, 20, 30]


@pytest.mark.parametrize("replace", [False, True])
def test_new_journal_file_is_read_from_its_beginning(tmp_path, replace):
    train(begin(tmp_path), 10, 20, 30)
    run = WatchedRun(str(tmp_path))
    run.read()
    if replace:  # by one that is longer
        train(begin(tmp_path / "new"), *range(1, 9))
        os.replace(tmp_path / "new" / JOURNAL_NAME, tmp_path / JOURNAL_NAME)
    else:
        (tmp_path / JOURNAL_NAME).write_text("")
        train(begin(tmp_path), *range(1, 2))
    assert run.read().curves["loss"]["steps"] == list(range(1, 9 if replace else 2))


def test_evaluation_that_runs_counts_for_the_time_left(tmp_path):
    train(journal := begin(tmp_path), 10)
    assert WatchedRun(str(tmp_path)).read().seconds_left == 90
    journal.write("phase", 10, phase="evaluation")
    make_older(tmp_path, 20)
    facts = WatchedRun(str(tmp_path)).read()
    # Times in journals are rounded.
    assert facts.seconds_left > 90 + 19 * 9 and facts.goodput < 0.5


def test_nan_is_known_before_a_log_line_has_it(tmp_path):
    train(journal := begin(tmp_path), 10)
    journal.write("warning", 12, text="", non_finite_step=13)
    assert WatchedRun(str(tmp_path)).read().nan == NanSpan(13, 13, usable=11)
    evaluate(journal, 15, loss=1.0)  # the loss of a single step was not finite
    assert WatchedRun(str(tmp_path)).read().nan is None


def test_losses_that_are_not_finite_are_shown(tmp_path, capsys, monkeypatch):
    journal = begin(tmp_path)
    train(journal, 10, loss=float("nan"))
    assert "nan" in show(capsys, monkeypatch, tmp_path)
    train(journal, 20, loss=1.0)
    train(journal, 30, loss=float("inf"))
    train(journal, 40, loss=1e300)
    evaluate(journal, 40, loss=float("nan"), accuracy=float("nan"))
    page = show(capsys, monkeypatch, tmp_path)
    assert "loss           1e+300     1       20" in page and "eval_accuracy     nan" in page and "NaN" not in page
    main(["watch", "--json", str(tmp_path)])
    (found,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["runs"]
    assert found["curves"]["loss"]["values"] == [None, 1.0, None, 1e300]
    assert found["metrics"]["eval_loss"] == {"last": None, "best": None, "best_step": None}
    train(journal, 50, 60, loss=float("nan"))
    journal.write("end", 60, reason="complete")
    assert "  loss NaN since step 41-50, complete " in show(capsys, monkeypatch, tmp_path).splitlines()[0]
    evaluate(journal, 40, accuracy=0.8)  # of weights that may be the cause
    assert WatchedRun(str(tmp_path)).read().metrics["eval_accuracy"]["best_step"] is None
    journal.write("warning", 60, text="", non_finite_step=43)
    evaluate(journal, 42, accuracy=0.9)
    assert WatchedRun(str(tmp_path)).read().metrics["eval_accuracy"]["best_step"] == 40
    evaluate(journal, 42, loss=1.0)  # they are not
    assert WatchedRun(str(tmp_path)).read().metrics["eval_accuracy"]["best_step"] == 42
    assert "  loss NaN since step 43, complete " in show(capsys, monkeypatch, tmp_path).splitlines()[0]


@pytest.mark.parametrize(("step", "mark"), [(39, ""), (40, ", maybe NaN"), (49, ", maybe NaN"), (50, ", NaN")])
def test_checkpoint_is_marked_if_its_weights_may_be_nan(step, mark):
    assert watch._nan_mark(step, NanSpan(41, 50, usable=39)) == mark
    assert watch._nan_mark(step, None) == ""


def test_low_page_keeps_a_chart(tmp_path):
    journal = begin(tmp_path)
    train(journal, *range(10, 60, 10))
    evaluate(journal, 50, **{f"metric_{number}": 0.5 for number in range(20)})
    for number in range(3):
        journal.write("warning", 50, text=f"warning {number} " * 20)
    console = Console(width=80, height=24, file=io.StringIO())
    console.print(watch._make_page(console, [("run", WatchedRun(str(tmp_path)).read())], 24))
    page = console.file.getvalue()
    assert page.count("\n") <= 24 and re.search(r"\+\d+ more", page) and "step 50 │" in page.replace("  ", "")
    assert "warning 2" in page and "warning 1" not in page and " not all lines fit: use a taller window " in page


def test_page_of_several_runs_keeps_evaluations(tmp_path):
    """Where no chart fits, goodput, times and time by activity are left out before metrics."""
    journal = begin(tmp_path)
    train(journal, *range(10, 60, 10))
    evaluate(journal, 50, loss=1.5, accuracy=0.5, f1=0.5, recall=0.5)
    console = Console(width=80, height=24, file=io.StringIO())
    console.print(watch._make_page(console, [(name, WatchedRun(str(tmp_path)).read()) for name in ("one", "two")], 24))
    page = console.file.getvalue()
    assert page.count("\n") <= 24 and page.count("│ eval_recall ") == page.count("lr 3.00e-04") == 2
    assert "goodput" not in page and "evaluation" not in page and " more" not in page


def test_page_of_a_stopped_run_says_how_to_resume(tmp_path, capsys, monkeypatch):
    journal = begin(tmp_path)
    train(journal, 10)
    (tmp_path / "checkpoint-10").mkdir()
    journal.write("checkpoint", 10, folder="checkpoint-10")
    assert "to resume" not in show(capsys, monkeypatch, tmp_path, width=300)
    journal.write("end", 10, reason="Ctrl-C")
    page = show(capsys, monkeypatch, tmp_path, width=300)
    assert f"to resume: trainer.train(resume_from_checkpoint='{tmp_path}/checkpoint-10')" in page


def test_chart_marks_values_that_are_not_finite(tmp_path, capsys, monkeypatch):
    """Also of a metric with a single finite value."""
    journal = begin(tmp_path)
    train(journal, 10)
    train(journal, 20, 30, loss=float("nan"))
    page = show(capsys, monkeypatch, tmp_path)
    assert re.search(r"│ +loss +│", page) and re.search(r"│ 2 \S +x +x +│", page)


def test_page_is_ascii_without_utf_8(tmp_path, monkeypatch):
    journal = begin(tmp_path)
    train(journal, 10, loss=10.0)
    train(journal, 20, loss=5.0)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    monkeypatch.setenv("COLUMNS", "80")
    main(["watch", "--once", str(tmp_path)])
    sys.stdout.flush()
    page = sys.stdout.buffer.getvalue().decode()
    assert "?" not in page and "2 x cuda | started" in page and re.search(r"10 [:.']+ .*\n", page)


@pytest.mark.parametrize(
    ("losses", "text"), [([1.0, 1.5] * 6 + [60.0], "max 60 at step 13"), ([500.0, 9.0, 0.5], "log scale")]
)
def test_chart_has_the_axis_of_plots(tmp_path, capsys, monkeypatch, losses, text):
    journal = begin(tmp_path)
    for step, loss in enumerate(losses, 1):
        train(journal, step, loss=loss)
    assert text in show(capsys, monkeypatch, tmp_path)


def test_run_without_log_lines_is_waited_for(tmp_path, capsys, monkeypatch):
    journal = begin(tmp_path, logging_steps=10)
    page = show(capsys, monkeypatch, tmp_path)
    assert "step 0 of 100" in page and "waiting for the first log line (logging_steps=10)" in page
    assert "best" not in page
    train(journal, 10)
    page = show(capsys, monkeypatch, tmp_path)
    assert "best" in page and "waiting" not in page and not re.search(r"10 +step 10 +│", page)
    train(journal, 20)
    assert re.search(r"10 +step 20 +│", show(capsys, monkeypatch, tmp_path))  # the axis of a chart
    train(journal, 120)
    assert "step 120, past the end at 100" in show(capsys, monkeypatch, tmp_path)


def test_run_without_a_journal_is_shown_from_its_checkpoints(tmp_path, capsys, monkeypatch):
    make_trainer(tmp_path, max_steps=4, save_steps=2, logging_steps=1).train()
    capsys.readouterr()
    (tmp_path / JOURNAL_NAME).unlink(missing_ok=True)
    page = show(capsys, monkeypatch, tmp_path)
    assert "complete, by its newest checkpoint" in page and "step 4 of 4" in page
    assert "checkpoint-4 0 s ago · checkpoint-2" in page and "loss" in page and "saving" not in page
    shutil.rmtree(tmp_path / "checkpoint-4")
    page = show(capsys, monkeypatch, tmp_path, width=110)
    assert "  not finished, by its newest checkpoint ─" in page and "step 2 of 4" in page
    assert "· observe=True shows a run live" in page
    title, *lines = show(capsys, monkeypatch, tmp_path / "checkpoint-2").splitlines()
    assert "checkpoint-2  checkpoint at step 2 of 4 " in title
    assert not any(re.fullmatch("[│ ]+", line) for line in lines)


def test_journal_written_by_a_trainer_is_shown(tmp_path, capsys, monkeypatch):
    """What the Trainer writes is what the page reads."""
    make_trainer(tmp_path, max_steps=4, save_steps=2, logging_steps=1, observe=True).train()
    capsys.readouterr()
    facts = WatchedRun(str(tmp_path)).read()
    assert facts.state == "complete" and facts.step == facts.max_steps == 4
    assert [made["step"] for made in facts.checkpoints] == [2, 4] and 0 < facts.goodput <= 1
    assert facts.curves["loss"]["steps"] == [1, 2, 3, 4] and facts.values["samples_per_second"] > 0
    text = show(capsys, monkeypatch, tmp_path)
    assert "complete" in text and "samples/s" in text and "saving" in text and "train_" not in text
    assert watch._join(["saved:  run-2 9 s ago", "run-1 12 s ago"], 30) == "saved: run-2 9 s ago\nrun-1 12 s ago"


def test_missing_rich_is_named_but_json_works(tmp_path, monkeypatch, capsys):
    begin(tmp_path / "run")  # the page of a folder of runs is of these
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(SystemExit) as ended:
        main(["watch", str(tmp_path)])
    assert ended.value.code == 2 and "pip install 'hftrainer[watch]'" in capsys.readouterr().err
    main(["watch", "--json", str(tmp_path)])
    assert json.loads(capsys.readouterr().out)["runs"][0]["state"] == "running"


def read_until(terminal, text):
    found, end = b"", time.monotonic() + 60
    while text.encode() not in found:
        assert time.monotonic() < end, found.decode(errors="replace")
        found += os.read(terminal, 100_000)
    return found.decode(errors="replace")


def test_terminal_page_follows_a_run_until_ctrl_c(tmp_path, processes):
    """The page waits for the run to make its folder, follows it, and ends with Ctrl-C."""
    terminal, inside = pty.openpty()
    command = [sys.executable, "-m", "hftrainer", "watch", str(tmp_path / "new"), "--every", "0.1"]
    variables = processes.environment() | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    # A job in the background of a shell ignores Ctrl-C, and so would what it starts.
    reset = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    watching = subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside, env=variables, preexec_fn=reset)
    os.close(inside)  # it has the other end alone, which its end closes
    try:
        assert "╭" not in read_until(terminal, "Waiting for a run: ")
        journal = begin(tmp_path / "new")
        train(journal, 10)
        read_until(terminal, "step 10 of 100")
        train(journal, 20)
        read_until(terminal, "step 20 of 100")
        watching.send_signal(signal.SIGINT)
        rest = processes.read_to_end(terminal).decode()
        assert watching.wait() == 0 and "Traceback" not in rest
        # The cursor and the screen are back, and the last page is below what was there.
        assert "╯" in rest.partition("\x1b[?25h\x1b[?1049l")[2]
    finally:
        watching.kill()
        watching.wait()
        os.close(terminal)
