"""`metrics_port` serves /health and /metrics during a run; here in one process with short limits."""

import functools
import json
import socket
import sys
import threading
import time
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
from tests.support.tiny import plain_data


class Clock:
    """A millisecond passes whenever the training thread asks it; none does for the threads that only look."""

    now = 0.0

    @classmethod
    def monotonic(cls):
        cls.now += 0.001 * (threading.current_thread() is threading.main_thread())
        return cls.now


@pytest.fixture
def port(monkeypatch):
    """A free port, and seconds that are right for steps of some milliseconds."""
    for name, seconds in {"_INTERVAL": 0.02, "_SHORTEST_LIMIT": 0.5, "_STACK_AFTER": 0.1, "time": Clock}.items():
        monkeypatch.setattr(health, name, seconds)
    return free_port()


def pass_time_until(port, holds):
    """Let the seconds between two records pass with each question."""

    def holds_now(said):
        Clock.now += health._INTERVAL
        return holds(said)

    return wait_until(port, holds_now)


class Asks(TrainerCallback):
    """Asks at some events; `said` and `metrics` have the last answers."""

    def __init__(self, port):
        self.port, self.said, self.metrics = port, {}, {}
        for name in ("on_train_begin", "on_step_begin", "on_prediction_step", "on_save", "on_train_end"):
            setattr(self, name, functools.partial(self.ask, name))

    def ask(self, name, args, state, control, **kwargs):
        phases = {"on_train_begin": "starting", "on_step_begin": "training", "on_prediction_step": "evaluation"}
        phase = {**phases, "on_save": "saving", "on_train_end": "ended"}[name]
        if name == "on_step_begin" and state.global_step == 0:
            return
        record = {"rank": 0, "step": state.global_step, "phase": phase}
        self.said[name] = wait_until(
            self.port, lambda said: said["ranks"] and record.items() <= said["ranks"][0].items()
        )
        self.metrics[name] = ask(self.port, "metrics")[1]


def value_of(metrics, name):
    (line,) = [line for line in metrics.splitlines() if line.startswith(f"{name} ")]
    return float(line.split()[1])


def test_health_and_metrics_follow_a_run(tmp_path, port):
    asks = Asks(port)
    trainer = make_trainer(tmp_path, callbacks=[asks], metrics_port=port, eval_strategy="steps", eval_steps=3)
    trainer.train()
    assert asks.said["on_train_begin"]["status"] == asks.said["on_train_begin"]["phase"] == "starting"
    assert asks.said["on_train_begin"]["last_checkpoint"] is None
    during = asks.said["on_step_begin"]
    assert (during["status"], during["phase"], during["step"], during["max_steps"]) == ("ok", "training", 8, 9)
    assert during["last_checkpoint"] == str(tmp_path / "checkpoint-6")
    assert during["seconds_since_step"] < 60
    assert len(during["ranks"]) == 1
    assert during["late_ranks"] == []
    assert asks.said["on_prediction_step"]["phase"] == "evaluation"
    assert asks.said["on_save"]["phase"] == "saving"
    assert asks.said["on_train_end"]["status"] == "ended"
    metrics = asks.metrics["on_step_begin"]
    assert value_of(metrics, "hftrainer_step") == value_of(metrics, "hftrainer_steps_total") == 8
    assert value_of(metrics, "hftrainer_max_steps") == 9
    assert value_of(metrics, "hftrainer_checkpoint_step") == 6
    assert value_of(metrics, "hftrainer_ranks_late") == 0
    assert value_of(metrics, "hftrainer_epoch") == pytest.approx(0.8)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert value_of(metrics, "hftrainer_loss") == losses[1]
    assert value_of(metrics, 'hftrainer_log{name="eval_loss"}') > 0  # the last line is that of the evaluation
    assert value_of(metrics, 'hftrainer_phase{phase="training"}') == 1
    assert value_of(metrics, 'hftrainer_phase{phase="saving"}') == 0
    with pytest.raises(urllib.error.URLError):
        ask(port)
    assert not (tmp_path / "_health").exists()
    assert "health" not in {thread.name for thread in threading.enumerate()}


def test_no_server_without_metrics_port(tmp_path):
    seen = []

    def look():
        seen.extend(thread for thread in threading.enumerate() if thread.name == "health")

    trainer = make_trainer(tmp_path, callbacks=[AtStep(2, look)], max_steps=3, save_strategy="no")
    trainer.train()
    assert seen == []
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


def hang_until_it_is_red(port, said):
    said.append(pass_time_until(port, lambda said: said["status"] == "stalled" and said["late_ranks"][0]["stack"]))


def test_hanging_thread_turns_health_red_with_its_stack(tmp_path, port):
    """It hangs until /health is red, which then turns green again."""
    said, metrics = [], []

    def hang():
        hang_until_it_is_red(port, said)
        metrics.append(ask(port, "metrics")[1])

    recovers = AtStep(7, lambda: said.append(wait_until(port, lambda said: said["status"] == "ok")))
    trainer = make_trainer(tmp_path, callbacks=[AtStep(5, hang), recovers], metrics_port=port, save_strategy="no")
    trainer.train()
    red, green = said
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

    def is_long_quiet(said):
        assert said["status"] != "stalled", said
        return said["ranks"] and said["ranks"][0]["seconds_since_sign"] > 1.0

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
        batches.append(pass_time_until(port, lambda said: Clock.now > began + 0.3)["status"])

    slow = TrainerCallback()
    slow.on_prediction_step = lambda *event, **kwargs: slowly()
    settings = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4, "per_device_eval_batch_size": 3}
    make_trainer(tmp_path, callbacks=[slow], metrics_port=port, **settings).train()
    assert batches == ["ok"] * 6


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_failed_run_ends_the_server(tmp_path, port, error):
    def fail():
        raise error

    with pytest.raises(error):
        make_trainer(tmp_path, callbacks=[AtStep(2, fail)], metrics_port=port, save_strategy="no").train()
    with pytest.raises(urllib.error.URLError):
        ask(port)
    assert not (tmp_path / "_health").exists()


def test_next_run_listens_on_the_same_port(tmp_path, port):
    """While loading processes still have a copy of the socket, and beside files of a killed run."""
    trainer = make_trainer(
        tmp_path,
        metrics_port=port,
        max_steps=2,
        save_strategy="no",
        dataloader_num_workers=1,
        dataloader_persistent_workers=True,
        eval_strategy="steps",
        eval_steps=1,
    )
    trainer.train()
    assert trainer._eval_dataloaders
    stale = tmp_path / "_health" / "rank-1.json"
    stale.parent.mkdir()
    stale.write_text("{}")
    trainer.add_callback(
        AtStep(1, lambda: wait_until(port, lambda said: len(said["ranks"]) == 1 and not stale.exists()))
    )
    trainer.train()


def test_full_disk_removes_the_record_of_the_rank(tmp_path, port, monkeypatch):
    """A rank that cannot write its record has none, rather than one that grows old."""

    def fill_disk():
        monkeypatch.setattr(health.json, "dumps", lambda *args: (_ for _ in ()).throw(OSError(28, "No space left")))
        deadline = time.monotonic() + 60
        while (tmp_path / "_health" / "rank-0.json").exists():
            assert time.monotonic() < deadline
        monkeypatch.undo()
        wait_until(port, lambda said: said["status"] == "ok")

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
        {**usual, "rank": 0, "step": 5, "seconds_since_sign": 0, "signs": 4},
        {**usual, "rank": 1, "step": 5, "seconds_since_sign": 1, **record},
    ]
    paths = [tmp_path / f"rank-{rank}.json" for rank in (0, 1)]
    reporter = health._Reporter(progress, TrainerState, lambda: None, paths)
    for then in (start, start + age, start + age + 4):
        now = then
        for path, each in zip(paths, records, strict=True):
            path.write_text(json.dumps({**each, "beat": then} if each["rank"] == 0 else each))
        reporter.read_records()
        # A record that seems old may be about to be renewed.
        assert then == start + age + 4 or not reporter.report()["late_ranks"]
    assert [each["rank"] for each in reporter.report()["late_ranks"]] == [1] * late
    paths[1].write_text(json.dumps({**records[1], "signs": 5}))  # it goes on: the other seems behind, for a moment
    reporter.read_records()
    assert not reporter.report()["late_ranks"]


def test_hub_uploads_leave_the_health_records_out():
    names = [f"{health.HEALTH_FOLDER}/rank-0.json", "config.json"]
    assert list(filter_repo_objects(names, ignore_patterns=list(IGNORE_PATTERNS))) == ["config.json"]
