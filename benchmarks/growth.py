"""Whether a long run slows down or grows: 100,000 steps, a log line at each tenth, and ten checkpoints.

python benchmarks/growth.py [--steps 100000] [--library transformers] [--json results.json]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import io
import json
import logging
import os
import tempfile
import time
import warnings
from pathlib import Path

import psutil
import torch
from step_overhead import BATCH, CASES, Layers, make_data


def measure(library: object, steps: int) -> list[dict[str, float]]:
    """Figures of each tenth of the run."""
    found: list[dict[str, float]] = []

    class Watch(library.TrainerCallback):  # type: ignore[name-defined]
        start = 0.0

        def on_train_begin(self, args, state, control, **kwargs) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs) -> None:
            if state.global_step % args.save_steps == 0:
                self.saves = time.perf_counter()
                self.seconds = self.saves - self.start

        def on_save(self, args, state, control, **kwargs) -> None:
            if state.global_step % args.save_steps:
                return
            written = Path(args.output_dir, f"checkpoint-{state.global_step}", "trainer_state.json")
            now = time.perf_counter()
            gc.collect()
            found.append(
                {
                    "step": state.global_step,
                    "µs a step": self.seconds / args.save_steps * 1e6,
                    "resident, MB": psutil.Process(os.getpid()).memory_info().rss / 1e6,
                    "save, ms": (now - self.saves) * 1e3,
                    "trainer_state.json, MB": written.stat().st_size / 1e6,
                }
            )
            self.start = time.perf_counter()

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        args = library.TrainingArguments(  # type: ignore[attr-defined]
            folder,
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            logging_steps=10,
            save_steps=steps // 10,
            save_total_limit=1,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        data = make_data(CASES["two-layers"])
        library.Trainer(Layers(), args, train_dataset=data, callbacks=[Watch]).train()  # type: ignore[attr-defined]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000, help="default %(default)s")
    parser.add_argument("--library", default="hftrainer", choices=["hftrainer", "transformers"])
    parser.add_argument("--json", help="also write the figures here")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = measure(importlib.import_module(options.library), options.steps)
    print("".join(f"{name:>24}" for name in found[0]))
    for row in found:
        print("".join(f"{value:24.2f}" for value in row.values()))
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
