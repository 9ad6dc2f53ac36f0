"""What the batches of a run hold: tokens, floating-point operations and samples."""

from types import SimpleNamespace

import pytest
import torch

from hftrainer.training.steps.counters import count_batch
from tests.support.small_models import make_bert


def test_operations_are_counted_once(make_trainer):
    trainer = make_trainer(make_bert())
    trainer.state.total_flos = 1.0
    trainer._hftrainer.run.attempt.flos = operations = trainer.floating_point_ops({"input_ids": torch.ones(2, 5)})
    for _ in range(2):
        trainer.store_flos()
    assert (trainer.state.total_flos, trainer._hftrainer.run.attempt.flos) == (1 + operations, 0)
    assert operations == 6 * trainer.model.num_parameters(exclude_embeddings=True) * 2 * 5


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
