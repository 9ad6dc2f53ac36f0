"""From every checkpoint of a run, the rest of the run is the same: weights, log, state."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler
from transformers import DataCollatorForLanguageModeling

import hftrainer
from hftrainer import Trainer, default_data_collator
from tests.support.checkpoints import make_trainer, train_to_end
from tests.support.parity import EVALUATED, assert_same_weights, comparable, with_own_step
from tests.support.small_models import Plain, ReadingStream, StatefulStream, plain_data, tokenizer

#: Generator → what is drawn from it. NumPy keeps every other normal number for the next call.
DRAWS = {"torch": lambda: torch.randn(8), "numpy": lambda: float(np.random.randn()), "python": random.random}


class Augmented(Dataset):
    def __init__(self, count=22, draws=tuple(DRAWS)):
        self.samples, self.draws, self.read = plain_data(count), draws, []

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        self.read.append(index)
        noise = sum(DRAWS[name]() for name in self.draws)
        return {**self.samples[index], "x": self.samples[index]["x"] + noise}


def augmented_stream():
    return ReadingStream(Augmented())


class Drawing(Plain):
    """A model that draws from all generators in training, as dropout and masks of spectra do."""

    def forward(self, x, labels=None):
        return super().forward(x + sum(draw() for draw in DRAWS.values()) if self.training else x, labels)


def data_in_memory():
    """Samples in memory: reading them draws nothing."""
    return plain_data(22)


def data_of_lengths(count=22):
    return [{**sample, "input_ids": [0] * (index % 7)} for index, sample in enumerate(plain_data(count))]


def build(folder, make_data=Augmented, collator=None, **settings):
    trainer_kwargs = {"train_dataset": make_data(), "eval_dataset": plain_data(9), **settings.pop("trainer", {})}
    if collator:
        trainer_kwargs["data_collator"] = collator()
    defaults = {"max_steps": -1, "num_train_epochs": 2, "logging_steps": 2, "save_steps": 1}
    return make_trainer(folder, trainer=trainer_kwargs, **{**defaults, **settings})


def comparable_log(trainer):
    *logs, last = comparable(trainer.state.log_history)
    return [*logs, {name: value for name, value in last.items() if name != "train_loss"}]


def end_workers(trainer):
    """End loading processes that stay now: the garbage collector ends them slowly, in the middle of another test."""
    for loader in (trainer.callback_handler.train_dataloader, *trainer._eval_dataloaders.values()):
        if getattr(loader, "persistent_workers", False) and loader._iterator is not None:
            loader._iterator._shutdown_workers()


def assert_resumes_alike(tmp_path, steps=None, **settings):
    """Train, then resume from each checkpoint; asserts that all end alike. Returns the datasets read."""
    whole = build(tmp_path, **settings)
    whole.train()
    state = whole.state
    end_workers(whole)
    resumed = []
    for step in steps or range(1, state.global_step + 1):
        trainer = build(tmp_path / "resumed", **{**settings, "save_steps": 1000})
        trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        end_workers(trainer)
        where = f"resumed from step {step}"
        assert comparable_log(trainer) == comparable_log(whole), where
        assert_same_weights(trainer.model.state_dict(), whole.model.state_dict())
        for name in ("global_step", "total_flos", "best_metric", "num_input_tokens_seen", "epoch"):
            assert getattr(trainer.state, name) == getattr(state, name), where
        resumed.append(trainer.train_dataset)
    return resumed


THREE = {"gradient_accumulation_steps": 3}
WORKERS = {"dataloader_num_workers": 2}
#: An epoch has six steps, or two of three micro-batches.
STATES = [1, 6, 7]
SETTINGS = {
    "plain": {},
    "evaluating": {"steps": [2, 5, 6, 7], **EVALUATED},
    "accumulated, evaluating": {**THREE, **EVALUATED},
    "in memory": {"make_data": data_in_memory, "trainer": {"model_init": Drawing}},
    "in memory, accumulated": {"make_data": data_in_memory, "trainer": {"model_init": Drawing}, **THREE},
    "by epoch": {"steps": STATES, "eval_strategy": "epoch", "logging_strategy": "epoch"},
    "last batch dropped": {"dataloader_drop_last": True, "max_steps": 7, **THREE},
    "sequential": {"steps": STATES, "train_sampling_strategy": "sequential", "logging_first_step": True},
    "bf16": {"steps": STATES, "bf16": True},
    "fp16": {"steps": STATES, "fp16": True},
    "plateau": {"steps": STATES, "lr_scheduler_type": "reduce_lr_on_plateau", **EVALUATED},
    "adafactor": {"steps": STATES, "optim": "adafactor"},
    "momentum": {"steps": STATES, "optim": "sgd", "optim_args": "momentum=0.9"},
    "best": (
        {"steps": STATES, "metric_for_best_model": "loss", "load_best_model_at_end": True}
        | {"eval_strategy": "steps", "eval_steps": 1}
    ),
    "tokens": {"steps": STATES, "logging_steps": 3, "include_num_input_tokens_seen": "all"},
    "own step": {"steps": STATES, "trainer_class": with_own_step(hftrainer)},
    "own step, accumulated": {"trainer_class": with_own_step(hftrainer), **THREE},
    "workers": {"steps": [2, 7], "dataloader_prefetch_factor": 3, **WORKERS, **EVALUATED},
    "workers that stay": {"dataloader_persistent_workers": True, **WORKERS, **THREE, **EVALUATED},
    "stream": {"steps": [1, 5, 6], "make_data": augmented_stream, "max_steps": 7},
    "accumulated stream": {"make_data": augmented_stream, "max_steps": 5, **THREE},
    "stream, workers": {"steps": [1, 6], "make_data": augmented_stream, "max_steps": 7, **WORKERS},
    "stream, by epoch": {"steps": [6, 12], "make_data": augmented_stream, "max_steps": 14, "save_strategy": "epoch"},
    "accumulated stream, by epoch": (
        {"steps": [2, 4], "make_data": augmented_stream, "max_steps": 5, "save_strategy": "epoch", **THREE}
        | {"eval_strategy": "epoch", "logging_strategy": "epoch"}
    ),
    "grouped by length": (
        {"steps": [2, 6], "make_data": data_of_lengths, "trainer": {"eval_dataset": data_of_lengths(9)}}
        | {"train_sampling_strategy": "group_by_length", **EVALUATED}
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_resume_is_exact_with_each_setting(tmp_path, name):
    assert_resumes_alike(tmp_path, **SETTINGS[name])


def test_train_loss_of_a_resumed_run_is_that_of_its_own_steps(tmp_path):
    """As in transformers. The losses since the last log line are in its first line, but were another call's."""
    logged = train_to_end(build(tmp_path / "each", logging_steps=1))
    build(tmp_path).train()
    losses = [line["loss"] for line in logged.state.log_history if "loss" in line]
    for step in (3, 4):  # between two log lines, and at one
        output = build(tmp_path).train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        # The sums are of float32.
        assert output.training_loss == pytest.approx(sum(losses[step:]) / len(losses[step:]), rel=1e-6)


class OneByOne(SequentialSampler):
    def __iter__(self):
        return (random.randrange(len(self.data_source)) for _ in self.data_source)


def weighted_sampler(data, generator=None):
    weights = [1.0 + i % 3 for i in range(len(data))]
    return torch.utils.data.WeightedRandomSampler(weights, len(data), generator=generator)


def seeded():
    return torch.Generator().manual_seed(3)


SAMPLERS = {
    "random": RandomSampler,
    "replacement": lambda data: RandomSampler(data, replacement=True, generator=seeded()),
    "weighted": weighted_sampler,
    "weighted-generator": lambda data: weighted_sampler(data, seeded()),
    "one-by-one": OneByOne,
}


@pytest.mark.parametrize("make_data", [Augmented, data_in_memory])
@pytest.mark.parametrize("name", SAMPLERS)
def test_resume_is_exact_with_a_custom_sampler(tmp_path, name, make_data):
    class Own(Trainer):
        def _get_train_sampler(self, train_dataset=None):
            return SAMPLERS[name](self.train_dataset)

    assert_resumes_alike(tmp_path, [2, 6, 8], trainer_class=Own, make_data=make_data, trainer={"model_init": Drawing})


@pytest.mark.parametrize(("prepared", "workers"), [(False, 0), (False, 2), (True, 2)])
def test_resume_is_exact_with_a_custom_batch_sampler(tmp_path, prepared, workers):
    class Own(Trainer):
        def get_train_dataloader(self):
            collate = self._get_collator_with_removed_columns(self.data_collator)
            sampler = torch.utils.data.BatchSampler(weighted_sampler(self.train_dataset, seeded()), 4, drop_last=False)
            loader = DataLoader(self.train_dataset, batch_sampler=sampler, num_workers=workers, collate_fn=collate)
            return self.accelerator.prepare(loader) if prepared else loader

    draws = tuple(DRAWS) if prepared or not workers else ()
    steps = [2, 6] if workers else [2, 6, 8]
    assert_resumes_alike(tmp_path, steps, trainer_class=Own, make_data=lambda: Augmented(22, draws))


#: Kind of generator → makes one, and draws from it.
KINDS = {
    "torch": (seeded, lambda generator: torch.rand(8, generator=generator)),
    "numpy": (lambda: np.random.default_rng(5), lambda generator: float(generator.normal())),
    "numpy-legacy": (lambda: np.random.RandomState(5), lambda generator: float(generator.normal())),
    "python": (lambda: random.Random(5), random.Random.random),
}


class NoisyCollator:
    """Has a generator of its own, made when it is first used, as those of transformers have."""

    generator = None

    def __init__(self, kind):
        self.kind = kind

    def __call__(self, samples):
        make, draw = KINDS[self.kind]
        self.generator = self.generator or make()
        batch = default_data_collator(samples)
        return {**batch, "x": batch["x"] * draw(self.generator)}


@pytest.mark.parametrize(("kind", "workers"), [*((kind, 0) for kind in KINDS), ("torch", 2), ("numpy", 2)])
def test_resume_restores_the_generator_of_a_collator(tmp_path, kind, workers):
    steps = [2, 6] if workers else [2, 6, 8]
    assert_resumes_alike(tmp_path, steps, collator=lambda: NoisyCollator(kind), dataloader_num_workers=workers)


class Masking:
    """Uses the masks of transformers' collator, whose generator belongs to a process (since v5.24)."""

    def __init__(self):
        self.data_collator = DataCollatorForLanguageModeling(tokenizer(mask_token="<m>"), mlm_probability=0.4, seed=3)

    def __call__(self, samples):
        masked = self.data_collator([{"input_ids": [2] * 8} for _ in samples])["labels"] != -100
        batch = default_data_collator(samples)
        return {**batch, "x": batch["x"] * masked}


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_restores_seeded_masks_of_transformers(tmp_path, workers):
    """Reported for v5.24, whose collator makes a new generator when it does not know the process of the old one."""
    steps = [2, 6] if workers else [2, 6, 8]
    assert_resumes_alike(tmp_path, steps, collator=Masking, dataloader_num_workers=workers)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_stateful_stream_is_not_read_again(tmp_path, accumulation):
    more = {"max_steps": 7, "gradient_accumulation_steps": accumulation}
    data = assert_resumes_alike(tmp_path, [1, 4, 7], make_data=lambda: StatefulStream(Augmented(26)), **more)
    assert data[0].read[0] == 4 * accumulation  # after one step of batches of 4
    assert data[-1].read == []  # its run was complete


def test_stateful_stream_begins_again_after_an_epoch_of_whole_batches(tmp_path):
    assert_resumes_alike(tmp_path, [5, 6, 7], make_data=lambda: StatefulStream(Augmented(24)), max_steps=12)


@pytest.mark.parametrize("shuffled", [False, True])
def test_resume_is_exact_with_a_stream_of_datasets(tmp_path, shuffled):
    datasets = pytest.importorskip("datasets")
    read = []

    def make_data():
        read.clear()
        rows = {"x": [sample["x"].tolist() for sample in plain_data(22)], "labels": [i % 3 for i in range(22)]}
        stream = datasets.Dataset.from_dict(rows).to_iterable_dataset(num_shards=2)
        stream = stream.map(lambda row, index: read.append(index) or row, with_indices=True)
        return (stream.shuffle(seed=1, buffer_size=5) if shuffled else stream).with_format("torch")

    assert_resumes_alike(tmp_path, [1, 5, 6, 3], make_data=make_data, max_steps=8)
    assert (read[0] == 0) == shuffled  # the samples in a shuffle buffer are not in the state: read again


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_is_exact_with_a_stateful_loader_of_torchdata(tmp_path, workers):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    class Own(Trainer):
        def get_train_dataloader(self):
            how = {"num_workers": workers, "collate_fn": default_data_collator}
            return stateful.StatefulDataLoader(self.train_dataset, 4, **how)

    settings = {"trainer_class": Own, "make_data": lambda: StatefulStream(Augmented(22, ())), "max_steps": 9}
    data = assert_resumes_alike(tmp_path, [1, 3, 6], **settings)
    assert workers or data[1].read[0] == 12  # after three batches of 4
