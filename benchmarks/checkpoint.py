"""How long a checkpoint blocks training: transformers, hftrainer, and hftrainer in the background.

    make bench BENCH=checkpoint

A model of 537 MB of weights with AdamW, so that a checkpoint has 1.6 GB. The time from the end of the step that saves
to the beginning of the next, less what passes there without a save; the steps until the next save, of which the first
may be slower while a thread writes; and the peak of resident memory from one save to the next, above that of the steps
before the first. Each variant in a process of its own, in turns.
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
from pathlib import Path
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


def megabytes(field: str) -> float:
    """A field of `/proc/self/status`, such as VmHWM: the peak of resident memory since it was last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith(field + ":"))


def clock(base: type, save_steps: int) -> Any:
    """A callback that keeps seconds and peaks of resident memory."""

    class Clock(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            self.ends: dict[int, float] = {}
            self.gaps: dict[int, float] = {}
            self.peaks: list[float] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            step = state.global_step
            if step == 2 or step % save_steps == 0:  # from step 2 on, the optimizer's state is there
                if step > 2:
                    self.peaks.append(megabytes("VmHWM"))
                Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
            self.ends[step] = time.perf_counter()

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step in self.ends:
                self.gaps[state.global_step] = time.perf_counter() - self.ends[state.global_step]

    return Clock()


def measure(variant: str, save_steps: int) -> dict[str, Any]:
    """Seconds for which each save holds up training, seconds between two saves, and MB of memory for saving."""
    library_name, settings = VARIANTS[variant]
    library = importlib.import_module(library_name)
    touch_memory()
    kept = clock(library.TrainerCallback, save_steps)
    with tempfile.TemporaryDirectory() as folder:
        args = library.TrainingArguments(
            folder,
            max_steps=save_steps * (SAVES + 1) - 1,
            per_device_train_batch_size=4,
            save_steps=save_steps,
            save_total_limit=1,
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            **settings,
        )
        data = [{"x": torch.randn(WIDTH), "labels": 0} for _ in range(4 * save_steps * (SAVES + 1))]
        library.Trainer(Wide(), args, train_dataset=data, callbacks=[kept]).train()
    without = statistics.median(gap for step, gap in kept.gaps.items() if step % save_steps)
    saves = [step for step in sorted(kept.gaps) if step % save_steps == 0]
    return {
        "stalls": [kept.gaps[step] - without for step in saves],
        "steps": [kept.ends[step + save_steps - 1] - kept.ends[step] - kept.gaps[step] for step in saves],
        "memory": max(kept.peaks[1:]) - kept.peaks[0],
    }


def run(variant: str, save_steps: int) -> dict[str, Any]:
    """`measure` in a process of its own."""
    line = [sys.executable, __file__, "--variant", variant, "--save-steps", str(save_steps)]
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def summary(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Medians of some runs of a variant."""
    return {
        "first": statistics.median(each["stalls"][0] for each in runs),
        "later": statistics.median(stall for each in runs for stall in each["stalls"][1:]),
        "steps": statistics.median(seconds for each in runs for seconds in each["steps"]),
        "memory": statistics.median(each["memory"] for each in runs),
    }


def main() -> None:
    """Run the variants in turns, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--save-steps", type=int, default=12, help="optimizer steps between two saves")
    parser.add_argument("--json", help="also write the figures into this file")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        print(json.dumps(measure(options.variant, options.save_steps)))
        return
    runs: dict[str, list[dict[str, Any]]] = {variant: [] for variant in VARIANTS}
    for _ in range(options.rounds):
        for variant in VARIANTS:
            runs[variant].append(run(variant, options.save_steps))
    found = {variant: summary(of_variant) for variant, of_variant in runs.items()}
    theirs = found["transformers"]
    print("| | first save | ratio | a later save | ratio | steps between saves | peak memory of saving |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for variant, ours in found.items():
        for name in ("first", "later"):
            ours[f"{name} / transformers"] = ours[name] / theirs[name]
        print(
            f"| {variant} | {ours['first']:.2f} s | {ours['first / transformers']:.3f} | {ours['later']:.2f} s | "
            f"{ours['later / transformers']:.3f} | {ours['steps']:.2f} s | {ours['memory']:,.0f} MB |"
        )
    if options.json:
        Path(options.json).write_text(
            json.dumps({"subject": "checkpoint", "unit": "s", "rows": found}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
