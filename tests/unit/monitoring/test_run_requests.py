"""`python -m hftrainer ask` makes requests to a live run; `save_minutes` and `eval_minutes` act by the clock."""

import gzip
import json
import socket
import subprocess
import threading

import pytest

from hftrainer import TrainerCallback, TrainerState
from hftrainer.__main__ import main
from hftrainer.monitoring import run_requests
from hftrainer.monitoring.journal import Journal
from hftrainer.monitoring.run_requests import FOLDER, send_request
from tests.support.checkpoints import make_trainer
from tests.support.small_models import plain_data


class AsksAt(TrainerCallback):
    """Asks for something at a step, from another thread, and waits until the file is there."""

    def __init__(self, folder, request, step):
        self.folder, self.request, self.step = folder, request, step
        self.answer, self.evaluated, self.asking = None, [], None

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.asking = threading.Thread(target=self.ask)
            self.asking.start()
            while not (self.folder / FOLDER / self.request).exists():
                pass

    def ask(self):
        self.answer = send_request(str(self.folder), self.request, 60.0)

    def on_evaluate(self, args, state, control, **kwargs):
        self.evaluated.append(state.global_step)


@pytest.fixture
def run_with_request(tmp_path, monkeypatch):
    monkeypatch.setattr(run_requests, "_PERIOD", 0.0)

    def run(request, step=3, **settings):
        callback = AsksAt(tmp_path, request, step)
        data = {"train_dataset": plain_data(200), "eval_dataset": plain_data(8), **settings.pop("trainer", {})}
        defaults = {"max_steps": 20, "save_steps": 100}
        trainer = make_trainer(tmp_path, callbacks=[callback], trainer=data, **{**defaults, **settings})
        trainer.train()
        callback.asking.join()
        return trainer, callback

    return run


def checkpoints(folder):
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def test_save_request_saves_at_that_step(run_with_request, tmp_path):
    _, callback = run_with_request("save")
    assert callback.answer == f"at step 3, in {tmp_path / 'checkpoint-3'}"
    assert checkpoints(tmp_path) == ["checkpoint-20", "checkpoint-3"]
    assert not list((tmp_path / FOLDER).iterdir())


def test_evaluate_request_evaluates_at_that_step(run_with_request):
    assert run_with_request("evaluate")[1].evaluated == [3]


def test_evaluate_request_without_data_is_refused(run_with_request):
    trainer, callback = run_with_request("evaluate", trainer={"eval_dataset": None})
    assert callback.answer == "refused: the run has no eval_dataset" and trainer.state.global_step == 20


@pytest.mark.parametrize(("strategy", "saved"), [("steps", ["checkpoint-3"]), ("no", [])])
def test_stop_request_ends_the_run(run_with_request, tmp_path, caplog, strategy, saved):
    trainer, _ = run_with_request("stop", save_strategy=strategy)
    assert trainer.state.global_step == 3 and checkpoints(tmp_path) == saved
    assert "Stopped at step 3 of 20, by `ask stop`." in caplog.messages
    assert not saved or caplog.messages[-1].endswith("trainer.train(resume_from_checkpoint=True) resumes from it.")


@pytest.mark.parametrize(("steps", "last"), [(20, 13), (8, 8)])
def test_profile_request_records_ten_steps(run_with_request, tmp_path, steps, last):
    run_with_request("profile", max_steps=steps)
    with gzip.open(tmp_path / "profile" / "steps-4.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    assert sum(event["name"].startswith("Optimizer.step") for event in events) == last - 3


def test_request_from_before_the_run_is_ignored(run_with_request, tmp_path):
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "stop").touch()
    assert run_with_request("save")[0].state.global_step == 20


def test_ask_command_gives_up_after_the_timeout(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["ask", str(tmp_path), "save", "--timeout", "0.3"])
    assert ended.value.code == 1 and "no answer within 0.3 s" in capsys.readouterr().err
    assert not list((tmp_path / FOLDER).iterdir())


@pytest.mark.parametrize(
    ("end", "text"),
    [("journal", "ended (stopped) at step 6, "), ("kill", "was killed after step 6"), ("state", "completed at step 6")],
)
def test_ask_command_says_how_the_run_has_ended(tmp_path, capsys, end, text):
    """Another run may have started since, which has written nothing yet: with --timeout it is asked."""
    if end == "state":
        TrainerState(global_step=6, max_steps=6).save_to_json(str(tmp_path / "trainer_state.json"))
    else:
        killed = subprocess.Popen(["true"])
        killed.wait()
        begin = {"host": socket.gethostname(), "pid": killed.pid, "max_steps": 9, "resumed_from": None}
        Journal(str(tmp_path)).write("begin", 6, **begin)
    if end == "journal":
        Journal(str(tmp_path)).write("end", 6, reason="stopped")
    for words, problem in (([], "so there is no run to ask"), (["--timeout", "0"], "no answer within 0 s: the run")):
        with pytest.raises(SystemExit) as ended:
            main(["ask", str(tmp_path), "save", *words])
        error = capsys.readouterr().err
        assert ended.value.code == 1 and problem in error and text in error


class Passes(TrainerCallback):
    """Lets a minute pass at each step, for the run's clock."""

    def __init__(self, clock):
        self.clock, self.evaluated = clock, []

    def on_step_begin(self, args, state, control, **kwargs):
        self.clock[0] += 60

    def on_evaluate(self, args, state, control, **kwargs):
        self.evaluated.append(state.global_step)


@pytest.fixture
def run_by_minutes(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(run_requests.time, "monotonic", lambda: clock[0])

    def run(steps, resume=None, **settings):
        callback = Passes(clock)
        data = {"train_dataset": plain_data(200), "eval_dataset": plain_data(8)}
        trainer = make_trainer(tmp_path, callbacks=[callback], trainer=data, max_steps=steps, **settings)
        trainer.train(resume_from_checkpoint=resume)
        return callback.evaluated

    return run


def test_save_and_eval_minutes_set_the_intervals(tmp_path, run_by_minutes):
    evaluated = run_by_minutes(16, save_minutes=4, eval_minutes=5, save_steps=100)
    assert evaluated == [5, 10, 15]
    assert checkpoints(tmp_path) == ["checkpoint-12", "checkpoint-16", "checkpoint-4", "checkpoint-8"]


def test_eval_minutes_continue_in_a_resumed_run(tmp_path, run_by_minutes):
    """The evaluation comes as long after the last one as in the run that was interrupted, four minutes after it."""
    assert run_by_minutes(9, eval_minutes=5, save_steps=9) == [5]
    assert run_by_minutes(16, resume=True, eval_minutes=5, save_steps=100) == [10, 15]


def test_eval_minutes_are_counted_from_evaluations_by_steps(tmp_path, run_by_minutes):
    assert run_by_minutes(12, eval_minutes=5, eval_strategy="steps", eval_steps=3, save_strategy="no") == [3, 6, 9, 12]
