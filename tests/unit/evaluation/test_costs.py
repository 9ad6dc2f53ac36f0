"""What an evaluation saves per batch: memory that comes and goes, and calls that change nothing."""

import platform
import subprocess
import sys

import numpy as np
import pytest
import torch

from hftrainer import Trainer, TrainingArguments
from hftrainer.evaluation import host_memory
from hftrainer.evaluation.growing_array import GrowingArray
from tests.support.tiny import make_plain, plain_data

FAULTS = """
import resource, sys, torch
from torchmetrics.classification import MulticlassAccuracy
from hftrainer import TorchMetrics, Trainer, TrainingArguments

class Wide(torch.nn.Module):
    def forward(self, x, labels):
        logits = x.repeat(1, 16_000)  # 8 MB for a batch
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

torch.set_num_threads(1)
batches = 3
data = [{"x": torch.randn(8), "labels": 1} for _ in range(16 * batches)]
args = TrainingArguments(sys.argv[1], per_device_eval_batch_size=16, use_cpu=True, disable_tqdm=True)
metric = MulticlassAccuracy(128_000, average="micro")
metric = TorchMetrics({"accuracy": metric}, adapter=lambda p: (p.predictions.argmax(-1), p.label_ids))
trainer = Trainer(Wide(), args, eval_dataset=data, compute_metrics=metric)
trainer.evaluate()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    trainer.evaluate()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / batches

print(min(faults() for _ in range(3)))  # what else has happened to the heap differs from run to run
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's heap is set")
@pytest.mark.parametrize("own_setting", [False, True])
def test_memory_of_a_batch_is_used_again(tmp_path, processes, own_setting):
    """A batch's logits and their log-softmax are 4,000 pages; a user's own setting of the heap is left alone."""
    environment = {
        name: value for name, value in processes.environment().items() if not name.startswith(("MALLOC_", "GLIBC_"))
    }
    if own_setting:
        environment |= {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}
    run = subprocess.run(
        [sys.executable, "-c", FAULTS, str(tmp_path)], capture_output=True, text=True, check=True, env=environment
    )
    faults = float(run.stdout.splitlines()[-1])
    assert faults > 4000 if own_setting else faults < 400


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_heap_is_set_on_the_cpu_alone_until_the_last_batch(monkeypatch, device):
    calls = []

    class Library:
        def mallopt(self, parameter, value):
            calls.append((parameter, value))

    monkeypatch.setattr(host_memory, "_glibc", Library)
    with host_memory.kept_between_batches(torch.device(device)):
        during = list(calls)
    if device == "cpu":
        assert during == [(-3, host_memory._ON_HEAP), (-1, -1)]
        assert calls[2:] == [(-1, 2 * host_memory._ON_HEAP)]
    else:
        assert not calls


@pytest.mark.parametrize("setting", [{"MALLOC_TOP_PAD_": "1"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1"}])
def test_heap_of_the_user_stays(monkeypatch, setting):
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    assert host_memory._glibc.__wrapped__() is None


# ---- Gathering in one process ----------------------------------------------------------------------------------------


@pytest.fixture
def make_trainer(tmp_path):
    def make(**settings):
        args = TrainingArguments(str(tmp_path), per_device_eval_batch_size=4, disable_tqdm=True, use_cpu=True)
        return Trainer(make_plain(), args, eval_dataset=plain_data(19), **settings)

    return make


def through_gather(trainer, record):
    original = trainer.accelerator.gather
    trainer.accelerator.gather = lambda rows: record(original(rows))


def through_gather_for_metrics(trainer, record):
    original = trainer.accelerator.gather_for_metrics
    trainer.gather_function = lambda rows: record(original(rows))


def through_other_accelerator_method(trainer, record):
    original = trainer.accelerator.gather
    trainer.gather_function = trainer.accelerator.gather = lambda rows: record(original(rows))


@pytest.mark.parametrize("replace", [through_gather, through_gather_for_metrics, through_other_accelerator_method])
def test_replaced_gathering_is_called_for_each_batch(make_trainer, replace):
    trainer, gathered = make_trainer(compute_metrics=lambda p: {}), []

    def record(rows):
        gathered.append(rows)
        return rows

    replace(trainer, record)
    trainer.evaluate()
    assert len(gathered) == 3 * 5  # losses, predictions and labels of five batches


def test_gathering_that_is_replaced_during_the_pass(make_trainer):
    trainer, seen = make_trainer(compute_metrics=lambda p: {"rows": len(p.predictions)}), []
    original = trainer.prediction_step

    def step(*args, **kwargs):
        seen.append(1)
        if len(seen) == 3:
            trainer.gather_function = lambda rows: rows[:1]
        return original(*args, **kwargs)

    trainer.prediction_step = step
    assert trainer.evaluate()["eval_rows"] == 4 + 4 + 1 + 1 + 1


# ---- Values that must not be shared ----------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 4])
def test_loss_in_a_buffer_that_the_model_uses_again(tmp_path, batch_size):
    """As graphs of CUDA do; each batch's loss is kept until four have been moved to the CPU."""

    class Reuses(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.loss = torch.zeros(())

        def forward(self, x, labels):
            return {"loss": self.loss.add_(1), "logits": x + 0}

    args = TrainingArguments(
        str(tmp_path), per_device_eval_batch_size=batch_size, eval_accumulation_steps=4, disable_tqdm=True, use_cpu=True
    )
    data = [{"x": torch.ones(2), "labels": 0} for _ in range(4 * batch_size)]
    assert Trainer(Reuses(), args, eval_dataset=data).evaluate()["eval_loss"] == (1 + 2 + 3 + 4) / 4


@pytest.mark.parametrize(("loss", "mean"), [(np.float64(2), 2), (torch.tensor([1.0, 3.0]), 69 / 35)])
def test_loss_of_an_override_may_be_an_array(make_trainer, loss, mean):
    """As in transformers, it is repeated: two numbers become eight for a batch of four, and three for the last."""
    trainer = make_trainer()
    trainer.prediction_step = lambda *args, **kwargs: (loss, None, None)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(mean)


def test_growing_array_after_a_wider_batch():
    """Batches as wide as the widest take a shorter way than others; all end in one array."""
    batches = [np.full((2, width, 3), width, np.float32) for width in (2, 2, 5, 2, 5, 6, 6)]
    array = GrowingArray(batches[0], rows=4)
    for batch in batches[1:]:
        array.add(batch)
    expected = [np.pad(batch, ((0, 0), (0, 6 - batch.shape[1]), (0, 0)), constant_values=-100) for batch in batches]
    assert np.array_equal(array.finish(), np.concatenate(expected))
