"""The default collator is that of transformers; errors name removed columns and values that no batch can hold."""

import datasets
import numpy as np
import pytest
import torch
import transformers

import hftrainer
from hftrainer.errors import InvalidSetup, RemovedColumn
from tests.support.parity import assert_same_weights, build
from tests.support.small_models import make_bert, make_plain, plain_data

ROWS = [{**row, "x": row["x"].tolist(), "weight": 2.0} for row in plain_data(8)]


class Weighs(hftrainer.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        weight = inputs.pop("weight").mean()
        outputs = model(**inputs)
        return (outputs["loss"] * weight, outputs) if return_outputs else outputs["loss"] * weight


def collate(rows):
    return {name: torch.tensor([row[name] for row in rows]) for name in ("x", "labels", "weight")}


@pytest.mark.parametrize("make_data", [datasets.Dataset.from_list, list], ids=["Dataset", "list"])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("reads", ["collator", "loss"])
@pytest.mark.parametrize("method", ["train", "evaluate"])
def test_reading_a_removed_column_names_it(tmp_path, make_data, workers, reads, method):
    trainer_kwargs = {"train_dataset": make_data(ROWS), "eval_dataset": make_data(ROWS)}
    trainer_kwargs |= {"data_collator": collate} if reads == "collator" else {}
    settings = {"dataloader_num_workers": workers, "max_steps": 1}
    trainer_class = (lambda library: Weighs) if reads == "loss" else (lambda library: library.Trainer)
    trainer, _ = build("hftrainer", "plain", tmp_path, trainer=trainer_kwargs, trainer_class=trainer_class, **settings)
    with pytest.raises(RemovedColumn, match=r"the column 'weight', .*remove_unused_columns=False"):
        getattr(trainer, method)()


def test_dataset_without_an_accepted_column_is_refused_without_notes(tmp_path):
    data = datasets.Dataset.from_dict({"text": ["a"] * 8, "target": [1] * 8})
    trainer, _ = build("hftrainer", "plain", tmp_path, trainer={"train_dataset": data})
    with pytest.raises(InvalidSetup, match="the dataset has target, text; the model accepts x") as caught:
        trainer.train()
    assert not any("The samples also have" in note for note in getattr(caught.value, "__notes__", ()))


def test_collator_error_names_removed_text_columns(tmp_path):
    def refuse(rows):
        raise ValueError("You should supply an encoding")

    trainer_kwargs = {"train_dataset": [{**row, "text": "a", "target": 1} for row in ROWS], "data_collator": refuse}
    trainer, _ = build("hftrainer", "plain", tmp_path, trainer=trainer_kwargs)
    with pytest.raises(ValueError, match="supply an encoding") as caught:
        trainer.train()
    assert any(note.startswith("The samples also have target, text, weight, which") for note in caught.value.__notes__)


class TakesX(torch.nn.Module):
    def forward(self, x=None, labels=None):
        raise ValueError("You must specify x")


TEXT = "'x' is text ('hello') in the samples, but the default collator needs numbers: tokenize or encode it, or pass a"


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("label", [1, 2]),
        ("label", [1.5, 2.5]),
        ("label", [[0, 1, 1], [1, 0, 0]]),
        ("label", [torch.tensor(1), torch.tensor(2)]),
        pytest.param("label", [np.int64(3), np.int64(4)], marks=pytest.mark.newest_peer),  # became floats before
        ("label_ids", [[1, 2], [3, 4]]),
        ("label_ids", [[1.0, 2.0], [3.0, 4.0]]),
        ("label_ids", [torch.tensor([1, 2]), torch.tensor([3, 4])]),
    ],
)
def test_default_collator_matches_transformers(name, values):
    others = {"x": torch.ones(2), "y": np.arange(3), "z": [1, 2], "text": "no", "nothing": None}
    features = [{**others, name: value} for value in values]
    ours, theirs = (library.default_data_collator(features) for library in (hftrainer, transformers))
    assert {key: tensor.dtype for key, tensor in ours.items()} == {key: each.dtype for key, each in theirs.items()}
    assert_same_weights(ours, theirs)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("x", None, "they are None in 7 of 8 samples (first in number 2 of the batch); replace or remove these"),
        ("x", "a", "they are text ('a') in 7 of 8 samples (first in number 2 of the batch); tokenize or encode it"),
        ("x", {"a": 1}, "they are a dict in 7 of 8 samples (first in number 2 of the batch); make its keys columns"),
        ("x", [1, "a"], "they are a list with text ('a') in 7 of 8"),
        ("x", object(), "they are an object in 7 of 8 samples (first in number 2 of the batch); convert it to num"),
        ("label", None, "The values of 'label' do not fit into one tensor ("),
        ("label_ids", ["a"], "they are a list with text ('a') in 7 of 8"),
    ],
)
def test_values_that_are_no_numbers_are_named(key, value, message):
    first = [1] if key == "label_ids" else 1
    with pytest.raises(InvalidSetup) as caught:
        hftrainer.default_data_collator([{key: first}, *[{key: value}] * 7])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("model", "sample", "message"),
    [
        (make_plain(), {"x": "hello", "labels": 0}, f"The batch has no 'x', which Plain.forward needs: {TEXT}"),
        (make_plain(), {"x": None, "labels": 0}, "which Plain.forward needs: 'x' is None in the samples, but"),
        (TakesX(), {"x": "hello", "labels": 0}, TEXT),
        (
            make_plain(),
            {"x": [1.0] * 8, "labels": None},
            "'labels' is None in the samples, but the default collator needs numbers: replace",
        ),
        (make_plain(), {"x": [1.0] * 8, "labels": 0.0}, "The labels are float32: use torch.long for class indices."),
        (make_plain(), {"x": torch.ones(8).double(), "labels": 0}, "The input is float64, the weights are float32"),
        (make_plain(), {"x": [1.0] * 8, "labels": True}, "The labels are bool: use torch.long for class indices."),
        (make_bert(), {"input_ids": [1] * 4, "labels": 1.0}, "The labels are float32: use torch.long for class"),
        (
            make_plain(),
            {"x": [1.0] * 8, "labels": [0, 1, 0]},
            "The labels are one-hot, int64 (8, 3), but the loss takes",
        ),
        (make_bert(), {"input_ids": [1] * 4, "labels": [0, 1, 0]}, "The labels are one-hot, int64 (8, 3), but the"),
        (make_plain(), {"x": [1.0] * 8, "labels": [0, 1, 1]}, "number for each class: convert these with .float()"),
        (make_plain(), {"y": 1.0, "z": 0}, "No key of the training samples is an argument of Plain.forward"),
        (make_plain(), {"x": [1.0] * 8}, "Not all samples of this batch have 'labels', but the first has."),
    ],
)
def test_error_explains_inputs_missing_from_the_batch(tmp_path, model, sample, message):
    args = hftrainer.TrainingArguments(str(tmp_path), use_cpu=True, max_steps=1, train_sampling_strategy="sequential")
    first = {"labels": 0, **sample} if "x" in sample else sample
    with pytest.raises((TypeError, ValueError, RuntimeError, KeyError)) as caught:
        hftrainer.Trainer(model, args, train_dataset=[first, *[sample] * 7]).train()
    told = [str(caught.value), *caught.value.__notes__]
    assert any(message in each for each in told)
    assert not any("The samples also have" in each for each in told)


def test_other_key_errors_stay_unchanged(tmp_path):
    class Wrong(hftrainer.Trainer):
        def compute_loss(self, *args, **kwargs):
            return {}["key"]

    trainer_kwargs = {"train_dataset": ROWS}
    trainer, _ = build("hftrainer", "plain", tmp_path, trainer=trainer_kwargs, trainer_class=lambda library: Wrong)
    with pytest.raises(KeyError) as caught:
        trainer.train()
    assert caught.type is KeyError and caught.value.args == ("key",)
