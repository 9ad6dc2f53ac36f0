"""Peak resident memory of training, evaluating, saving and searching, by size of the model, against transformers.

    make bench BENCH=memory    # or: python benchmarks/memory.py --sizes 10M 100M --json results.json

A Llama with a vocabulary of 1,024 and AdamW in float32, batches of 2 samples of 16 tokens, one thread. Each figure is
taken in a process of its own, which first does the same with a tiny model, so that whatever is imported on first use is
no part of it: the peak from before the model is made, above what was resident then. Blocks from 64 KB on are returned
when they are freed (glibc would keep some, by chance up to a tenth of the peak of a small model). Transformers saves in
the foreground; the row of the background is compared with that.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SIZES = {"tiny": (32, 1), "10M": (384, 6), "100M": (768, 14), "500M": (1536, 18)}  # hidden size, layers
VOCABULARY, LENGTH, BATCH, STEPS = 1024, 16, 2, 2
RETURN_FREED = {"MALLOC_MMAP_THRESHOLD_": str(64 * 1024)}  # glibc's own threshold moves with what is freed
SEARCHED = ("tiny", "10M", "100M")
BYTES_A_PARAMETER = {"evaluate": 6, "save in the background": 30}  # at most, to see whether there is room
BYTES_OTHERWISE = 20
ON_DISK = "/var/tmp"  # checkpoints in a file system in memory would take the room that is measured


class Dataset(torch.utils.data.Dataset):
    """Random tokens, made when they are read."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def make_model(size: str) -> Any:
    """A Llama of about so many parameters: 12 layers hidden²."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers = SIZES[size]
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def make_trainer(library_name: str, size: str, folder: str, searching: bool = False, **settings: Any) -> Any:
    """A Trainer of one of the libraries; in a search it makes its models itself."""
    library = importlib.import_module(library_name)
    args = library.TrainingArguments(
        folder,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **{"save_strategy": "no", "logging_steps": 1, **settings},
    )
    model = {"model_init": lambda: make_model(size)} if searching else {"model": make_model(size)}
    return library.Trainer(
        args=args, train_dataset=Dataset(BATCH * STEPS), eval_dataset=Dataset(BATCH * STEPS), **model
    )


def train(library: str, size: str, folder: str) -> None:
    """Two steps."""
    make_trainer(library, size, folder).train()


def train_and_evaluate(library: str, size: str, folder: str) -> None:
    """Two steps, evaluating after each."""
    make_trainer(library, size, folder, eval_strategy="steps", eval_steps=1).train()


def evaluate(library: str, size: str, folder: str) -> None:
    """One evaluation, without training."""
    make_trainer(library, size, folder).evaluate()


def save(library: str, size: str, folder: str, **settings: Any) -> None:
    """Two steps, saving after each."""
    saving = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    make_trainer(library, size, folder, **saving, **settings).train()


def save_in_background(library: str, size: str, folder: str) -> None:
    """The same in the background, by the one that can."""
    settings = {"lightning_config": {"async_checkpoint": True}} if library == "hftrainer" else {}
    save(library, size, folder, **settings)


def search(library: str, size: str, folder: str) -> None:
    """Three trials."""
    make_trainer(library, size, folder, searching=True).hyperparameter_search(
        lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-5, 1e-3)},
        n_trials=3,
        backend="optuna",
        direction="minimize",
    )


SUBJECTS: dict[str, Callable[[str, str, str], None]] = {
    "train": train,
    "train and evaluate": train_and_evaluate,
    "evaluate": evaluate,
    "save": save,
    "save in the background": save_in_background,
    "search": search,
}
LIBRARIES = ("transformers", "hftrainer")


def status(name: str) -> float:
    """A memory figure of this process in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def measure(subject: str, library: str, size: str) -> float:
    """Peak memory of one subject in MB, above what is there after the same with a tiny model."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(dir=ON_DISK) as folder:
        SUBJECTS[subject](library, "tiny", f"{folder}/tiny")
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = status("VmRSS")
        SUBJECTS[subject](library, size, f"{folder}/{size}")
        return status("VmHWM") - before


def measure_apart(subject: str, library: str, size: str) -> float:
    """`measure` in a process of its own."""
    command = [sys.executable, __file__, "--one", subject, library, size]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **RETURN_FREED})
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def has_room(subject: str, size: str) -> bool:
    """Whether the free memory suffices: a machine that swaps, or ends a process, measures nothing."""
    free = int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) * 1024
    hidden, layers = SIZES[size]
    return free > 12 * layers * hidden**2 * BYTES_A_PARAMETER.get(subject, BYTES_OTHERWISE)


def compare(subject: str, size: str, repeats: int) -> dict[str, float]:
    """Median peaks of both libraries, in turns; empty where there is no room."""
    peaks: dict[str, list[float]] = {library: [] for library in LIBRARIES}
    for _ in range(repeats):
        for library in LIBRARIES:
            if not has_room(subject, size):
                print(f"{subject}, {size}: not enough free memory", file=sys.stderr)
                return {}
            peaks[library].append(measure_apart(subject, library, size))
    return {library: statistics.median(values) for library, values in peaks.items()}


def cell(peaks: dict[str, float]) -> str:
    """Both peaks and their ratio."""
    if not peaks:
        return "not measured"
    theirs, ours = (peaks[library] for library in LIBRARIES)
    return f"{ours:,.0f} / {theirs:,.0f} MB: {ours / theirs:.2f}"


def main() -> None:
    """Measure what is asked for, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["10M", "100M", "500M"])
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--repeats", type=int, default=1, help="processes a figure, in turns (default %(default)s)")
    parser.add_argument("--json", help="also write the figures here, in MB")
    parser.add_argument("--one", nargs=3, metavar=("SUBJECT", "LIBRARY", "SIZE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*options.one)))
        return
    results: dict[str, dict[str, dict[str, float]]] = {}
    print("| hftrainer / transformers | " + " | ".join(options.sizes) + " |\n| --- |" + " --- |" * len(options.sizes))
    for subject in options.subjects:
        sizes = (size for size in options.sizes if subject != "search" or size in SEARCHED)
        results[subject] = {size: compare(subject, size, options.repeats) for size in sizes}
        cells = (cell(results[subject].get(size, {})) for size in options.sizes)
        print(f"| {subject} | " + " | ".join(cells) + " |", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
