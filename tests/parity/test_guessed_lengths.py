"""Batch samplers whose `__len__` is a guess: all that they give is trained on and evaluated, as in transformers."""

import itertools
from pathlib import Path

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler, SequentialSampler

import hftrainer
from hftrainer.data.samplers import gives_its_length
from tests.support.parity import LIBRARIES, accuracy, alike, assert_same_weights, build, comparable, record
from tests.support.tiny import make_plain, plain_data


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
    """Each sample twice, and the length of the dataset."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self):
        return iter([index % self.samples for index in range(2 * self.samples)])

    def __len__(self) -> int:
        return self.samples


def trainer_class(train: Guessing, evaluation: Guessing):
    def make(library):
        class Own(library.Trainer):
            def get_train_dataloader(self):
                loader = DataLoader(self.train_dataset, batch_sampler=train, collate_fn=self.data_collator)
                return self.accelerator.prepare(loader)

            def get_eval_dataloader(self, eval_dataset=None):
                loader = DataLoader(self.eval_dataset, batch_sampler=evaluation, collate_fn=self.data_collator)
                return self.accelerator.prepare(loader)

            get_test_dataloader = get_eval_dataloader

        return Own

    return make


def run(library: str, folder: Path, train: Guessing, evaluation: Guessing, resume: str | None = None, **settings):
    """Train, evaluate and predict; all that can be compared."""
    trainer, recorder = build(
        library,
        "plain",
        folder,
        trainer_class=trainer_class(train, evaluation),
        logging_steps=1,
        eval_strategy="epoch",
        trainer={"compute_metrics": accuracy},
        **settings,
    )
    output = trainer.train(resume_from_checkpoint=resume)
    metrics = comparable([trainer.evaluate()])[0]
    predictions = trainer.predict(trainer.eval_dataset)
    found = record(trainer, recorder, folder)
    sizes = output.global_step, output.training_loss, trainer.state.max_steps, trainer.state.epoch
    return found, (sizes, metrics, predictions.predictions.tolist(), predictions.label_ids.tolist())


SAMPLES = len(plain_data())
#: Batches that the training data and the evaluation data claim to have; they have 10 and 5.
CLAIMS = [(10, 5), (9, 4), (6, 2), (1, 1), (11, 6), (15, 50)]


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("left_out", [0, 3])
@pytest.mark.parametrize("claimed", CLAIMS)
def test_all_that_comes_is_used(tmp_path, claimed, left_out, accumulation):
    def run_one(library):
        samplers = [Guessing(*each, left_out) for each in zip((SAMPLES, 19), claimed, strict=True)]
        settings = {"save_strategy": "no", "gradient_accumulation_steps": accumulation}
        found, found.extra["outcome"] = run(library, tmp_path / library, *samplers, **settings)
        return found

    alike(run_one)


@pytest.mark.parametrize("claimed", [3, 5, 9])
def test_metrics_batch_by_batch_end_with_the_last(tmp_path, claimed):
    """`compute_result` is True for the batch that is the last, not for that whose number is the length."""
    results = {}
    for library in LIBRARIES:
        seen: list[bool] = []

        def metric(prediction, compute_result, seen=seen):
            seen.append(compute_result)
            return {"batches": len(seen)}

        trainer, _ = build(
            library,
            "plain",
            tmp_path / library,
            trainer_class=trainer_class(Guessing(SAMPLES, 10), Guessing(19, claimed)),
            trainer={"compute_metrics": metric},
            batch_eval_metrics=True,
        )
        results[library] = trainer.evaluate()["eval_batches"], seen
    assert results["hftrainer"] == results["transformers"] == (5, [False] * 4 + [True])


@pytest.mark.parametrize("claimed", [8, 14])
@pytest.mark.parametrize("step", [4, 13])
def test_resumed(tmp_path, claimed, step):
    """A run goes on from the middle of an epoch that is shorter or longer than it says."""
    make = (Guessing(SAMPLES, claimed), Guessing(19, 3))
    whole, of_whole = run("hftrainer", tmp_path / "whole", *make, save_strategy="steps", save_steps=step)
    folder = tmp_path / "whole" / f"checkpoint-{step}"
    resumed, of_resumed = run("hftrainer", tmp_path / "resumed", *make, resume=str(folder), save_strategy="no")
    assert of_resumed[0][0] == of_whole[0][0]
    assert of_resumed[0][2:] == of_whole[0][2:]
    assert_same_weights(resumed.weights, whole.weights)
    count = len(whole.logs)
    assert resumed.logs[: count - 2] == whole.logs[: count - 2]  # but for the mean loss, and the evaluation after it


def test_share_of_an_evaluation(tmp_path):
    """Lightning's `limit_val_batches` as a share needs a length, and takes the guess."""
    trainer, _ = build(
        "hftrainer",
        "plain",
        tmp_path,
        trainer_class=trainer_class(Guessing(SAMPLES, 10), Guessing(19, 4)),
        lightning_config={"limit_val_batches": 0.5},
    )
    assert trainer.evaluate()
    assert trainer._hftrainer.engine.trainer.validate_loop.batch_progress.total.completed == 2


def test_which_lengths_are_sure():
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
        itertools.repeat(data, 3),
    ]
    args = hftrainer.TrainingArguments("unused", use_cpu=True, report_to="none")
    trainer = hftrainer.Trainer(make_plain(), args)
    for loader in sure:
        assert gives_its_length(loader) and gives_its_length(trainer.accelerator.prepare(loader))
    for loader in guessed:
        assert not gives_its_length(loader)
    for loader in guessed[:4]:
        assert not gives_its_length(trainer.accelerator.prepare(loader))
