"""How long training stands still for a checkpoint: transformers, hftrainer, and hftrainer in the background.

    make bench-checkpoint

A model of 537 MB of weights with AdamW, so that a checkpoint has 1.6 GB. The time from the end of the step that saves
to the beginning of the next, less what passes there without a save; each variant in a process of its own, in turns.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
from torch import nn

VARIANTS = {
    "transformers": ("transformers", {}),
    "hftrainer": ("hftrainer", {}),
    "hftrainer, in the background": ("hftrainer", {"lightning_config": {"async_checkpoint": True}}),
}
WIDTH, LAYERS, SAVES = 4096, 8, 4


class Wide(nn.Module):
    """Weights enough, and little to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """The mean of the squares."""
        return {"loss": self.layers(x).square().mean()}


def touch_memory(gigabytes: int = 8) -> None:
    """Use memory once: the host of a virtual machine hands out fresh pages slowly, which is not ours to measure."""
    block = torch.empty(gigabytes * 2**28)
    block.fill_(1.0)


def measure(variant: str, save_steps: int) -> dict[str, Any]:
    """Seconds between steps, with a save and without."""
    library_name, settings = VARIANTS[variant]
    library = importlib.import_module(library_name)
    touch_memory()
    ends: dict[int, float] = {}
    gaps: dict[int, float] = {}

    class Clock(library.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ends[state.global_step] = time.perf_counter()

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step in ends:
                gaps[state.global_step] = time.perf_counter() - ends[state.global_step]

    with tempfile.TemporaryDirectory() as folder:
        args = library.TrainingArguments(
            folder,
            max_steps=save_steps * SAVES + 2,
            per_device_train_batch_size=4,
            save_steps=save_steps,
            save_total_limit=1,
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            **settings,
        )
        data = [{"x": torch.randn(WIDTH), "labels": 0} for _ in range(4 * (save_steps * SAVES + 2))]
        library.Trainer(Wide(), args, train_dataset=data, callbacks=[Clock]).train()
    without = statistics.median(gap for step, gap in gaps.items() if step % save_steps)
    return {"stalls": [gaps[step] - without for step in sorted(gaps) if step % save_steps == 0]}


def main() -> None:
    """Run the variants in turns, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--save-steps", type=int, default=12, help="optimizer steps between two saves")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        print(json.dumps(measure(options.variant, options.save_steps)))
        return
    stalls: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    first: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in range(options.rounds):
        for variant in VARIANTS:
            line = [sys.executable, __file__, "--variant", variant, "--save-steps", str(options.save_steps)]
            done = subprocess.run(line, capture_output=True, text=True, check=True)
            measured = json.loads(done.stdout.splitlines()[-1])["stalls"]
            first[variant].append(measured[0])
            stalls[variant] += measured[1:]
    theirs = statistics.median(stalls["transformers"])
    print("| | first save | a later save | ratio to transformers |\n| --- | --- | --- | --- |")
    for variant, measured in stalls.items():
        median = statistics.median(measured)
        print(f"| {variant} | {statistics.median(first[variant]):.2f} s | {median:.2f} s | {median / theirs:.2f} |")


if __name__ == "__main__":
    main()
