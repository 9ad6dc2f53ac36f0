"""The state of an optimizer and its schedule is loaded by name into other groups, or refused with what to do."""

import copy
import os
import re

import pytest
import torch

from hftrainer.checkpointing.optimizer_state import load_scheduler_or_scaler
from hftrainer.errors import InvalidSetup
from tests.support.parity import assert_same_weights, callback, train
from tests.support.small_models import make_plain, plain_data

SAVED = {"save_strategy": "steps", "save_steps": 1}
STEPS = {"max_steps": 6, "logging_steps": 1, "save_strategy": "steps", "save_steps": 2}
EMBEDDINGS = {"pattern": "*.embed*", "lr": 1e-3, "weight_decay": 0.0}
ATTENTION = {"pattern": ["*.q_proj.*", "*.k_proj.*"], "lr_scale": 0.5, "betas": [0.8, 0.9]}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, None),
        ({"learning_rate": 1.0}, "learning_rate=5e-05, not 1.0"),
        ({"adam_beta1": 0.5}, "betas=(0.9, 0.999), not (0.5, 0.999)"),
    ],
)
def test_settings_of_the_checkpoint_stay_in_use(make_trainer, tmp_path, caplog, changed, words):
    make_trainer(**SAVED).train()
    make_trainer(max_steps=3, **changed).train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert re.findall(r"checkpoint stay in use: (.*\)|.*?)\. To use", caplog.text) == ([words] if words else [])


def test_missing_state_of_a_scaler_warns(tmp_path, caplog):
    load_scheduler_or_scaler(None, str(tmp_path), "scaler")
    assert "lacks the scaler state: the scaler starts from scratch" in caplog.text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        *(({}, {"optim": optim}) for optim in ("sgd", "adafactor", "adagrad", "rmsprop")),
        ({"optim": "sgd"}, {}),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"}, {"lr_scheduler_type": "linear"}),
    ],
    ids=str,
)
def test_resume_with_another_optimizer_or_schedule_is_refused(make_trainer, tmp_path, before, after):
    folder = str(tmp_path / "out" / "checkpoint-2")
    first = make_trainer(**SAVED, **before)
    first.train()
    name = next(iter({**after, **before}))
    then = make_trainer(**{"max_steps": 3, **before, **after, **({} if after else {"optim": "adamw_torch"})})
    was, now = (getattr(trainer.args, name).value for trainer in (first, then))
    message = (
        f"{folder} was written with {name}={was!r}, whose state {name}={now!r} cannot use: resume with {name}={was!r}"
    )
    with pytest.raises(InvalidSetup, match=re.escape(message)) as caught:
        then.train(resume_from_checkpoint=folder)
    assert "delete optimizer.pt in that folder, then pass its path" in str(caught.value)
    os.remove(f"{folder}/optimizer.pt")
    assert then.train(resume_from_checkpoint=folder).global_step == 3


def test_plateau_schedule_may_resume_another(make_trainer, tmp_path):
    """As in transformers, since its state keeps what the other lacks."""
    make_trainer(**SAVED).train()
    then = make_trainer(lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="epoch", max_steps=3)
    assert then.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2")).global_step == 3


def resume(folder, **settings):
    """State and settings of each parameter when the resumed run begins, by name, and the record of the run."""
    began = {}

    def on_step_begin(self, args, state, control, model, optimizer, **kwargs):
        names = {parameter: name for name, parameter in model.named_parameters()}
        for group in optimizer.param_groups if not began else ():
            for parameter in group["params"]:
                held = copy.deepcopy(optimizer.state[parameter])
                began[names[parameter]] = (held, group["lr"], group["weight_decay"])

    settings |= {**STEPS, "callback": callback(on_step_begin=on_step_begin)}
    ended = train("hftrainer", "llama", folder, str(folder / "checkpoint-2"), **settings)
    return began, ended


@pytest.mark.parametrize("schedule", ["linear", "reduce_lr_on_plateau"])
def test_resume_with_changed_groups_keeps_moments(tmp_path, schedule):
    settings = {"lr_scheduler_type": schedule, "warmup_steps": 0, "eval_strategy": "epoch"}
    train("hftrainer", "llama", tmp_path, param_groups=[EMBEDDINGS], **STEPS, **settings)
    state = torch.load(tmp_path / "checkpoint-2" / "optimizer.pt", weights_only=True)
    names = [name for group in state["param_groups"] for name in group["param_names"]]
    stored = {names[number]: held for number, held in state["state"].items()}
    entries = [{"pattern": "*.mlp.*", "lr": 3e-3, "weight_decay": 0.3}, {**EMBEDDINGS, "lr": 2e-3}]
    began, _ = resume(tmp_path, param_groups=entries, **settings)
    assert began.keys() == stored.keys()
    factor = 1.0 if schedule == "reduce_lr_on_plateau" else 4 / 6  # after 2 of 6 steps
    for name, (held, rate, decay) in began.items():
        assert all(torch.equal(value, stored[name][key]) for key, value in held.items())
        base = 3e-3 if ".mlp." in name else 2e-3 if ".embed" in name else 1e-2
        assert rate == base * factor
        assert decay == (0.3 if ".mlp." in name else 0.0 if ".embed" in name or "norm" in name else 0.1)


ALL, MLP, QUERIES = ([{"pattern": pattern, "lr_scale": 1.0}] for pattern in ("*", "*.mlp.*", "*.q_proj.*"))


@pytest.mark.parametrize(("before", "now"), [([EMBEDDINGS, ATTENTION],) * 2, (None, ALL), (ALL, None), (MLP, QUERIES)])
def test_resume_with_groups_of_the_same_settings_is_exact(tmp_path, before, now):
    undisturbed = train("hftrainer", "llama", tmp_path, param_groups=before, **STEPS)
    _, ended = resume(tmp_path, param_groups=now)
    assert_same_weights(ended.weights, undisturbed.weights)
    if before == now:
        assert ended.logs[:-1] == undisturbed.logs[:-1]
    losses = [[line.get("loss") for line in run.logs[:-1]] for run in (ended, undisturbed)]
    assert losses[0] == losses[1]


def test_optimizer_state_has_no_names_without_param_groups(tmp_path):
    train("hftrainer", (make_plain, plain_data), tmp_path, **STEPS)
    state = torch.load(tmp_path / "checkpoint-2" / "optimizer.pt", weights_only=True)
    assert all(not {"name", "param_names"} & group.keys() for group in state["param_groups"])
