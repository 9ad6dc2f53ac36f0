"""Keras models on torch by TFTrainer, beside Keras' own `train_on_batch`: prints how far their weights are apart."""

import json
import os
import sys

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import torch

from hftrainer import TFTrainer, TFTrainingArguments
from hftrainer_tensorflow.pipelines import RowDataset


def make_model():
    keras.utils.set_random_seed(0)
    inputs = {"x": keras.Input((4,), name="x")}
    hidden = keras.layers.Dense(6, activation="tanh")(inputs["x"])
    return keras.Model(inputs, keras.layers.Dense(3)(hidden))


def decayed():
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.3)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01, epsilon=1e-3),
    "amsgrad": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "adamw": decayed,
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.5), momentum=0.8),
    "clipnorm": lambda: keras.optimizers.SGD(0.05, clipnorm=0.1),
    "global clipnorm": lambda: keras.optimizers.SGD(0.05, global_clipnorm=0.2),
    "clipvalue": lambda: keras.optimizers.Adam(0.01, clipvalue=0.05),
    "weight decay": lambda: keras.optimizers.SGD(0.05, weight_decay=0.2),
}
random = np.random.default_rng(0)
ROWS = [({"x": random.normal(size=4).astype("float32")}, int(random.integers(3))) for _ in range(20)]
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def far(name: str, folder: str) -> float:
    ours, theirs = make_model(), make_model()
    ours.compile(loss=LOSS)
    theirs.compile(loss=LOSS, optimizer=OPTIMIZERS[name]())
    args = TFTrainingArguments(
        folder, report_to="none", use_cpu=True, max_steps=8, per_device_train_batch_size=4, disable_tqdm=True,
        logging_strategy="no", save_strategy="no",
    )  # fmt: skip
    TFTrainer(ours, args, ROWS, optimizers=(OPTIMIZERS[name](), None)).train()
    pipeline = RowDataset(ROWS).repeat().shuffle(len(ROWS), seed=args.seed).batch(4)
    for epoch in (5, 3):
        for _, (features, labels) in zip(range(epoch), pipeline, strict=False):
            theirs.train_on_batch(features, labels)
    before = make_model().get_weights()
    assert all(abs(new - old).max() > 1e-3 for new, old in zip(ours.get_weights(), before, strict=True))
    return float(max(abs(a - b).max() for a, b in zip(ours.get_weights(), theirs.get_weights(), strict=True)))


def saved(folder: str) -> bool:
    model = make_model()
    model.compile(loss=LOSS)
    args = TFTrainingArguments(folder, report_to="none", use_cpu=True, max_steps=2, disable_tqdm=True)
    trainer = TFTrainer(model, args, ROWS, ROWS[:7])
    trainer.train()
    trainer.save_model()
    again = keras.saving.load_model(os.path.join(folder, "model.keras"))
    features = torch.from_numpy(np.stack([row["x"] for row, _ in ROWS[:7]]))
    with torch.no_grad():
        expected = again({"x": features}).numpy()
    return bool(np.allclose(trainer.predict(ROWS[:7]).predictions, expected, atol=1e-6))


def refused(folder: str) -> str:
    args = TFTrainingArguments(folder, report_to="none", use_cpu=True, max_steps=2, disable_tqdm=True)
    try:
        TFTrainer(make_model(), args, ROWS).train()
    except ValueError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    place = sys.argv[1]
    found = {name: far(name, f"{place}/{number}") for number, name in enumerate(OPTIMIZERS)}
    print("FOUND", json.dumps({"far": found, "saved": saved(f"{place}/saved"), "refused": refused(f"{place}/refused")}))
