"""A run that changes its size keeps the samples of each global batch, however ranks and micro-batches divide it."""

import os
import random
from collections import Counter
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler

from hftrainer import Trainer, TrainingArguments
from hftrainer.arguments.accelerator_config import AcceleratorConfig
from hftrainer.data.elastic import accumulation_steps
from hftrainer.data.epoch_reader import EpochReader, EpochStart
from hftrainer.data.loaders import PreparedDataLoader
from hftrainer.data.samplers import LengthGroupedSampler, ShardSpec
from hftrainer.errors import InvalidArgument, UnsupportedArgument
from tests.support.small_models import language_data, make_bert, make_llama, text_data, without_dropout

#: `make soak` makes more of them.
RUNS = int(os.environ.get("FUZZ", "4"))
#: Ranks in one process: each has as many batches as the others.
ALONE = SimpleNamespace(any_rank=lambda value: value)


class Stream(IterableDataset):
    """Its order depends on the epoch, as that of a `datasets.IterableDataset`."""

    def __init__(self, count):
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = list(range(self.count))
        random.Random(self.epoch).shuffle(order)
        return iter(order)


class StreamWithState(Stream):
    """Saves its position, and notes the samples that it has passed on."""

    def __init__(self, count):
        super().__init__(count)
        self.position, self.passed_on = 0, []

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]

    def __iter__(self):
        for sample in list(super().__iter__())[self.position :]:
            self.position += 1
            self.passed_on.append(sample)
            yield sample
        self.position = 0


def datasets_stream(count):
    return Dataset.from_dict({"index": range(count)}).to_iterable_dataset(num_shards=min(3, count))


STREAMS = {"stream": Stream, "with state": StreamWithState, "of datasets": datasets_stream}


def collate(samples):
    return [sample["index"] if isinstance(sample, dict) else sample for sample in samples]


class Lazy(Sampler):
    """A script's sampler, which draws each index from torch's global generator when it is asked."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __iter__(self):
        left = list(range(self.count))
        while left:
            yield left.pop(int(torch.randint(len(left), ())))


def sort_by_length(count, size):
    return LengthGroupedSampler(size, lengths=[index * 7 % 11 for index in range(count)])


SAMPLERS = {
    "random": lambda count, size: RandomSampler(range(count)),
    "by length": sort_by_length,
    "of a script": lambda count, size: Lazy(count),
    "with a generator": lambda count, size: RandomSampler(range(count), generator=torch.Generator().manual_seed(3)),
    "in order": lambda count, size: range(count),
}


def make_loaders(kind, count, size, global_batch, processes, workers=0, **settings):
    config = AcceleratorConfig()
    loaders = []
    for rank in range(processes):
        torch.manual_seed(0)
        if kind in STREAMS:
            config.dispatch_batches = False
            loader = DataLoader(STREAMS[kind](count), size, collate_fn=collate, num_workers=workers, **settings)
        else:
            sampler = SAMPLERS[kind](count, global_batch)
            loader = DataLoader(range(count), size, sampler=sampler, collate_fn=list, num_workers=workers, **settings)
        spec = ShardSpec(rank, processes)
        made = PreparedDataLoader(
            loader, torch.device("cpu"), config=config, shard_spec=spec, processes=ALONE, global_batch=global_batch
        )
        loaders.append(made)
        torch.manual_seed(rank)  # ranks draw other numbers for their models
    return loaders


def read_steps(loaders, epoch, skipped, size, global_batch, state=None):
    """The samples of each step of an epoch, from a step on, or from the state of the data after it."""
    accumulation = accumulation_steps(global_batch, size, len(loaders))
    of_ranks = []
    for loader in loaders:
        start = EpochStart(skipped * accumulation, restore_random_states=list, saved_state=state)
        of_ranks.append([sample for batch in EpochReader(loader).open_epoch(epoch, start) for sample in batch])
    width = global_batch // len(loaders)
    steps = len(of_ranks[0]) // width
    assert all(len(each) == steps * width for each in of_ranks)
    return [
        Counter(sample for each in of_ranks for sample in each[step * width : (step + 1) * width])
        for step in range(steps)
    ]


def possible_sizes(global_batch):
    """Batch sizes and numbers of processes that make such global batches."""
    sizes = [(size, processes) for processes in (1, 2, 4) for size in range(1, global_batch + 1)]
    return [(size, processes) for size, processes in sizes if global_batch % (size * processes) == 0]


@pytest.mark.parametrize("kind", [*SAMPLERS, *STREAMS])
def test_resized_run_has_the_same_samples_in_each_step(kind):
    """Random runs over two epochs, which change their size after random steps."""
    draw = random.Random(kind)
    for _ in range(RUNS):
        global_batch = draw.choice([4, 6, 8, 12])
        count = draw.randrange(1, 5 * global_batch)
        drop_last = draw.random() < 0.3 and count >= global_batch
        make = [kind, count]
        whole = make_loaders(*make, global_batch, global_batch, 1, drop_last=drop_last)
        for epoch in (0, 1):
            expected = read_steps(whole, epoch, 0, global_batch, global_batch)
            found = []
            while len(found) < len(expected):
                size, processes = draw.choice(possible_sizes(global_batch))
                loaders = make_loaders(*make, size, global_batch, processes, drop_last=drop_last)
                if kind not in STREAMS:
                    assert len(loaders[0]) * size * processes == len(expected) * global_batch
                rest = read_steps(loaders, epoch, len(found), size, global_batch)
                found += rest[: draw.randrange(1, len(rest) + 1)]
            assert found == expected
            times = sum(expected, Counter())
            if count % global_batch == 0:
                assert times == Counter(range(count))
            elif drop_last:
                assert set(times.values()) == {1} and len(times) == count - count % global_batch
            else:
                assert len(times) == count  # the last step has samples of the first in addition


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random", "stream", "of datasets"])
def test_loading_processes_read_the_same_samples(kind):
    for size, processes in ((4, 2), (2, 4), (8, 1)):
        alone = make_loaders(kind, 30, size, 8, processes)
        with_workers = make_loaders(kind, 30, size, 8, processes, workers=2)
        assert read_steps(alone, 1, 2, size, 8) == read_steps(with_workers, 1, 2, size, 8)


@pytest.mark.parametrize("kind", ["with state", "of datasets"])
@pytest.mark.parametrize(("size", "processes"), [(8, 1), (2, 1), (2, 2), (1, 4)])
def test_stream_continues_from_its_saved_state(kind, size, processes):
    """What was read is not read again, but for the first two samples, which complete the last step of 30."""
    before = make_loaders(kind, 30, 4, 8, 1)
    expected = read_steps(before, 1, 0, 4, 8)
    reader = EpochReader(before[0])
    assert len([*islice(reader.open_epoch(1), 4)]) == 4
    state = reader.state_dict() | {"before": None}
    after = make_loaders(kind, 30, size, 8, processes)
    assert read_steps(after, 1, 2, size, 8, state) == expected[2:]
    if kind == "with state":
        stream = Stream(30)
        stream.set_epoch(1)
        order = list(stream)
        assert [each.source.passed_on for each in after] == [order[16:] + order[:2]] * processes


def test_accumulation_steps_follow_from_the_global_batch():
    assert accumulation_steps(24, 4, 2) == 3
    assert accumulation_steps(24, 24, 1) == 1
    with pytest.raises(InvalidArgument) as refused:
        accumulation_steps(24, 5, 2)
    assert "per_device_train_batch_size of 1, 2, 3, 4, 6 or 12." in str(refused.value)
    with pytest.raises(InvalidArgument, match="batch_size of 1 or 3, or 1, 2, 3 or 6 processes"):
        accumulation_steps(12, 2, 4)
    with pytest.raises(InvalidArgument, match="Use other numbers"):
        accumulation_steps(4, 8, 3)


@pytest.mark.parametrize(("make_model", "make_data"), [(make_bert, text_data), (make_llama, language_data)])
def test_loss_does_not_depend_on_micro_batch_size(tmp_path, make_model, make_data):
    """A classifier, which accepts `num_items_in_batch` and ignores it, and a language model with items to predict."""
    losses = []
    for size in (8, 4, 2):
        args = TrainingArguments(
            str(tmp_path / str(size)),
            **{"elastic": True, "max_steps": 4, "logging_steps": 1, "use_cpu": True, "save_strategy": "no"},
            **{"per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // size, "disable_tqdm": True},
        )
        trainer = Trainer(without_dropout(make_model)().double(), args, train_dataset=make_data())
        trainer.train()
        losses.append([line[key] for line in trainer.state.log_history[:-1] for key in ("loss", "grad_norm")])
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], abs=1e-6)  # the sum of losses that is logged is in float32


class Pairs(BatchSampler):
    """A batch sampler of a script."""


@pytest.mark.parametrize(
    ("settings", "config", "message"),
    [
        ({"dataset": range(8), "batch_sampler": Pairs(range(8), 2, False)}, {}, "Pairs makes the batches"),
        ({"dataset": Stream(8), "batch_size": None}, {}, "the stream makes the batches"),
        ({"dataset": range(8), "batch_size": 2}, {"split_batches": True}, "must have their defaults"),
        ({"dataset": range(8), "batch_size": 2}, {"even_batches": False}, "must have their defaults"),
    ],
)
def test_batches_that_cannot_be_resized_are_refused(settings, config, message):
    parts = {"config": AcceleratorConfig(**config), "shard_spec": ShardSpec(0, 2), "processes": ALONE}
    with pytest.raises(UnsupportedArgument, match=f"elastic=True: .*{message}"):
        PreparedDataLoader(DataLoader(**settings), torch.device("cpu"), **parts, global_batch=4)
