"""`skip_memory_metrics=False` reports memory, and `debug='underflow_overflow'` finds infinite numbers."""

import sys

import pytest
import torch
from torch import nn

from tests.support.parity import assert_same, build, train
from tests.support.small_models import Plain, plain_data


def test_memory_metric_names_match_transformers(tmp_path):
    """The first stage also reports the memory of the construction."""
    names = []
    for name in ("hftrainer", "transformers"):
        trainer, _ = build(name, "plain", tmp_path / name, skip_memory_metrics=False, eval_strategy="epoch")
        trained = trainer.train().metrics
        evaluated = trainer.evaluate()
        predicted = trainer.predict(plain_data()[:5]).metrics
        logs = [[key for key in line if "mem" in key] for line in trainer.state.log_history]
        names.append([[key for key in found if "mem" in key] for found in (trained, evaluated, predicted)] + logs)
    assert names[0] == names[1]
    assert "init_mem_cpu_alloc_delta" in names[0][0]


def test_memory_report_counts_a_large_tensor(make_trainer):
    class Hungry(Plain):
        def forward(self, x, labels=None):
            big = torch.ones(40_000_000)  # 160 MB for a moment
            assert big.sum() > 0
            return super().forward(x, labels)

    metrics = make_trainer(Hungry(), max_steps=5, skip_memory_metrics=False).train().metrics
    assert metrics["train_mem_cpu_alloc_delta"] + metrics["train_mem_cpu_peaked_delta"] > 100 << 20
    assert metrics["before_init_mem_cpu"] > 50 << 20


def test_memory_report_needs_psutil(make_trainer, monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(ImportError, match="pip install psutil"):
        make_trainer(skip_memory_metrics=False)


class Explodes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 3)
        self.calls = 0

    def forward(self, x, labels=None):
        self.calls += 1
        hidden = self.first(x)
        logits = self.second(hidden / 0 if self.calls == 3 else hidden)
        return nn.functional.cross_entropy(logits, labels), logits


def test_underflow_overflow_names_the_bad_module(make_trainer):
    trainer = make_trainer(Explodes(), max_steps=5, debug="underflow_overflow")
    words = r"^second \(Linear\): input\[0\] has (inf|nan), output has (inf|nan)"
    with pytest.raises(ValueError, match=words) as caught:
        trainer.train()
    assert "first (Linear)" in str(caught.value)
    assert trainer.state.global_step == 2
    assert not any(module._forward_hooks for module in trainer.model.modules())


def test_underflow_overflow_does_not_change_training(tmp_path):
    watched = train("hftrainer", "bert", tmp_path / "with", debug="underflow_overflow")
    assert_same(watched, train("hftrainer", "bert", tmp_path / "without"))
