"""The schedules: every learning rate is that of transformers, by formula, and in a run of each."""

import copy
import importlib
import inspect
import itertools
import sys

import pytest

import hftrainer.optimization
from hftrainer.errors import MissingPackage
from hftrainer.optimizers.schedules import SCHEDULES
from hftrainer.trainer_utils import SchedulerType
from tests.support.parity import LIBRARIES, assert_same, build, compare, train

theirs = importlib.import_module("transformers.optimization")
STEPS = 16
#: Schedules that depend on evaluations.
BY_METRIC = {name: {"eval_strategy": "steps", "eval_steps": 1} for name in ("reduce_lr_on_plateau", "greedy")}
KWARGS = {
    "cosine": [{}, {"num_cycles": 1.5}],
    "cosine_with_restarts": [{}, {"num_cycles": 3}, {"num_cycles": "2"}],
    "polynomial": [{}, {"lr_end": 1e-3, "power": 2.0}],
    "inverse_sqrt": [{}, {"timescale": 5}],
    "cosine_with_min_lr": [{"min_lr": 1e-3}, {"min_lr_rate": 0.2, "num_cycles": 1.0}],
    "cosine_warmup_with_min_lr": [{"min_lr": 1e-3}, {"min_lr_rate": 0.2, "warmup_lr_rate": 0.3}],
    "warmup_stable_decay": [
        {"num_decay_steps": 7},
        {"num_decay_steps": 5, "num_stable_steps": 3, "warmup_type": "cosine", "decay_type": "linear"},
        {"num_decay_steps": 5, "warmup_type": "1-sqrt", "decay_type": "1-sqrt", "min_lr_ratio": 0.1},
    ],
    "reduce_lr_on_plateau": [{}, {"factor": 0.5, "patience": 0, "cooldown": 1}],
    "greedy": [
        {"patience": 0, "factor": 0.5, "min_lr": 1e-4},
        {"patience": 0, "smooth": True, "window_size": 2, "cooldown": 1, "warmup": 1, "min_lr": 1e-5},
        {"patience": 0, "factor": 0.1, "min_lr": 5e-3, "reset_start": 1, "threshold": 0.9, "threshold_mode": "rel"},
    ],
}
NAMES = [kind.value for kind in SchedulerType]
CASES = [(name, *case) for name in NAMES for case in itertools.product((0, 4, 0.3), KWARGS.get(name, [{}]))]


def settings_of(name, warmup, kwargs):
    settings = {"lr_scheduler_type": name, "lr_scheduler_kwargs": kwargs, "warmup_steps": warmup, "max_steps": STEPS}
    return {**settings, **BY_METRIC.get(name, {})}


def step_and_collect(schedule, optimizer, name, first, last):
    found = [[group["lr"] for group in optimizer.param_groups]]
    for step in range(first, last):
        optimizer.step()
        # The metric gets better, then worse, then stays: each of the two schedules reacts.
        schedule.step(*([abs(step - 5) // 2 + 0.5 * (step % 2)] if name in BY_METRIC else []))
        found.append([group["lr"] for group in optimizer.param_groups])
    return found


@pytest.mark.parametrize(("name", "warmup", "kwargs"), CASES)
def test_every_learning_rate_is_that_of_transformers(tmp_path, name, warmup, kwargs):
    def make_schedule(library):
        trainer, _ = build(library, "plain", tmp_path, **settings_of(name, warmup, kwargs))
        trainer.create_optimizer_and_scheduler(STEPS)
        return trainer.lr_scheduler, trainer.optimizer

    whole, states = {}, {}
    for library in LIBRARIES:
        schedule, optimizer = make_schedule(library)
        found = step_and_collect(schedule, optimizer, name, 0, STEPS // 2)
        states[library] = copy.deepcopy((schedule.state_dict(), optimizer.state_dict()))
        whole[library] = found + step_and_collect(schedule, optimizer, name, STEPS // 2, STEPS)[1:]
    assert whole["hftrainer"] == whole["transformers"]
    assert len(whole["hftrainer"]) == STEPS + 1
    for reader, writer in (LIBRARIES, LIBRARIES[::-1]):
        schedule, optimizer = make_schedule(reader)
        schedule.load_state_dict(states[writer][0])
        optimizer.load_state_dict(states[writer][1])
        assert step_and_collect(schedule, optimizer, name, STEPS // 2, STEPS) == whole[writer][STEPS // 2 :]


@pytest.mark.parametrize("name", NAMES)
def test_run_with_each_schedule_resumes_from_either_library(tmp_path, name):
    """With the last of its keyword sets in KWARGS."""
    settings = settings_of(name, 4, KWARGS.get(name, [{}])[-1])
    settings |= {"logging_steps": 1, "save_strategy": "steps", "save_steps": STEPS // 2}
    compare(tmp_path, "plain", **settings)
    ours, others = (
        train(reader, "plain", tmp_path / reader, str(tmp_path / writer / "checkpoint-8"), **settings)
        for reader, writer in (LIBRARIES[::-1], LIBRARIES)
    )
    assert_same(ours, others)


def test_schedules_take_the_keywords_of_transformers():
    for kind, function in SCHEDULES.items():
        parameters = inspect.signature(theirs.TYPE_TO_SCHEDULER_FUNCTION[kind.value]).parameters
        assert inspect.signature(function).parameters.keys() == parameters.keys(), kind


@pytest.mark.parametrize("name", ["Adafactor", "AdafactorSchedule", "get_adafactor_schedule", "GreedyLR"])
def test_names_of_transformers_are_imported_or_the_package_asked_for(monkeypatch, name):
    assert getattr(hftrainer.optimization, name) is getattr(theirs, name)
    monkeypatch.setitem(sys.modules, "transformers.optimization", None)
    with pytest.raises(MissingPackage, match=rf"hftrainer.optimization.{name} needs {name} of transformers"):
        getattr(hftrainer.optimization, name)
