"""Lightning's loops count our steps, and resume from our counters."""

from types import SimpleNamespace

import pytest
import torch

from hftrainer import Trainer
from hftrainer.training.run import Attempt
from hftrainer.training.run_lengths import RunLengths
from hftrainer.training.steps.micro_batches import MicroBatchPosition
from hftrainer_lightning.private_api import epoch_loop
from tests.support.small_models import make_plain


@pytest.fixture
def pl_trainer(make_args):
    """A `lightning.Trainer` with our loops."""
    made = Trainer(make_plain(), make_args())._hftrainer.engine._make_pl_trainer(max_epochs=9)
    loop = SimpleNamespace(batches=SimpleNamespace(position=MicroBatchPosition()))
    epoch_loop.install_training_loops(made, loop, is_epoch_overridden=False)
    return made


@pytest.mark.parametrize(("epoch", "batch"), [(2, 0), (2, 3)])
def test_counters_continue_where_the_checkpoint_ended(pl_trainer, epoch, batch):
    attempt = Attempt(first_epoch=epoch, finished_micro_batches=batch)
    attempt.lengths = RunLengths(9, 0, 0, 0, 0, 5, 0)  # of five micro-batches
    epoch_loop.restore_progress(pl_trainer, attempt, 7)
    progress, loop = pl_trainer.fit_loop.epoch_loop.batch_progress, pl_trainer.fit_loop.epoch_loop
    assert pl_trainer.current_epoch == epoch
    assert pl_trainer.fit_loop.epoch_progress.current.started == epoch + (batch > 0)
    assert progress.total.completed == epoch * 5 + batch
    assert progress.current.ready == batch
    assert pl_trainer.global_step == loop._batches_that_stepped == 7
    with epoch_loop.use_previous_epoch(pl_trainer):
        assert pl_trainer.current_epoch == epoch - 1, "callbacks of an epoch's end read it"
    assert pl_trainer.current_epoch == epoch


def test_step_is_counted_at_the_end_of_its_window(pl_trainer):
    loop = pl_trainer.fit_loop.epoch_loop
    for is_last, counted in ((False, 0), (True, 1)):
        loop.training_loop.batches.position.is_last = is_last
        assert loop._should_accumulate() is not is_last
        loop.announce_batch_end(None, torch.ones(()), is_last=is_last)
        assert loop.automatic_optimization.optim_progress.optimizer.step.total.completed == counted
