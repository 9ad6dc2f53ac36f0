"""Runs a training whole, then again from each of its checkpoints, and compares the ends."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

import hftrainer
from tests.support.parity import assert_same_weights, comparable
from tests.support.tiny import make_plain, plain_data


class Augmented(Dataset):
    """The plain samples with noise from the generators named; counts what is read."""

    def __init__(self, count: int = 22, draws: str = "torch numpy python") -> None:
        self.samples = plain_data(count)
        self.draws = draws.split()
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append(index)
        return noisy(self.samples[index], self.draws)


def noisy(sample: dict[str, Any], draws: Any) -> dict[str, Any]:
    x = sample["x"].clone()
    if "torch" in draws:
        x = x + torch.randn(8)
    if "numpy" in draws:
        x = x + float(np.random.randn())  # an odd number of normal ones, so that NumPy keeps one for the next call
    if "python" in draws:
        x = x * random.random()
    return {**sample, "x": x}


class AugmentedStream(IterableDataset):
    """The same as a stream."""

    def __init__(self, count: int = 22, draws: str = "torch numpy python") -> None:
        self.samples = plain_data(count)
        self.draws = draws.split()
        self.read: list[int] = []

    def __iter__(self):
        for index, sample in enumerate(self.samples):
            self.read.append(index)
            yield noisy(sample, self.draws)


class StatefulStream(AugmentedStream):
    """A stream that can be brought back to where it was."""

    done = 0

    def __iter__(self):
        start, self.done = self.done, 0
        for index in range(start, len(self.samples)):
            self.read.append(index)
            self.done = index + 1
            yield noisy(self.samples[index], self.draws)
        self.done = 0

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


def build(folder: Path, make_data: Any = Augmented, trainer_class: Any = hftrainer.Trainer, **settings: Any) -> Any:
    """A Trainer with a checkpoint at each step."""
    given = {"model": make_plain(), **settings.pop("trainer", {})}
    defaults: dict[str, Any] = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 2,
        "save_strategy": "steps",
        "save_steps": 1,
        "disable_tqdm": True,
        "use_cpu": True,
        "report_to": "none",
    }
    args = hftrainer.TrainingArguments(str(folder), **{**defaults, **settings})
    data = given.pop("train_dataset", None) or make_data()
    return trainer_class(args=args, train_dataset=data, eval_dataset=given.pop("eval_dataset", plain_data(9)), **given)


def lines(trainer: Any) -> list[dict]:
    """The log without measured times, and without the last line's mean loss, which is of one call's steps."""
    *logs, last = comparable(trainer.state.log_history)
    return [*logs, {name: value for name, value in last.items() if name != "train_loss"}]


def end_workers(trainer: Any) -> None:
    """End loading processes that stay now: the garbage collector ends them slowly, in the middle of another test."""
    for loader in (trainer.callback_handler.train_dataloader, *trainer._eval_dataloaders.values()):
        if getattr(loader, "persistent_workers", False) and loader._iterator is not None:
            loader._iterator._shutdown_workers()


def resumed_from_each(tmp_path: Path, steps: Any = None, **settings: Any) -> list[Any]:
    """Train, then resume from each checkpoint; asserts that all end alike. Returns the datasets read."""
    whole = build(tmp_path, **settings)
    whole.train()
    end, log, state = whole.model.state_dict(), lines(whole), whole.state
    end_workers(whole)
    resumed = []
    for step in steps or range(1, state.global_step + 1):
        trainer = build(tmp_path / "resumed", **{**settings, "save_steps": 1000})
        trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        where = f"resumed from step {step}"
        assert trainer.state.global_step == state.global_step, where
        assert lines(trainer) == log, where
        assert_same_weights(trainer.model.state_dict(), end)
        for name in ("total_flos", "best_metric", "num_input_tokens_seen", "epoch"):
            assert getattr(trainer.state, name) == getattr(state, name), where
        resumed.append(trainer.train_dataset)
        end_workers(trainer)
    return resumed
