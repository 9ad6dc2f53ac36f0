"""Tokens a second, peak memory and host synchronizations a step on a GPU: hftrainer, transformers and a raw loop.

    make bench BENCH=gpu    # or: python benchmarks/gpu.py --rounds 3 --json results.json

A Llama of 125M parameters in bf16 (autocast), fused AdamW, a linear schedule and clipping at 1.0, with and without
`torch.compile`, a log line every 10 steps. Each contender trains in a process of its own, in turns: first the steps
that warm up, then those that are timed, then those in which `torch.cuda.set_sync_debug_mode` shows each operation that
waits for the device. Those between the end of a step and its log line are left out: a log line has to read the loss.

    python benchmarks/gpu.py --device cpu --tiny    # the same path without a GPU, with a tiny model; counts nothing
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

WARM, TIMED, COUNTED, LOGGING = 10, 50, 20, 10  # optimizer steps
STEPS = WARM + TIMED + COUNTED
LARGE = {"vocab_size": 50_304, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12}
TINY = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
CONTENDERS = ("raw", "transformers", "hftrainer")
SHAPES = {False: (8, 1024), True: (2, 16)}  # tiny → samples, tokens


class Meter:
    """Follows a run by the ends of its steps and its log lines.

    Attributes:
        seconds: what the timed steps took.
        megabytes: their peak of allocated device memory; None on the CPU.
        stacks: where the host waited in the counted steps, outside log lines → how often.
    """

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"
        self.seconds = self._start = 0.0
        self.megabytes: float | None = None
        self.stacks: collections.Counter[str] = collections.Counter()
        self._logging = False
        self._counting = contextlib.ExitStack()

    def step_ended(self, step: int, logs: bool) -> None:
        """Note the end of optimizer step `step`, after which there may be a log line."""
        if step == WARM:
            if self.on_gpu:
                torch.cuda.reset_peak_memory_stats()
            self._start = self._now()
        elif step == WARM + TIMED:
            self.seconds = self._now() - self._start
            if self.on_gpu:
                self.megabytes = torch.cuda.max_memory_allocated() / 2**20
                self._begin_counting()
        elif step == STEPS:
            self._counting.close()
        self._logging = logs

    def logged(self) -> None:
        """Note that the log line is complete."""
        self._logging = False

    def _now(self) -> float:
        if self.on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _begin_counting(self) -> None:
        self._counting.enter_context(warnings.catch_warnings())
        warnings.simplefilter("always")
        warnings.showwarning = self._note
        torch.cuda.set_sync_debug_mode("warn")
        self._counting.callback(torch.cuda.set_sync_debug_mode, "default")

    def _note(self, message: Warning | str, *args: Any, **kwargs: Any) -> None:
        if "synchronizing CUDA operation" in str(message) and not self._logging:
            frames = traceback.extract_stack()[:-1][-4:]
            where = (f"{'/'.join(Path(f.filename).parts[-3:])}:{f.lineno} {f.name}" for f in reversed(frames))
            self.stacks[" < ".join(where)] += 1


def make_model(tiny: bool) -> torch.nn.Module:
    """The Llama, with random weights in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = TINY if tiny else LARGE
    heads = sizes["hidden_size"] // (16 if tiny else 64)
    config = LlamaConfig(**sizes, num_attention_heads=heads, tie_word_embeddings=True, use_cache=False)
    return LlamaForCausalLM(config)


def make_data(tiny: bool) -> list[dict[str, torch.Tensor]]:
    """A batch of random tokens for each step."""
    samples, length = SHAPES[tiny]
    vocabulary = (TINY if tiny else LARGE)["vocab_size"]
    ids = torch.randint(0, vocabulary, (samples * STEPS, length), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


def train_raw(meter: Meter, device: str, tiny: bool, compiled: bool) -> None:
    """A plain PyTorch loop that does what the others do by default, and waits for the device in log lines only."""
    model = make_model(tiny).to(device).train()
    run: Any = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / STEPS))
    loader = torch.utils.data.DataLoader(
        make_data(tiny),  # type: ignore[arg-type] # a list is a dataset
        SHAPES[tiny][0],
        shuffle=True,
        pin_memory=device == "cuda",
    )
    summed = torch.zeros((), device=device)
    for step, batch in enumerate(loader, start=1):
        batch = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = run(**batch)["loss"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        summed += loss.detach()
        logs = step % LOGGING == 0
        meter.step_ended(step, logs)
        if logs:
            print({"loss": summed.item() / LOGGING})
            summed.zero_()
            meter.logged()


def train_with(library_name: str, meter: Meter, device: str, tiny: bool, compiled: bool) -> None:
    """The Trainer of one of the libraries, with its default settings."""
    library = importlib.import_module(library_name)

    class Reports(library.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            meter.step_ended(state.global_step, control.should_log)

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            meter.logged()

    with tempfile.TemporaryDirectory() as folder:
        args = library.TrainingArguments(
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=SHAPES[tiny][0],
            logging_steps=LOGGING,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            bf16=True,
            torch_compile=compiled,
            use_cpu=device == "cpu",
        )
        library.Trainer(make_model(tiny), args, train_dataset=make_data(tiny), callbacks=[Reports]).train()


def measure(contender: str, device: str, tiny: bool, compiled: bool) -> dict[str, Any]:
    """One run of a contender."""
    meter = Meter(device)
    if contender == "raw":
        train_raw(meter, device, tiny, compiled)
    else:
        train_with(contender, meter, device, tiny, compiled)
    samples, length = SHAPES[tiny]
    return {
        "tokens_per_second": samples * length * TIMED / meter.seconds,
        "megabytes": meter.megabytes,
        "synchronizations": {stack: count / COUNTED for stack, count in meter.stacks.items()},
    }


def measure_apart(contender: str, device: str, tiny: bool, compiled: bool) -> dict[str, Any]:
    """`measure` in a process of its own, which sees one GPU: with several, both libraries would use them all."""
    command = [sys.executable, __file__, "--device", device, "--one", contender]
    command += ["--tiny"] * tiny + ["--compiled"] * compiled
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": first})
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(device: str, tiny: bool, compiled: bool, rounds: int) -> dict[str, dict[str, Any]]:
    """Medians of the contenders, in turns; synchronizations are those of the last round."""
    runs: dict[str, list[dict[str, Any]]] = {contender: [] for contender in CONTENDERS}
    for _ in range(rounds):
        for contender, measured in runs.items():
            measured.append(measure_apart(contender, device, tiny, compiled))
    return {
        contender: {
            **measured[-1],
            "tokens_per_second": statistics.median(each["tokens_per_second"] for each in measured),
        }
        for contender, measured in runs.items()
    }


def print_table(title: str, results: dict[str, dict[str, Any]]) -> None:
    """The table of one variant, and below it where the host waits."""
    theirs = results["transformers"]
    print(f"| {title} | tokens a second | of transformers' | of raw | peak memory | of transformers' | waits a step |")
    print("| --- |" + " --- |" * 6)
    for contender, result in results.items():
        rate, memory = result["tokens_per_second"], result["megabytes"]
        of_theirs, of_raw = (rate / other["tokens_per_second"] for other in (theirs, results["raw"]))
        on_gpu = ["-"] * 3
        if memory is not None:
            waits = sum(result["synchronizations"].values())
            on_gpu = [f"{memory:,.0f} MB", f"{memory / theirs['megabytes']:.2f}", f"{waits:.2f}"]
        print(f"| {contender} | {rate:,.0f} | {of_theirs:.2f} | {of_raw:.2f} | " + " | ".join(on_gpu) + " |")
    for contender, result in results.items():
        for stack, count in result["synchronizations"].items():
            print(f"\n{contender} waits {count:.2f} times a step: {stack}")
    print(flush=True)


def main() -> None:
    """Measure, and print a table for each variant."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model: tries the code, measures nothing")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender (default %(default)s)")
    parser.add_argument("--json", help="also write the figures here")
    parser.add_argument("--one", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--compiled", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("Nothing measured: this benchmark needs a CUDA GPU with 24 GB, and torch built for CUDA.")
        print("To try its code without one: python benchmarks/gpu.py --device cpu --tiny")
        return
    if options.one:
        print(json.dumps(measure(options.one, options.device, options.tiny, options.compiled)))
        return
    results = {}
    for title, compiled in (("eager", False), ("torch.compile", True)):
        results[title] = compare(options.device, options.tiny, compiled, options.rounds)
        print_table(title, results[title])
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
