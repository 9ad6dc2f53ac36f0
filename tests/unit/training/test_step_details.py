"""What `on_step_end` may ask for: the loss, the inputs and the outputs of its step."""

import pytest
import torch

from hftrainer import Trainer, TrainerCallback
from hftrainer.training.steps import StepDetails
from tests.support.parity import build, train
from tests.support.tiny import Plain


class Asks(TrainerCallback):
    def __init__(self):
        self.steps = []

    def on_step_end(self, args, state, control, loss=None, inputs=None, outputs=None, **kwargs):
        self.steps.append((loss, inputs, outputs))


class AsksForLoss(TrainerCallback):
    def __init__(self):
        self.losses, self.others = [], []

    def on_step_end(self, args, state, control, loss, **kwargs):
        self.losses.append(loss)
        self.others.append(sorted(kwargs.keys() & {"inputs", "outputs"}))


class AsksNothing(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_step_end(self, args, state, control, **kwargs):
        self.seen.append(sorted(kwargs.keys() & {"loss", "inputs", "outputs"}))


class OwnStep(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        return super().training_step(model, inputs, num_items_in_batch)


@pytest.mark.parametrize("kind", [Trainer, OwnStep], ids=["automatic", "manual"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_details_of_a_step(tmp_path, kind, accumulation):
    asks = Asks()
    settings = {"max_steps": 3, "logging_steps": 1, "gradient_accumulation_steps": accumulation}
    settings |= {"eval_strategy": "steps", "eval_steps": 1}
    trainer, _ = build("hftrainer", "plain", tmp_path, trainer_class=lambda _: kind, **settings)
    trainer.add_callback(asks)
    trainer.train()
    logged = [line["loss"] for line in trainer.state.log_history if "learning_rate" in line]
    assert [loss.item() for loss, _, _ in asks.steps] == pytest.approx(logged)
    for loss, inputs, outputs in asks.steps:
        assert isinstance(loss, torch.Tensor) and not loss.requires_grad
        assert sorted(inputs) == ["labels", "x"] and inputs["x"].shape == (4, 8)
        assert outputs["logits"].shape == (4, 3)  # of training's micro-batch, not of an evaluation's batch of 8
        assert torch.equal(torch.nn.functional.cross_entropy(outputs["logits"], inputs["labels"]), outputs["loss"])
    assert not trainer.model._forward_hooks


def test_nothing_is_kept_when_nobody_asks(tmp_path):
    nothing, some = AsksNothing(), AsksForLoss()
    assert StepDetails([nothing]).requested == set()
    assert StepDetails([nothing, some]).requested == {"loss"}
    trainer, _ = build("hftrainer", "plain", tmp_path, max_steps=2)
    trainer.add_callback(nothing)
    hooks = []
    original = Plain.register_forward_hook
    try:
        Plain.register_forward_hook = lambda self, hook: hooks.append(hook) or original(self, hook)
        trainer.train()
        assert not hooks
        trainer.add_callback(some)
        trainer.train()
    finally:
        del Plain.register_forward_hook
    assert nothing.seen[:2] == [[], []]
    assert nothing.seen[2:] == [["loss"], ["loss"]]  # what one asks for, all get
    assert [loss.ndim for loss in some.losses] == [0, 0] and some.others == [[], []]


def test_the_run_is_the_same(tmp_path):
    plain = train("hftrainer", "bert", tmp_path / "a", max_steps=4)
    asked = train("hftrainer", "bert", tmp_path / "b", max_steps=4, trainer={"callbacks": [Asks()]})
    assert plain.logs == asked.logs
    assert all(torch.equal(plain.weights[name], asked.weights[name]) for name in plain.weights)
