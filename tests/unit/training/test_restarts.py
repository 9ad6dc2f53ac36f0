"""A run that starts again has its first weights, buffers, optimizer and random numbers."""

import copy

import pytest
import torch

from hftrainer import Trainer
from hftrainer.errors import UnsupportedArgument
from hftrainer.training.restarts import InitialStateSnapshot
from tests.support.small_models import make_plain, plain_data


def test_initial_state_is_restored_after_training(make_args):
    model = make_plain()
    model.register_buffer("seen", torch.zeros(()), persistent=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = Trainer(model, make_args(), train_dataset=plain_data(), optimizers=(optimizer, None))
    snapshot, first = InitialStateSnapshot(trainer), copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    drawn = torch.rand(3)
    trainer.train()
    model.seen += 1
    assert optimizer.state
    snapshot.restore()
    assert torch.equal(torch.rand(3), drawn) and model.seen == 0
    assert all(torch.equal(value, first[0][name]) for name, value in model.state_dict().items())
    assert optimizer.state_dict()["state"] == first[1]["state"] == {}


def test_weights_unfrozen_since_the_copy_cannot_be_restored(make_args):
    model = make_plain()
    weight = model.layers[0].weight.requires_grad_(False)
    snapshot = InitialStateSnapshot(Trainer(model, make_args()))
    weight.requires_grad_(True)
    with pytest.raises(UnsupportedArgument, match=r"'layers.0.weight' has been unfrozen"):
        snapshot.restore()
