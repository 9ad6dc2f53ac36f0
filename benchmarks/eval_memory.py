"""Memory and time of an evaluation: transformers against hftrainer with a function, and with torchmetrics.

    make bench BENCH=eval_memory

Part one evaluates a language model with a vocabulary of 32,000 on 64, 256 and 1,024 samples of 16 tokens, in batches of
16, each in a process of its own: the peak of resident memory above what was there before, and the time. Part two
evaluates a two-class classifier, whose outputs are small, in both libraries in turn: samples per second.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
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

SIZES = (64, 256, 1024)
VOCABULARY, LENGTH, BATCH = 32_000, 16, 16
VARIANTS = {
    "transformers, a function": ("transformers", "function"),
    "hftrainer, a function": ("hftrainer", "function"),
    "hftrainer, torchmetrics": ("hftrainer", "torchmetrics"),
}


def accuracy(prediction: Any) -> dict[str, float]:
    """Share of tokens that are predicted, row by row, so that the metric itself needs no memory."""
    rows = zip(prediction.predictions, prediction.label_ids, strict=True)
    return {
        "accuracy": sum(float((row.argmax(-1) == labels).mean()) for row, labels in rows) / len(prediction.label_ids)
    }


def streamed_accuracy() -> Any:
    """The same by torchmetrics."""
    from torchmetrics.classification import MulticlassAccuracy

    from hftrainer import TorchMetrics

    metric = MulticlassAccuracy(VOCABULARY, average="micro")
    return TorchMetrics({"accuracy": metric}, adapter=lambda p: (p.predictions.argmax(-1), p.label_ids))


def make_trainer(library_name: str, metrics: str, samples: int, folder: str) -> Any:
    """A Trainer with a tiny language model and as many samples."""
    from transformers import LlamaConfig, LlamaForCausalLM

    library = importlib.import_module(library_name)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes))
    ids = torch.randint(0, VOCABULARY, (samples, LENGTH))
    data = [{"input_ids": row, "labels": row} for row in ids]
    args = library.TrainingArguments(
        folder, per_device_eval_batch_size=BATCH, report_to="none", disable_tqdm=True, use_cpu=True
    )
    compute = accuracy if metrics == "function" else streamed_accuracy()
    return library.Trainer(model, args, eval_dataset=data, compute_metrics=compute)


def status(name: str) -> float:
    """A memory figure of this process in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def measure(library: str, metrics: str, samples: int) -> dict[str, float]:
    """Peak memory in MB above that before, of one evaluation, and the seconds of the faster of two more."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(library, metrics, samples, folder)
        trainer.evaluate(trainer.eval_dataset[:BATCH])
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what the first batches have freed is no part of what was there before
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = status("VmRSS")
        result = trainer.evaluate()
        megabytes = status("VmHWM") - before
        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            trainer.evaluate()
            seconds.append(time.perf_counter() - start)
    return {"megabytes": megabytes, "seconds": min(seconds), "accuracy": result["eval_accuracy"]}


def measure_apart(variant: str, samples: int) -> dict[str, float]:
    """`measure` in a process of its own."""
    command = [sys.executable, __file__, "--one", *VARIANTS[variant], str(samples)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(output.splitlines()[-1])


def warm_memory() -> None:
    """Touch most of the free memory once: a virtual machine's host hands it out at 2 s a GB, to whoever comes first."""
    free = Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]
    torch.ones(int(free) * 1024 * 7 // 10, dtype=torch.uint8)


class Classifier(nn.Module):
    """Two classes from sixteen numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Loss and logits."""
        logits = self.layer(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def throughput(repeats: int, samples: int = 16_000) -> dict[str, float]:
    """Samples per second of the classifier's evaluation, the median of several in turn."""
    torch.set_num_threads(1)
    features, labels = torch.randn(samples, 16), torch.randint(0, 2, (samples,))
    data = [{"x": features[i], "labels": labels[i]} for i in range(samples)]
    seconds: dict[str, list[float]] = {"transformers": [], "hftrainer": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(repeats):
            for name, measured in seconds.items():
                library = importlib.import_module(name)
                args = library.TrainingArguments(folder, report_to="none", disable_tqdm=True, use_cpu=True)
                trainer = library.Trainer(
                    Classifier(),
                    args,
                    eval_dataset=data,
                    compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
                )
                trainer.log = lambda *args, **kwargs: None
                trainer.evaluate(data[:64])
                start = time.perf_counter()
                trainer.evaluate()
                measured.append(time.perf_counter() - start)
    return {name: samples / statistics.median(measured) for name, measured in seconds.items()}


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", help="also write the ratios to transformers here")
    parser.add_argument("--one", nargs=3, metavar=("LIBRARY", "METRICS", "SAMPLES"))
    options = parser.parse_args()
    if options.one:
        library, metrics, samples = options.one
        print(json.dumps(measure(library, metrics, int(samples))))
        return
    warm_memory()
    print(f"{'evaluation':<28}" + "".join(f"{size:>9} samples" for size in SIZES))
    results = {(variant, size): measure_apart(variant, size) for variant in VARIANTS for size in SIZES}
    for variant in VARIANTS:
        cells = (results[variant, size] for size in SIZES)
        print(f"{variant:<28}" + "".join(f"{c['megabytes']:>7.0f} MB {c['seconds']:>5.1f} s" for c in cells))
    theirs, ours, streamed = ({size: results[name, size] for size in SIZES} for name in VARIANTS)
    small, large = SIZES[0], SIZES[-1]
    assert len({round(cell["accuracy"], 6) for cell in (theirs[large], ours[large])}) == 1
    print(f"\npeak with a function, of transformers': {ours[large]['megabytes'] / theirs[large]['megabytes']:.2f}")
    print(f"peak with torchmetrics, growth from {small} to {large} samples: ", end="")
    print(f"{streamed[large]['megabytes'] - streamed[small]['megabytes']:.0f} MB")
    for name, cells in (("a function", ours), ("torchmetrics", streamed)):
        print(f"{name}: {large // small} times the samples in ", end="")
        print(f"{cells[large]['seconds'] / cells[small]['seconds']:.1f} times the time, ", end="")
        print(f"{theirs[large]['seconds'] / cells[large]['seconds']:.1f} times as fast as transformers")
    rates = throughput(options.repeats)
    print(f"\ntwo-class classifier, samples per second: transformers {rates['transformers']:,.0f}, ", end="")
    print(f"hftrainer {rates['hftrainer']:,.0f}: {rates['hftrainer'] / rates['transformers']:.2f} times")
    if options.json:
        of_small = rates["transformers"] / rates["hftrainer"]
        Path(options.json).write_text(
            json.dumps({"ratios": ratios(theirs, ours, streamed) | {SMALL: of_small}}, indent=2)
        )


SMALL = "time of an evaluation, small outputs"


def ratios(theirs: dict[int, Any], ours: dict[int, Any], streamed: dict[int, Any]) -> dict[str, float]:
    """hftrainer / transformers, for the largest set."""
    size = SIZES[-1]
    return {
        f"{what} of an evaluation, {name}": cells[size][figure] / theirs[size][figure]
        for what, figure in (("time", "seconds"), ("memory", "megabytes"))
        for name, cells in (("a function", ours), ("torchmetrics", streamed))
    }


if __name__ == "__main__":
    main()
