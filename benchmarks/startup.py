"""Seconds from `python script.py` to the end of the first optimizer step: hftrainer and its peers.

Two models: a plain module, and a tiny BERT of transformers, whose import all four pay for. Each turn is a process of
its own, and they take turns; the figure is the median. Warm: every file is in the page cache. Cold: before each turn
the kernel is asked to drop the files of Python and its packages from the cache. It keeps those that another process
has mapped, and the names and sizes of all: a start right after a boot is slower. "MB read" says how far it went. The
seconds of the processor are what is left of a start when other work takes turns with it.

    python benchmarks/startup.py [--rounds 7] [--cases plain bert] [--caches warm cold] [--json results.json]
"""

from __future__ import annotations

# Nothing but small modules of the standard library: all that is imported here counts in each turn.
import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BATCH, FEATURES, CLASSES, WORDS, LENGTH = 8, 64, 10, 100, 16
ROOT = Path(__file__).parents[1]


def finish() -> None:
    """Say when the step ended, by the clock that all processes share, and end at once."""
    print(time.monotonic(), flush=True)
    os._exit(0)


def plain() -> tuple[Any, list[dict[str, Any]]]:
    """A two-layer module and its data."""
    import torch
    from torch import nn

    class TwoLayers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU(), nn.Linear(FEATURES, CLASSES))

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.layers(x)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    return TwoLayers(), [{"x": torch.randn(FEATURES), "labels": i % CLASSES} for i in range(BATCH)]


def bert() -> tuple[Any, list[dict[str, Any]]]:
    """A tiny BERT and its data."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertForSequenceClassification(BertConfig(vocab_size=WORDS, **size))
    return model, [{"input_ids": torch.randint(WORDS, (LENGTH,)), "labels": i % 2} for i in range(BATCH)]


def raw(model: Any, data: list[dict[str, Any]]) -> None:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, fused=True)
    for batch in torch.utils.data.DataLoader(data, BATCH, shuffle=True):
        model(**batch)["loss"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        finish()


def plain_lightning(model: Any, data: list[dict[str, Any]]) -> None:
    import lightning.pytorch as pl
    import torch

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: dict, batch_idx: int) -> torch.Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.model.parameters(), lr=5e-5, fused=True)

        def on_train_batch_end(self, *args: Any) -> None:
            finish()

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(max_steps=1, accelerator="cpu", gradient_clip_val=1.0, enable_model_summary=False, **quiet)
    trainer.fit(Module(), torch.utils.data.DataLoader(data, BATCH, shuffle=True))


def with_trainer(name: str) -> Callable[[Any, list[dict[str, Any]]], None]:
    def run(model: Any, data: list[dict[str, Any]]) -> None:
        library: Any = importlib.import_module(name)

        class Stop(library.TrainerCallback):
            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                finish()

        quiet = {"logging_strategy": "no", "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
        args = library.TrainingArguments(
            tempfile.gettempdir(), max_steps=1, per_device_train_batch_size=BATCH, use_cpu=True, **quiet
        )
        library.Trainer(model, args, train_dataset=data, callbacks=[Stop]).train()

    return run


CASES: dict[str, Callable[[], tuple[Any, list[dict[str, Any]]]]] = {"plain": plain, "bert": bert}
CONTENDERS: dict[str, Callable[[Any, list[dict[str, Any]]], None]] = {
    "raw": raw,
    "lightning": plain_lightning,
    "transformers": with_trainer("transformers"),
    "hftrainer": with_trainer("hftrainer"),
}


def drop_files() -> None:
    """Ask the kernel to drop the files of Python, its packages and this repository from the page cache."""
    folders = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    for folder in (*folders, ROOT / "hftrainer", ROOT / "adapters"):
        for path, _, files in os.walk(folder):
            for file in files:
                try:
                    descriptor = os.open(os.path.join(path, file), os.O_RDONLY)
                except FileNotFoundError:
                    continue  # a link to nothing
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)


def turn(contender: str, case: str, cold: bool) -> dict[str, float]:
    """Seconds to the end of the first step, those of the processor among them, and megabytes read from the disk."""
    if cold:
        drop_files()
    paths = os.pathsep.join([str(ROOT), str(ROOT / "adapters")])
    env = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
    # With it, only this repository's modules would be compiled in each turn: those of packages are compiled already.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, __file__, "--turn", contender, case],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=env,
        text=True,
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{contender}, {case}: exit status {process.returncode}")
    return {
        "seconds": float(output.splitlines()[-1]) - start,
        "processor": usage.ru_utime + usage.ru_stime,
        "megabytes": usage.ru_inblock * 512 / 1e6,
    }


def measure(case: str, cold: bool, rounds: int) -> dict[str, dict[str, float]]:
    """Contender → figure → median; a first round, which is not counted, fills the cache."""
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    for round_ in range(rounds + (not cold)):
        for name in CONTENDERS:
            figures = turn(name, case, cold)
            if cold or round_:
                turns[name].append(figures)
    return {
        name: {figure: statistics.median(each[figure] for each in all_turns) for figure in all_turns[0]}
        for name, all_turns in turns.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contender (default %(default)s)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--caches", nargs="+", choices=("warm", "cold"), default=["warm", "cold"])
    parser.add_argument("--json", help="also write the figures here")
    parser.add_argument("--turn", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.turn:
        contender, case = options.turn
        CONTENDERS[contender](*CASES[case]())
        raise SystemExit("the training ended without a step")
    results: dict[str, dict[str, dict[str, float]]] = {}
    for case in options.cases:
        for cache in options.caches:
            results[f"{case}, {cache}"] = medians = measure(case, cache == "cold", options.rounds)
            print(f"\n{case + ', ' + cache:14}{'seconds':>9}{'ratio':>7}{'processor':>11}{'ratio':>7}{'MB read':>9}")
            theirs = medians["transformers"]
            for name, row in medians.items():
                wall, processor = (row[figure] / theirs[figure] for figure in ("seconds", "processor"))
                print(
                    f"{name:14}{row['seconds']:9.2f}{wall:7.2f}"
                    f"{row['processor']:11.2f}{processor:7.2f}{row['megabytes']:9.0f}"
                )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
