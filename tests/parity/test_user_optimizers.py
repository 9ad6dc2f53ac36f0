"""Optimizers and schedules that the user brings."""

import importlib

import pytest
import torch

from tests.support.parity import (
    EVALUATED,
    alike,
    both,
    compare,
    train,
)
from tests.support.tiny import Plain, make_plain


def test_optimizers_pair(tmp_path):
    def run(name):
        model = make_plain()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        given = {"model": model, "optimizers": (optimizer, scheduler)}
        return train(name, "plain", tmp_path / name, trainer=given)

    alike(run)


def test_optimizer_cls_and_kwargs(tmp_path):
    compare(tmp_path, "plain", trainer={"optimizer_cls_and_kwargs": (torch.optim.Adagrad, {"lr": 0.05})})


@pytest.mark.parametrize("accumulation", [1, 2])
def test_optimizer_hooks_see_the_gradients(tmp_path, accumulation):
    seen = []

    def make():
        model = make_plain()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def halve(optimizer, args, kwargs):
            grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
            seen.append(all(grad is not None for grad in grads))
            for grad in grads:
                grad.mul_(0.5)

        optimizer.register_step_pre_hook(halve)
        return {"model": model, "optimizers": (optimizer, None)}

    both(tmp_path, make, gradient_accumulation_steps=accumulation)
    assert seen
    assert all(seen)


class Stubborn(torch.optim.Optimizer):
    """Never calls its closure."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])


def test_optimizer_that_ignores_closures(tmp_path):
    both(tmp_path, lambda: {"optimizer_cls_and_kwargs": (Stubborn, {"lr": 0.1})})


class OwnScheduler:
    """All that transformers asks of a scheduler."""

    def __init__(self, optimizer):
        self.optimizer, self.steps = optimizer, 0

    def step(self):
        self.steps += 1

    def get_last_lr(self):
        return [0.1 / (1 + self.steps)]

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


@pytest.mark.parametrize("kind", ["plateau", "own"])
def test_schedulers_of_the_user(tmp_path, kind):
    def make():
        model = make_plain()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"model": model, "optimizers": (optimizer, plateau if kind == "plateau" else OwnScheduler(optimizer))}

    ours = both(tmp_path, make, metric_for_best_model="loss", **EVALUATED)
    rates = [line["learning_rate"] for line in ours.logs if "learning_rate" in line]
    assert len(set(rates)) > 1


def test_greedy_scheduler_of_transformers(tmp_path):
    """Given as an object, which is no scheduler of torch's."""

    def run(name):
        torch.manual_seed(1)
        model = Plain()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = importlib.import_module("transformers.optimization").GreedyLR(optimizer, patience=0)
        given = {"model": model, "optimizers": (optimizer, schedule)}
        settings = {"max_steps": 8, "metric_for_best_model": "loss", "logging_steps": 1, **EVALUATED}
        return train(name, "plain", tmp_path / name, trainer=given, **settings)

    alike(run)
