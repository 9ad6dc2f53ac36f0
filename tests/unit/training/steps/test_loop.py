"""Which micro-batches make up each optimizer step of a run, and what a run announces, returns and forgets."""

import pytest
import torch

import hftrainer
from hftrainer import TrainerCallback
from tests.support.checkpoints import AtStep, SetFlag, make_trainer
from tests.support.divergence import SIZE, entries, fit, rows
from tests.support.parity import make_recorder
from tests.support.small_models import Stream, plain_data


class StepSizes(TrainerCallback):
    """The micro-batches of each step, by epoch: `[[2, 1]]` is an epoch of two steps, the second of one micro-batch."""

    def __init__(self):
        self.epochs, self.since_step = [], 0

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.epochs.append([])

    def on_substep_end(self, args, state, control, **kwargs):
        self.since_step += 1

    def on_step_end(self, args, state, control, **kwargs):
        self.epochs[-1].append(self.since_step + 1)
        self.since_step = 0


class AccumulateTwo(TrainerCallback):
    """Changes the accumulation after the first step."""

    def on_step_end(self, args, state, control, **kwargs):
        args.gradient_accumulation_steps = 2


EPOCH = [2, 2, 1]
#: In two epochs of five micro-batches, two to a step, unless the settings say otherwise: the sizes of the steps.
RUNS = {
    "an epoch ends with a step of what remains": ({}, [EPOCH, EPOCH]),
    "an epoch shorter than the accumulation is one step": ({"gradient_accumulation_steps": 9}, [[5], [5]]),
    "an incomplete batch is a micro-batch": ({"data": plain_data(9)}, [EPOCH, EPOCH]),
    "a dropped batch is none": ({"data": plain_data(9), "dataloader_drop_last": True}, [[2, 2], [2, 2]]),
    "max_steps end a run within an epoch": ({"max_steps": 4}, [EPOCH, [2]]),
    "a stream that ends is read again": ({"data": Stream(8), "max_steps": 5}, [[2, 2], [2, 2], [2]]),
    # Without a length, nothing tells that it is the last one.
    "what a stream leaves over joins the next step": ({"data": Stream(10), "max_steps": 4}, [[2, 2], [3, 2]]),
    # The next micro-batches have been read, and an epoch keeps its number of micro-batches.
    "a changed accumulation counts from the step after the next": (
        {"gradient_accumulation_steps": 1, "callback": AccumulateTwo()},
        [[1, 1, 2, 1], EPOCH],
    ),
    "should_epoch_stop ends the epoch": ({"callback": SetFlag("should_epoch_stop", 2)}, [[2, 2], EPOCH]),
    "should_training_stop ends the training": ({"callback": SetFlag("should_training_stop", 2)}, [[2, 2]]),
    "a stop within a step gives it up": ({"callback": SetFlag("should_training_stop", 1, "on_substep_end")}, [[2]]),
    "a stop before an epoch trains none of it": (
        {"callback": SetFlag("should_training_stop", 3, "on_epoch_begin")},
        [EPOCH, []],
    ),
}


def train(folder, data=None, callback=None, **settings):
    sizes = StepSizes()
    defaults = {"num_train_epochs": 2, "max_steps": -1, "save_strategy": "no", "per_device_train_batch_size": 2}
    options = {"callbacks": [sizes, *filter(None, [callback])], "trainer": {"train_dataset": data or plain_data(10)}}
    trainer = make_trainer(folder, **{**options, **defaults, "gradient_accumulation_steps": 2, **settings})
    trainer.train()
    return sizes.epochs, trainer.state.global_step


@pytest.mark.parametrize("run", RUNS)
def test_sizes_of_the_steps(tmp_path, run):
    settings, expected = RUNS[run]
    assert train(tmp_path, **settings) == (expected, sum(map(len, expected)))


def test_step_that_diverges_is_left_out(tmp_path):
    """Of eight steps the fifth diverges: the run goes back to its checkpoint of step 4, and skips the samples."""
    read, data = [], rows(8 * SIZE, [4 * SIZE])

    class InputRecorder(TrainerCallback):
        def on_step_end(self, args, state, control, inputs=None, **kwargs):
            read.append(inputs["x"].clone())

    fit(tmp_path, data, callbacks=[InputRecorder()], max_steps=-1, num_train_epochs=1, on_divergence="rollback")
    assert [entry["step"] for entry in entries(tmp_path)] == [5]
    steps = [torch.stack([row["x"] for row in data[start : start + SIZE]]) for start in range(0, len(data), SIZE)]
    assert len(read) == 7
    assert all(map(torch.equal, read, steps[:4] + steps[5:]))


def test_events_of_a_run_in_their_order(tmp_path):
    settings = {"max_steps": 1, "logging_steps": 1, "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    recorder = make_recorder(hftrainer)
    make_trainer(tmp_path, callbacks=[recorder], gradient_accumulation_steps=2, **settings).train()
    step = ["step_begin", "substep_end", "pre_optimizer_step", "optimizer_step", "step_end"]
    # An evaluation and the end of training each write a log line.
    due = ["log", "log", "evaluate", "save"]
    events = [event.removeprefix("on_") for event, *_ in recorder.events if event != "on_prediction_step"]
    assert events == ["init_end", "train_begin", "epoch_begin", *step, *due, "epoch_end", "log", "train_end"]


def test_training_again_begins_at_step_zero_and_returns_the_mean_loss(tmp_path):
    steps = []
    trainer = make_trainer(tmp_path, max_steps=2, logging_steps=1, save_strategy="no")
    for step in (1, 2):
        trainer.add_callback(AtStep(step, lambda step=step: steps.append(step)))
    for _ in range(2):
        result = trainer.train()
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        assert result.global_step == len(losses) == 2
        assert result.training_loss == pytest.approx(sum(losses) / 2, abs=1e-6)
    assert steps == [1, 2, 1, 2]


@pytest.mark.parametrize(("scale", "rates"), [(1.0, [0.75, 0.5, 0.25]), (2.0**60, [0.75] * 3)])
def test_step_skipped_by_the_loss_scaler_does_not_advance_the_schedule(tmp_path, caplog, scale, rates):
    settings = {"max_steps": 3, "logging_steps": 1, "learning_rate": 0.75, "save_strategy": "no"}
    trainer = make_trainer(tmp_path, fp16=True, **settings)
    trainer.accelerator.scaler = trainer._hftrainer.engine.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    trainer.train()
    assert [line["learning_rate"] for line in trainer.state.log_history[:-1]] == pytest.approx(rates)
    assert "fp16=True on a CPU computes in float16" in caplog.text
