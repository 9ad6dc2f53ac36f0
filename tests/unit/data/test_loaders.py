"""`PreparedDataLoader`: one batch ahead, where each batch stands, what is skipped, and samples that fail."""

import pytest
import torch
from torch.utils.data import DataLoader

from hftrainer import default_data_collator
from hftrainer.arguments.accelerator_config import AcceleratorConfig
from hftrainer.data.loaders import PreparedDataLoader, skip_first
from hftrainer.data.samplers import ShardSpec
from tests.support.small_models import Numbers, plain_data

CPU = torch.device("cpu")


def prepare(data, size=4, device=CPU, **settings):
    of_loader = {name: settings.pop(name) for name in ("config", "shard_spec") if name in settings}
    return PreparedDataLoader(DataLoader(data, size, **settings), device, **of_loader)


def test_next_batch_is_read_before_the_last_one_is_used():
    reads = []
    loader = prepare(range(10), collate_fn=lambda rows: reads.append(rows) or len(rows))
    used = [(size, len(reads), loader.position.is_last) for size in loader]
    assert used == [(4, 2, False), (4, 3, False), (2, 3, True)]
    assert loader.position.iteration == 0  # outside of iterations


def test_iterator_that_is_dropped_late_does_not_end_a_newer_one():
    loader = prepare(range(10))
    old, new = iter(loader), iter(loader)
    next(old), next(new)
    number = loader.position.iteration
    old.close()
    assert number and [loader.position.iteration for _ in new] == [number, number]


@pytest.mark.parametrize(
    ("data", "settings", "counted"),
    [
        (range(10), {}, [None, None, 2]),
        (range(8), {}, [None, None]),
        (range(10), {"drop_last": True}, [None, None]),
        (Numbers(10), {}, [None, None, 2]),
        (range(10), {"shard_spec": ShardSpec(0, 2)}, [None, 2]),
        (range(10), {"shard_spec": ShardSpec(1, 2)}, [None, 0]),  # a filler
    ],
)
def test_last_batch_of_an_evaluation_counts_its_samples(data, settings, counted):
    loader = prepare(data, **settings)
    assert [loader.position.counted_samples for _ in loader] == counted


@pytest.mark.parametrize("make", [prepare, DataLoader], ids=["prepared", "of a script"])
def test_first_batches_are_skipped_once(make):
    loader, left = skip_first(make(range(10), 4), 2)
    assert (left, [len(batch) for batch in loader]) == (0, [2])
    if make is prepare:
        assert len(list(loader)) == 3
    assert skip_first([1, 2], 1) == ([1, 2], 1)


@pytest.mark.parametrize(("kind", "expected"), [("mps", False), ("cuda", True)])
def test_batches_are_moved_without_waiting_but_not_to_mps(kind, expected):
    config = AcceleratorConfig(non_blocking=True)
    assert prepare(plain_data(8), device=torch.device(kind), config=config).non_blocking is expected


class Fails(list):
    def __getitem__(self, index):
        if index == 21:
            raise LookupError("mine")
        return super().__getitem__(index)


def fail(samples):
    raise LookupError("mine")


FIRST = "the samples [0, 1, 2, 3] were read and collated."
#: Settings of a loader whose data or collator fails → what the note of the error says.
FAILURES = [
    ({"data": Fails(plain_data())}, "sample 21 was read."),
    ({"data": Fails(plain_data()), "num_workers": 2}, FIRST.replace("0, 1, 2, 3", "20, 21, 22, 23")),
    ({"collate_fn": fail}, FIRST),
    ({"collate_fn": fail, "num_workers": 2, "prefetch_factor": 3}, FIRST),
    ({"collate_fn": fail, "size": 20}, FIRST.replace("3]", f"{', '.join(map(str, range(3, 16)))}, ...]")),
]


@pytest.mark.parametrize(("settings", "place"), FAILURES)
def test_error_names_the_samples_that_were_read(settings, place):
    with pytest.raises(LookupError) as caught:
        list(prepare(**{"data": plain_data(), "collate_fn": default_data_collator, **settings}))
    assert caught.value.__notes__ == [f"This happened while {place}"]
