"""Batch samplers with a wrong `__len__`: every batch that they give is trained on and evaluated, as in transformers."""

import itertools

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler, SequentialSampler

from hftrainer.data.samplers import has_exact_length
from tests.support.parity import accuracy, array_bytes, assert_same_weights, build, comparable, compare, subclass, train


class Guessing:
    """Batches of four samples in a random order, without some of the samples, and a length that may be wrong."""

    drop_last = False
    batch_size = 4

    def __init__(self, samples: int, claimed: int, left_out: int = 0) -> None:
        self.samples, self.claimed, self.left_out = samples, claimed, left_out

    def __iter__(self):
        order = torch.randperm(self.samples).tolist()[self.left_out :]
        for start in range(0, len(order), self.batch_size):
            yield order[start : start + self.batch_size]

    def __len__(self) -> int:
        return self.claimed


class GuessingSampler(Sampler):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self):
        return iter([index % self.samples for index in range(2 * self.samples)])

    def __len__(self) -> int:
        return self.samples


def make_class(claimed_training, claimed_evaluation, left_out=0):
    """A Trainer of loaders that claim to have so many batches; they have 10 and 5."""

    def loader(self, data, claimed):
        sampler = Guessing(len(data), claimed, left_out)
        return self.accelerator.prepare(DataLoader(data, batch_sampler=sampler, collate_fn=self.data_collator))

    def get_eval_dataloader(self, dataset=None):
        return loader(self, self.eval_dataset, claimed_evaluation)

    return subclass(
        get_train_dataloader=lambda self: loader(self, self.train_dataset, claimed_training),
        get_eval_dataloader=get_eval_dataloader,
        get_test_dataloader=get_eval_dataloader,
    )


SETTINGS = {"logging_steps": 1, "eval_strategy": "epoch", "trainer": {"compute_metrics": accuracy}}


def run_methods(trainer, resume=None):
    output = trainer.train(resume_from_checkpoint=resume)
    metrics = comparable([trainer.evaluate()])
    predicted = trainer.predict(trainer.eval_dataset)
    sizes = output.global_step, trainer.state.max_steps, trainer.state.epoch
    return output.training_loss, sizes, metrics, array_bytes([predicted.predictions, predicted.label_ids])


@pytest.mark.parametrize(
    ("claimed", "left_out", "accumulation"),
    [
        *((claimed, 0, 3) for claimed in [(10, 5), (9, 4), (1, 1), (15, 50)]),
        *((claimed, 3, 1) for claimed in [(10, 5), (6, 2), (11, 6)]),
    ],
)
def test_every_batch_is_used_whatever_the_claimed_length(tmp_path, claimed, left_out, accumulation):
    settings = {**SETTINGS, "trainer_class": make_class(*claimed, left_out)}
    compare(tmp_path, "plain", script=run_methods, gradient_accumulation_steps=accumulation, **settings)


@pytest.mark.parametrize("claimed", [3, 5, 9])
def test_compute_result_is_true_for_the_last_batch_that_comes(tmp_path, claimed):
    def script(trainer):
        seen = []
        trainer.compute_metrics = lambda _, compute_result: seen.append(compute_result) or {"batches": len(seen)}
        return trainer.evaluate()["eval_batches"], seen

    settings = {"trainer": {"compute_metrics": lambda _, compute_result: {}}, "trainer_class": make_class(10, claimed)}
    ours = compare(tmp_path, "plain", script=script, batch_eval_metrics=True, **settings)
    assert ours.extra["script"] == (5, [False] * 4 + [True])


@pytest.mark.parametrize("claimed", [8, 14])
@pytest.mark.parametrize("step", [4, 13])
def test_resume_within_an_epoch_of_wrong_length(tmp_path, claimed, step):
    settings = {**SETTINGS, "trainer_class": make_class(claimed, 3), "save_strategy": "steps", "save_steps": step}
    whole = train("hftrainer", "plain", tmp_path, script=run_methods, **settings)
    checkpoint = str(tmp_path / f"checkpoint-{step}")
    resumed = train("hftrainer", "plain", tmp_path, script=lambda trainer: run_methods(trainer, checkpoint), **settings)
    assert resumed.extra["script"][1:] == whole.extra["script"][1:]
    assert_same_weights(resumed.weights, whole.weights)
    count = len(whole.logs) - 2  # but for the mean loss, and the evaluation after it
    assert resumed.logs[:count] == whole.logs[:count]


def test_fractional_limit_val_batches_is_a_share_of_the_claimed_length(tmp_path):
    """The share is of the 4 claimed batches, not of the 5 that come."""
    settings = {"trainer_class": make_class(10, 4), "lightning_config": {"limit_val_batches": 0.5}}
    trainer, _ = build("hftrainer", "plain", tmp_path, **settings)
    assert trainer.evaluate()
    assert trainer._hftrainer.engine.pl_trainer.validate_loop.batch_progress.total.completed == 2


def test_has_exact_length_of_each_kind_of_loader(tmp_path):
    data = list(range(10))
    sure = [
        DataLoader(data, 3),
        DataLoader(data, 3, shuffle=True),
        DataLoader(data, batch_size=None),
        DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 3, drop_last=True)),
    ]
    guessed = [
        DataLoader(data, batch_sampler=Guessing(10, 3)),
        DataLoader(data, 3, sampler=GuessingSampler(10)),
        DataLoader(data, batch_size=None, sampler=GuessingSampler(10)),
        DataLoader(data, batch_sampler=BatchSampler(GuessingSampler(10), 3, drop_last=True)),
    ]
    trainer, _ = build("hftrainer", "plain", tmp_path)
    for loaders, expected in ((sure, True), (guessed, False)):
        for loader in loaders:
            assert has_exact_length(loader) is has_exact_length(trainer.accelerator.prepare(loader)) is expected
    assert not has_exact_length(itertools.repeat(data, 3))
