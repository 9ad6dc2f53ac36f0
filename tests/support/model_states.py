"""What every strategy does with states: a suite that the tests of each strategy inherit.

A subclass names the implementation, and how a Trainer comes to it. Strategies of several processes run the suite in two
ranks, the same tests in the same order: `assert_passed_in_ranks` does so.
"""

import collections
import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hftrainer import Trainer, TrainingArguments
from hftrainer.checkpointing.writing.folder import CheckpointFolder
from hftrainer.strategies.strategy import Strategy
from tests.support import processes
from tests.support.processes import ROOT
from tests.support.small_models import make_plain, plain_data

#: The file of a plain module's weights.
FULL = "pytorch_model.bin"
#: Where the processes of one run meet: each has a tmp_path of its own.
SHARED = "SHARED_FOLDER"


def run_file(path: Path) -> collections.Counter[str]:
    """Run a file of tests in this process, of which none fails; returns the outcomes."""
    found: collections.Counter[str] = collections.Counter()

    class Outcomes:
        def pytest_runtest_logreport(self, report):
            if report.when == "call" or report.outcome != "passed":
                found[report.outcome] += 1

    words = ["-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), str(path)]
    assert pytest.main(words, plugins=[Outcomes()]) == 0
    return found


def assert_passed_in_ranks(path: Path, folder: Path) -> None:
    """Assert that each test of a file passes in two ranks."""
    for found in processes.run_ranks(run_file, 2, path, **{SHARED: str(folder)}):
        assert found.keys() == {"passed"}


class ModelStatesSuite:
    """Whatever the strategy, a checkpoint brings back what was there, and nothing gathered is left."""

    implementation: type[Strategy]
    #: Arguments that choose the strategy.
    settings: dict[str, Any] = {}

    @pytest.fixture
    def folder(self, request):
        if SHARED not in os.environ:
            return request.getfixturevalue("tmp_path")
        return Path(os.environ[SHARED]) / re.sub(r"\W", "_", request.node.name)  # DeepSpeed reads [2] as a pattern

    def make(self, folder, **settings):
        """A Trainer with this strategy; the same model and data each time."""
        torch.manual_seed(7)
        defaults = {"max_steps": 4, "save_steps": 2, "logging_steps": 1, "learning_rate": 0.01, "optim": "adamw_torch"}
        quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True}
        args = TrainingArguments(str(folder), **{**defaults, **quiet, **self.settings, **settings})
        data = plain_data()
        return Trainer(self.make_model(), args, train_dataset=data, eval_dataset=data[:8])

    def make_model(self):
        return make_plain()

    def weights(self, trainer):
        """The full weights; those of the first process count."""
        found = trainer.accelerator.get_state_dict(trainer.model)
        return {name: value.clone() for name, value in found.items()} if trainer.args.process_index == 0 else {}

    def assert_same(self, ours, theirs):
        assert ours.keys() == theirs.keys()
        assert not [name for name, value in ours.items() if not torch.equal(value, theirs[name])]

    def test_trainer_uses_the_implementation(self, folder):
        trainer = self.make(folder)
        assert type(trainer._hftrainer.strategy) is self.implementation
        assert trainer.place_model_on_device is not trainer._hftrainer.strategy.shards_model

    def test_resumed_run_is_the_undisturbed_one(self, folder):
        undisturbed = self.make(folder / "one")
        undisturbed.train()
        resumed = self.make(folder / "two")
        resumed.train(resume_from_checkpoint=str(folder / "one" / "checkpoint-2"))
        self.assert_same(self.weights(resumed), self.weights(undisturbed))
        ours, theirs = ([line for line in each.state.log_history if "loss" in line] for each in (resumed, undisturbed))
        assert ours == theirs and len(ours) == 4

    def test_save_model_writes_full_weights(self, folder):
        trainer = self.make(folder / "run", save_strategy="no")
        trainer.train()
        trainer.save_model(str(folder / "saved"))
        expected = self.weights(trainer)
        if trainer.args.process_index == 0:
            (path,) = [path for path in (folder / "saved").iterdir() if path.name in ("model.safetensors", FULL)]
            found = torch.load(path, weights_only=True) if path.name == FULL else load_file(path)
            self.assert_same(found, expected)

    def test_save_only_model_writes_no_optimizer(self, folder):
        trainer = self.make(folder, save_only_model=True)
        trainer.train()
        trainer.accelerator.wait_for_everyone()
        names = [path.name for path in (folder / "checkpoint-4").rglob("*")]
        assert names and not [name for name in names if "optim" in name or name == "scheduler.pt"]

    def test_gathered_weights_are_not_kept(self, folder):
        trainer = self.make(folder)
        trainer.train()
        assert (folder / "checkpoint-4").is_dir()
        assert not [value for value in vars(trainer._hftrainer.strategy).values() if isinstance(value, dict) and value]

    def test_best_model_is_loaded_at_the_end(self, folder):
        """The weights of the step whose evaluation was best, not the last ones."""
        settings = {"lr_scheduler_type": "constant", "eval_strategy": "steps", "eval_steps": 1}
        highest = {"metric_for_best_model": "loss", "greater_is_better": True}  # early: it falls
        trainer = self.make(folder / "run", save_steps=1, load_best_model_at_end=True, **highest, **settings)
        trainer.train()
        best = trainer.state.best_global_step
        assert best < 4
        short = self.make(folder / "short", save_strategy="no", max_steps=best, **settings)
        short.train()
        self.assert_same(self.weights(trainer), self.weights(short))

    def test_checkpoint_whose_folder_cannot_be_made_is_skipped(self, folder, monkeypatch):
        """The checkpoint is skipped in all processes, and training goes on."""
        begin = CheckpointFolder.begin

        def begin_unless_full(folder):
            if folder.path.name == "checkpoint-2":
                raise OSError(errno.ENOSPC, "No space left on device")
            begin(folder)

        monkeypatch.setattr(CheckpointFolder, "begin", begin_unless_full)  # only the first process calls it
        trainer = self.make(folder)
        trainer.train()
        assert trainer.state.global_step == 4
        assert (folder / "checkpoint-4").is_dir() and not (folder / "checkpoint-2").exists()

    def test_weight_decay_is_that_of_an_unsharded_model(self, folder):
        trainer = self.make(folder)
        trainer.train()
        decayed = {name.replace("_fsdp_wrapped_module.", "") for name in self.decayed(trainer)}
        assert decayed == {"layers.0.weight", "layers.4.weight"}

    def decayed(self, trainer):
        return trainer.get_decay_parameter_names(trainer.model)
