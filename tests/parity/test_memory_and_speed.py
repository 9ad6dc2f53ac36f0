"""Emptied caches, tokens per second, FLOs."""

import pytest

from tests.support.parity import build, compare


def test_emptied_caches(tmp_path, monkeypatch):
    emptied = []
    monkeypatch.setattr("hftrainer.parallel.devices.empty_cache", lambda: emptied.append(1))
    compare(tmp_path, "plain", torch_empty_cache_steps=3, max_steps=7)
    assert len(emptied) == 3  # before steps 1, 4 and 7


def test_tokens_per_second(tmp_path):
    """As v4.48 reports it: at the end of training, of all input tokens."""
    trainer, _ = build("hftrainer", "llama", tmp_path, include_tokens_per_second=True, max_steps=3)
    metrics = trainer.train().metrics
    assert metrics["train_tokens_per_second"] == pytest.approx(3 * 4 * 12 / metrics["train_runtime"], rel=0.05)
    assert "train_tokens_per_second" not in build("hftrainer", "llama", tmp_path, max_steps=3)[0].train().metrics


def test_speed_and_flos(tmp_path):
    ours = compare(tmp_path, "bert", gradient_accumulation_steps=3)
    assert ours.logs[-1]["total_flos"] > 0
