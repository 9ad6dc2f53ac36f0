"""Small runs that write checkpoints, and what damages their files."""

import os

import torch

from hftrainer import Trainer, TrainingArguments
from tests.support.tiny import language_data, make_bert, make_llama, make_peft, make_plain, plain_data, text_data

MODELS = {
    "plain": (make_plain, plain_data),
    "bert": (make_bert, text_data),
    "llama": (make_llama, language_data),
    "peft": (make_peft, language_data),
}


def make_tied():
    """A plain module with a shared parameter."""
    model = make_plain()
    model.twin = torch.nn.Linear(8, 16)
    model.twin.weight = model.layers[0].weight
    return model


MODELS["tied"] = (make_tied, plain_data)


def make_trainer(folder, model="plain", callbacks=(), **settings):
    defaults = {
        "max_steps": 9,
        "per_device_train_batch_size": 4,
        "save_steps": 3,
        "logging_steps": 3,
        "learning_rate": 1e-2,
        "disable_tqdm": True,
        "use_cpu": True,
    }
    make, data = MODELS[model]
    args = TrainingArguments(str(folder), **{**defaults, **settings})
    samples = data()
    return Trainer(make(), args, train_dataset=samples, eval_dataset=samples[:9], callbacks=list(callbacks))


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def empty(path):
    os.truncate(path, 0)


def grow(path):
    with path.open("ab") as file:
        file.write(b"\0" * 100)
