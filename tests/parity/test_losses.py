"""The loss that is trained and logged: functions of the user, label smoothing, losses in parts, `log_metric`."""

import logging
import math
import sys

import pytest
import torch
import transformers
from torch import nn

from hftrainer.errors import InvalidArgument
from hftrainer.monitoring.journal import read_events
from tests.support import parity
from tests.support.losses import MEANS
from tests.support.parity import EVALUATED, EVERY_STEP, assert_same_weights, build, compare, subclass, train
from tests.support.small_models import Plain, language_data, make_llama, make_plain, make_t5, plain_data, t5_data


def make_without_loss():
    model = make_plain()
    original = model.forward
    model.forward = lambda x, labels=None: original(x)
    return model


@pytest.mark.parametrize("name", MEANS)
def test_loss_function_without_num_items_in_batch_is_averaged(tmp_path, name):
    settings = {"gradient_accumulation_steps": 3, **EVALUATED}
    plain = train("hftrainer", "plain", tmp_path / "plain", **settings)
    ours = train("hftrainer", "plain", tmp_path / "own", trainer={"compute_loss_func": MEANS[name]}, **settings)
    assert_same_weights(ours.weights, plain.weights)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_compute_loss_func_with_num_items_in_batch_trains_alike(tmp_path, accumulation):
    counts = set()

    def loss_func(outputs, labels, num_items_in_batch=None):
        summed = nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum")
        if num_items_in_batch is None:
            return summed / len(labels)
        counts.add(num_items_in_batch.dtype)
        return summed / num_items_in_batch

    trainer_kwargs = {"compute_loss_func": loss_func, "compute_metrics": parity.accuracy}
    settings = {"gradient_accumulation_steps": accumulation, **EVERY_STEP}
    compare(tmp_path, "plain", trainer=lambda: {"model": make_without_loss(), **trainer_kwargs}, **settings)
    assert counts == {torch.float32}


@pytest.mark.parametrize("logging_steps", [1, 4])  # a line of one step has no losses before the one that is left out
@pytest.mark.parametrize("filtered", [True, False])
def test_nan_losses_are_filtered_from_the_log_alike(tmp_path, filtered, logging_steps):
    data = plain_data()
    for sample in data[8:12]:
        sample["labels"] = torch.tensor(-100)  # a batch of these has no mean
    settings = {"train_sampling_strategy": "sequential", "num_train_epochs": 1, "trainer": {"train_dataset": data}}
    settings |= {"logging_nan_inf_filter": filtered, "logging_steps": logging_steps}
    losses = parity.assert_agree(
        lambda name: [
            str(line["loss"]) for line in train(name, "plain", tmp_path / name, **settings).logs if "loss" in line
        ]
    )
    assert losses.count("nan") == (0 if filtered else 8 // logging_steps)  # from step 3 of 10 on


class NumberPerRow(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.scale * x


def test_first_number_of_a_models_output_is_the_loss(tmp_path, caplog):
    """The model returns one number per row; its evaluation has no labels and no loss."""
    ours = compare(tmp_path, (NumberPerRow, lambda: [{"x": float(number)} for number in range(38)]), **EVALUATED)
    assert ours.logs[0]["loss"] != 0
    (said,) = {line.message for line in caplog.records if line.name == "hftrainer.model.inspection"}
    assert "its first number is used as the loss" in said


class BadAtTwoSteps(Plain):
    calls, factor = 0, 1.0  # an infinite summand leaves the weights finite, a factor of NaN does not

    def forward(self, x, labels=None):
        outputs = super().forward(x, labels)
        self.calls += self.training
        return {**outputs, "loss": outputs["loss"] * self.factor + math.inf} if self.calls in (3, 5) else outputs


@pytest.mark.parametrize("filtered", [True, False])
@pytest.mark.parametrize(
    ("factor", "summary"),
    [(1.0, "in some steps"), (math.nan, "since step 3 of 6: the last weights may be unusable")],
)
def test_bad_loss_is_reported_with_its_step_and_advice(
    tmp_path, caplog, capsys, monkeypatch, filtered, factor, summary
):
    model = BadAtTwoSteps()
    settings = {"max_steps": 6, "logging_nan_inf_filter": filtered, "logging_steps": 2, "observe": True}
    model.factor = factor
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with caplog.at_level(logging.INFO, logger="hftrainer"):
        (trainer := build("hftrainer", "plain", tmp_path, trainer={"model": model}, **settings)[0]).train()
    assert f"{summary}{'. In log_history, loss and train_loss leave' if filtered else '.'}" in caplog.text
    (said,) = [
        text for text in caplog.messages if f"The loss is {'NaN' if math.isnan(factor) else 'infinite'} at step" in text
    ]
    assert all(words in said for words in ("step 3", "learning_rate", "underflow_overflow"))
    assert ("log_history leaves it out of its means" in said) == filtered
    lines = [event for event in read_events(trainer.args.output_dir) if "loss" in event.get("logs", ())]
    assert [line.get("is_partial", False) for line in lines] == [False, True, True]
    # A log line of losses that are all NaN shows that.
    assert ("NaN at step 3\n" in capsys.readouterr().out) == (filtered and factor == 1)


def test_nan_in_the_data_is_named(tmp_path, caplog):
    data = [{**row, "x": row["x"] * float("nan")} for row in plain_data()]
    build("hftrainer", "plain", tmp_path, trainer={"train_dataset": data}, max_steps=1)[0].train()
    assert "its means. The batch's 'x' contains NaN (32 of 32 values): clean the data." in caplog.text


def decoder_data(count=38):
    """With the decoder's inputs, which a model cannot make of labels that the smoother has taken."""
    shift = make_t5()._shift_right
    return [{**row, "decoder_input_ids": shift(row["labels"][None])[0]} for row in t5_data(count)]


@pytest.mark.parametrize("model", ["bert", "llama", "peft", (make_t5, decoder_data)])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_label_smoothing_trains_alike(tmp_path, model, accumulation):
    """Labels of causal models are shifted; `num_items_in_batch` divides where the model takes it."""
    settings = {"gradient_accumulation_steps": accumulation, **EVALUATED}
    smoothed = compare(tmp_path, model, label_smoothing_factor=0.2, **settings)
    plain = train("hftrainer", model, tmp_path / "plain", **settings)
    assert smoothed.logs[0]["loss"] != plain.logs[0]["loss"]


class OwnLlama(transformers.LlamaForCausalLM):
    """A class whose name transformers does not know."""


class Wrapper(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, input_ids, labels=None):
        return self.model(input_ids=input_ids, labels=labels)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda model: OwnLlama(model.config), id="subclass"),
        pytest.param(Wrapper, id="module around one"),
        pytest.param(lambda model: torch.compile(model, backend="eager"), id="compiled"),
    ],
)
def test_label_smoothing_shifts_labels_of_custom_causal_models(tmp_path, change):
    """Reported in QwenLM/Qwen#834: the labels are shifted, as for the classes that transformers knows by name."""

    def loss(name, change):
        model = make_llama()
        changed = change(model)
        changed.load_state_dict(model.state_dict()) if isinstance(changed, OwnLlama) else None
        trainer_kwargs = {"model": changed, "eval_dataset": language_data(6)}
        more = {"label_smoothing_factor": 0.1, "label_names": ["labels"]}
        trainer, _ = build("hftrainer", "llama", tmp_path / name, trainer=trainer_kwargs, **more)
        return trainer.evaluate()["eval_loss"]

    assert loss("own", change) == pytest.approx(loss("known", lambda model: model), rel=1e-6)


def test_label_smoothing_in_seq2seq(tmp_path):
    settings = {"predict_with_generate": True, "generation_max_length": 6, "label_smoothing_factor": 0.1}
    settings |= {"trainer_class": parity.seq2seq, "script": lambda trainer: trainer.evaluate() and None}
    compare(tmp_path, (make_t5, decoder_data), **settings)


class TwoLosses(Plain):
    def __init__(self, with_total=True):
        torch.manual_seed(1)
        super().__init__()
        self.with_total = with_total

    def forward(self, x, labels=None):
        outputs = super().forward(x, labels)
        size = outputs["logits"].square().mean()
        total = {"loss": outputs["loss"] + size} if self.with_total else {}
        return {"loss": {"entropy": outputs["loss"], "size": size, **total}, "logits": outputs["logits"]}


def losses_of(combine):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = combine(outputs["loss"], outputs["logits"].square().mean())
        return (loss, outputs) if return_outputs else loss

    return subclass(compute_loss=compute_loss)


IN_PARTS = {
    "model": {"trainer": lambda: {"model": TwoLosses()}},
    "model without a total": {"trainer": lambda: {"model": TwoLosses(with_total=False)}},
    "compute_loss": {"trainer_class": losses_of(lambda entropy, size: {"entropy": entropy, "size": size})},
}


@pytest.mark.parametrize("where", IN_PARTS)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_dict_of_losses_is_summed_and_each_is_logged(tmp_path, where, accumulation):
    settings = {"gradient_accumulation_steps": accumulation, **EVALUATED}
    parts = train("hftrainer", "plain", tmp_path / "parts", **settings, **IN_PARTS[where])
    summed = losses_of(lambda entropy, size: entropy + size)
    whole = train("hftrainer", "plain", tmp_path / "whole", trainer_class=summed, **settings)
    assert_same_weights(parts.weights, whole.weights)
    for ours, theirs in zip(parts.logs, whole.logs, strict=True):
        assert [ours.get(key) for key in ("loss", "eval_loss")] == [theirs.get(key) for key in ("loss", "eval_loss")]
        if "learning_rate" in ours:
            assert ours["entropy"] + ours["size"] == pytest.approx(ours["loss"], rel=1e-5)


def training_lines(found):
    return [line for line in found.logs if "learning_rate" in line]


def test_log_metric_logs_the_mean_since_the_last_line(tmp_path):
    def compute_loss(self, *args, **kwargs):
        step = self.state.global_step
        self.log_metric("twice", 2.0 * step)
        self.log_metric("tensor", torch.tensor(float(step), requires_grad=True) + 1)
        if step == 2:
            self.log_metric("seldom", 7)
        return super(type(self), self).compute_loss(*args, **kwargs)

    settings = {"max_steps": 6, "logging_steps": 3}
    own = subclass(compute_loss=compute_loss)
    lines = training_lines(train("hftrainer", "plain", tmp_path / "own", trainer_class=own, **settings))
    plain = training_lines(train("hftrainer", "plain", tmp_path / "plain", **settings))
    assert [[line.get(name) for line in lines] for name in ("twice", "tensor", "seldom")] == [[2, 8], [2, 5], [7, None]]
    assert [line["loss"] for line in lines] == [line["loss"] for line in plain]


def test_each_log_line_reads_the_device_once(tmp_path, monkeypatch):
    reads = []
    original = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(self.shape) or original(self))
    train("hftrainer", "plain", tmp_path, trainer={"model": TwoLosses()}, max_steps=4, logging_steps=2)
    assert [shape for shape in reads if shape == (3,)] == [(3,), (3,)]


def test_log_metric_leaves_out_evaluations_and_earlier_runs(tmp_path):
    def compute_loss(self, model, inputs, *args, **kwargs):
        self.log_metric("training", float(model.training))
        self.log_metric("size", len(inputs["x"]))
        return super(type(self), self).compute_loss(model, inputs, *args, **kwargs)

    settings = {"max_steps": 5, "trainer_class": subclass(compute_loss=compute_loss), **EVALUATED}
    trainer, _ = build("hftrainer", "plain", tmp_path, **settings)
    trainer.evaluate()
    for _ in range(2):
        trainer.train()
        lines = [line for line in trainer.state.log_history if "learning_rate" in line]
        assert [(line["training"], line["size"]) for line in lines] == [(1.0, 4.0)] * 2


@pytest.mark.parametrize("wrong", ["loss", "metric"])
def test_logging_a_tensor_of_several_numbers_is_refused(tmp_path, wrong):
    def compute_loss(self, model, inputs, *args, **kwargs):
        loss, outputs = super(type(self), self).compute_loss(model, inputs, True)
        if wrong == "metric":
            self.log_metric("logits", outputs["logits"])
        return {"loss": loss, "aux": None, "logits": outputs["logits"]}

    with pytest.raises(InvalidArgument, match=r"'logits' cannot be logged: it is a tensor of shape \(4, 3\)"):
        train("hftrainer", "plain", tmp_path, trainer_class=subclass(compute_loss=compute_loss), max_steps=1)
