"""Copies of a Trainer by `copy.deepcopy` and by pickling, made before and after runs, work as the original does."""

import copy
import math
import pickle

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

import hftrainer
from tests.support.checkpoints import AtStep
from tests.support.parity import EVALUATED, accuracy, array_bytes, assert_same_weights, build, comparable


class Counts(hftrainer.TrainerCallback):
    def __init__(self, trainer=None):
        self.trainer, self.steps = trainer, 0

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1


def make_trainer(library, folder, model="bert", callbacks=(), **settings):
    trainer_kwargs = {"compute_metrics": accuracy, "callbacks": list(callbacks)}
    settings = {**EVALUATED, "max_steps": 4, "logging_steps": 1, **settings}
    return build(library, model, folder, trainer=trainer_kwargs, **settings)[0]


def pickle_and_load(trainer):
    return pickle.loads(pickle.dumps(trainer))


def weights_of(trainer):
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def counter_of(trainer):
    return next(each for each in trainer.callback_handler.callbacks if isinstance(each, Counts))


def train_evaluate_predict(trainer):
    hftrainer.set_seed(3)
    before = len(trainer.state.log_history)
    losses = trainer.train().training_loss, trainer.evaluate()["eval_loss"]
    predictions = array_bytes(trainer.predict(trainer.eval_dataset).predictions)
    return losses, predictions, comparable(trainer.state.log_history[before:]), weights_of(trainer)


BEFORE = {"nothing": [], "evaluated": ["evaluate"], "trained": ["train"], "all": ["train", "evaluate", "predict"]}
BEST = {"load_best_model_at_end": True, "metric_for_best_model": "accuracy"}
SETTINGS = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "bar": {"disable_tqdm": False},
    "best": {"save_strategy": "steps", "save_steps": 2, **BEST},
    "bf16": {"bf16": True},
}


@pytest.mark.parametrize(
    ("how", "settings", "before"),
    [
        *((copy.deepcopy, "plain", each) for each in BEFORE),
        *((pickle_and_load, each, "all") for each in [*SETTINGS, "tensorboard"]),
        *((copy.deepcopy, each, "all") for each in [*SETTINGS, "tensorboard"][1:]),
    ],
)
def test_copy_and_original_train_alike_and_independently(tmp_path, how, before, settings):
    """With transformers, the copy of a trained Trainer would step the weights of its original."""
    arguments = {"report_to": "tensorboard"} if settings == "tensorboard" else SETTINGS[settings]
    trainer = make_trainer("hftrainer", tmp_path, callbacks=[Counts()], **arguments)
    for method in BEFORE[before]:
        getattr(trainer, method)(*([trainer.eval_dataset] if method == "predict" else []))
    start = weights_of(trainer)
    copied = how(trainer)
    assert_same_weights(weights_of(copied), start)
    of_copy = train_evaluate_predict(copied)
    assert_same_weights(weights_of(trainer), start)
    of_original = train_evaluate_predict(trainer)
    assert of_original[:-1] == of_copy[:-1]
    assert_same_weights(of_original[-1], of_copy[-1])
    steps = 8 if before in ("trained", "all") else 4  # each run has four, of which one may come before the copy
    assert counter_of(trainer).steps == counter_of(copied).steps == steps


@pytest.mark.parametrize("how", [copy.deepcopy, pickle_and_load])
def test_copy_refers_to_itself_and_keeps_optimizer_and_schedule(tmp_path, how):
    checkpoints = ModelCheckpoint(tmp_path / "lightning", monitor="eval_loss")
    trainer = make_trainer("hftrainer", tmp_path, "plain", callbacks=[checkpoints])
    trainer.add_callback(Counts(trainer))
    trainer.train()
    copied = how(trainer)
    assert counter_of(copied).trainer is copied._hftrainer.trainer is copied
    assert copied.callback_handler.model is copied.model is copied.model_wrapped
    parameters = {id(parameter) for parameter in copied.model.parameters()}
    assert {id(each) for group in copied.optimizer.param_groups for each in group["params"]} == parameters
    assert copied.lr_scheduler.optimizer is copied.optimizer
    assert copied.lr_scheduler.get_last_lr() == trainer.lr_scheduler.get_last_lr()
    assert copied.state == trainer.state and copied.state is not trainer.state
    assert copied.accelerator is not trainer.accelerator and copied.args is not trainer.args
    copied.train()
    assert copied.lightning_trainer.callbacks != []
    assert trainer.state.global_step == 4


def test_copy_made_during_training_evaluates_alike(tmp_path):
    found = []

    def copy_and_evaluate():
        found.extend(each.evaluate()["eval_loss"] for each in (copy.deepcopy(trainer), trainer))

    trainer = make_trainer("hftrainer", tmp_path, "plain", callbacks=[AtStep(2, copy_and_evaluate)], eval_strategy="no")
    trainer.train()
    assert found[0] == found[1]
    assert math.isfinite(found[0])


class Doubles(hftrainer.Trainer):
    losses = 0

    def compute_loss(self, *args, **kwargs):
        Doubles.losses += 1
        return super().compute_loss(*args, **kwargs)


def test_pickled_subclass_keeps_class_and_attributes(tmp_path):
    trainer = make_trainer("hftrainer", tmp_path, "plain")
    trainer.__class__ = Doubles
    trainer.mine = [trainer, "kept"]
    copied = pickle_and_load(trainer)
    assert type(copied) is Doubles
    assert copied.mine == [copied, "kept"]
    assert copied.evaluate()["eval_loss"] == trainer.evaluate()["eval_loss"]
    assert Doubles.losses == 6
