"""Microseconds per optimizer step above a raw PyTorch loop: hftrainer, transformers and plain Lightning.

Every contender trains the same two-layer model on the same data with the same fused AdamW, linear schedule and
clipping at 1.0, so what is left is the loop. They take turns, many times, so that whatever else the machine does falls
on all of them alike; the figure is the median over the turns.

    python benchmarks/step_overhead.py [--rounds 15] [--steps 1000] [--json results.json]
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

import lightning.pytorch as pl
import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader

import hftrainer

BATCH, FEATURES, HIDDEN, CLASSES = 8, 64, 128, 10


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def make_data(steps: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(steps * BATCH, FEATURES, generator=generator)
    y = torch.randint(0, CLASSES, (steps * BATCH,), generator=generator)
    return [{"x": x[i], "labels": y[i]} for i in range(len(x))]


def make_optimizer(model: nn.Module, steps: int) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.0, fused=True)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))


def raw(data: list, steps: int) -> float:
    model = TwoLayers().train()
    optimizer, scheduler = make_optimizer(model, steps)
    loader = DataLoader(data, BATCH, shuffle=True, collate_fn=hftrainer.default_data_collator)
    start = time.perf_counter()
    for batch in loader:
        loss = model(**batch)["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return time.perf_counter() - start


class Clock:
    """Times the loop only: from the first batch's start to the last one's end."""

    start = stop = 0.0


def plain_lightning(data: list, steps: int) -> float:
    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = TwoLayers()

        def training_step(self, batch: dict, batch_idx: int) -> torch.Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> dict:
            optimizer, scheduler = make_optimizer(self.model, steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def on_train_epoch_start(self) -> None:
            Clock.start = time.perf_counter()

        def on_train_epoch_end(self) -> None:
            Clock.stop = time.perf_counter()

    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(data, BATCH, shuffle=True, collate_fn=hftrainer.default_data_collator))
    return Clock.stop - Clock.start


def with_trainer(library: object) -> Callable[[list, int], float]:
    class Stopwatch(library.TrainerCallback):  # type: ignore[name-defined]
        def on_epoch_begin(self, args, state, control, **kwargs) -> None:
            Clock.start = time.perf_counter()

        def on_epoch_end(self, args, state, control, **kwargs) -> None:
            Clock.stop = time.perf_counter()

    def run(data: list, steps: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            args = library.TrainingArguments(  # type: ignore[attr-defined]
                folder,
                num_train_epochs=1,
                per_device_train_batch_size=BATCH,
                logging_strategy="no",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
            )
            model = TwoLayers()
            optimizers = make_optimizer(model, steps)
            library.Trainer(  # type: ignore[attr-defined]
                model, args, train_dataset=data, callbacks=[Stopwatch], optimizers=optimizers
            ).train()
        return Clock.stop - Clock.start

    return run


CONTENDERS: dict[str, Callable[[list, int], float]] = {
    "raw": raw,
    "lightning": plain_lightning,
    "transformers": with_trainer(transformers),
    "hftrainer": with_trainer(hftrainer),
}


def measure(rounds: int, steps: int) -> dict[str, float]:
    """Median microseconds per step of each contender, which take turns."""
    data = make_data(steps)
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for round_ in range(rounds + 1):
        for name, run in CONTENDERS.items():
            with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                seconds = run(data, steps)
            if round_:  # the first round warms up
                times[name].append(seconds / steps * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="turns of each contender (default %(default)s)")
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps per turn (default %(default)s)")
    parser.add_argument("--json", help="also write the figures here")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    medians = measure(options.rounds, options.steps)
    theirs = medians["transformers"] - medians["raw"]
    print(f"{'':14}{'µs a step':>10}{'above raw':>11}{'ratio to transformers':>23}")
    for name, value in medians.items():
        above = value - medians["raw"]
        print(f"{name:14}{value:10.0f}{above:11.0f}{above / theirs:23.2f}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(medians, file, indent=2)


if __name__ == "__main__":
    main()
