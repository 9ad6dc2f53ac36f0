"""What the batches of a run hold: tokens, floating-point operations and samples."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hftrainer.training.run import Run
from hftrainer.training.steps.counters import Counters, count_batch


def test_operations_are_counted_once():
    model = nn.Linear(2, 3)
    model.num_parameters = lambda **_: 9
    args, state = SimpleNamespace(world_size=1), SimpleNamespace(total_flos=1.0)
    trainer = SimpleNamespace(model=model, args=args, state=state)
    run, policy = Run(), SimpleNamespace(estimates_total_flos=True)
    counters = Counters(SimpleNamespace(trainer=trainer, run=run, policy=policy))
    run.flos = counters.floating_point_ops({"input_ids": torch.ones(2, 5)})
    for _ in range(2):
        counters.store_flos()
    assert (state.total_flos, run.flos) == (1 + 6 * 9 * 2 * 5, 0)


@pytest.mark.parametrize(
    ("inputs", "counts"),
    [
        ({"input_ids": torch.ones(2, 5, dtype=torch.long)}, (2, 10)),
        ({"input_ids": torch.ones(1, 5, dtype=torch.long), "position_ids": torch.tensor([[0, 1, 2, 0, 0]])}, (3, 5)),
        ({"input_ids": torch.ones(2, 5)}, (2, 0)),
    ],
)
def test_samples_and_tokens_of_a_micro_batch(inputs, counts):
    trainer = SimpleNamespace(model=None, args=SimpleNamespace(flatten_batches="position_ids" in inputs))
    assert count_batch(trainer, inputs) == counts
