"""A mixture in several processes is that of one: the same samples in each step, and the same sums in each log line."""

import json

import pytest
import torch

import hftrainer
from hftrainer.trainer_utils import get_last_checkpoint
from tests.support.checkpoints import SetFlag
from tests.support.mixture_sources import WEIGHTS, make_sources
from tests.support.parity import assert_same_weights
from tests.support.small_models import make_plain, without_dropout

#: Samples of a step.
GLOBAL_BATCH = 8


def train(folder, kind, stops_at, settings):
    """Train with global batches of 8, from the newest checkpoint on; returns weights, log, and samples by step."""
    torch.set_num_threads(1)
    args = hftrainer.TrainingArguments(
        str(folder),
        **{"use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 2, "mixture_weights": WEIGHTS},
        **{"save_steps": 5, "learning_rate": 1e-2, "per_device_train_batch_size": 2, "elastic": True, "max_steps": 15},
        gradient_accumulation_steps=1,
        **settings,
    )
    args.gradient_accumulation_steps = GLOBAL_BATCH // 2 // args.world_size
    samples = {}

    class RecordingTrainer(hftrainer.Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            step = samples.setdefault(self.state.global_step + 1, [])
            step += inputs["x"][:, 0].int().tolist()
            inputs["x"][:, 0] = 0
            return super().training_step(model, inputs, num_items_in_batch)

    trainer = RecordingTrainer(
        without_dropout(make_plain)().double(),
        args,
        lambda rows: {
            "x": torch.stack([row["x"] for row in rows]).double(),
            "labels": torch.stack([row["labels"] for row in rows]),
        },
        make_sources(kind),
        callbacks=[SetFlag("should_training_stop", stops_at)],
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)) if folder.exists() else None)
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    return weights, [line for line in trainer.state.log_history if "loss" in line], samples


def samples_by_step(ranks):
    """The samples of each step, over all ranks."""
    return {step: sorted(index for _, _, samples in ranks for index in samples[step]) for step in ranks[0][2]}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("map-style", {}),
        ("map-style", {"accelerator_config": {"dispatch_batches": True}}),
        ("both", {}),
        ("both", {"accelerator_config": {"dispatch_batches": False}}),
    ],
    ids=json.dumps,
)
def test_mixture_is_the_same_with_changing_numbers_of_processes(processes, tmp_path, kind, settings):
    alone = processes.run_ranks(train, 1, tmp_path / "alone", kind, None, settings)
    first = processes.run_ranks(train, 2, tmp_path / "changing", kind, 5, settings)
    then = processes.run_ranks(train, 1, tmp_path / "changing", kind, 10, settings)
    last = processes.run_ranks(train, 2, tmp_path / "changing", kind, None, settings)
    samples = samples_by_step(first) | samples_by_step(then) | samples_by_step(last)
    assert samples == samples_by_step(alone)
    assert list(samples) == [*range(1, 16)]
    for ours, theirs in zip(last[0][1], alone[0][1], strict=True):
        assert ours.keys() == theirs.keys()
        assert ours["loss"] == ours["loss/code"] + ours["loss/chat"]
        assert ours == pytest.approx(theirs, rel=1e-5)  # sums of ranks are added in another order
    for name, weight in last[0][0].items():
        torch.testing.assert_close(weight, alone[0][0][name], rtol=1e-9, atol=1e-9)
    assert_same_weights(last[0][0], last[1][0])
