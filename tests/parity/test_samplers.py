"""Samplers of the user, and what seeds those of ours."""

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler
from transformers.trainer_pt_utils import LengthGroupedSampler as TheirLengthGroupedSampler

from hftrainer.data.samplers import LengthGroupedSampler
from tests.support.parity import EVALUATED, accuracy, alike, assert_equal, assert_same_weights, build, compare, train


@pytest.mark.parametrize("kind", ["sampler", "batch-sampler"])
def test_subclasses_of_samplers(tmp_path, kind):
    class OwnRandom(RandomSampler):
        pass

    class OwnBatches(BatchSampler):
        pass

    def trainer_class(library):
        class Own(library.Trainer):
            if kind == "sampler":

                def _get_train_sampler(self, *args):
                    return OwnRandom(self.train_dataset)

            else:

                def get_train_dataloader(self):
                    sampler = OwnBatches(RandomSampler(self.train_dataset), 4, False)
                    loader = torch.utils.data.DataLoader(self.train_dataset, batch_sampler=sampler)
                    return self.accelerator.prepare(loader)

        return Own

    compare(tmp_path, "plain", trainer_class=trainer_class)


def test_loaders_shuffle_anew(tmp_path):
    def run(name):
        trainer, _ = build(name, "plain", tmp_path / name)
        loader = trainer.get_train_dataloader()
        return [[batch["labels"].tolist() for batch in loader] for _ in range(3)]

    ours = alike(run, assert_equal)
    assert ours[0] != ours[1]


class Draws(torch.utils.data.Dataset):
    """Each sample says which random numbers its worker draws."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        import random

        import numpy as np

        drawn = torch.tensor([random.random(), np.random.rand(), float(torch.rand(()))])
        return {"x": torch.cat([drawn, torch.zeros(5)]).float(), "labels": torch.tensor(index % 3)}


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_are_seeded_alike(tmp_path, workers):
    compare(tmp_path, "plain", trainer={"train_dataset": Draws()}, dataloader_num_workers=workers)


def with_samplers(signature):
    def own(library):
        class Own(library.Trainer):
            if signature == "old":

                def _get_train_sampler(self):
                    return torch.utils.data.SequentialSampler(self.train_dataset)

            else:

                def _get_train_sampler(self, train_dataset=None):
                    return torch.utils.data.SequentialSampler(train_dataset)

            def _get_eval_sampler(self, eval_dataset):
                order = torch.Generator().manual_seed(3)
                return torch.utils.data.SubsetRandomSampler(range(len(eval_dataset)), order)

        return Own

    return own


@pytest.mark.parametrize("signature", ["old", "new"])
def test_samplers_of_ones_own(tmp_path, signature):
    if signature == "old":  # transformers 5.23 calls it with the dataset only
        ours = train("hftrainer", "plain", tmp_path, trainer_class=with_samplers("old"), **EVALUATED)
        new = train("hftrainer", "plain", tmp_path / "new", trainer_class=with_samplers("new"), **EVALUATED)
        assert_same_weights(ours.weights, new.weights)
        return
    compare(tmp_path, "plain", trainer_class=with_samplers("new"), trainer={"compute_metrics": accuracy}, **EVALUATED)


@pytest.mark.parametrize("batch_size", [1, 4, 7])
@pytest.mark.parametrize("count", [3, 38, 999, 2001])
def test_groups_of_similar_length(count, batch_size):
    """Also of more samples than are sorted at once."""
    lengths = torch.randint(1, 500, (count,), generator=torch.Generator().manual_seed(count)).tolist()
    ours, theirs = (
        list(sampler(batch_size, lengths=lengths, generator=torch.Generator().manual_seed(0)))
        for sampler in (LengthGroupedSampler, TheirLengthGroupedSampler)
    )
    assert ours == theirs
