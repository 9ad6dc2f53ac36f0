"""What a set can be: streams, sized or not, samples that draw random numbers, a dict of sets, loaders of the user."""

import importlib

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.support.parity import EVALUATED, EVERY_STEP, accuracy, alike, assert_equal, build, compare, train
from tests.support.tiny import SizedStream, Stream, plain_data


def test_dict_of_eval_datasets(tmp_path):
    sets = {"first": plain_data()[:9], "second": plain_data()[9:20]}
    settings = {**EVERY_STEP, "load_best_model_at_end": True, "metric_for_best_model": "eval_second_loss"}
    compare(tmp_path, "plain", trainer={"eval_dataset": sets, "compute_metrics": accuracy}, **settings)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("count", [38, 12], ids=["ends-within-window", "shorter-than-training"])
def test_iterable_with_max_steps(tmp_path, accumulation, count):
    settings = {"max_steps": 9, "gradient_accumulation_steps": accumulation}
    compare(tmp_path, "plain", trainer={"train_dataset": Stream(count)}, **settings)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_iterable_with_length(tmp_path, accumulation):
    data = {"train_dataset": SizedStream(38), "eval_dataset": SizedStream(13)}
    compare(tmp_path, "plain", trainer=data, gradient_accumulation_steps=accumulation, **EVERY_STEP)


class Noisy(Dataset):
    """Draws from torch's global generator for each sample, as augmentation does."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        sample = self.data[index]
        return {"x": sample["x"] + torch.randn(8), "labels": sample["labels"]}


@pytest.mark.parametrize("accumulation", [1, 3])
def test_data_that_draws_random_numbers(tmp_path, accumulation):
    """Dropout and augmentation take turns at one generator, so samples must be fetched when transformers does."""
    data = {"train_dataset": Noisy(plain_data()), "eval_dataset": Noisy(plain_data()[:11])}
    compare(tmp_path, "plain", trainer=data, gradient_accumulation_steps=accumulation, **EVERY_STEP)


@pytest.mark.parametrize("prepared", [False, True], ids=["plain-loader", "prepared-loader"])
def test_own_dataloaders(tmp_path, prepared):
    def trainer_class(library):
        class Own(library.Trainer):
            def get_train_dataloader(self):
                loader = DataLoader(Noisy(plain_data()), 4, shuffle=True)
                return self.accelerator.prepare(loader) if prepared else loader

            def get_eval_dataloader(self, eval_dataset=None):
                loader = DataLoader(plain_data()[:11], 8)
                return self.accelerator.prepare(loader) if prepared else loader

        return Own

    compare(tmp_path, "plain", trainer_class=trainer_class, **EVERY_STEP)


def test_datasets_library(tmp_path):
    datasets = importlib.import_module("datasets")
    rows = [{"x": sample["x"].tolist(), "label": int(sample["labels"]), "unused": "text"} for sample in plain_data()]
    data = datasets.Dataset.from_list(rows)
    compare(tmp_path, "plain", trainer={"train_dataset": data, "eval_dataset": data.select(range(9))}, **EVERY_STEP)


def test_predict_without_labels(tmp_path):
    results = []
    for name in ("hftrainer", "transformers"):
        trainer, _ = build(name, "plain", tmp_path / name)
        results.append(trainer.predict([{"x": sample["x"]} for sample in plain_data()[:11]]))
    assert (results[0].predictions == results[1].predictions).all()
    assert results[0].label_ids is None
    assert results[0].metrics.keys() == results[1].metrics.keys()


class EpochStream(IterableDataset):
    """Notes the epochs that it is told."""

    def __init__(self, count):
        self.count = count
        self.epochs = []

    def __iter__(self):
        return iter(plain_data(self.count))

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


@pytest.mark.parametrize("count", [19, 16, 5])
def test_evaluation_of_a_stream(tmp_path, count):
    compare(tmp_path, "plain", trainer={"eval_dataset": EpochStream(count), "compute_metrics": accuracy}, **EVALUATED)


def test_datasets_are_told_the_epoch(tmp_path):
    def run(name):
        stream = EpochStream(12)
        train(name, "plain", tmp_path / name, trainer={"train_dataset": stream}, max_steps=5)
        return stream.epochs

    ours = alike(run, assert_equal)
    assert ours
