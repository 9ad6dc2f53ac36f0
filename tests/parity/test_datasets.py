"""Data trains as in transformers: streams, samples that draw random numbers, and the user's loaders and samplers."""

import random

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from datasets import Dataset as Table
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler, SubsetRandomSampler
from transformers.trainer_pt_utils import LengthGroupedSampler as TheirLengthGroupedSampler

from hftrainer.data.samplers import LengthGroupedSampler
from tests.support.parity import EVERY_STEP, accuracy, compare, subclass
from tests.support.small_models import Noisy, SizedStream, Stream, make_bert, plain_data


class Draws(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        drawn = torch.tensor([random.random(), np.random.rand(), float(torch.rand(()))])
        return {"x": torch.cat([drawn, torch.zeros(5)]).float(), "labels": torch.tensor(index % 3)}


ROWS = [{"x": sample["x"].tolist(), "label": int(sample["labels"]), "unused": "text"} for sample in plain_data()]
SETS = {"first": plain_data()[:9], "second": plain_data()[9:20]}
BEST_OF_SECOND = {"load_best_model_at_end": True, "metric_for_best_model": "eval_second_loss"}


def given_data(training, evaluation, **settings):
    return {"trainer": {"train_dataset": training, "eval_dataset": evaluation}, **EVERY_STEP, **settings}


#: What the Trainer is given, and the settings of the run.
CASES = {
    "several sets to evaluate": given_data(plain_data(), SETS, **BEST_OF_SECOND),
    "stream that ends in a window": given_data(Stream(38), Stream(19), max_steps=9),
    "stream that ends before training": given_data(Stream(12), Stream(16), max_steps=9),
    "stream with a length": given_data(SizedStream(38), SizedStream(13)),
    # dropout and augmentation share a generator, so samples must be read when transformers reads them
    "samples that draw random numbers": given_data(Noisy(), Noisy(11)),
    "a table with more columns": given_data(Table.from_list(ROWS), Table.from_list(ROWS[:9])),
}


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_kinds_of_datasets_train_alike(tmp_path, case, accumulation):
    compare(tmp_path, "plain", gradient_accumulation_steps=accumulation, **CASES[case])


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_are_seeded_alike(tmp_path, workers):
    compare(tmp_path, "plain", trainer={"train_dataset": Draws()}, dataloader_num_workers=workers)


class EpochStream(Stream):
    def __init__(self, count):
        super().__init__(count)
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


def test_set_epoch_is_called_on_datasets(tmp_path):
    def script(trainer):
        trainer.train()
        return trainer._get_train_sampler(), trainer.train_dataset.epochs

    trainer_kwargs = lambda: {"train_dataset": EpochStream(12)}  # noqa: E731
    assert compare(tmp_path, "plain", script=script, trainer=trainer_kwargs, max_steps=5).extra["script"][1]


class OwnRandom(RandomSampler):
    pass


class OwnBatches(BatchSampler):
    pass


def train_loader(self):
    return DataLoader(Noisy(), 4, shuffle=True)


def eval_loader(self, eval_dataset=None):
    return DataLoader(plain_data()[:11], 8)


def prepared(make_loader):
    return lambda self, *args: self.accelerator.prepare(make_loader(self, *args))


def batch_loader(self):
    sampler = OwnBatches(RandomSampler(self.train_dataset), 4, False)
    return self.accelerator.prepare(DataLoader(self.train_dataset, batch_sampler=sampler))


def shuffled_once(self, eval_dataset):
    return SubsetRandomSampler(range(len(eval_dataset)), torch.Generator().manual_seed(3))


def in_order(self, train_dataset=None):
    return SequentialSampler(train_dataset)


METHODS = {
    "loaders": {"get_train_dataloader": train_loader, "get_eval_dataloader": eval_loader},
    "prepared loaders": {"get_train_dataloader": prepared(train_loader), "get_eval_dataloader": prepared(eval_loader)},
    "subclass of a sampler": {"_get_train_sampler": lambda self, *args: OwnRandom(self.train_dataset)},
    "subclass of a batch sampler": {"get_train_dataloader": batch_loader},
    "samplers": {"_get_train_sampler": in_order, "_get_eval_sampler": shuffled_once},
}


@pytest.mark.parametrize("name", METHODS)
def test_overridden_loaders_and_samplers_train_alike(tmp_path, name):
    settings = {"trainer_class": subclass(**METHODS[name]), "trainer": {"compute_metrics": accuracy}}
    compare(tmp_path, "plain", **settings, **EVERY_STEP)


def test_loader_is_reshuffled_alike_in_each_pass(tmp_path):
    def script(trainer):
        loader = trainer.get_train_dataloader()
        return [[batch["labels"].tolist() for batch in loader] for _ in range(3)]

    first, second, _ = compare(tmp_path, "plain", script=script).extra["script"]
    assert first != second


@pytest.mark.parametrize("batch_size", [1, 4, 7])
@pytest.mark.parametrize("count", [3, 38, 999, 2001])
def test_length_grouped_sampler_has_the_same_order(count, batch_size):
    lengths = torch.randint(1, 500, (count,), generator=torch.Generator().manual_seed(count)).tolist()
    ours, theirs = (
        list(sampler(batch_size, lengths=lengths, generator=torch.Generator().manual_seed(0)))
        for sampler in (LengthGroupedSampler, TheirLengthGroupedSampler)
    )
    assert ours == theirs


def make_tokenizer(**kwargs):
    vocabulary = {"[PAD]": 0, "[UNK]": 1, **{f"w{i}": i for i in range(2, 50)}}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, pad_token="[PAD]", unk_token="[UNK]", **kwargs)


@pytest.mark.parametrize("model", ["bert", "llama"])
def test_tokenizer_pads_batches(tmp_path, model):
    """Samples of different lengths: batches are padded by the tokenizer, predictions with -100."""
    rows = [{"input_ids": [2 + (i * j) % 47 for j in range(3 + i % 6)], "label": i % 3} for i in range(30)]
    collator = None
    if model == "llama":
        rows = [{"input_ids": row["input_ids"]} for row in rows]
        collator = transformers.DataCollatorForLanguageModeling(make_tokenizer(), mlm=False)
    trainer_kwargs = {"train_dataset": rows, "eval_dataset": rows[:11], "processing_class": make_tokenizer()}
    trainer_kwargs |= {"data_collator": collator, "compute_metrics": lambda p: {"shape": list(p.predictions.shape)}}
    compare(tmp_path, model, trainer=trainer_kwargs, gradient_accumulation_steps=3, **EVERY_STEP)


def test_masked_language_collator_trains_alike(tmp_path):
    how = {"mlm_probability": 0.4, "pad_to_multiple_of": 8}
    collator = transformers.DataCollatorForLanguageModeling(make_tokenizer(mask_token="w49"), **how)
    rows = [{"input_ids": [2 + (i * j) % 40 for j in range(5 + i % 9)]} for i in range(30)]
    masked = (lambda: make_bert("BertForMaskedLM"), lambda: rows)
    compare(tmp_path, masked, trainer={"data_collator": collator}, **EVERY_STEP)
