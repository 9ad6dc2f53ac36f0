"""Walks over a model's modules see and clear what torch's own do."""

import pytest
import torch
from torch import nn

from hftrainer.model import walks


class Tied(nn.Module):
    """A module that is in the model twice, a tied weight, a missing part, and a parameter beside modules."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 3), nn.Dropout()))
        self.scale = nn.Parameter(torch.ones(3))
        self.again, self.missing = self.first[2], None
        self.last = nn.Linear(3, 3)
        self.last.weight = self.first[0].weight
        self.register_parameter("none", None)

    def forward(self, x):
        return self.last(self.again(self.first(x))) * self.scale


class OwnChoice(Tied):
    """Hides its scale from whoever clips and clears."""

    def named_parameters(self, *args, **kwargs):
        return ((name, value) for name, value in super().named_parameters(*args, **kwargs) if name != "scale")


MODELS = {
    "tied": Tied,
    "own choice": OwnChoice,
    "scripted": lambda: torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)))),
    "a scripted part": lambda: nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.Linear(3, 3))),
    "compiled": lambda: torch.compile(Tied(), backend="eager"),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_parameters_as_torch_has_them(make):
    model = make()
    assert [id(each) for each in walks.parameters(model)] == [id(each) for each in model.parameters()]


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_gradients_are_cleared_as_by_zero_grad(make):
    model = make()
    model(torch.ones(2, 3)).sum().backward()
    had = {id(each) for each in nn.Module.parameters(model) if each.grad is not None}
    walks.clear_gradients(model)
    chosen = {id(each) for each in model.parameters()}
    assert had & chosen
    assert {id(each) for each in nn.Module.parameters(model) if each.grad is not None} == had - chosen


def test_a_zero_grad_of_the_model_is_called():
    model, called = Tied(), []
    model.zero_grad = lambda: called.append(True)
    walks.clear_gradients(model)
    assert called == [True]


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_any_part_in_eval_mode_is_found(make):
    model = make().train()
    assert walks.is_training(model)
    for module in model.modules():
        module.training = False
        assert not walks.is_training(model)
        module.training = True
    assert walks.is_training(model)
