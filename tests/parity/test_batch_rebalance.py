"""`train_sampling_strategy="batch_rebalance"`: batches of varying sizes and the same cost, by transformers' sampler."""

import pytest

from tests.support.parity import EVERY_STEP, assert_same_weights, build, compare, train
from tests.support.small_models import make_llama, pad, varied_language_data

pytestmark = pytest.mark.newest_peer
SETTINGS = {"train_sampling_strategy": "batch_rebalance", "gradient_accumulation_steps": 2, **EVERY_STEP}


def make_trainer_kwargs():
    data = varied_language_data(23)
    return {"model": make_llama(), "train_dataset": data, "eval_dataset": data[:8], "data_collator": pad}


@pytest.mark.parametrize("drops", [False, True])
def test_training_is_that_of_transformers(tmp_path, drops):
    record = compare(tmp_path, "plain", trainer=make_trainer_kwargs, **SETTINGS, dataloader_drop_last=drops)
    assert record.extra["global_step"] == (4 if drops else 6)


def test_resume_within_an_epoch(tmp_path):
    settings = {**SETTINGS, "logging_steps": 1, "trainer": make_trainer_kwargs}
    whole = train("hftrainer", "plain", tmp_path, **settings)
    resumed = train("hftrainer", "plain", tmp_path, resume=str(tmp_path / "checkpoint-2"), **settings)
    assert resumed.logs[:-1] == whole.logs[:-1]  # but for the mean loss, which is that of the steps of a run
    assert_same_weights(resumed.weights, whole.weights)


def test_samples_without_a_length_are_refused(tmp_path):
    data = [{"x": row["input_ids"]} for row in varied_language_data(8)]
    trainer_kwargs = {"model": make_llama(), "train_dataset": data}
    trainer, _ = build("hftrainer", "plain", tmp_path, trainer=trainer_kwargs, **SETTINGS)
    with pytest.raises(ValueError, match=r"'input_ids'.*length_column_name"):
        trainer.train()
