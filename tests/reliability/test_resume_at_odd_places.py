"""Runs that end after an error, within an epoch or within an evaluation go on from there."""

import signal

import pytest
import torch

from hftrainer import Trainer, TrainerCallback, TrainingArguments
from tests.support.checkpoints import make_trainer
from tests.support.jobs import names
from tests.support.tiny import Plain, plain_data


def test_memory_runs_out_after_a_resume(tmp_path):
    """Starting again with smaller batches needs the checkpoint that the run goes on from."""

    class Hungry(Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            if self.state.global_step >= 5 and len(inputs["labels"]) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().compute_loss(model, inputs, *args, **kwargs)

    make_trainer(tmp_path, max_steps=3).train()
    trainer = make_trainer(tmp_path, auto_find_batch_size=True, save_total_limit=1, save_steps=4)
    trainer.__class__ = Hungry
    assert trainer.train(resume_from_checkpoint=True).global_step == 9
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-9"]


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("fails", [4, 5, 6, 7])
def test_place_after_an_error(tmp_path, accumulation, fails):
    """Without random numbers of the model, a run that goes on after an error is the undisturbed one."""

    class Fails(Plain):
        calls, fails = 0, None

        def forward(self, x, labels=None):
            if self.training:
                Fails.calls += 1
                if Fails.calls == Fails.fails:
                    raise RuntimeError("my own bug")
            return super().forward(x, labels)

    def train(folder, number=None, **options):
        torch.manual_seed(1)
        Fails.calls, Fails.fails = 0, number
        model = Fails()
        model.layers[3].p = 0.0  # the dropout
        args = TrainingArguments(
            str(folder),
            num_train_epochs=2,
            per_device_train_batch_size=4,
            use_cpu=True,
            disable_tqdm=True,
            gradient_accumulation_steps=accumulation,
            learning_rate=1e-2,
        )
        trainer = Trainer(model, args, train_dataset=plain_data())
        trainer.train(**options)
        return trainer

    whole = train(tmp_path / "whole")
    with pytest.raises(RuntimeError, match="my own bug"):
        train(tmp_path / "out", fails)
    resumed = train(tmp_path / "out", resume_from_checkpoint=True)
    assert resumed.state.global_step == whole.state.global_step
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("max_steps", [8, 14])
def test_more_steps_after_an_end_in_mid_epoch(tmp_path, max_steps):
    settings = {"save_strategy": "epoch"}
    make_trainer(tmp_path, max_steps=6, **settings).train()
    further = make_trainer(tmp_path, max_steps=max_steps, **settings)
    assert further.train(resume_from_checkpoint=True).global_step == max_steps
    assert further.state.epoch == pytest.approx(max_steps / 10)


@pytest.mark.parametrize("stopped_by", ["signal", "error"])
@pytest.mark.parametrize("step", [3, 10])
def test_an_evaluation_that_was_left_is_made_up(tmp_path, stopped_by, step):
    """Else the log and the best metric would lack it."""

    class Stops(TrainerCallback):
        def on_prediction_step(self, args, state, control, **kwargs):
            if state.global_step == step:
                if stopped_by == "error":
                    raise RuntimeError("my own bug")
                signal.raise_signal(signal.SIGTERM)

    settings = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "max_steps": 14,
        "load_best_model_at_end": True,
        "save_steps": 1,
    }
    whole = make_trainer(tmp_path / "a", **settings)
    whole.train()
    with pytest.raises(SystemExit if stopped_by == "signal" else RuntimeError):
        make_trainer(tmp_path / "b", callbacks=[Stops()], **settings).train()
    resumed = make_trainer(tmp_path / "b", **settings)
    resumed.train(resume_from_checkpoint=True)

    def losses(trainer):
        return [(line["step"], line["eval_loss"]) for line in trainer.state.log_history if "eval_loss" in line]

    assert losses(resumed) == losses(whole)
    assert resumed.state.best_global_step == whole.state.best_global_step
    assert resumed.state.best_metric == whole.state.best_metric
