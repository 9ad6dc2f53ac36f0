"""Copies of a Trainer, by `copy.deepcopy` and by pickling, before and after runs."""

import copy
import importlib
import pickle

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import hftrainer
from tests.support.parity import LIBRARIES, accuracy, assert_same_weights, comparable
from tests.support.tiny import make_bert, make_plain, plain_data, text_data


class Counts(hftrainer.TrainerCallback):
    """Counts steps, of a Trainer that it knows."""

    def __init__(self, trainer=None):
        self.trainer, self.steps = trainer, 0

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1


def make(library, folder, model="bert", **settings):
    given = importlib.import_module(library)
    callbacks = settings.pop("callbacks", [])
    defaults = {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "save_strategy": "no",
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "disable_tqdm": True,
        "use_cpu": True,
        "report_to": "none",
    }
    args = given.TrainingArguments(str(folder), **{**defaults, **settings})
    made, data = (make_bert(), text_data()) if model == "bert" else (make_plain(), plain_data())
    return given.Trainer(
        made, args, train_dataset=data, eval_dataset=data[:9], compute_metrics=accuracy, callbacks=list(callbacks)
    )


def nothing(trainer):
    """A Trainer as it was made."""


def evaluated(trainer):
    trainer.evaluate()


def trained(trainer):
    trainer.train()


def all_of_it(trainer):
    trainer.train()
    trainer.evaluate()
    trainer.predict(text_data(5))


def pickled(trainer):
    return pickle.loads(pickle.dumps(trainer))


def weights(trainer):
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def everything(trainer):
    """What a script does with a Trainer, from a seed."""
    hftrainer.set_seed(3)
    before = len(trainer.state.log_history)
    output = trainer.train()
    metrics = trainer.evaluate()["eval_loss"]
    predictions = trainer.predict(text_data(5)).predictions.tolist()
    return output.training_loss, metrics, predictions, comparable(trainer.state.log_history[before:]), weights(trainer)


def assert_equal(one, other):
    assert one[:-1] == other[:-1]
    assert_same_weights(one[-1], other[-1])


SETTINGS = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "bar": {"disable_tqdm": False},
    "best": {
        "load_best_model_at_end": True,
        "save_strategy": "steps",
        "save_steps": 2,
        "metric_for_best_model": "accuracy",
    },
    "bf16": {"bf16": True},
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("before", [nothing, evaluated])
def test_deepcopy_does_what_theirs_does(tmp_path, before, settings):
    found = {}
    for library in LIBRARIES:
        trainer = make(library, tmp_path / library, **SETTINGS[settings])
        before(trainer)
        copied = copy.deepcopy(trainer)
        assert type(copied) is type(trainer)
        assert copied.model is not trainer.model
        assert copied.args is not trainer.args
        found[library] = everything(copied)
    assert_equal(found["hftrainer"], found["transformers"])


@pytest.mark.parametrize("how", [copy.deepcopy, pickled])
@pytest.mark.parametrize("before", [nothing, evaluated, trained, all_of_it])
@pytest.mark.parametrize("settings", [*SETTINGS, "tensorboard"])
def test_a_copy_and_its_original(tmp_path, how, before, settings):
    """Each goes on by itself, and as the other does; after training, a copy of theirs steps its original's weights."""
    given = {"report_to": "tensorboard"} if settings == "tensorboard" else SETTINGS[settings]
    trainer = make("hftrainer", tmp_path, callbacks=[Counts()], **given)
    before(trainer)
    start = weights(trainer)
    copied = how(trainer)
    assert_same_weights(weights(copied), start)
    of_copy = everything(copied)
    assert_same_weights(weights(trainer), start)
    assert_equal(everything(trainer), of_copy)
    steps = [
        next(each for each in one.callback_handler.callbacks if isinstance(each, Counts)).steps
        for one in (trainer, copied)
    ]
    assert steps == [8, 8] if before in (trained, all_of_it) else [4, 4]


@pytest.mark.parametrize("how", [copy.deepcopy, pickled])
def test_what_a_copy_holds(tmp_path, how):
    """References to the Trainer are to the copy; Lightning's callbacks, optimizer and schedule come along."""
    trainer = make(
        "hftrainer", tmp_path, "plain", callbacks=[ModelCheckpoint(tmp_path / "lightning", monitor="eval_loss")]
    )
    trainer.add_callback(Counts(trainer))
    trainer.train()
    copied = how(trainer)
    counts = next(each for each in copied.callback_handler.callbacks if isinstance(each, Counts))
    assert counts.trainer is copied
    assert copied.callback_handler.model is copied.model is copied.model_wrapped
    parameters = {id(parameter) for parameter in copied.model.parameters()}
    assert {id(each) for group in copied.optimizer.param_groups for each in group["params"]} == parameters
    assert copied.lr_scheduler.optimizer is copied.optimizer
    assert copied.lr_scheduler.get_last_lr() == trainer.lr_scheduler.get_last_lr()
    assert copied.state == trainer.state and copied.state is not trainer.state
    assert copied.accelerator is not trainer.accelerator
    assert copied._hftrainer.trainer is copied
    copied.train()
    assert copied.lightning_trainer.callbacks != []
    assert trainer.state.global_step == 4


def test_during_training(tmp_path):
    """A callback may copy its Trainer, and evaluate the copy."""
    found = []

    class Copies(hftrainer.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                found.append(copy.deepcopy(trainer).evaluate()["eval_loss"])
                found.append(trainer.evaluate()["eval_loss"])

    trainer = make("hftrainer", tmp_path, "plain", eval_strategy="no")
    trainer.add_callback(Copies)
    trainer.train()
    assert found[0] == found[1]
    assert torch.isfinite(torch.tensor(found)).all()


def test_a_subclass(tmp_path):
    """Its own attributes come along, and its overrides are called."""
    trainer = make("hftrainer", tmp_path, "plain")
    trainer.__class__ = Doubles
    trainer.mine = [trainer, "kept"]
    copied = pickled(trainer)
    assert type(copied) is Doubles
    assert copied.mine == [copied, "kept"]
    assert copied.evaluate()["eval_loss"] == trainer.evaluate()["eval_loss"]
    assert Doubles.losses == 4


class Doubles(hftrainer.Trainer):
    losses = 0

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        Doubles.losses += 1
        return super().compute_loss(model, inputs, return_outputs, **kwargs)
