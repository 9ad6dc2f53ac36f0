"""False alarms of `divergence_threshold` in runs on clean data, and what `on_divergence` costs a step.

python benchmarks/divergence.py [RUNS]
"""

import logging
import statistics
import sys
import tempfile
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hftrainer import Trainer, TrainingArguments, set_seed

THRESHOLDS = (4, 6, 8, 10)
STEPS = 200


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))

    def forward(self, x, labels):
        return {"loss": torch.nn.functional.cross_entropy(self.layers(x), labels)}


def classification():
    x = torch.randn(600, 8)
    return Classifier(), [{"x": row, "labels": int(row[:3].argmax())} for row in x]


def language():
    config = LlamaConfig(
        **{"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        intermediate_size=32,
    )
    ids = torch.randint(1, 50, (300, 12)).sort().values
    return LlamaForCausalLM(config), [{"input_ids": row, "labels": row} for row in ids]


def train(make, seed, **settings):
    set_seed(seed)
    model, data = make()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            **{"save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True, "seed": seed},
            **{"max_steps": STEPS, "logging_steps": 1, "per_device_train_batch_size": 4, **settings},
        )
        trainer = Trainer(model, args, train_dataset=data)
        start = time.perf_counter()
        trainer.train()
        return [line["loss"] for line in trainer.state.log_history if "loss" in line], time.perf_counter() - start


def highest(losses):
    """How many standard deviations a loss is above those before it, at most: as `DivergenceWatch` counts."""
    found = 0.0
    for step in range(20, len(losses)):
        recent = losses[max(0, step - 100) : step]
        mean = statistics.fmean(recent)
        found = max(found, (losses[step] - mean) / max(statistics.pstdev(recent), 0.01 * abs(mean)))
    return found


def main(runs):
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    scores = []
    for seed in range(runs):
        make, rate = (classification, language)[seed % 2], (1e-3, 1e-2)[seed // 2 % 2]
        settings = {"on_divergence": "stop", "divergence_threshold": THRESHOLDS[-1], "learning_rate": rate}
        scores.append(highest(train(make, seed, **settings)[0]))
    for threshold in THRESHOLDS:
        print(f"divergence_threshold={threshold}: {sum(score > threshold for score in scores)} of {runs} runs alarmed")
    print(f"the highest of all: {max(scores):.1f} standard deviations")
    settings = {"logging_steps": 1000, "max_steps": 2000}
    without, alone = ([], [])
    for seed in range(5):
        without.append(train(classification, seed, **settings)[1])
        alone.append(train(classification, seed, on_divergence="stop", divergence_threshold=10, **settings)[1])
    print(f"{(min(alone) - min(without)) / 2000 * 1e6:.0f} µs a step, of {min(without) / 2000 * 1e6:.0f} µs")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
