"""The sums of losses and logged values, and the loss, inputs and outputs of its step that `on_step_end` may ask for."""

import pytest
import torch

import hftrainer
from hftrainer import Trainer, TrainerCallback
from hftrainer.training.run import Run
from hftrainer.training.steps.sums import LoggedMetrics, LossAccumulator, StepEndValues
from tests.support.checkpoints import make_trainer
from tests.support.parity import build, make_recorder, train
from tests.support.small_models import Plain, make_plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_losses_are_summed_in_float32(make_args, dtype):
    """As transformers does, also losses of float64; a loss that is not finite counts as the mean so far."""
    trainer, run = Trainer(make_plain(), make_args(on_divergence="stop")), Run()
    run.attempt.begin(trainer.state, trainer.args.device)
    trainer.state.global_step = 1
    losses = LossAccumulator(trainer, run)
    expected = torch.tensor(0.0)
    for loss in torch.tensor([1 / 3, 2 / 3, float("nan"), 0.1], dtype=dtype):
        losses.add_loss(loss, {})
        expected += loss if loss.isfinite() else expected / 2
    assert run.attempt.loss_since_log.dtype is torch.float32
    assert torch.equal(run.attempt.loss_since_log, expected)


@pytest.mark.parametrize(("step", "is_named"), [(4, True), (5, False)])
def test_weights_of_a_checkpoint_that_are_not_finite_are_named(make_args, caplog, step, is_named):
    """In the first step after a resume; later ones have trained them."""
    trainer, run = Trainer(make_plain(), make_args()), Run(resume_folder="out/checkpoint-4")
    run.attempt.begin(trainer.state, trainer.args.device)
    next(trainer.model.parameters()).data.fill_(float("nan"))
    trainer.state.global_step = step
    LossAccumulator(trainer, run).add_loss(torch.tensor(float("nan")), {})
    advice = "The weights of out/checkpoint-4 are not finite: resume from an older checkpoint."
    assert (advice in caplog.text) == is_named and "is NaN at step" in caplog.text


def test_logged_values_are_means_over_their_counts_or_else_over_the_steps():
    metrics = LoggedMetrics()
    for value in (1.0, 2.0):
        metrics.add("counted", value)
        metrics.add("uncounted", torch.tensor(value), count=0)
    metrics.add("once", 5.0)
    metrics.set({"last": 7.0})
    means = {"counted": 3 / 2, "uncounted": 3 / 4, "once": 5.0, "last": 7.0}
    assert metrics.pop(torch.tensor(8.0), 4) == (8.0, means)
    assert metrics.pop(torch.tensor(8.0), 4) == (8.0, {})


class StepEndRecorder(TrainerCallback):
    def __init__(self):
        self.steps = []

    def on_step_end(self, args, state, control, loss=None, inputs=None, outputs=None, **kwargs):
        self.steps.append((loss, inputs, outputs))


class RequiresLoss(TrainerCallback):
    def on_step_end(self, args, state, control, loss, **kwargs):
        assert loss.ndim == 0


class OwnStep(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        return super().training_step(model, inputs, num_items_in_batch)


@pytest.mark.parametrize("kind", [Trainer, OwnStep], ids=["automatic", "manual"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_on_step_end_gets_loss_inputs_and_outputs(tmp_path, kind, accumulation):
    recorder = StepEndRecorder()
    settings = {"max_steps": 3, "logging_steps": 1, "gradient_accumulation_steps": accumulation}
    settings |= {"eval_strategy": "steps", "eval_steps": 1}
    trainer, _ = build("hftrainer", "plain", tmp_path, trainer_class=lambda _: kind, **settings)
    trainer.add_callback(recorder)
    trainer.train()
    logged = [line["loss"] for line in trainer.state.log_history if "learning_rate" in line]
    assert [loss.item() for loss, _, _ in recorder.steps] == pytest.approx(logged)
    for loss, inputs, outputs in recorder.steps:
        assert isinstance(loss, torch.Tensor) and not loss.requires_grad
        assert sorted(inputs) == ["labels", "x"] and inputs["x"].shape == (4, 8)
        assert outputs["logits"].shape == (4, 3)  # of training's micro-batch, not of an evaluation's batch of 8
        assert torch.equal(torch.nn.functional.cross_entropy(outputs["logits"], inputs["labels"]), outputs["loss"])
    assert not trainer.model._forward_hooks


def test_only_requested_values_are_recorded(tmp_path, monkeypatch):
    recorder, requires_loss = make_recorder(hftrainer), RequiresLoss()
    assert StepEndValues([recorder]).requested_names == set()
    assert StepEndValues([recorder, requires_loss]).requested_names == {"loss"}
    trainer, _ = build("hftrainer", "plain", tmp_path, max_steps=2)
    trainer.add_callback(recorder)
    monkeypatch.setattr(Plain, "register_forward_hook", lambda *_: pytest.fail("outputs are recorded"))
    trainer.train()
    trainer.add_callback(requires_loss)
    trainer.train()
    given = [{"loss", "inputs", "outputs"} & {*names} for event, *_, names in recorder.events if event == "on_step_end"]
    assert given == [set(), set(), {"loss"}, {"loss"}]  # all callbacks get what one asks for


def test_requesting_values_does_not_change_the_run(tmp_path):
    plain = train("hftrainer", "bert", tmp_path / "a", max_steps=4)
    asked = train("hftrainer", "bert", tmp_path / "b", max_steps=4, trainer={"callbacks": [StepEndRecorder()]})
    assert plain.logs == asked.logs
    assert all(torch.equal(plain.weights[name], asked.weights[name]) for name in plain.weights)


@pytest.mark.parametrize("logging_steps", [1, 100])
def test_mean_loss_of_a_resumed_rank_leaves_out_the_losses_that_it_restores(tmp_path, monkeypatch, logging_steps):
    """A log line has their mean over the ranks, here another than this rank's; without one, the end has its own."""
    settings = {"save_steps": 2, "logging_steps": 100, "max_steps": 4}
    make_trainer(tmp_path, **settings).train()

    def mean_loss(change):
        trainer = make_trainer(tmp_path, **settings | {"logging_steps": logging_steps})
        reduce = type(trainer.accelerator.processes).reduce
        with monkeypatch.context() as patch:
            patch.setattr(type(trainer.accelerator.processes), "reduce", lambda *of: reduce(*of) + change)
            return trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2")).training_loss

    assert mean_loss(5.0) == pytest.approx(mean_loss(0.0), abs=1e-6)
