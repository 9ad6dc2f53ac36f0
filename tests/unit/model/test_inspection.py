"""The walks over modules and parameters at every step find what torch finds."""

import pytest
import torch
from torch import nn

from hftrainer.model import inspection
from tests.support.small_models import make_peft, make_plain


class OwnParameters(nn.Linear):
    def named_parameters(self, *args, **kwargs):
        yield "weight", self.weight


def make_shared():
    """A module in two places, a parameter in two modules, and an empty place."""
    shared, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.weight, other.empty = shared.weight, None
    return nn.ModuleDict({"a": nn.Sequential(shared, nn.ReLU()), "b": shared, "c": other})


@pytest.mark.parametrize("make", [make_plain, make_peft, make_shared, lambda: OwnParameters(4, 4)])
def test_walks_find_what_torch_finds(make):
    model, other = make(), make()
    assert list(map(id, inspection.parameters(model))) == list(map(id, model.parameters()))
    for each in (*nn.Module.parameters(model), *nn.Module.parameters(other)):
        each.grad = torch.ones_like(each)
    inspection.clear_gradients(model)
    other.zero_grad()
    cleared, expected = ([p.grad is None for p in nn.Module.parameters(each)] for each in (model, other))
    assert cleared == expected
    assert inspection.is_training(model)
    list(model.modules())[-1].eval()
    assert not inspection.is_training(model)


def test_module_that_takes_nothing_does_not_forward_its_inputs_to_its_child():
    class Without(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self):
            return self.layer(torch.zeros(1, 4))

    class ForwardsAll(Without):
        def forward(self, *args):
            return self.layer(*args)

    assert isinstance(inspection.called_model(Without()), Without)
    assert isinstance(inspection.called_model(ForwardsAll()), nn.Linear)
