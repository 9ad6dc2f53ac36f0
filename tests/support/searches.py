"""What each backend of `hyperparameter_search` does: a suite that the tests of each inherit, and small searches."""

import importlib
import math
from typing import Any

import pytest
import torch

from hftrainer import TrainerCallback
from hftrainer.errors import InvalidArgument, SearchFailed, UnknownArgument, UnsupportedArgument
from tests.support.small_models import Plain, make_plain, plain_data


def make_search_trainer(folder, trainer=(), model_init=make_plain, library="hftrainer", **settings: Any) -> Any:
    package = importlib.import_module(library)
    defaults = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "no", "report_to": "none"}
    args = package.TrainingArguments(str(folder), disable_tqdm=True, use_cpu=True, **{**defaults, **settings})
    trainer_kwargs = {"train_dataset": plain_data(), "eval_dataset": plain_data(8), **dict(trainer)}
    return package.Trainer(model_init=model_init, args=args, **trainer_kwargs)


def plain_of_width(width: int) -> torch.nn.Module:
    model = Plain()
    model.layers = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Linear(width, 3))
    return model


class Failing(TrainerCallback):
    """Fails at a learning rate of 0.5, as a GPU does whose memory is full, after one evaluation."""

    def on_step_end(self, args, state, control, **kwargs):
        if args.learning_rate == 0.5 and state.global_step == 2:
            raise torch.OutOfMemoryError("CUDA out of memory: as asked")


def nan_above_5(metrics):
    return math.nan if metrics["eval_loss"] > 5 else metrics["eval_loss"]


def return_nan(metrics):
    return math.nan


def return_none(metrics):
    """No objective."""


#: Case → keywords of the search, or a function of the backend that makes them; the error and its words.
REFUSED = {
    "direction": ({"direction": "down"}, InvalidArgument, "direction='down': use 'minimize' or 'maximize'"),
    "no space": ({"hp_space": lambda trial: None}, InvalidArgument, "hp_space returned None"),
    "a misspelled argument": (
        lambda backend: backend.grid(learning_rte=[1.0]),
        UnknownArgument,
        "TrainingArguments has no argument 'learning_rte'; did you mean 'learning_rate'",
    ),
    "read once": (lambda backend: backend.grid(report_to=["csv"]), InvalidArgument, "report_to: used when"),
    "a misspelled keyword": (
        lambda backend: {backend.keyword[:-1]: 1},
        UnknownArgument,
        r"has no argument '(\w+)'; did you mean '\1.'",
    ),
    "a keyword of no library": ({"zebra": 1}, UnknownArgument, r"has no argument 'zebra'($|\n)"),
}


class SearchBackend:
    """The suite; `keyword` is one of the backend's own."""

    name: str
    keyword: str

    def grid(self, **values):
        """The keywords of a search that tries each value."""
        raise NotImplementedError

    def keywords(self, trainer):
        return {}

    def search(self, trainer, **keywords):
        defaults = {"backend": self.name, **self.grid(learning_rate=[1e-3]), **self.keywords(trainer)}
        return trainer.hyperparameter_search(**{**defaults, **keywords})

    def assert_refused(self, folder, keywords, error, words, **settings):
        """A search is refused, and the Trainer is as it was."""
        trainer = make_search_trainer(folder, learning_rate=0.5, **settings)
        with pytest.raises(error, match=words):
            self.search(trainer, **(keywords(self) if callable(keywords) else keywords))
        assert trainer.hp_search_backend is None and trainer.args.learning_rate == 0.5

    @pytest.mark.parametrize("case", REFUSED)
    def test_wrong_search_arguments_are_refused(self, tmp_path, case):
        self.assert_refused(tmp_path, *REFUSED[case])

    def test_failed_trials_cannot_be_the_best(self, tmp_path, caplog):
        """The best objective is of a trial that failed afterwards, and the next is NaN."""
        trainer = make_search_trainer(tmp_path / "out", {"callbacks": [Failing]})
        arguments, rates = trainer.args.to_dict(), self.grid(learning_rate=[0.5, 1e3, 1e-3])
        best = self.search(trainer, compute_objective=nan_above_5, direction="maximize", **rates)
        assert best.hyperparameters == {"learning_rate": 1e-3}
        assert trainer.args.to_dict() == arguments and trainer.hp_search_backend is None
        said = self.failures(trainer, best, caplog)
        assert "OutOfMemoryError: CUDA out of memory: as asked" in said and "compute_objective returned nan" in said

    def failures(self, trainer, best, caplog):
        """What is said of the trials that failed."""
        raise NotImplementedError

    def test_search_without_a_completed_trial_fails(self, tmp_path):
        trainer = make_search_trainer(tmp_path / "out")
        words = r"No trial was completed \(2 \w+\).*\n- compute_objective returned nan"
        with pytest.raises(SearchFailed, match=words):
            self.search(trainer, compute_objective=return_nan, **self.grid(learning_rate=[1e-3, 1e-2]))


class OneProcessBackend(SearchBackend):
    """Of backends that train a trial in one process, for one objective, and say so where there are `several`."""

    several: str

    def test_several_objectives_are_refused(self, tmp_path):
        words = "one objective; use backend='optuna'"
        self.assert_refused(tmp_path, {"direction": ["minimize", "maximize"]}, UnsupportedArgument, words)

    def test_several_processes_are_refused(self, tmp_path, monkeypatch):
        trainer = make_search_trainer(tmp_path)
        monkeypatch.setattr(type(trainer.args), "world_size", 2)
        with pytest.raises(UnsupportedArgument, match=self.several):
            self.search(trainer)
