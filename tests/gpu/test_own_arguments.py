"""Arguments that only hftrainer has work on a device: rollbacks, flattened batches, searches, `observe`."""

import optuna
import pytest
import torch
from torch import nn

from hftrainer import Trainer, TrainingArguments
from tests.gpu.support import HERE, ON_GPU, ForbidWaiting, build, needs_gpu, train
from tests.support.checkpoints import assert_same_end
from tests.support.divergence import FAULTS, SIZE, STEPS, fit, rows, rows_without
from tests.support.small_models import (
    make_bert,
    make_llama,
    make_plain,
    pad,
    text_data,
    varied_language_data,
    without_dropout,
)

FP16 = pytest.param("fp16", marks=needs_gpu("transformers trains in float32 there"))


@pytest.mark.parametrize("precision", ["float32", "bf16", FP16])
@pytest.mark.parametrize("kind", FAULTS)
def test_rollback_skips_bad_samples_exactly(tmp_path, kind, precision):
    """The run ends as one whose data lacked the samples, with the same scale of the loss."""
    if kind == "infinite gradient" and precision == "fp16":
        pytest.skip("the gradient scaler skips such a step")
    windows = [23, 30]
    settings = {**HERE, "max_steps": STEPS - 2, "on_divergence": "rollback"}
    settings |= {precision: True} if precision != "float32" else {}
    settings |= {"divergence_threshold": 10} if kind == "spike" else {}
    good = fit(tmp_path / "good", rows_without(windows, SIZE), **settings)
    bad = rows(STEPS * SIZE, [window * SIZE for window in windows], FAULTS[kind])
    rolled = fit(tmp_path / "bad", bad, **settings)
    assert_same_end(rolled, good)
    assert len((tmp_path / "bad" / "skipped_samples.jsonl").read_text().splitlines()) == 2
    if precision == "fp16":
        assert rolled.accelerator.scaler.state_dict() == good.accelerator.scaler.state_dict()


class Greedy(nn.Module):
    """Asks for more memory than there is for more than 4 samples."""

    def __init__(self):
        super().__init__()
        self.bert = make_bert()

    def forward(self, input_ids, labels, **inputs):
        if len(labels) > 4:
            torch.empty(2**60, dtype=torch.uint8, device=labels.device)
        return self.bert(input_ids, labels=labels, **inputs)


def test_auto_find_batch_size_ends_as_run_with_that_size(tmp_path):
    """After running out of memory, the run is that of the smaller batch size, with the same dropout masks."""
    model = (Greedy, text_data)
    smaller = {"per_device_train_batch_size": 16, "auto_find_batch_size": True}
    found, began = (
        train("hftrainer", model, tmp_path / name, **HERE, **settings)
        for name, settings in (("found", smaller), ("began", {"per_device_train_batch_size": 4}))
    )
    assert found.logs == began.logs
    assert all(torch.equal(value, began.weights[name]) for name, value in found.weights.items())


@pytest.mark.parametrize(("precision", "rounding"), [("float32", 1e-4), ("bf16", 2e-2)])
def test_flattened_batches_have_losses_of_padded_ones(tmp_path, precision, rounding):
    """Rows without padding give the loss of padded ones, but for rounding: float32 has 24 bits, bfloat16 8."""
    losses = []
    for flat in (False, True):
        args = TrainingArguments(
            str(tmp_path), max_steps=6, learning_rate=1e-3, flatten_batches=flat, bf16=precision == "bf16",
            per_device_train_batch_size=4, logging_steps=1, report_to="none", disable_tqdm=True, save_strategy="no",
            **HERE,
        )  # fmt: skip
        trainer = Trainer(
            without_dropout(make_llama)(), args, train_dataset=varied_language_data(24), data_collator=pad
        )
        trainer.train()
        losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    padded, flattened = losses
    assert len(padded) == 6
    assert flattened == pytest.approx(padded, rel=rounding)


def test_search_in_two_processes_gives_same_values(tmp_path):
    """They share the device, and each trial ends as it would alone."""

    def draw(trial):
        return {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1)}

    results = {}
    for n_jobs in (1, 2):
        trainer, _ = build(
            "hftrainer", "plain", tmp_path / str(n_jobs), max_steps=4, eval_strategy="epoch",
            trainer={"model_init": make_plain}, **HERE,
        )  # fmt: skip
        storage = f"sqlite:///{tmp_path}/{n_jobs}.db"
        grid = optuna.samplers.GridSampler({"learning_rate": [1e-3, 1e-2, 1e-1, 3e-1]}, seed=0)
        trainer.hyperparameter_search(draw, n_trials=4, n_jobs=n_jobs, storage=storage, study_name="s", sampler=grid)
        trials = optuna.load_study(study_name="s", storage=storage).trials
        results[n_jobs] = {trial.params["learning_rate"]: trial.value for trial in trials}
    assert len(results[1]) == 4
    assert results[2] == results[1]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_gpu("nothing is counted there"))])
def test_observe_logs_speed_memory_and_mfu(tmp_path, compiled):
    """Counting the operations for `mfu` changes no loss."""
    settings = {**HERE, "bf16": True, "logging_steps": 2, "torch_compile": compiled}
    plain = train("hftrainer", "llama without dropout", tmp_path / "plain", **{**settings, "torch_compile": False})
    trainer, _ = build("hftrainer", "llama without dropout", tmp_path / "observed", observe=True, **settings)
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert len(lines) > 5
    for line in lines:
        assert line["tokens_per_second"] > 0
        assert ("mfu" in line) is ON_GPU
        assert 0 < line.get("mfu", 0.5) < 1
        if ON_GPU:
            assert 0 < line["peak_memory_mb"] * 1e6 <= torch.cuda.max_memory_reserved()
    if not compiled:
        assert [line["loss"] for line in lines] == [line["loss"] for line in plain.logs if "loss" in line]


@needs_gpu("there is nothing to wait for")
@pytest.mark.parametrize("settings", [{"observe": True}, {"tokens_per_batch": 36}, {"flatten_batches": True}], ids=str)
def test_arguments_do_not_wait_for_the_device(tmp_path, settings):
    watch = ForbidWaiting()
    settings = {**HERE, **settings, "max_steps": 10, "logging_steps": 10, "num_train_epochs": 9, "bf16": True}
    settings["accelerator_config"] = {"non_blocking": True}
    made = {"callbacks": [watch], "data_collator": pad, "train_dataset": varied_language_data(24)}
    trainer, _ = build("hftrainer", "llama without dropout", tmp_path, **settings, trainer=made)
    try:
        trainer.train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert watch.steps == list(range(4, 11))
