"""Microseconds per optimizer step above a raw PyTorch loop: hftrainer, transformers and plain Lightning.

Every contender trains the same model on the same data with the same fused AdamW, linear schedule and clipping at 1.0,
so what is left is the loop. They take turns, many times, so that whatever else the machine does falls on all of them
alike; the figure is the median over the turns.

    python benchmarks/step_overhead.py [--models two-layers bert] [--rounds 15] [--json results.json]
    torchrun --nproc_per_node 2 benchmarks/step_overhead.py --models two-layers

In several processes (DDP, gloo) it also counts the collective operations of a step.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import lightning.pytorch as pl
import torch
import transformers
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import hftrainer

#: Processes, and the rank of this one.
WORLD, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
BATCH, FEATURES, HIDDEN, CLASSES = 8, 64, 128, 10


class Layers(nn.Module):
    """Linear layers with ReLU between them: two by default, or many of width 8."""

    def __init__(self, modules: int = 5) -> None:
        super().__init__()
        inner = [layer for _ in range((modules - 5) // 2) for layer in (nn.Linear(8, 8), nn.ReLU())]
        hidden = 8 if inner else HIDDEN
        self.layers = nn.Sequential(nn.Linear(FEATURES, hidden), nn.ReLU(), *inner, nn.Linear(hidden, CLASSES))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def bert() -> nn.Module:
    """Twelve layers of width 32: some 200 modules."""
    config = transformers.BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=12, num_attention_heads=2, intermediate_size=64, num_labels=10
    )
    return transformers.BertForSequenceClassification(config)


class Case(NamedTuple):
    """A model, its steps in a turn, and whether it reads tokens."""

    model: Callable[[], nn.Module]
    steps: int
    reads_tokens: bool = False


CASES = {
    "two-layers": Case(Layers, 1000),
    "bert": Case(bert, 150, reads_tokens=True),
    "20-modules": Case(lambda: Layers(20), 1000),
    "200-modules": Case(lambda: Layers(200), 300),
    "2000-modules": Case(lambda: Layers(2000), 50),
}


def make_data(case: Case) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    samples = case.steps * BATCH * WORLD
    labels = torch.randint(0, CLASSES, (samples,), generator=generator)
    if case.reads_tokens:
        tokens = torch.randint(5, 100, (samples, 8), generator=generator)
        return [{"input_ids": tokens[i], "labels": labels[i]} for i in range(samples)]
    x = torch.randn(samples, FEATURES, generator=generator)
    return [{"x": x[i], "labels": labels[i]} for i in range(samples)]


def make_optimizer(model: nn.Module, steps: int) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.0, fused=True)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))


def raw(data: list, case: Case) -> float:
    model = case.model().train()
    optimizer, scheduler = make_optimizer(model, case.steps)
    sampler = None
    if WORLD > 1:
        # transformers sets find_unused_parameters for models that are not its own
        model, sampler = DistributedDataParallel(model, find_unused_parameters=True), DistributedSampler(data)
    collate = hftrainer.default_data_collator
    loader = DataLoader(data, BATCH, shuffle=sampler is None, sampler=sampler, collate_fn=collate)
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


def plain_lightning(data: list, case: Case) -> float:
    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = case.model()

        def training_step(self, batch: dict, batch_idx: int) -> torch.Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> dict:
            optimizer, scheduler = make_optimizer(self.model, case.steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def on_train_epoch_start(self) -> None:
            Clock.start = time.perf_counter()

        def on_train_epoch_end(self) -> None:
            Clock.stop = time.perf_counter()

    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=WORLD,
        strategy="ddp_find_unused_parameters_true" if WORLD > 1 else "auto",
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(data, BATCH, shuffle=True, collate_fn=hftrainer.default_data_collator))
    return Clock.stop - Clock.start


def with_trainer(library: object, **settings: object) -> Callable[[list, Case], float]:
    class Stopwatch(library.TrainerCallback):  # type: ignore[name-defined]
        def on_epoch_begin(self, args, state, control, **kwargs) -> None:
            Clock.start = time.perf_counter()

        def on_epoch_end(self, args, state, control, **kwargs) -> None:
            Clock.stop = time.perf_counter()

    def run(data: list, case: Case) -> float:
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
                ddp_backend="gloo" if WORLD > 1 else None,
                **settings,
            )
            model = case.model()
            optimizers = make_optimizer(model, case.steps)
            library.Trainer(  # type: ignore[attr-defined]
                model, args, train_dataset=data, callbacks=[Stopwatch], optimizers=optimizers
            ).train()
        return Clock.stop - Clock.start

    return run


CONTENDERS: dict[str, Callable[[list, Case], float]] = {
    "raw": raw,
    "lightning": plain_lightning,
    "transformers": with_trainer(transformers),
    "hftrainer": with_trainer(hftrainer),
    "observed": with_trainer(hftrainer, observe=True),
}


def run_quietly(name: str, data: list, case: Case) -> float:
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return CONTENDERS[name](data, case)


def collectives(name: str, case: Case) -> dict[str, float]:
    """Collective operations per step, by kind; those before and after the loop are subtracted."""
    counts = []
    for steps in (10, 110):
        shorter = case._replace(steps=steps)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            run_quietly(name, make_data(shorter), shorter)
        counts.append(Counter(event.name for event in profiler.events() if event.name.startswith("gloo:")))
    fewer, more = counts
    return {kind.removeprefix("gloo:"): (count - fewer[kind]) / 100 for kind, count in more.items()}


def measure(case: Case, rounds: int) -> dict[str, float]:
    """Median microseconds per step of each contender, which take turns."""
    data = make_data(case)
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for round_ in range(rounds + 1):
        # In both orders alike, since each contender leaves caches and memory to the one after it.
        for name in list(CONTENDERS)[:: 1 if round_ % 2 else -1]:
            seconds = run_quietly(name, data, case)
            if round_:  # the first round warms up
                times[name].append(seconds / case.steps * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=CASES, help="default: all")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each contender (default %(default)s)")
    parser.add_argument("--json", help="also write the figures here")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if WORLD > 1:
        distributed.init_process_group("gloo")
    results = {}
    for model in options.models:
        results[model] = medians = measure(CASES[model], options.rounds)
        if RANK:
            continue
        theirs = medians["transformers"] - medians["raw"]
        print(f"{model:14}{'µs a step':>10}{'above raw':>11}{'ratio to transformers':>23}")
        for name, value in medians.items():
            above = value - medians["raw"]
            print(f"{name:14}{value:10.0f}{above:11.0f}{above / theirs:23.2f}", flush=True)
    for name in CONTENDERS if WORLD > 1 else ():
        found = collectives(name, CASES["two-layers"])
        if not RANK:
            print(f"{name:14}", ", ".join(f"{count:.2f} {kind}" for kind, count in found.items()), "a step")
    if options.json and not RANK:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
