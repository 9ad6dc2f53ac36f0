"""Small runs on an XLA device, and on the CPU to compare them with."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from hftrainer import Trainer, TrainingArguments
from tests.support import processes, small_models

ROOT = Path(__file__).parents[3]
#: XLA sums up the products of a matrix in another order than torch's kernels, and fuses multiplications with additions:
#: float32 numbers of one step differ by a unit or two in the last place, which dozens of optimizer steps make 1e-5.
TOLERANCE = 2e-5
MODELS = {name: small_models.MODELS[name] for name in ("plain", "bert", "llama", "peft")}


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    return model


def make_trainer(
    output_dir, name="plain", *, dropout=False, samples=38, callbacks=(), kind=Trainer, model=None, **settings
):
    make, data = MODELS[name]
    model = model or (make() if dropout else without_dropout(make()))
    defaults = {"max_steps": 12, "logging_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 1e-3}
    defaults |= {"weight_decay": 0.1, "save_strategy": "no", "disable_tqdm": True, "report_to": "none"}
    args = TrainingArguments(str(output_dir), **{**defaults, **settings})
    return kind(model, args, train_dataset=data(samples), eval_dataset=data(10), callbacks=list(callbacks))


def numbers(done: Trainer) -> list[dict]:
    timed = ("runtime", "per_second", "preparation_time")
    return [{k: v for k, v in line.items() if not k.endswith(timed)} for line in done.state.log_history]


def assert_close(ours: Trainer, other: Trainer, tolerance: float = TOLERANCE, compared: slice = slice(None)) -> None:
    lines, others = numbers(ours)[compared], numbers(other)[compared]
    assert [line.keys() for line in lines] == [line.keys() for line in others]
    for line, expected in zip(lines, others, strict=True):
        assert line == pytest.approx(expected, rel=tolerance, abs=tolerance)
    expected_weights = weights(other)
    for name, value in weights(ours).items():
        # Adam divides by the size of the gradients: where they are near zero, their last digits become whole steps.
        torch.testing.assert_close(value, expected_weights[name], rtol=0, atol=5 * tolerance, msg=name)


def weights(done: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu() for name, value in done.model.state_dict().items()}


def run_script(*words: str, timeout: float = 240, **environment: str) -> subprocess.CompletedProcess:
    env = {**processes.environment(), "PJRT_DEVICE": "CPU", **environment}
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout, check=False
    )
