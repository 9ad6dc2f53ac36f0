"""The lengths of a run whose batches differ in size, and the steps between log lines."""

import sys

import pytest

from tests.support.checkpoints import make_trainer
from tests.support.token_batches import llama, make_token_trainer, samples


@pytest.mark.parametrize(
    ("strategy", "steps"), [({"logging_strategy": "epoch"}, 5), ({"logging_strategy": "no"}, sys.maxsize), ({}, 3)]
)
def test_lightning_logs_at_the_steps_of_the_arguments(tmp_path, strategy, steps):
    trainer = make_trainer(tmp_path, gradient_accumulation_steps=2, **strategy)
    trainer.state.compute_steps(trainer.args, 9)
    planner = trainer._hftrainer.training_runner.planner
    assert planner.steps_between_logs(planner.plan_lengths(trainer.args, trainer.get_train_dataloader())) == steps


def test_samples_of_a_step_are_the_mean_over_token_batches(tmp_path):
    trainer = make_token_trainer(tmp_path, llama(), samples(40), tokens_per_batch=64, gradient_accumulation_steps=3)
    loader = trainer.get_train_dataloader()
    lengths = trainer._hftrainer.training_runner.planner.plan_lengths(trainer.args, loader)
    assert lengths.total_train_batch_size == round(3 * 40 / len(loader)) > 3


@pytest.mark.parametrize(("ignores", "position"), [(False, 6), (True, 0)])
def test_state_is_that_of_the_checkpoint(tmp_path, ignores, position):
    trainer = make_trainer(tmp_path, max_steps=6)
    trainer.train()
    trainer.args.ignore_data_skip = ignores
    planner = trainer._hftrainer.training_runner.planner
    trainer._hftrainer.run.lengths = planner.plan_lengths(trainer.args, trainer.get_train_dataloader())
    assert planner.init_state(9, 2, None, None) == (0, 0)
    assert trainer.state.global_step == 0
    assert planner.init_state(9, 2, str(tmp_path / "checkpoint-6"), {"learning_rate": 1.0}) == (0, position)
    assert (trainer.state.global_step, trainer.state.max_steps) == (6, 9)
