"""`EpochReader`: an epoch that is resumed has the batches and random numbers of one that was not interrupted."""

import copy
import itertools

import datasets
import pytest
import torch
import transformers
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

from hftrainer import DataCollatorWithPadding, default_data_collator
from hftrainer.data.collators import RemoveColumnsCollator
from hftrainer.data.epoch_reader import EpochReader, EpochStart, may_draw
from hftrainer.data.loaders import PreparedDataLoader
from hftrainer.data.randomness import cpu_rng_state, set_cpu_rng_state
from tests.support.small_models import ReadingStream, StatefulStream, tokenizer

ROWS = [{"input_ids": [1, 2], "labels": 0}] * 8
ROWS_OF_DATASETS = datasets.Dataset.from_list(ROWS)
WITHOUT_DRAWS = {
    "a list": {},
    "datasets": {"dataset": ROWS_OF_DATASETS.with_format("torch")},
    "padding": {"collate_fn": DataCollatorWithPadding(tokenizer())},
    "transformers' collator": {"collate_fn": transformers.DefaultDataCollator()},
    "transformers' function": {"collate_fn": transformers.default_data_collator},
    "removed columns": {"collate_fn": RemoveColumnsCollator(default_data_collator, frozenset({"labels"}), "", None)},
    "any order": {"shuffle": True},
}


class Padding(DataCollatorWithPadding):
    """May do more than its base class."""


WITH_DRAWS = {
    "transform": {"dataset": ROWS_OF_DATASETS.with_transform(lambda rows: rows)},
    "a dataset of the script": {"dataset": TensorDataset(torch.zeros(8))},
    "samples of the script": {"dataset": [transformers.BatchEncoding(row) for row in ROWS]},
    "subclass": {"collate_fn": Padding(tokenizer())},
    "function": {"collate_fn": lambda rows: rows},
    "masks": {"collate_fn": transformers.DataCollatorForLanguageModeling(tokenizer(mask_token="<m>"))},
    "removed, then the script's": {"collate_fn": RemoveColumnsCollator(list, frozenset({"labels"}), "", None)},
    "replacement": {"sampler": RandomSampler(ROWS, replacement=True)},
    "batch sampler": {"batch_sampler": [[0], [1]]},
}


@pytest.mark.parametrize("case", [*WITHOUT_DRAWS, *WITH_DRAWS])
def test_random_states_are_recorded_where_reading_may_draw(case):
    settings = {"dataset": ROWS, "collate_fn": default_data_collator, **(WITHOUT_DRAWS | WITH_DRAWS)[case]}
    loader = PreparedDataLoader(DataLoader(**settings), torch.device("cpu"))
    assert may_draw(loader) is (case in WITH_DRAWS)


class Noisy(Dataset):
    """Ten samples: the index, and a number that is drawn when it is read. `read` has the indices in order."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return 10

    def __getitem__(self, index):
        self.read.append(index)
        return index, round(torch.rand(()).item(), 4)


def noisy_stream():
    return ReadingStream(Noisy())


def make_reader(make_data=Noisy, *, is_prepared=True, **settings):
    loader = DataLoader(make_data(), 2, collate_fn=list, **settings)
    return EpochReader(PreparedDataLoader(loader, torch.device("cpu"), seed=3) if is_prepared else loader)


def use(batches):
    """Batches that are used, each with a number that the model draws, as dropout does."""
    return [(batch, torch.rand(()).item()) for batch in batches]


def open_at_first_batch(reader, epoch):
    """The batches of an epoch, which is not open yet when a checkpoint is written before its first batch."""
    yield from reader.open_epoch(epoch)


def read_epoch_interrupted_after(count, **settings):
    """The batches of the second epoch in one piece, those after the interruption, and the resumed reader."""
    reader = make_reader(**settings)
    use(reader.open_epoch(0))
    iterator = open_at_first_batch(reader, 1)
    before = use(itertools.islice(iterator, count))
    state, random_states = copy.deepcopy(reader.state_dict()), cpu_rng_state()
    whole = before + use(iterator)
    torch.manual_seed(99)
    resumed = make_reader(**settings)
    resumed.restore_generators(state)
    start = EpochStart(count, lambda: set_cpu_rng_state(random_states), state)
    return whole, use(resumed.open_epoch(1, start)), resumed


@pytest.mark.parametrize("count", [0, 1, 3, 5])
@pytest.mark.parametrize(
    "settings",
    [
        {"shuffle": True},
        {"sampler": RandomSampler(range(10), replacement=True)},
        {"make_data": noisy_stream},
        {"is_prepared": False},
        {"is_prepared": False, "make_data": noisy_stream},
        {"is_prepared": False, "shuffle": True},
    ],
    ids=lambda settings: ", ".join(settings),
)
def test_resumed_epoch_has_the_remaining_batches_and_random_numbers(settings, count):
    whole, rest, _ = read_epoch_interrupted_after(count, **settings)
    assert len(whole) == 5 and rest == whole[count:]


@pytest.mark.parametrize(
    ("make_data", "is_prepared", "first_read"),
    [(Noisy, True, 6), (Noisy, False, 6), (noisy_stream, True, 0), (lambda: StatefulStream(Noisy()), True, 6)],
)
def test_used_samples_are_read_again_only_by_streams_without_state(make_data, is_prepared, first_read):
    whole, rest, resumed = read_epoch_interrupted_after(3, make_data=make_data, is_prepared=is_prepared)
    assert rest == whole[3:]
    assert resumed.loader.dataset.read[0] == first_read


def test_order_is_that_of_the_epoch():
    reader = make_reader(shuffle=True)
    first, second = ([index for batch in reader.open_epoch(epoch) for index, _ in batch] for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(10)) and first != second
    torch.manual_seed(99)
    assert [index for batch in make_reader(shuffle=True).open_epoch(1) for index, _ in batch] == second


@pytest.mark.parametrize(("count", "is_exhausted"), [(4, False), (5, True)])
def test_state_tells_whether_the_epoch_has_another_batch(count, is_exhausted):
    reader = make_reader()
    use(itertools.islice(reader.open_epoch(0), count))
    assert reader.state_dict()["exhausted"] is is_exhausted


def test_checkpoint_of_transformers_resumes_at_its_position():
    """It has no state of the data: random numbers are restored only once the rest of the epoch is open."""
    restored = []
    rest = make_reader().open_epoch(0, EpochStart(3, lambda: restored.append("random states"), None))
    assert [index for batch in rest for index, _ in batch] == [6, 7, 8, 9]
    assert restored == []
