"""`hyperparameter_search(backend="wandb")` with W&B's client and agent, and a server of sweeps on this machine."""

import importlib
import itertools
import json
import math
from pathlib import Path

import pytest
import yaml
from pytest_httpserver import HTTPServer
from werkzeug import Response

from hftrainer.errors import InvalidArgument, SearchFailed
from hftrainer.trainer_utils import BestRun, default_hp_space_wandb
from tests.support.known_differences import OWN_FILES
from tests.support.parity import LIBRARIES
from tests.support.searches import OneProcessBackend, make_search_trainer, return_none
from tests.support.tracking import wandb_items, wandb_records

wandb = pytest.importorskip("wandb")
RATES = [1e-3, 1e-4, 1e-2]


class Sweeps:
    """What a W&B server holds: grids. Each method answers the query of its name as W&B does.

    Attributes:
        configurations: of the sweeps, by id.
    """

    def __init__(self):
        self.configurations, self._left = {}, {}

    def answer(self, request):
        operation = request.json.get("operationName") or request.json["query"].split("(")[0].split("{")[0].split()[-1]
        data = getattr(self, f"_{operation}")(**(request.json.get("variables") or {}))
        return Response(json.dumps({"data": data}), content_type="application/json")

    def _Viewer(self):
        return {"viewer": {"id": "1", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}}

    def _UpsertSweep(self, config, **variables):
        sweep = f"sweep{len(self.configurations)}"
        self.configurations[sweep] = configuration = yaml.safe_load(config)
        parameters = configuration["parameters"]
        runs = itertools.product(*(each["values"] for each in parameters.values()))
        commands = (
            {
                "type": "run",
                "run_id": f"{sweep}-{number}",
                "args": {name: {"value": value} for name, value in zip(parameters, run, strict=True)},
            }
            for number, run in enumerate(runs)
        )
        self._left[sweep] = itertools.chain(commands, itertools.repeat({"type": "exit"}))
        project = {"id": "1", "name": "tests", "entity": {"id": "1", "name": "me"}}
        return {"upsertSweep": {"sweep": {"name": sweep, "project": project}, "configValidationWarnings": []}}

    def _CreateAgent(self, sweep, **variables):
        return {"createAgent": {"agent": {"id": f"agent of {sweep}"}}}

    def _Heartbeat(self, id, runState, **variables):
        commands = [] if "true" in runState else [next(self._left[id.removeprefix("agent of ")])]
        return {"agentHeartbeat": {"agent": {"id": id}, "commands": json.dumps(commands)}}


@pytest.fixture
def sweeps(tmp_path, monkeypatch):
    """What the server holds. Runs are offline: they ask it for what to train, and leave their lines in files."""
    from wandb.agents.pyagent import Agent

    monkeypatch.setattr(Agent, "HEARTBEAT_SLEEP_SECONDS", 0.05)
    held = Sweeps()
    with HTTPServer() as server:
        server.expect_request("/graphql", method="POST").respond_with_handler(held.answer)
        address = server.url_for("").rstrip("/")
        values = {"BASE_URL": address, "API_KEY": "0" * 40, "MODE": "offline", "DIR": str(tmp_path), "SILENT": "true"}
        for name, value in {**values, "ENTITY": "me", "PROJECT": "tests"}.items():
            monkeypatch.setenv(f"WANDB_{name}", value)
        yield held
        wandb.teardown()
        server.check()  # an answer that failed fails the test


def grid(**values):
    parameters = {name: {"values": choices} for name, choices in values.items()}
    space = {"method": "grid", "metric": {}, "parameters": parameters}
    return {"hp_space": lambda _: space, "n_trials": math.prod(map(len, values.values()))}


def search(trainer, n_trials=1, **keywords):
    defaults = {"backend": "wandb", **grid(learning_rate=RATES), "n_trials": n_trials}
    return trainer.hyperparameter_search(**{**defaults, **keywords})


def files(folder):
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    return sorted(name.replace("sweep1", "sweep0") for name in names)


def test_search_and_its_files_are_those_of_transformers(tmp_path, sweeps):
    ours, theirs = (
        search(make_search_trainer(tmp_path / name, library=name, save_strategy="steps", save_steps=2), 3, name="mine")
        for name in reversed(LIBRARIES)
    )
    assert ours.hyperparameters == {"learning_rate": 1e-4}
    assert theirs.hyperparameters == {**ours.hyperparameters, "assignments": {}, "metric": "eval/loss"}
    assert ours.objective == theirs.objective
    assert (ours.run_id, ours.run_summary) == ("sweep0-1", "sweep0")
    assert (theirs.run_id, theirs.run_summary) == ("sweep1-1", "sweep1")
    assert sweeps.configurations["sweep0"] == sweeps.configurations["sweep1"]
    assert sweeps.configurations["sweep0"]["metric"] == {"name": "eval/loss", "goal": "minimize"}
    names = files(tmp_path / "transformers")
    assert [name for name in files(tmp_path / "hftrainer") if Path(name).name not in OWN_FILES] == names
    assert {name.split("/")[0] for name in names} == {f"run-sweep0-{number}" for number in range(3)}


def test_search_joins_an_existing_sweep(tmp_path, sweeps):
    trainer = make_search_trainer(tmp_path)
    first = search(trainer)
    second = search(trainer, 2, sweep_id=first.run_summary)
    assert first == BestRun("sweep0-0", first.objective, {"learning_rate": 1e-3}, "sweep0")
    assert second.run_id == "sweep0-1"  # of those that this search has trained
    assert list(sweeps.configurations) == ["sweep0"]
    assert trainer.loggers == []


def test_objective_is_logged_and_compared_by_the_sweep(tmp_path, sweeps):
    saved = {"save_strategy": "steps", "save_steps": 2}
    trainer = make_search_trainer(tmp_path / "out", eval_strategy="no", report_to="wandb", **saved)
    best = search(
        trainer,
        **grid(learning_rate=[1e-2], seed=[7]),
        compute_objective=lambda metrics: -metrics["eval_loss"],
        direction="maximize",
        hp_name=lambda trial: f"rate-{trial['learning_rate']}",
        metric="objective",
    )
    assert sweeps.configurations["sweep0"]["metric"] == {"name": "objective", "goal": "maximize"}
    assert trainer.state.trial_params == best.hyperparameters == {"learning_rate": 1e-2, "seed": 7}
    assert (tmp_path / "out" / "rate-0.01" / "checkpoint-2").is_dir()
    lines = [wandb_items(record.history.item) for record in wandb_records(tmp_path) if record.HasField("history")]
    assert [line["objective"] for line in lines if "objective" in line] == [best.objective]
    assert any(line.get("eval/loss") == -best.objective for line in lines)


def test_metric_that_is_not_logged_warns(tmp_path, sweeps, caplog):
    search(make_search_trainer(tmp_path), metric="eval/accuracy")
    assert "metric='eval/accuracy' is not among the logged metrics (eval/loss, " in caplog.text


def test_a_wrong_objective_fails_every_run(tmp_path, sweeps):
    wrong = r"sweep sweep0: No trial was completed \(2 failed\).*\n- InvalidArgument: compute_objective returned None"
    with pytest.raises(SearchFailed, match=wrong):
        search(make_search_trainer(tmp_path), 2, compute_objective=return_none)


REFUSED = {
    "no space": (lambda _: {"learning_rate": 1}, "must return the configuration"),
    "a space for Optuna": (
        lambda trial: {"seed": trial.suggest_int("seed", 1, 2)},
        "hp_space uses its trial as with Optuna .*, but backend='wandb' calls it with None",
    ),
}


class TestWandb(OneProcessBackend):
    name, keyword = "wandb", "sweep_id"
    several = "start the script once per device, with the sweep_id"
    grid = staticmethod(grid)

    def failures(self, trainer, best, caplog):
        assert "2 runs of the sweep sweep0 failed:\n- " in caplog.text
        return caplog.text

    @pytest.fixture(autouse=True)
    def _sweeps(self, sweeps):
        self.sweeps = sweeps

    def assert_refused(self, *args, **settings):
        super().assert_refused(*args, **settings)
        assert not self.sweeps.configurations

    @pytest.mark.parametrize("case", REFUSED)
    def test_space_that_is_not_for_wandb_is_refused(self, tmp_path, case):
        space, words = REFUSED[case]
        self.assert_refused(tmp_path, {"hp_space": space}, InvalidArgument, words)


def test_default_space_is_that_of_transformers():
    theirs = importlib.import_module("transformers.trainer_utils").default_hp_space_wandb(None)
    assert default_hp_space_wandb(None) == {name: value for name, value in theirs.items() if name != "metric"}
