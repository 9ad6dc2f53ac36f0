"""What an evaluation saves per batch: memory that comes and goes, and calls that change nothing."""

import platform
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import torch

from hftrainer.evaluation import host_memory

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
    inherited = {name: value for name, value in processes.environment().items() if "MALLOC_" not in name}
    environment = {**inherited, **dict.fromkeys(["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"], "131072")}
    how = {"env": environment if own_setting else inherited, "stdout": subprocess.PIPE, "text": True, "check": True}
    run = subprocess.run([sys.executable, "-c", FAULTS, tmp_path], **how)  # glibc reads them when Python starts
    faults = float(run.stdout.splitlines()[-1])
    assert faults > 4000 if own_setting else faults < 400


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_heap_is_set_on_the_cpu_alone_until_the_last_batch(monkeypatch, device):
    glibc = mock.Mock()
    monkeypatch.setattr(host_memory, "_glibc", lambda: glibc)
    with host_memory.kept_between_batches(torch.device(device)):
        during = [call.args for call in glibc.mallopt.mock_calls]
    after = [call.args for call in glibc.mallopt.mock_calls[len(during) :]]
    on_heap = host_memory._ON_HEAP
    assert (during, after) == (([(-3, on_heap), (-1, -1)], [(-1, 2 * on_heap)]) if device == "cpu" else ([], []))


@pytest.mark.parametrize("setting", [{"MALLOC_TOP_PAD_": "1"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1"}])
def test_heap_of_the_user_stays(monkeypatch, setting):
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    assert host_memory._glibc.__wrapped__() is None


# ---- Gathering in one process ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("replaced", ["accelerator.gather", "gather_function", "both"])
def test_replaced_gathering_is_called_for_each_batch(make_trainer, replaced):
    trainer, gathered = make_trainer(trainer={"compute_metrics": lambda p: {}}), []
    of_accelerator = "gather_for_metrics" if replaced == "gather_function" else "gather"
    original = getattr(trainer.accelerator, of_accelerator)

    def record(rows):
        gathered.append(rows)
        return original(rows)

    if replaced != "gather_function":
        trainer.accelerator.gather = record
    if replaced != "accelerator.gather":
        trainer.gather_function = record
    trainer.evaluate()
    assert len(gathered) == 3 * 5  # losses, predictions and labels of five batches


def test_gathering_that_is_replaced_during_the_pass(make_trainer):
    trainer, seen = make_trainer(trainer={"compute_metrics": lambda p: {"rows": len(p.predictions)}}), []
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
def test_loss_in_a_buffer_that_the_model_uses_again(make_trainer, batch_size):
    """As graphs of CUDA do; each batch's loss is kept until four have been moved to the CPU."""

    class Reuses(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.loss = torch.zeros(())

        def forward(self, x, labels):
            return {"loss": self.loss.add_(1), "logits": x + 0}

    data = [{"x": torch.ones(2), "labels": 0} for _ in range(4 * batch_size)]
    trainer = make_trainer(Reuses(), data, per_device_eval_batch_size=batch_size, eval_accumulation_steps=4)
    assert trainer.evaluate()["eval_loss"] == (1 + 2 + 3 + 4) / 4


@pytest.mark.parametrize(("loss", "mean"), [(np.float64(2), 2), (torch.tensor([1.0, 3.0]), 69 / 35)])
def test_loss_of_an_override_may_be_an_array(make_trainer, loss, mean):
    """As in transformers, it is repeated: two numbers become eight for a batch of four, and three for the last."""
    trainer = make_trainer()
    trainer.prediction_step = lambda *args, **kwargs: (loss, None, None)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(mean)
