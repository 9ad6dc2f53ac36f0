"""The loss that is trained and logged: functions of the user, label smoothing, losses that are not numbers."""

import importlib
import logging

import pytest
import torch
from torch import nn

import hftrainer
from tests.support.parity import (
    EVALUATED,
    EVERY_STEP,
    accuracy,
    alike,
    assert_equal,
    both,
    build,
    compare,
    train,
)
from tests.support.tiny import MODELS, Plain, make_bert, make_plain, make_t5, plain_data, t5_data


@pytest.mark.parametrize("accumulation", [1, 3])
def test_compute_loss_func(tmp_path, accumulation):
    def loss_func(outputs, labels, num_items_in_batch=None):
        summed = torch.nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum")
        return summed / (num_items_in_batch if num_items_in_batch is not None else len(labels))

    def make():
        model = make_plain()
        original = model.forward
        model.forward = lambda x, labels=None: original(x)
        return model

    def run(name):
        given = {"model": make(), "compute_loss_func": loss_func, "compute_metrics": accuracy}
        settings = {"gradient_accumulation_steps": accumulation, **EVERY_STEP}
        return train(name, "plain", tmp_path / name, trainer=given, **settings)

    alike(run)


@pytest.mark.parametrize("logging_steps", [1, 4])  # a line of one step has no losses before the one that is left out
@pytest.mark.parametrize("filtered", [True, False])
def test_nan_losses(tmp_path, filtered, logging_steps):
    settings = {
        "logging_nan_inf_filter": filtered,
        "logging_steps": logging_steps,
        "train_sampling_strategy": "sequential",
        "num_train_epochs": 1,
    }
    losses = []
    for name in ("hftrainer", "transformers"):
        data = plain_data()
        for sample in data[8:12]:
            sample["labels"] = torch.tensor(-100)  # a batch of these has no mean
        logs = train(name, "plain", tmp_path / name, trainer={"train_dataset": data}, **settings).logs
        losses.append([str(line["loss"]) for line in logs if "loss" in line])  # nan is not equal to itself
    assert losses[0] == losses[1]
    assert losses[0].count("nan") == (0 if filtered else 8 // logging_steps)  # without the filter it stays


def test_items_in_batch_are_float32(tmp_path):
    seen = set()

    def loss_func(outputs, labels, num_items_in_batch=None):
        seen.add((num_items_in_batch.dtype, float(num_items_in_batch)))
        return torch.nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch

    def make():
        model = make_plain()
        original = model.forward
        model.forward = lambda x, labels=None: original(x)
        return {"model": model, "compute_loss_func": loss_func}

    both(tmp_path, make, gradient_accumulation_steps=3)
    assert {dtype for dtype, _ in seen} == {torch.float32}


def decoder_data(count=38):
    """With the decoder's inputs, which a model cannot make of labels that the smoother has taken."""
    shift = make_t5()._shift_right
    return [{**row, "decoder_input_ids": shift(row["labels"][None])[0]} for row in t5_data(count)]


MODELS.setdefault("t5", (make_t5, decoder_data))


@pytest.mark.parametrize("model", ["bert", "llama", "peft", "t5"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_label_smoothing(tmp_path, model, accumulation):
    """The shift of causal models included; `num_items_in_batch` divides where the model takes it."""
    settings = {"label_smoothing_factor": 0.2, "gradient_accumulation_steps": accumulation, **EVALUATED}
    smoothed = compare(tmp_path, model, **settings)
    plain = train("hftrainer", model, tmp_path / "plain", **{**settings, "label_smoothing_factor": 0.0})
    assert smoothed.logs[0]["loss"] != plain.logs[0]["loss"]


class NumberEach(nn.Module):
    """Returns a number for each row, and no loss."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.scale * x


MODELS.setdefault("number each", (NumberEach, lambda: [{"x": float(number)} for number in range(38)]))


def test_first_number_is_the_loss(tmp_path, caplog):
    """Of a model that returns a number for each row; the evaluation has no labels and no loss."""
    hftrainer.training.loss._warn_once.cache_clear()
    ours = compare(tmp_path, "number each", **EVALUATED)
    assert ours.logs[0]["loss"] != 0
    (said,) = {line.message for line in caplog.records if line.name == "hftrainer.training.loss"}
    assert "the first of them is the loss" in said


def test_label_smoothing_in_seq2seq(tmp_path):
    def run(name):
        library = importlib.import_module(name)
        args = library.Seq2SeqTrainingArguments(
            str(tmp_path),
            label_smoothing_factor=0.1,
            predict_with_generate=True,
            generation_max_length=6,
            use_cpu=True,
            disable_tqdm=True,
            report_to="none",
        )
        trainer = library.Seq2SeqTrainer(make_t5(), args, compute_metrics=lambda p: {})
        return trainer.evaluate(decoder_data(5))["eval_loss"]

    alike(run, assert_equal)


def test_label_smoothing_of_several_labels(tmp_path):
    model = make_bert()
    model.config.problem_type = "multi_label_classification"
    args = hftrainer.TrainingArguments(str(tmp_path), label_smoothing_factor=0.1, use_cpu=True)
    with pytest.warns(UserWarning, match="label_smoothing_factor"):
        assert hftrainer.Trainer(model, args).label_smoother is None


class Dirty(Plain):
    """Its loss is not a number at some steps."""

    calls = 0

    def forward(self, x, labels=None):
        outputs = super().forward(x, labels)
        self.calls += self.training
        return {**outputs, "loss": outputs["loss"] * (float("nan") if self.calls in (3, 5) else 1.0)}


def test_warning_of_a_loss_that_is_no_number(tmp_path, caplog):
    trainer, _ = build("hftrainer", "plain", tmp_path, trainer={"model": Dirty()}, max_steps=6)
    with caplog.at_level(logging.WARNING, logger="hftrainer"):
        trainer.train()
    said = [message for message in caplog.messages if "The loss is nan at optimizer step 3" in message]
    assert len(said) == 1
    assert "learning_rate" in said[0] and "underflow_overflow" in said[0]
    assert not [message for message in caplog.messages if "step 5" in message]
