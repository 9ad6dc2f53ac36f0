"""Padding and tokens per second of four ways to make batches, for documents of log-normal lengths.

A tiny llama trains one epoch on one core. Tokens per second do not count padding.

    python benchmarks/token_batches.py [--samples 1500] [--json results.json]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from typing import Any

import numpy as np
import torch
import transformers

from hftrainer import Trainer, TrainingArguments

BUDGET = 2048
WAYS: dict[str, dict[str, Any]] = {
    "random": {},
    "group_by_length": {"train_sampling_strategy": "group_by_length"},
    "tokens_per_batch": {"tokens_per_batch": BUDGET},
    "tokens_per_batch, flatten_batches": {"tokens_per_batch": BUDGET, "flatten_batches": True},
}


class Counting(Trainer):
    """Counts the tokens of each batch, with padding, and the time of the steps."""

    def training_step(self, model: Any, inputs: Any, *others: Any) -> torch.Tensor:
        self.cells = getattr(self, "cells", 0) + inputs["input_ids"].numel()
        return super().training_step(model, inputs, *others)


def pad(rows: list[Any]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True)
    return {"input_ids": ids, "labels": torch.where(ids == 0, -100, ids), "attention_mask": (ids != 0).long()}


def measure(way: dict[str, Any], rows: list[Any], size: int) -> dict[str, float]:
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=2048,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, per_device_train_batch_size=size, num_train_epochs=1, report_to="none", use_cpu=True,
            save_strategy="no", logging_strategy="no", disable_tqdm=True, **way,
        )  # fmt: skip
        trainer = Counting(transformers.LlamaForCausalLM(config), args, train_dataset=rows, data_collator=pad)
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
    tokens = sum(len(row["input_ids"]) for row in rows)
    return {"padding": 1 - tokens / trainer.cells, "tokens_per_second": tokens / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1500)
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    drawn = np.random.default_rng(0)
    lengths = np.clip(drawn.lognormal(4.5, 0.8, options.samples), 8, 1024).astype(int)
    rows = [{"input_ids": drawn.integers(1, 512, length).tolist()} for length in lengths]
    size = max(1, round(BUDGET / lengths.mean()))
    measure({}, rows[:64], size)  # imports and first calls
    results = {name: measure(way, rows, size) for name, way in WAYS.items()}
    for name, result in results.items():
        print(f"{name:36} {result['padding']:6.1%} padding {result['tokens_per_second']:9.0f} tokens/s")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
