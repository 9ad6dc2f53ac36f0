"""How fast training is with a checkpoint every 20 steps in the background, of its speed without checkpoints.

    make bench BENCH=background_save

Models of 8 layers with AdamW, in one thread, so that the process that writes has a core of its own. The mean time of a
step over ten saves, after two that are not counted. Each variant in a process of its own, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hftrainer

VARIANTS = {
    "no checkpoints": {"save_strategy": "no"},
    "in the background": {"lightning_config": {"async_checkpoint": True}},
    "at once": {},
}
EVERY, FIRST, COUNTED = 20, 2, 10


class Stack(nn.Module):
    """Layers of one width; its state has 96 bytes for each pair of inputs and outputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """The mean of the squares."""
        return {"loss": self.layers(x).square().mean()}


class Clock(hftrainer.TrainerCallback):
    """Keeps when each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the time."""
        self.ends.append(time.perf_counter())


def measure(variant: str, width: int) -> float:
    """Seconds of a step."""
    torch.set_num_threads(1)
    clock, steps = Clock(), EVERY * (FIRST + COUNTED)
    with tempfile.TemporaryDirectory(dir=os.getcwd()) as folder:
        args = hftrainer.TrainingArguments(
            folder,
            max_steps=steps + 1,
            per_device_train_batch_size=64,
            save_steps=EVERY,
            save_total_limit=1,
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            **VARIANTS[variant],
        )
        data = [{"x": torch.randn(width), "labels": 0} for _ in range(640)]
        hftrainer.Trainer(Stack(width), args, train_dataset=data, callbacks=[clock]).train()
    return (clock.ends[steps - 1] - clock.ends[EVERY * FIRST - 1]) / (EVERY * COUNTED)


def main() -> None:
    """Run the variants in turns, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--json", help="also write the figures into this file")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        print(json.dumps(measure(options.variant, options.width[0])))
        return
    print("| state | checkpoints | a step | speed, of that without |\n| --- | --- | --- | --- |")
    rows: dict[str, dict[str, float]] = {}
    for width in options.width:
        seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        for _ in range(options.rounds):
            for variant, found in seconds.items():
                line = [sys.executable, __file__, "--variant", variant, "--width", str(width)]
                done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True)
                found.append(json.loads(done.stdout.splitlines()[-1]))
        for variant, found in seconds.items():
            # The other variants ran right before and after: the speed of a machine changes in minutes.
            ratios = [without / each for without, each in zip(seconds["no checkpoints"], found, strict=True)]
            state = f"{96 * width * width / 1e6:,.0f} MB"
            rows[f"{state}, {variant}"] = {"step": statistics.median(found), "speed": statistics.median(ratios)}
            print(
                f"| {state} | {variant} | {statistics.median(found) * 1e3:.1f} ms | {statistics.median(ratios):.2f} |"
            )
    if options.json:
        Path(options.json).write_text(
            json.dumps({"subject": "background save", "unit": "s", "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
