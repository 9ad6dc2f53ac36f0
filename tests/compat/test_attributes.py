"""Every attribute in use has the value that it has in transformers, and counts when it is set."""

import copy
import dataclasses
import importlib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hftrainer
from hftrainer import default_data_collator
from hftrainer.errors import UnsupportedArgument
from hftrainer.releases import followed
from hftrainer_ray.search import RaySearch
from tests.compat.names_in_use import ABSENT, READ
from tests.support.changed_trainers import Doubled, assert_changed_alike, library_of, parent, run_changed
from tests.support.parity import EVENTS, EVERY_STEP, LIBRARIES, accuracy, assert_agree, build, comparable
from tests.support.releases import TRANSFORMERS, pinned
from tests.support.small_models import make_bert, make_plain

pytestmark = pytest.mark.usefixtures("as_installed")
IS_NEWEST = pinned("transformers") <= TRANSFORMERS


def plain_value(name: str, value: Any) -> Any:
    if name == "model_preparation_time":
        return type(value)
    if name in ("state", "control"):
        fields = {key: each for key, each in dataclasses.asdict(value).items() if key != "stateful_callbacks"}
        if name == "state":
            best = value.best_model_checkpoint and Path(value.best_model_checkpoint).name
            fields |= {"log_history": comparable(value.log_history), "best_model_checkpoint": best}
        return fields
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return sorted(map(str, value))
    if isinstance(value, list):
        return len(value) if value and isinstance(value[0], dict) else sorted(set(value))
    return value if value is None or isinstance(value, (bool, int, float, str)) else "an object"


def values_of(library_name: str, folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """The attributes when the Trainer is made, at each event, and at the end."""
    seen = []
    settings = {"eval_steps": 3, "save_steps": 3, "gradient_accumulation_steps": 3, "load_best_model_at_end": True}
    workers = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    trainer, _ = build(library_name, "bert", folder, neftune_noise_alpha=5.0, **{**EVERY_STEP, **settings}, **workers)

    def look(event: str) -> None:
        values = {name: plain_value(name, getattr(trainer, name)) for name in READ if hasattr(trainer, name)}
        seen.append((event, values))

    looks = {event: lambda self, *args, event=event, **kwargs: look(event) for event in EVENTS}
    trainer.add_callback(type("Looks", (library_of(trainer).TrainerCallback,), looks))
    look("made")
    if IS_NEWEST:
        trainer.evaluate()  # which measures model_preparation_time
    trainer.train()
    trainer.evaluate()
    look("end")
    return seen


def test_attributes_have_the_same_values_at_each_event(tmp_path):
    """Until v5.2 the last log line is no part of training, and the state has fewer fields."""
    theirs, ours = (values_of(name, tmp_path / name) for name in LIBRARIES)
    later = set() if IS_NEWEST else {"is_in_train", "state"}
    assert [event for event, _ in ours] == [event for event, _ in theirs]
    for (event, mine), (_, expected) in zip(ours, theirs, strict=True):
        compared = expected.keys() - later
        assert {name: mine[name] for name in compared} == {name: expected[name] for name in compared}, event
    if not later:
        assert {*READ} == {name for _, values in theirs for name in values}


def sum_loss(outputs, labels, num_items_in_batch=None):
    loss = 2 * nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum")
    return loss / (num_items_in_batch if num_items_in_batch is not None else len(labels))


def smoothed_loss(outputs, labels, **kwargs):
    return nn.functional.cross_entropy(outputs["logits"], labels, label_smoothing=0.3)


def reset_log(trainer):
    """As TRL's trainers do when they have logged by themselves."""
    trainer._total_loss_scalar += trainer._tr_loss.item()
    trainer._tr_loss -= trainer._tr_loss
    return trainer.state.global_step


def own_handler(trainer):
    old = trainer.callback_handler

    class Quiet(type(old)):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if logs is not None:
                logs["seen"] = len(state.log_history)
            return super().on_log(args, state, control, logs, **kwargs)

    return Quiet(old.callbacks, trainer.model, trainer.processing_class, trainer.optimizer, trainer.lr_scheduler)


def own_optimizer(trainer):
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.5)
    trainer.lr_scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 2)
    return trainer.optimizer


def with_values(holder, **values):
    vars(holder).update(values)
    return holder


WINDOWS = {"gradient_accumulation_steps": 3}
#: Attribute → its value, and settings; `step` is where it is set, after `__init__` if not given.
SET: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "label_names": (lambda trainer: [], {"trainer": {}}),
    "can_return_loss": (lambda trainer: setattr(trainer, "label_names", []) or True, {"trainer": {}, "same": True}),
    "model_accepts_loss_kwargs": (lambda trainer: False, {**WINDOWS, "model": "llama"}),
    "compute_loss_func": (lambda trainer: sum_loss, WINDOWS),
    "loss_is_scaled_for_ga": (lambda trainer: True, WINDOWS),
    "label_smoother": (lambda trainer: smoothed_loss, {}),
    "_train_batch_size": (lambda trainer: 2, {}),
    "optimizer, with its lr_scheduler": (own_optimizer, {}),
    "optimizer_cls_and_kwargs": (lambda trainer: (torch.optim.SGD, {"lr": 0.1}), {}),
    "data_collator": (lambda trainer: lambda samples: default_data_collator(samples[::-1]), {}),
    "train_dataset": (lambda trainer: trainer.train_dataset[:11], {}),
    "eval_dataset": (lambda trainer: trainer.train_dataset[:5], {}),
    "model_init": (lambda trainer: make_plain, {}),
    "model_wrapped": (lambda trainer: Doubled(trainer.model), {}),
    "callback_handler": (own_handler, {}),
    "args": (lambda trainer: with_values(copy.copy(trainer.args), learning_rate=0.5, weight_decay=0.0), {}),
    "_globalstep_last_logged": (reset_log, {"step": 4, "logging_steps": 3}),
    "_total_loss_scalar": (lambda trainer: 5.0, {"step": 4}),
    "_tr_loss": (lambda trainer: torch.full_like(trainer._tr_loss, 7.0), {"step": 4}),
    "current_flos": (lambda trainer: 1000.0, {"step": 4}),
    "control": (lambda trainer: dataclasses.replace(trainer.control, should_epoch_stop=True), {"step": 4}),
    "state": (lambda trainer: with_values(trainer.state, global_step=trainer.state.global_step + 5), {"step": 4}),
    "gather_function": (lambda trainer: trainer.accelerator.gather, {}),
    "_mixed_mesh_grads": (lambda trainer: True, {"same": True}),
}
#: Attributes that v4.48 lacks or ignores.
NEWER = {"loss_is_scaled_for_ga", "_train_batch_size", "_globalstep_last_logged", "_tr_loss"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.newest_peer] * (n in NEWER)) for n in SET])
def test_setting_an_attribute_has_the_same_effect(tmp_path, name):
    value, settings = SET[name]
    assert_changed_alike(
        tmp_path,
        change=lambda trainer: setattr(trainer, name.partition(",")[0], value(trainer)),
        **{"trainer": {"compute_metrics": accuracy}, "logging_steps": 2, "eval_strategy": "epoch", **settings},
    )


#: What a subclass may set in its `__init__` and finds again after each `train()` with a `model_init`.
KEPT = {
    "label_names": ["labels", "mine"],
    "can_return_loss": True,
    "model_accepts_loss_kwargs": False,
    "_signature_columns": ["input_ids", "attention_mask", "label", "labels", "mine"],
    "_loss_shifts_labels": True,
    "label_smoother": None,
    "place_model_on_device": False,
    "is_model_parallel": True,
    "compute_loss_func": None,
    "loss_is_scaled_for_ga": True,
    "neftune_noise_alpha": None,
    "_train_batch_size": 8,
}


def test_attributes_set_by_a_subclass_survive_model_init(tmp_path):
    def run(library_name):
        class Own(importlib.import_module(library_name).Trainer):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                for name, value in KEPT.items():
                    setattr(self, name, value)

        options = {"trainer_class": lambda _: Own, "trainer": {"model_init": lambda: make_bert()}}
        trainer, _ = build(library_name, "bert", tmp_path / library_name, **options)
        return [{name: getattr(trainer, name) for name in KEPT} for _ in range(2) if trainer.train()]

    reads_once = followed.make_policy(followed.installed_release()).reads_batch_size_once
    assert assert_agree(run)[1] == KEPT | ({} if reads_once else {"_train_batch_size": 4})


def test_script_may_remove_the_neftune_hook(tmp_path):
    def training_step(self, *args, **kwargs):
        handle, self.neftune_hook_handle = self.neftune_hook_handle, None
        if handle is not None:
            handle.remove()
        return parent(self).training_step(*args, **kwargs)

    settings = {"methods": {"training_step": training_step}, "model": "bert", "neftune_noise_alpha": 5}
    run = run_changed("hftrainer", tmp_path, **settings)
    assert run.extra["hooks"] == [0] * len(run.extra["hooks"])


def test_attributes_that_are_not_set_follow_the_new_model(tmp_path):
    """A `model_init` may make models of several kinds; lists that a script has extended stay extended."""

    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 3)

        def forward(self, x, label_of_other=None, **kwargs):
            return {"loss": self.layer(x).sum()}

    made = [make_plain(), make_plain(), Other()]
    trainer, _ = build("hftrainer", "plain", tmp_path, trainer={"model_init": lambda: made.pop(0)}, max_steps=1)
    trainer.train()
    assert trainer.label_names == ["labels"] and not trainer.model_accepts_loss_kwargs
    trainer.train()
    assert trainer.label_names == ["label_of_other"] and trainer.model_accepts_loss_kwargs
    trainer._set_signature_columns_if_needed()
    assert "label_of_other" in trainer._signature_columns
    trainer.label_names.append("mine")
    made.append(make_plain())
    trainer.train()
    assert trainer.label_names == ["label_of_other", "mine"]
    trainer.label_names = names = np.array(["labels", "others"])
    made.append(make_plain())
    trainer.train()
    assert trainer.label_names is names


def test_search_attributes_are_set_during_and_after_a_search(tmp_path):
    """`hp_space`, `compute_objective`, `hp_name`, `hp_search_backend` and `objective` during a search and after it."""

    def run(library_name):
        def model_init(trial):
            if trial is not None:
                found = trainer.hp_space(trial), trainer.compute_objective({"eval_loss": 1.5}), trainer.hp_name(trial)
                seen.append((*found, str(trainer.hp_search_backend)))
            return make_plain()

        trainer, seen = None, []
        trainer, _ = build(library_name, "plain", tmp_path / library_name, trainer={"model_init": model_init})
        seen.append([hasattr(trainer, name) for name in ("hp_space", "compute_objective")])
        trainer.hyperparameter_search(
            hp_space=lambda trial: {"seed": trial.suggest_int("seed", 3, 3)},
            compute_objective=lambda metrics: metrics["eval_loss"] * 2,
            n_trials=1,
            hp_name=lambda trial: f"trial {trial.number}",
        )
        return [*seen, (trainer.hp_search_backend, trainer.compute_objective({"eval_loss": 1}), trainer.objective)]

    assert len(assert_agree(run)) == 3


@pytest.mark.parametrize("name", ABSENT)
@pytest.mark.parametrize("is_sharded", [False, True])
def test_absent_name_raises_and_its_override_is_refused(tmp_path, name, is_sharded):
    """Only overrides that transformers calls are refused."""
    args = hftrainer.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    model = make_plain()
    assert not hasattr(hftrainer.Trainer(model, args), name)
    kind = type("Own", (hftrainer.Trainer,), {name: lambda self, **kwargs: {}})
    model.is_distributed_loading_by_transformers = is_sharded
    is_called = ABSENT[name].startswith("called") and (is_sharded or "sharded" not in ABSENT[name])
    with pytest.raises(UnsupportedArgument, match=f"{name} is never called") if is_called else nullcontext():
        kind(model, args)


def test_override_of_tune_save_checkpoint_is_refused(tmp_path, monkeypatch):
    args = hftrainer.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    monkeypatch.setattr(RaySearch, "is_available", lambda: True)
    kind = type("Own", (hftrainer.Trainer,), {"_tune_save_checkpoint": lambda self, checkpoint_dir: None})
    with pytest.raises(UnsupportedArgument, match="_tune_save_checkpoint is never called"):
        kind(args=args, model_init=make_plain).hyperparameter_search(backend="ray")
