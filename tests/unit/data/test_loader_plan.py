"""The main process dispatches batches to the ranks as accelerate's does, over many sizes."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from hftrainer.data.loader_plan import group_batches, split_groups
from tests.support.small_models import Numbers


def dispatched_by_accelerate(count, size, processes, split, drop_last):
    """The parts of each round, as accelerate slices the main process's batch."""
    from accelerate.data_loader import DataLoaderDispatcher

    found = []

    def cut(batch, part, process_index, num_processes):
        found.append([batch[rank * part.stop : (rank + 1) * part.stop].tolist() for rank in range(num_processes)])
        return batch[part]

    settings = {"batch_size": size, "drop_last": drop_last, "_drop_last": drop_last, "split_batches": split}
    loader = DataLoaderDispatcher(Numbers(count), slice_fn=cut, **settings)
    loader.state = SimpleNamespace(process_index=0, num_processes=processes, device=torch.device("cpu"))
    return [found[-1] for _ in loader]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("split", [False, True])
def test_dispatched_batches_match_accelerate(processes, split, drop_last):
    for count, factor in itertools.product(range(1, 20), range(1, 4)):
        size = factor * processes if split else factor
        if drop_last and count < (size if split else size * processes):
            continue  # accelerate fails when there is not one round
        loader = torch.utils.data.DataLoader(Numbers(count), batch_size=size, drop_last=drop_last)
        read = group_batches(iter(loader), 1 if split else processes, drop_last)
        ours = [[part.tolist() for part in group] for group in split_groups(read, processes, drop_last)]
        assert ours == dispatched_by_accelerate(count, size, processes, split, drop_last)


def test_nested_batches_are_split_for_the_ranks():
    batch = {"x": torch.arange(4), "nested": [torch.arange(8).reshape(4, 2), (torch.arange(4) * 2,)]}
    (first, second) = next(split_groups(iter([[batch]]), 2, False))
    assert first["x"].tolist() == [0, 1]
    assert second["nested"][0].tolist() == [[4, 5], [6, 7]]
    assert second["nested"][1][0].tolist() == [4, 6]
