"""Two processes with batches by tokens read all samples, in equally many steps, and keep equal weights."""

from typing import Any

import pytest
import torch

from tests.support.token_batches import make_token_trainer, samples


def train(folder: Any, flat: bool) -> tuple[list[int], int, list[torch.Tensor]]:
    trainer = make_token_trainer(folder, tokens_per_batch=64, flatten_batches=flat, num_train_epochs=1)
    trainer.train()
    loader = trainer.get_train_dataloader()
    read = loader.record_batches()
    steps = len(list(loader))
    assert steps == trainer.state.global_step
    weights = [weight.detach().clone() for weight in trainer.model.parameters()]
    return [index for batch in read for index in batch], steps, weights


@pytest.mark.parametrize("flat", [False, True])
def test_two_processes_read_all_samples_in_equal_steps(processes: Any, tmp_path: Any, flat: bool) -> None:
    (first, steps, ours), (second, others, theirs) = processes.run_ranks(train, 2, tmp_path, flat)
    assert steps == others > 1
    assert {*first, *second} == set(range(len(samples())))
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
