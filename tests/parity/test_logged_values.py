"""Several losses, and `log_metric`."""

import pytest
import torch

import hftrainer
from hftrainer.errors import InvalidArgument
from tests.support.parity import EVALUATED, assert_same_weights, build, train
from tests.support.tiny import Plain


class TwoLosses(Plain):
    """Returns its loss in parts."""

    def __init__(self, with_total=True):
        super().__init__()
        self.with_total = with_total

    def forward(self, x, labels=None):
        outputs = super().forward(x, labels)
        size = outputs["logits"].square().mean()
        total = {"loss": outputs["loss"] + size} if self.with_total else {}
        return {"loss": {"entropy": outputs["loss"], "size": size, **total}, "logits": outputs["logits"]}


@pytest.mark.parametrize("where", ["model", "model without a total", "compute_loss"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_several_losses(tmp_path, where, accumulation):
    torch.manual_seed(1)
    model = Plain() if where == "compute_loss" else TwoLosses(with_total=where == "model")

    class InParts(hftrainer.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            size = outputs["logits"].square().mean()
            loss = {"entropy": outputs["loss"], "size": size}
            return (loss, outputs) if return_outputs else loss

    class Summed(hftrainer.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            loss = outputs["loss"] + outputs["logits"].square().mean()
            return (loss, outputs) if return_outputs else loss

    settings = {"gradient_accumulation_steps": accumulation, "logging_steps": 2, **EVALUATED}
    kind = InParts if where == "compute_loss" else hftrainer.Trainer
    parts = train(
        "hftrainer", "plain", tmp_path / "a", trainer={"model": model}, trainer_class=lambda _: kind, **settings
    )
    torch.manual_seed(1)
    whole = train(
        "hftrainer", "plain", tmp_path / "b", trainer={"model": Plain()}, trainer_class=lambda _: Summed, **settings
    )
    assert_same_weights({name.removeprefix("inner."): value for name, value in parts.weights.items()}, whole.weights)
    for ours, theirs in zip(parts.logs, whole.logs, strict=True):
        if "learning_rate" in ours:
            assert ours["loss"] == theirs["loss"]
            assert ours["entropy"] + ours["size"] == pytest.approx(ours["loss"], rel=1e-5)
        if "eval_loss" in ours:
            assert ours["eval_loss"] == theirs["eval_loss"]


def test_log_metric(tmp_path):
    """The mean over all steps since the last log line; nothing is read in between."""

    class Own(hftrainer.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            step = self.state.global_step
            self.log_metric("twice", 2.0 * step)
            self.log_metric("tensor", torch.tensor(float(step), requires_grad=True) + 1)
            if step == 2:
                self.log_metric("seldom", 7)
            return (loss, outputs) if return_outputs else loss

    settings = {"max_steps": 6, "logging_steps": 3}
    ours = train("hftrainer", "plain", tmp_path / "a", trainer_class=lambda _: Own, **settings)
    lines = [line for line in ours.logs if "learning_rate" in line]
    assert [line["twice"] for line in lines] == [2.0, 8.0]
    assert [line["tensor"] for line in lines] == [2.0, 5.0]
    assert [line.get("seldom") for line in lines] == [7.0, None]
    plain = train("hftrainer", "plain", tmp_path / "b", **settings)
    assert [line["loss"] for line in lines] == [line["loss"] for line in plain.logs if "learning_rate" in line]


def test_no_further_transfer(tmp_path, monkeypatch):
    """One read of the device per log line, however many numbers it has."""
    reads = []
    original = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(self.shape) or original(self))
    trainer, _ = build("hftrainer", "plain", tmp_path, trainer={"model": TwoLosses()}, max_steps=4, logging_steps=2)
    trainer.train()
    assert [shape for shape in reads if shape == (3,)] == [(3,), (3,)]


def test_log_metric_is_about_training(tmp_path):
    """Values of an evaluation, and of a run before, are no part of the mean."""

    class Own(hftrainer.Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            self.log_metric("training", float(model.training))
            self.log_metric("size", len(inputs["x"]))
            return super().compute_loss(model, inputs, *args, **kwargs)

    settings = {"max_steps": 5, "logging_steps": 2, **EVALUATED}
    trainer, _ = build("hftrainer", "plain", tmp_path, trainer_class=lambda _: Own, **settings)
    trainer.evaluate()
    for _ in range(2):
        trainer.train()
        lines = [line for line in trainer.state.log_history if "learning_rate" in line]
        assert [(line["training"], line["size"]) for line in lines] == [(1.0, 4.0)] * 2


@pytest.mark.parametrize("wrong", ["loss", "metric"])
def test_what_cannot_be_logged(tmp_path, wrong):
    class Own(hftrainer.Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            loss, outputs = super().compute_loss(model, inputs, True)
            if wrong == "metric":
                self.log_metric("logits", outputs["logits"])
            return {"loss": loss, "aux": None, "logits": outputs["logits"]}

    trainer, _ = build("hftrainer", "plain", tmp_path, trainer_class=lambda _: Own, max_steps=1)
    with pytest.raises(InvalidArgument, match=r"'logits' cannot be logged: it is a tensor of shape \(4, 3\)"):
        trainer.train()
