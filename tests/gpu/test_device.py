"""A run needs no more memory of its device than transformers, does not wait for it, and logs its statistics."""

import gc

import pytest
import torch
from lightning.pytorch.callbacks import DeviceStatsMonitor

from tests.gpu.support import HERE, ON_GPU, WIDTH, ForbidWaiting, build, make_wide, needs_gpu, plain_data

MB = 2**20


def allocated_above_start(work):
    """Bytes of device memory that `work` needs at its peak, above what is in use before."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return torch.cuda.max_memory_allocated() - before


@needs_gpu("the outputs of all samples are in the memory that would be measured; see benchmarks/eval_memory.py")
@pytest.mark.parametrize("metrics", [False, True], ids=["loss only", "outputs kept"])
def test_evaluation_memory_is_flat(tmp_path, metrics):
    kept = {"compute_metrics": lambda prediction: {"rows": len(prediction.predictions)}} if metrics else {}
    trainer, _ = build("hftrainer", "wide", tmp_path, per_device_eval_batch_size=64, trainer=kept, **HERE)
    few, many = plain_data(4 * 64), plain_data(64 * 64)
    trainer.evaluate(few)  # allocates what cuBLAS keeps
    needed = [allocated_above_start(lambda data=data: trainer.evaluate(data)) for data in (few, many)]
    # Outputs that stayed would take 60 batches more; blocks of other sizes may take less than one.
    assert needed[1] - needed[0] < 64 * WIDTH * 4, [size / MB for size in needed]


@needs_gpu("there is nothing to wait for")
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_device_is_not_waited_for_between_log_lines(tmp_path, bf16, accumulation):
    """With batches that are copied while the device computes, which transformers leaves off by default."""
    settings = {**HERE, "bf16": bf16, "max_steps": 10, "logging_steps": 10, "num_train_epochs": 9}
    settings |= {"gradient_accumulation_steps": accumulation, "accelerator_config": {"non_blocking": True}}
    watch = ForbidWaiting()
    trainer, _ = build("hftrainer", "plain", tmp_path, **settings, trainer={"callbacks": [watch]})
    try:
        trainer.train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert watch.steps == list(range(4, 11))
    assert "loss" in trainer.state.log_history[0]


def test_device_stats_monitor_logs_device_values(tmp_path):
    """Lightning's callback logs what its accelerator measures: of the GPU's allocator, or of the processor."""
    if not ON_GPU:
        pytest.importorskip("psutil", reason="DEVICE=cpu: Lightning measures the processor with psutil")
    trainer, _ = build("hftrainer", "plain", tmp_path, **HERE, trainer={"callbacks": [DeviceStatsMonitor()]})
    trainer.train()
    logged = {name: value for line in trainer.state.log_history for name, value in line.items()}
    name = "allocated_bytes.all.peak" if ON_GPU else "cpu_vm_percent"
    for point in ("on_train_batch_start", "on_train_batch_end"):
        assert logged[f"DeviceStatsMonitor.{point}/{name}"] > 0


@needs_gpu("the system measures whole processes there; see benchmarks/memory.py")
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_peak_memory_is_not_above_transformers(tmp_path, bf16, accumulation):
    settings = {**HERE, "bf16": bf16, "gradient_accumulation_steps": accumulation, "max_steps": 6}

    def needed(library):
        return allocated_above_start(lambda: build(library, "wide", tmp_path / library, **settings)[0].train())

    needed("transformers")  # allocates what cuBLAS keeps
    theirs, ours = needed("transformers"), needed("hftrainer")
    # The weights take 33 MB, so a copy of any of them shows. We keep some numbers more on the device, such as the sum
    # of the losses; each takes a block of 512 bytes.
    assert ours <= theirs + 0.25 * MB, f"{ours / MB:.2f} MB, and {theirs / MB:.2f} MB with transformers"
    weights = sum(weight.nbytes for weight in make_wide().parameters())
    assert theirs > 4 * weights, "weights, gradients and two averages were not measured"
