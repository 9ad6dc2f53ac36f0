"""From every checkpoint of a run, the rest of the run is the same: weights, log, state."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler

import hftrainer
from tests.reliability.exact import Augmented, AugmentedStream, StatefulStream, build, resumed_from_each
from tests.support.tiny import plain_data

EVALUATING = {"eval_strategy": "steps", "eval_steps": 2}


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="plain"),
        pytest.param(EVALUATING, id="evaluating"),
        pytest.param({"eval_strategy": "epoch", "logging_strategy": "epoch"}, id="by-epoch"),
        pytest.param({"dataloader_drop_last": True, "max_steps": 7}, id="drop-last-max-steps"),
        pytest.param({"train_sampling_strategy": "sequential", "logging_first_step": True}, id="sequential"),
    ],
)
def test_samples_that_draw_random_numbers(tmp_path, accumulation, more):
    resumed_from_each(tmp_path, gradient_accumulation_steps=accumulation, **more)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"bf16": True}, id="bf16"),
        pytest.param({"fp16": True}, id="fp16"),
        pytest.param({"lr_scheduler_type": "reduce_lr_on_plateau", **EVALUATING}, id="plateau"),
        pytest.param({"optim": "adafactor"}, id="adafactor"),
        pytest.param({"optim": "sgd", "optim_args": "momentum=0.9"}, id="sgd"),
        pytest.param(
            {
                "metric_for_best_model": "loss",
                "load_best_model_at_end": True,
                "eval_strategy": "steps",
                "eval_steps": 1,
            },
            id="best",
        ),
        pytest.param({"logging_steps": 3, "include_num_input_tokens_seen": "all"}, id="tokens"),
    ],
)
def test_states(tmp_path, more):
    resumed_from_each(tmp_path, steps=[1, 4, 6, 7], **more)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_loading_processes(tmp_path, persistent, accumulation):
    more = {"dataloader_persistent_workers": persistent, "dataloader_prefetch_factor": 3, **EVALUATING}
    steps = [1, 2, 5, 6, 7, 9, 11] if accumulation == 1 else None
    resumed_from_each(tmp_path, steps, dataloader_num_workers=2, gradient_accumulation_steps=accumulation, **more)


def grouped(count=22):
    return [{**sample, "input_ids": [0] * (index % 7)} for index, sample in enumerate(plain_data(count))]


@pytest.mark.parametrize("workers", [0, 2])
def test_group_by_length(tmp_path, workers):
    more = {"train_sampling_strategy": "group_by_length", "dataloader_num_workers": workers}
    resumed_from_each(
        tmp_path, [2, 5, 6, 8], make_data=grouped, trainer={"eval_dataset": grouped(9)}, **more, **EVALUATING
    )


def weighted(data, generator=None):
    return WeightedRandomSampler([1.0 + i % 3 for i in range(len(data))], len(data), generator=generator)


class OneByOne(torch.utils.data.Sampler):
    """Draws each index when it is asked for."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __iter__(self):
        return (random.randrange(len(self.data)) for _ in self.data)


SAMPLERS = {
    "random": RandomSampler,
    "replacement": lambda data: RandomSampler(data, replacement=True, generator=torch.Generator().manual_seed(3)),
    "weighted": weighted,
    "weighted-generator": lambda data: weighted(data, torch.Generator().manual_seed(3)),
    "one-by-one": OneByOne,
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_own_sampler(tmp_path, name):
    class Own(hftrainer.Trainer):
        def _get_train_sampler(self, train_dataset=None):
            return SAMPLERS[name](self.train_dataset)

    resumed_from_each(tmp_path, [2, 5, 6, 8], trainer_class=Own)


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_own_batch_sampler(tmp_path, prepared, workers):
    class Own(hftrainer.Trainer):
        def get_train_dataloader(self):
            sampler = BatchSampler(weighted(self.train_dataset, torch.Generator().manual_seed(3)), 4, drop_last=False)
            loader = DataLoader(
                self.train_dataset,
                batch_sampler=sampler,
                num_workers=workers,
                collate_fn=self._get_collator_with_removed_columns(self.data_collator),
            )
            return self.accelerator.prepare(loader) if prepared else loader

    draws = "torch numpy python" if prepared or not workers else ""
    resumed_from_each(tmp_path, [2, 5, 6, 8], trainer_class=Own, make_data=lambda: Augmented(draws=draws))


class NoisyCollator:
    """Has a generator of its own, made when it is first used, as those of transformers have."""

    def __init__(self, kind):
        self.kind = kind
        self.generator = None

    def __call__(self, samples):
        batch = hftrainer.default_data_collator(samples)
        if self.generator is None:
            self.generator = self.kind()
        batch["x"] = batch["x"] * self.draw()
        return batch

    def draw(self):
        if isinstance(self.generator, torch.Generator):
            return torch.rand(8, generator=self.generator)
        return float(self.generator.normal() if hasattr(self.generator, "normal") else self.generator.random())


KINDS = {
    "torch": lambda: torch.Generator().manual_seed(5),
    "numpy": lambda: np.random.default_rng(5),
    "numpy-legacy": lambda: np.random.RandomState(5),
    "python": lambda: random.Random(5),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_collator_with_a_generator(tmp_path, kind, workers):
    class Fresh(hftrainer.Trainer):
        def __init__(self, **kwargs):
            super().__init__(**{**kwargs, "data_collator": NoisyCollator(KINDS[kind])})

    resumed_from_each(tmp_path, [2, 5, 6, 8], trainer_class=Fresh, dataloader_num_workers=workers)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_stream_is_passed_over(tmp_path, accumulation):
    more = {"max_steps": 7, "gradient_accumulation_steps": accumulation}
    resumed_from_each(tmp_path, make_data=AugmentedStream, **more)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_stream_with_a_state_is_not_read_again(tmp_path, accumulation):
    more = {"max_steps": 7, "gradient_accumulation_steps": accumulation}
    data = resumed_from_each(tmp_path, make_data=lambda: StatefulStream(26), **more)
    assert data[0].read[0] == 4 * accumulation
    assert data[-1].read == []  # its run was complete


def test_stream_in_loading_processes(tmp_path):
    resumed_from_each(tmp_path, [1, 3, 6], make_data=AugmentedStream, max_steps=7, dataloader_num_workers=2)


@pytest.mark.parametrize("shuffled", [False, True])
def test_stream_of_datasets(tmp_path, shuffled):
    datasets = pytest.importorskip("datasets")
    read = []

    def make_data():
        rows = {"x": [sample["x"].tolist() for sample in plain_data(22)], "labels": [i % 3 for i in range(22)]}
        stream = datasets.Dataset.from_dict(rows).to_iterable_dataset(num_shards=2)
        stream = stream.map(lambda row, index: read.append(index) or row, with_indices=True)
        return (stream.shuffle(seed=1, buffer_size=5) if shuffled else stream).with_format("torch")

    resumed_from_each(tmp_path, make_data=make_data, max_steps=8)
    read.clear()
    trainer = build(tmp_path / "again", make_data=make_data, max_steps=8, save_strategy="no")
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert (read[0] == 0) == shuffled  # the samples in a shuffle buffer are not in the state: read again


@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_loader_of_torchdata(tmp_path, workers):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    class Own(hftrainer.Trainer):
        def get_train_dataloader(self):
            return stateful.StatefulDataLoader(
                self.train_dataset, 4, num_workers=workers, collate_fn=hftrainer.default_data_collator
            )

    data = resumed_from_each(
        tmp_path, [1, 3, 6, 8], trainer_class=Own, max_steps=9, make_data=lambda: StatefulStream(draws="")
    )
    if not workers:
        assert data[1].read[0] == 12
