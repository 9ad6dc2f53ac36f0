"""Samples of similar length together: the order of transformers, also of more samples than are sorted at once."""

import pytest
import torch
from transformers.trainer_pt_utils import LengthGroupedSampler as Theirs

from hftrainer.data.samplers import LengthGroupedSampler


@pytest.mark.parametrize("batch_size", [1, 4, 7])
@pytest.mark.parametrize("count", [3, 38, 999, 2001])
def test_as_transformers(count, batch_size):
    lengths = torch.randint(1, 500, (count,), generator=torch.Generator().manual_seed(count)).tolist()
    orders = [
        list(sampler(batch_size, lengths=lengths, generator=torch.Generator().manual_seed(0)))
        for sampler in (LengthGroupedSampler, Theirs)
    ]
    assert orders[0] == orders[1]
