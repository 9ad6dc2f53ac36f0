"""What Lightning's finders suggest takes effect in the run, and their trial steps leave nothing behind."""

from types import SimpleNamespace

import pytest
import torch

from hftrainer.training.lightning_finders import FinderSteps, LightningFinders
from hftrainer.training.run import Run


def make_parts(found=None, *, creates_scheduler=True):
    """A run with batches of 8, whose finder suggests `found`."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    trainer = SimpleNamespace(args=SimpleNamespace(learning_rate=0.5, max_grad_norm=3.0, device="cpu"), model="model")
    trainer.optimizer, trainer.lr_scheduler = optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)

    def find_size(steps, model):
        trainer.optimizer = "of the trial steps"
        return found

    engine = SimpleNamespace(search_batch_size=find_size, search_learning_rate=lambda steps, model: found)
    run = Run(train_batch_size=8, current_gradient_accumulation_steps=4, has_created_scheduler=creates_scheduler)
    return SimpleNamespace(trainer=trainer, run=run, engine=engine, require_optimizer=lambda: optimizer)


@pytest.mark.parametrize(("found", "size"), [(32, 32), (None, 8)])
def test_found_batch_size_replaces_that_of_the_arguments(found, size):
    parts = make_parts(found)
    LightningFinders(parts).apply_batch_size_finder()
    assert parts.run.train_batch_size == size
    assert parts.trainer.optimizer is parts.require_optimizer()


@pytest.mark.parametrize(
    ("found", "is_own", "rate", "base", "made"),
    [(0.25, True, 0.25, 0.5, [(None, 9)]), (0.25, False, 0.25, 0.25, []), (None, True, 0.5, 0.5, [])],
)
def test_schedule_begins_at_the_found_learning_rate(monkeypatch, found, is_own, rate, base, made):
    """The Trainer's own schedule is made again; that of a script goes on from there."""
    parts, again = make_parts(found, creates_scheduler=is_own), []
    scheduler = parts.trainer.lr_scheduler
    target = "hftrainer.training.lightning_finders.call_create_scheduler"
    monkeypatch.setattr(target, lambda trainer, steps: again.append((trainer.lr_scheduler, steps)))
    LightningFinders(parts).apply_learning_rate_finder(9)
    group = parts.require_optimizer().param_groups[0]
    assert group["lr"] == group["initial_lr"] == rate
    assert scheduler.base_lrs == [base]
    assert again == made


def test_trial_loader_restores_the_batch_size_of_the_run():
    parts = make_parts()
    parts.trainer.get_train_dataloader = lambda: [None] * (6 // parts.run.train_batch_size)
    assert len(FinderSteps(parts).make_loader(2)) == 3
    with pytest.raises(ZeroDivisionError):
        FinderSteps(parts).make_loader(0)
    assert parts.run.train_batch_size == 8


def test_trial_loss_is_that_of_a_whole_step_and_is_not_logged():
    parts = make_parts()
    parts.trainer._get_num_items_in_batch = lambda batches, device: len(batches) * 7

    def micro_batch_loss(model, inputs, items):
        parts.run.attempt.logged_metrics.add("part", torch.tensor(1.0))
        return inputs, items, parts.run.current_gradient_accumulation_steps

    parts.loss_computer = SimpleNamespace(micro_batch_loss=micro_batch_loss)
    assert FinderSteps(parts).loss("model", "batch") == ("batch", 7, 1)
    assert parts.run.attempt.logged_metrics.state_dict() == {}
