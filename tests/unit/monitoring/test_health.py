"""`metrics_port` serves /health and /metrics during a run; here in one process with short limits."""

import functools
import json
import os
import socket
import sys
import threading
import types
import urllib.error

import pytest
from huggingface_hub.utils import filter_repo_objects

from hftrainer import TrainerCallback, TrainingArguments
from hftrainer.callbacks.state import TrainerState
from hftrainer.errors import InvalidArgument, MissingPackage
from hftrainer.hub.repository import IGNORE_PATTERNS
from hftrainer.monitoring import health
from tests.support.checkpoints import AtStep, make_trainer
from tests.support.health_client import ask, wait_until
from tests.support.launchers import free_port
from tests.support.small_models import plain_data


class Clock:
    """A millisecond passes whenever the training thread asks it; none does for the threads that only look."""

    now = 0.0

    @classmethod
    def monotonic(cls):
        cls.now += 0.001 * (threading.current_thread() is threading.main_thread())
        return cls.now


def use_short_seconds(monkeypatch):
    """Set seconds that are right for steps of some milliseconds."""
    for name, seconds in {"_INTERVAL": 0.02, "_SHORTEST_LIMIT": 0.5, "_STACK_AFTER": 0.1, "time": Clock}.items():
        monkeypatch.setattr(health, name, seconds)


@pytest.fixture
def port(monkeypatch):
    """A free port."""
    use_short_seconds(monkeypatch)
    return free_port()


def pass_time_until(port, holds):
    """Let the seconds between two records pass with each question."""

    def holds_now(answer):
        Clock.now += health._INTERVAL
        return holds(answer)

    return wait_until(port, holds_now)


#: Event at which the server is asked → what the run does.
PHASES = {"on_train_begin": "starting", "on_step_begin": "training", "on_prediction_step": "evaluation"}
PHASES |= {"on_save": "saving", "on_train_end": "ended"}


class AnswerRecorder(TrainerCallback):
    """Asks the server at some events; `health` and `metrics` have the last answers."""

    def __init__(self, port):
        self.port, self.health, self.metrics = port, {}, {}
        for event in PHASES:
            setattr(self, event, functools.partial(self.ask, event))

    def ask(self, event, args, state, control, **kwargs):
        if event == "on_step_begin" and state.global_step == 0:
            return
        record = {"rank": 0, "step": state.global_step, "phase": PHASES[event]}
        self.health[event] = wait_until(
            self.port, lambda answer: answer["ranks"] and record.items() <= answer["ranks"][0].items()
        )
        self.metrics[event] = ask(self.port, "metrics")[1]


def value_of(metrics, name):
    (line,) = [line for line in metrics.splitlines() if line.startswith(f"{name} ")]
    return float(line.split()[1])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A Trainer after its run of nine steps, and what the server answered meanwhile."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_short_seconds(monkeypatch)
        answers = AnswerRecorder(free_port())
        settings = {"metrics_port": answers.port, "eval_strategy": "steps", "eval_steps": 3}
        trainer = make_trainer(tmp_path_factory.mktemp("run"), callbacks=[answers], **settings)
        trainer.train()
    return trainer, answers


def test_health_follows_a_run(finished):
    trainer, answers = finished
    assert {event: answer["phase"] for event, answer in answers.health.items()} == PHASES
    begin, end = answers.health["on_train_begin"], answers.health["on_train_end"]
    assert (begin["status"], begin["last_checkpoint"], end["status"]) == ("starting", None, "ended")
    answer = answers.health["on_step_begin"]
    assert (answer["status"], answer["step"], answer["max_steps"], answer["late_ranks"]) == ("ok", 8, 9, [])
    assert answer["last_checkpoint"] == os.path.join(trainer.args.output_dir, "checkpoint-6")
    assert answer["seconds_since_step"] < 60
    assert len(answer["ranks"]) == 1


def test_metrics_follow_a_run(finished):
    trainer, answers = finished
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    expected = {"step": 8, "steps_total": 8, "max_steps": 9, "checkpoint_step": 6, "ranks_late": 0, "loss": losses[1]}
    expected |= {'phase{phase="training"}': 1, 'phase{phase="saving"}': 0}
    metrics = answers.metrics["on_step_begin"]
    assert {name: value_of(metrics, f"hftrainer_{name}") for name in expected} == expected
    assert value_of(metrics, "hftrainer_epoch") == pytest.approx(0.8)
    assert value_of(metrics, 'hftrainer_log{name="eval_loss"}') > 0  # the last line is that of the evaluation


def test_no_server_without_metrics_port(tmp_path):
    threads = []
    look = AtStep(2, lambda: threads.extend(threading.enumerate()))
    make_trainer(tmp_path, callbacks=[look], max_steps=3, save_strategy="no").train()
    assert threads and "health" not in {thread.name for thread in threads}
    assert not (tmp_path / "_health").exists()


@pytest.mark.parametrize("value", [0, 70000, -1, "http", True, 94.5, "0.0.0.0", "0.0.0.0:", "host:99999"])
def test_wrong_port_is_refused(tmp_path, value):
    with pytest.raises(InvalidArgument, match=r"metrics_port=.*: use a port from 1 to 65535"):
        make_trainer(tmp_path, metrics_port=value)


@pytest.mark.parametrize(
    ("port", "address"),
    [
        (9400, ("127.0.0.1", 9400)),
        ("9400", ("127.0.0.1", 9400)),
        ("0.0.0.0:9400", ("0.0.0.0", 9400)),
        ("[::1]:80", ("::1", 80)),
    ],
)
def test_metrics_port_may_be_a_port_or_an_address(port, address):
    assert health.read_address(port) == address
    assert TrainingArguments("x", metrics_port=port).metrics_port == (9400 if port == "9400" else port)


def test_health_never_has_the_metrics_as_its_answer(tmp_path, port, monkeypatch):
    """Asked as soon as the server listens, before it had been told what to answer at /health."""
    asked = []
    monkeypatch.setattr(health.WSGIServer, "serve_forever", lambda server: asked.append(server.get_app()))
    monkeypatch.setattr(health.WSGIServer, "shutdown", lambda server: None)
    make_trainer(tmp_path, metrics_port=port, max_steps=1).train()
    (app,) = asked
    assert json.loads(b"".join(app({"PATH_INFO": "/health"}, lambda *status: None)))["max_steps"] == 1


def test_port_in_use_is_named(tmp_path, port):
    with socket.socket() as other:
        other.bind(("127.0.0.1", int(port)))
        other.listen()
        with pytest.raises(InvalidArgument, match=f"metrics_port={port}: cannot listen on 127.0.0.1:{port} .*in use"):
            make_trainer(tmp_path, metrics_port=port).train()


def test_address_of_another_machine_is_refused(tmp_path, port):
    with pytest.raises(InvalidArgument, match=r"metrics_port='192.0.2.1:.*cannot listen on 192.0.2.1"):
        make_trainer(tmp_path, metrics_port=f"192.0.2.1:{port}").train()


def test_missing_prometheus_client_is_named(tmp_path, port, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingPackage, match=r"metrics_port needs .*: pip install 'hftrainer\[metrics\]'"):
        make_trainer(tmp_path, metrics_port=port).train()


def hang_until_it_is_red(port):
    return pass_time_until(port, lambda answer: answer["status"] == "stalled" and answer["late_ranks"][0]["stack"])


def test_hanging_thread_turns_health_red_with_its_stack(tmp_path, port):
    """It hangs until /health is red, which then turns green again."""
    answers, metrics = [], []

    def hang():
        answers.append(hang_until_it_is_red(port))
        metrics.append(ask(port, "metrics")[1])

    recovers = AtStep(7, lambda: answers.append(wait_until(port, lambda answer: answer["status"] == "ok")))
    trainer = make_trainer(tmp_path, callbacks=[AtStep(5, hang), recovers], metrics_port=port, save_strategy="no")
    trainer.train()
    red, green = answers
    assert (red["step"], red["phase"]) == (5, "training")
    (late,) = red["late_ranks"]
    assert (late["rank"], late["host"]) == (0, socket.gethostname())
    assert "hang_until_it_is_red" in late["stack"].split("in hang\n")[0]
    assert "health.py" not in late["stack"].split("hang_until_it_is_red")[1].splitlines()[0]
    assert late["stack"].count("Thread 0x") == 1
    assert value_of(metrics[0], "hftrainer_ranks_late") == 1
    assert green["late_ranks"] == []


def compile_something(port):
    """Be slow in a function that seems to belong to torch.compile."""
    code = "def convert(wait): wait()"
    module = types.ModuleType("torch._dynamo.convert_frame")
    exec(code, vars(module))
    module.convert(lambda: be_slow(port))


def be_slow(port):
    """Wait until a rank that hangs would have turned /health red long ago."""

    def is_long_quiet(answer):
        assert answer["status"] != "stalled", answer
        return answer["ranks"] and answer["ranks"][0]["seconds_since_sign"] > 1.0

    pass_time_until(port, is_long_quiet)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "step", "act"),
    [
        ("on_step_begin", 0, be_slow),  # the first step
        ("on_prediction_step", 3, be_slow),  # the first batch of an evaluation
        ("on_evaluate", 3, be_slow),  # what follows the last one
        ("on_save", 3, be_slow),
        ("on_epoch_begin", 5, be_slow),
        ("on_step_begin", 7, compile_something),
        ("on_train_end", 9, be_slow),
    ],
)
def test_slow_phase_does_not_turn_health_red(tmp_path, port, event, step, act):
    once = [lambda: act(port)]
    slow = AtStep(step, lambda: once and once.pop()(), event)
    samples = plain_data(20)  # five steps an epoch
    data = {"train_dataset": samples, "eval_dataset": samples}
    settings = {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 2}
    make_trainer(tmp_path, callbacks=[slow], metrics_port=port, trainer=data, **settings).train()
    assert not once


@pytest.mark.slow
def test_slow_evaluation_batches_do_not_turn_health_red(tmp_path, port):
    """Batches that take longer than any step, but not much longer than other batches."""
    batches = []

    def slowly():
        began = Clock.now
        batches.append(pass_time_until(port, lambda answer: Clock.now > began + 0.3)["status"])

    slow = TrainerCallback()
    slow.on_prediction_step = lambda *event, **kwargs: slowly()
    settings = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4, "per_device_eval_batch_size": 3}
    make_trainer(tmp_path, callbacks=[slow], metrics_port=port, **settings).train()
    assert batches == ["ok"] * 6


def assert_server_has_ended(folder, port):
    with pytest.raises(urllib.error.URLError):
        ask(port)
    assert not (folder / "_health").exists()
    assert "health" not in {thread.name for thread in threading.enumerate()}


def test_completed_run_ends_the_server(tmp_path, port):
    make_trainer(tmp_path, metrics_port=port, max_steps=1).train()
    assert_server_has_ended(tmp_path, port)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_failed_run_ends_the_server(tmp_path, port, error):
    def fail():
        raise error

    with pytest.raises(error):
        make_trainer(tmp_path, callbacks=[AtStep(2, fail)], metrics_port=port, save_strategy="no").train()
    assert_server_has_ended(tmp_path, port)


def test_next_run_listens_on_the_same_port(tmp_path, port):
    """While loading processes still have a copy of the socket, and beside files of a killed run."""
    settings = {"max_steps": 2, "save_strategy": "no", "eval_strategy": "steps", "eval_steps": 1}
    workers = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    trainer = make_trainer(tmp_path, metrics_port=port, **settings, **workers)
    trainer.train()
    assert trainer._eval_dataloaders
    stale = tmp_path / "_health" / "rank-1.json"
    stale.parent.mkdir()
    stale.write_text("{}")
    trainer.add_callback(
        AtStep(1, lambda: wait_until(port, lambda answer: len(answer["ranks"]) == 1 and not stale.exists()))
    )
    trainer.train()


def test_full_disk_removes_the_record_of_the_rank(tmp_path, port, monkeypatch):
    """A rank that cannot write its record has none, rather than one that grows old."""

    def fill_disk():
        monkeypatch.setattr(health.json, "dumps", lambda *args: (_ for _ in ()).throw(OSError(28, "No space left")))
        while (tmp_path / "_health" / "rank-0.json").exists():
            pass  # for as long as pytest-timeout allows
        monkeypatch.undo()
        wait_until(port, lambda answer: answer["status"] == "ok")

    make_trainer(tmp_path, callbacks=[AtStep(4, fill_disk)], metrics_port=port, save_strategy="no").train()


@pytest.mark.parametrize(
    ("record", "age", "late"),
    [
        ({}, 9, False),
        ({}, 14.1, True),  # a process that no longer writes: C code holds the GIL, or it is stopped
        ({"phase": "saving", "limit": 300}, 250, False),
        ({"phase": "saving", "limit": 300}, 300, True),
        ({"phase": "starting", "limit": None}, 10, False),
        ({"phase": "starting", "limit": None}, 16, True),  # the other ranks have ended the first step
        ({"host": "elsewhere"}, 60, False),  # its records may come late
        ({"host": "elsewhere"}, 75, True),
        ({"step": 6}, 300, False),  # it waits for rank 0
    ],
)
def test_rank_is_late_when_its_record_grows_old(tmp_path, monkeypatch, record, age, late):
    now = start = 100.0
    monkeypatch.setattr(health, "time", types.SimpleNamespace(monotonic=lambda: now))
    progress = health.Heartbeat()
    progress.record_event("on_step_end")
    usual = {"host": socket.gethostname(), "pid": 1, "thread": 1, "phase": "training", "signs": 3, "limit": 15}
    records = [
        {**usual, "rank": 0, "step": 5, "seconds_since_sign": 0, "signs": 4, "stack": ""},
        {**usual, "rank": 1, "step": 5, "seconds_since_sign": 1, "stack": "Thread 0x0000000000000001", **record},
    ]
    paths = [tmp_path / f"rank-{rank}.json" for rank in (0, 1)]
    reporter = health._Reporter(progress, TrainerState, lambda: None, paths)
    for then in (start, start + age, start + age + 4):
        now = then
        paths[0].write_text(json.dumps({**records[0], "beat": then}))
        paths[1].write_text(json.dumps(records[1]))
        reporter.read_records()
        # A record that seems old may be about to be renewed.
        assert then == start + age + 4 or not reporter.report()["late_ranks"]
    # There is no file with the stack, which may be half written when it is read.
    assert [rank["stack"] for rank in reporter.report()["late_ranks"]] == [records[1]["stack"]] * late
    paths[1].write_text(json.dumps({**records[1], "signs": 5}))  # it goes on: the other seems behind, for a moment
    reporter.read_records()
    assert not reporter.report()["late_ranks"]


def test_hub_uploads_leave_the_health_records_out():
    names = [f"{health.HEALTH_FOLDER}/rank-0.json", "config.json"]
    assert list(filter_repo_objects(names, ignore_patterns=list(IGNORE_PATTERNS))) == ["config.json"]
