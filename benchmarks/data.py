"""Data that is slow to make, and resuming in the middle of a large epoch.

Reading: documents are tokenized when they are read, at some 1,000 a second. At best, a step takes as long as the slower
one of its data and its computation; without loading processes they follow each other, in one thread.

Resuming: seconds from `train(resume_from_checkpoint=...)` to the first step, at 90 % of an epoch.

    python benchmarks/data.py [--rounds 5] [--samples 10000000] [--json results.json]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import datasets
import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.utils.data import DataLoader, Dataset

import hftrainer
from hftrainer.checkpointing.inspection import accept_checkpoint

BATCH, STEPS, WIDTH = 8, 150, 64
#: Characters of a document; at 1,000 a second on one core of the machine of README.md.
CHARACTERS = 12_000


class Documents(Dataset):
    """Documents that are tokenized when they are read; a sample is the first tokens and the parity of their number."""

    def __init__(self) -> None:
        words = [f"word{number}" for number in range(500)]
        self.tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, "word0"))
        self.tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
        choices = np.random.default_rng(0).choice(words, (64, CHARACTERS // 8))
        self.texts = [" ".join(row) for row in choices]

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.tokenizer.encode(self.texts[index % len(self.texts)]).ids
        return {"x": torch.tensor(ids[:WIDTH]) / 500, "labels": torch.tensor(len(ids) % 2)}


class Numbers(Dataset):
    """A large map-style set."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((WIDTH,), index % 7 / 7), "labels": torch.tensor(index % 2)}


class Model(nn.Module):
    """Takes some 10 ms for forward and backward of a batch."""

    def __init__(self, width: int = 512, depth: int = 6) -> None:
        super().__init__()
        inner = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.layers = nn.Sequential(nn.Linear(WIDTH, width), *inner, nn.Linear(width, 2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Times:
    begin = end = 0.0


def arguments(library: object, folder: str, **settings: object) -> object:
    defaults = {
        "per_device_train_batch_size": BATCH,
        "num_train_epochs": 1,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return library.TrainingArguments(folder, **(defaults | settings))  # type: ignore[attr-defined]


# ---- Reading ---------------------------------------------------------------------------------------------------------


def loader(workers: int) -> DataLoader:
    return DataLoader(Documents(), BATCH, num_workers=workers, collate_fn=hftrainer.default_data_collator)


def data_alone(workers: int) -> float:
    start, count = 0.0, 0
    for _ in loader(workers):
        start = start or time.perf_counter()  # without the start of the processes
        count += 1
    return (time.perf_counter() - start) / (count - 1)


def train(model: nn.Module, batches: Callable[[], object]) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    start, count = 0.0, 0
    for batch in batches():  # type: ignore[attr-defined]
        start = start or time.perf_counter()
        model(**batch)["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        count += 1
    return (time.perf_counter() - start) / count


def computation_alone(workers: int) -> float:
    batch = next(iter(loader(0)))
    return train(Model(), lambda: [batch] * STEPS)


def raw(workers: int) -> float:
    return train(Model(), lambda: loader(workers))


def with_trainer(library: object) -> Callable[[int], float]:
    class Stopwatch(library.TrainerCallback):  # type: ignore[name-defined]
        def on_step_begin(self, args, state, control, **kwargs) -> None:
            if state.global_step == 0:
                Times.begin = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs) -> None:
            Times.end = time.perf_counter()

    def run(workers: int) -> float:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            args = arguments(library, folder, dataloader_num_workers=workers)
            library.Trainer(Model(), args, train_dataset=Documents(), callbacks=[Stopwatch]).train()  # type: ignore[attr-defined]
        return (Times.end - Times.begin) / STEPS

    return run


READING: dict[str, Callable[[int], float]] = {
    "data alone": data_alone,
    "computation alone": computation_alone,
    "raw": raw,
    "transformers": with_trainer(transformers),
    "hftrainer": with_trainer(hftrainer),
}


def measure_reading(rounds: int) -> dict[int, dict[str, float]]:
    """Median seconds per step, by number of loading processes."""
    found: dict[int, dict[str, float]] = {}
    for workers in (0, 2):
        times: dict[str, list[float]] = {name: [] for name in READING}
        for _ in range(rounds):
            for name, run in READING.items():
                times[name].append(run(workers))
        found[workers] = {name: statistics.median(values) for name, values in times.items()}
    return found


# ---- Resuming --------------------------------------------------------------------------------------------------------


def resume(library: object, kind: str, samples: int) -> float:
    """Seconds to the first step at 90 % of an epoch, of a checkpoint that says so."""

    class Stop(library.TrainerCallback):  # type: ignore[name-defined]
        def on_step_begin(self, args, state, control, **kwargs) -> None:
            Times.begin = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs) -> None:
            control.should_training_stop = control.should_save = state.global_step >= self.stop_at

    def trainer(folder: str, stop_at: int) -> object:
        stop = Stop()
        stop.stop_at = stop_at  # type: ignore[attr-defined]
        args = arguments(library, folder, save_strategy="steps", per_device_train_batch_size=batch, max_steps=total)
        return library.Trainer(Model(8, 1), args, train_dataset=data, callbacks=[stop])  # type: ignore[attr-defined]

    if kind == "map-style":
        batch, data = BATCH, Numbers(samples)
        total, stop_at = samples // batch, 1
    else:  # a stream must be read to the place where it resumes
        rows = samples // 20
        batch = 500
        columns = {"x": np.zeros((rows, WIDTH), "float32"), "labels": np.zeros(rows, "int64")}
        data = datasets.Dataset.from_dict(columns).with_format("torch").to_iterable_dataset(num_shards=8)
        total = rows // batch
        stop_at = int(total * 0.9)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer(folder, stop_at).train()  # type: ignore[attr-defined]
        (checkpoint,) = Path(folder).glob("checkpoint-*")
        if kind == "map-style":
            move_to(checkpoint, int(total * 0.9))
        again = trainer(folder, 0)
        start = time.perf_counter()
        again.train(resume_from_checkpoint=str(checkpoint))  # type: ignore[attr-defined]
    return Times.begin - start


def move_to(checkpoint: Path, step: int) -> None:
    """Let a checkpoint of the first step be one of a later step, as far as the reading of data goes."""
    state = checkpoint / "trainer_state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"global_step": step, "epoch": 0.9}))
    progress = checkpoint / "progress.pt"
    if progress.exists():  # hftrainer's own position
        torch.save(torch.load(progress, weights_only=False) | {"position": step}, progress)
        accept_checkpoint(checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender (default %(default)s)")
    parser.add_argument("--samples", type=int, default=10_000_000, help="in the resumed epoch (default %(default)s)")
    parser.add_argument("--json", help="also write the figures here")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    reading = measure_reading(options.rounds)
    for workers, medians in reading.items():
        best = max(medians["data alone"], medians["computation alone"])
        print(f"{workers} processes{'ms a step':>20}{'ratio to the slower part':>26}")
        for name, value in medians.items():
            print(f"{name:20}{value * 1e3:11.2f}{value / best:26.2f}", flush=True)
    resuming = {}
    for kind in ("map-style", "stream"):
        for library in (transformers, hftrainer):
            turns = 3 if kind == "map-style" else 1
            seconds = statistics.median(resume(library, kind, options.samples) for _ in range(turns))
            resuming[f"{kind}, {library.__name__}"] = seconds
            print(f"resuming, {kind:10} {library.__name__:13}{seconds:7.2f} s", flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"reading": reading, "resuming": resuming}, file, indent=2)


if __name__ == "__main__":
    main()
