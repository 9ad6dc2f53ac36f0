"""`hyperparameter_search(backend="wandb")` with W&B's client and agent, and a server of sweeps on this machine."""

import importlib
import math
from pathlib import Path

import pytest

from hftrainer.errors import InvalidArgument, SearchFailed, UnknownArgument, UnsupportedArgument
from hftrainer.trainer_utils import BestRun, default_hp_space_wandb
from tests.support.differences import OWN_FILES
from tests.support.parity import build
from tests.support.tiny import make_bert
from tests.support.tracking import wandb_items, wandb_records
from tests.support.wandb_server import serving

wandb = pytest.importorskip("wandb")
RATES = [1e-3, 1e-2, 1e-4]


@pytest.fixture
def sweeps(tmp_path, monkeypatch):
    """What the server holds. Runs are offline: they ask it for what to train, and leave their lines in files."""
    from wandb.agents.pyagent import Agent

    monkeypatch.setattr(Agent, "HEARTBEAT_SLEEP_SECONDS", 0.05)
    with serving() as (address, held):
        values = {"BASE_URL": address, "API_KEY": "0" * 40, "MODE": "offline", "DIR": str(tmp_path), "SILENT": "true"}
        for name, value in {**values, "ENTITY": "me", "PROJECT": "tests"}.items():
            monkeypatch.setenv(f"WANDB_{name}", value)
        yield held
        wandb.teardown()


def make_trainer(folder, library="hftrainer", model_init=make_bert, **settings):
    saved = {"save_strategy": "steps", "save_steps": 2}
    defaults = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "learning_rate": 5e-5, **saved}
    return build(library, "bert", folder, trainer={"model_init": model_init}, **{**defaults, **settings})[0]


def space(**parameters):
    values = {name: {"values": value} for name, value in {"learning_rate": RATES, **parameters}.items()}
    return lambda _: {"method": "grid", "metric": {}, "parameters": values}


def files(folder):
    """The files of the runs of a sweep, whatever it is called."""
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    return sorted(name.replace("sweep1", "sweep0") for name in names)


def test_as_transformers(tmp_path, sweeps):
    found = {}
    for library in ("hftrainer", "transformers"):
        trainer = make_trainer(tmp_path / library, library)
        found[library] = trainer.hyperparameter_search(space(), n_trials=3, backend="wandb", name="mine")
    ours, theirs = found["hftrainer"], found["transformers"]
    assert ours.hyperparameters == {"learning_rate": 1e-2}
    assert theirs.hyperparameters == {**ours.hyperparameters, "assignments": {}, "metric": "eval/loss"}
    assert ours.objective == theirs.objective
    assert (ours.run_id, ours.run_summary) == ("sweep0-1", "sweep0")
    assert (theirs.run_id, theirs.run_summary) == ("sweep1-1", "sweep1")
    assert sweeps.configurations["sweep0"] == sweeps.configurations["sweep1"]
    assert sweeps.configurations["sweep0"]["metric"] == {"name": "eval/loss", "goal": "minimize"}
    names = files(tmp_path / "transformers")
    assert [name for name in files(tmp_path / "hftrainer") if Path(name).name not in OWN_FILES] == names
    assert {name.split("/")[0] for name in names} == {f"run-sweep0-{number}" for number in range(3)}


def test_takes_part_in_a_sweep(tmp_path, sweeps):
    trainer = make_trainer(tmp_path)
    first = trainer.hyperparameter_search(space(), n_trials=1, backend="wandb")
    second = trainer.hyperparameter_search(space(), n_trials=2, backend="wandb", sweep_id=first.run_summary)
    assert first == BestRun("sweep0-0", first.objective, {"learning_rate": 1e-3}, "sweep0")
    assert second.run_id == "sweep0-1"  # of those that this search has trained
    assert list(sweeps.configurations) == ["sweep0"]
    assert trainer.args.learning_rate == 5e-5  # as before
    assert trainer.loggers == []


def test_the_objective_is_what_runs_are_compared_by(tmp_path, sweeps):
    trainer = make_trainer(tmp_path / "out", eval_strategy="no", report_to="wandb")
    best = trainer.hyperparameter_search(
        space(learning_rate=[1e-2], seed=[7]),
        compute_objective=lambda metrics: -metrics["eval_loss"],
        n_trials=1,
        direction="maximize",
        backend="wandb",
        hp_name=lambda trial: f"rate-{trial['learning_rate']}",
        metric="objective",
    )
    assert sweeps.configurations["sweep0"]["metric"] == {"name": "objective", "goal": "maximize"}
    assert trainer.state.trial_params == best.hyperparameters == {"learning_rate": 1e-2, "seed": 7}
    assert (tmp_path / "out" / "rate-0.01" / "checkpoint-2").is_dir()
    lines = [wandb_items(record.history.item) for record in wandb_records(tmp_path) if record.HasField("history")]
    logged = [line for line in lines if "objective" in line]
    assert [line["objective"] for line in logged] == [best.objective]
    assert any(line.get("eval/loss") == -best.objective for line in lines)


def test_runs_that_fail_are_left_out(tmp_path, sweeps, caplog):
    def model_init(trial):
        if trial is not None and trial["learning_rate"] == RATES[0]:
            raise RuntimeError("no memory")
        return make_bert()

    def objective(metrics):
        return math.nan if trainer.args.learning_rate == RATES[1] else metrics["eval_loss"]

    trainer = make_trainer(tmp_path, model_init=model_init)
    best = trainer.hyperparameter_search(
        space(), compute_objective=objective, n_trials=3, backend="wandb", metric="eval/accuracy"
    )
    assert best.hyperparameters == {"learning_rate": RATES[2]}
    assert "2 runs of the sweep sweep0 failed:\n- RuntimeError: no memory\n- compute_objective" in caplog.text
    assert "metric='eval/accuracy' is not among the logged metrics (eval/loss, " in caplog.text


def test_no_run_is_completed(tmp_path, sweeps):
    trainer = make_trainer(tmp_path)
    wrong = r"sweep sweep0: No trial was completed \(2 failed\).*\n- InvalidArgument: compute_objective returned None"
    with pytest.raises(SearchFailed, match=wrong):
        trainer.hyperparameter_search(space(), compute_objective=lambda metrics: None, n_trials=2, backend="wandb")


WITH_OPTUNA = {"hp_space": lambda trial: {"seed": trial.suggest_int("seed", 1, 2)}}
REFUSED = [
    ({"direction": ["minimize", "maximize"]}, UnsupportedArgument, "a sweep has one objective; use backend='optuna'"),
    ({"direction": "down"}, InvalidArgument, "direction='down': give 'minimize' or 'maximize'"),
    ({"sweepid": "x"}, UnknownArgument, "has no argument 'sweepid'; did you mean 'sweep_id'"),
    ({"zebra": "x"}, UnknownArgument, "hyperparameter_search with W&B has no argument 'zebra'$"),
    ({"hp_space": lambda _: {"learning_rate": 1}}, InvalidArgument, "must return the configuration"),
    (WITH_OPTUNA, InvalidArgument, "uses its trial as with Optuna .*, but backend='wandb' calls it with None"),
    ({"hp_space": space(learning_rat=[1])}, UnknownArgument, "did you mean 'learning_rate'"),
    ({"hp_space": space(report_to=["none"])}, InvalidArgument, "report_to: read only when"),
]


@pytest.mark.parametrize(("given", "kind", "message"), REFUSED)
def test_refused_before_there_is_a_sweep(tmp_path, sweeps, given, kind, message):
    with pytest.raises(kind, match=message):
        make_trainer(tmp_path).hyperparameter_search(**{"hp_space": space(), **given}, backend="wandb")
    assert not sweeps.configurations


def test_refused_in_several_processes(tmp_path, sweeps, monkeypatch):
    trainer = make_trainer(tmp_path)
    monkeypatch.setattr(type(trainer.args), "world_size", 2)
    with pytest.raises(UnsupportedArgument, match="start the script once for each device, with the sweep_id"):
        trainer.hyperparameter_search(space(), backend="wandb")


def test_default_space():
    theirs = importlib.import_module("transformers.trainer_utils").default_hp_space_wandb(None)
    assert default_hp_space_wandb(None) == {name: value for name, value in theirs.items() if name != "metric"}
