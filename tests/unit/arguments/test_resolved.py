"""What training arguments mean is parsed once for a Trainer, and once for each trial of a search."""

import copy
import pickle

import pytest

from hftrainer import Trainer, TrainingArguments
from hftrainer.arguments.resolved import ResolvedArguments
from tests.support.tiny import make_plain, plain_data


def make(folder, **settings):
    return TrainingArguments(str(folder), max_steps=2, disable_tqdm=True, use_cpu=True, save_strategy="no", **settings)


def test_config_file_is_not_read_again_after_construction(tmp_path):
    path = tmp_path / "lightning.yaml"
    path.write_text("precision: bf16-mixed")
    trainer = Trainer(make_plain(), make(tmp_path, lightning_config=str(path)), train_dataset=plain_data())
    path.write_text("no: such: thing")
    assert trainer.args.world_size == 1
    trainer.train()
    assert trainer.accelerator.mixed_precision == "bf16"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda args: pickle.loads(pickle.dumps(args))])
def test_copied_arguments_are_resolved_anew(tmp_path, monkeypatch, copied):
    """What was parsed belongs to one Trainer and to this process."""
    args = make(tmp_path)
    trainer = Trainer(make_plain(), args, train_dataset=plain_data())
    assert ResolvedArguments.from_args(args) is trainer._hftrainer.resolved
    other = copied(args)
    assert other == args
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert (args.world_size, other.world_size) == (1, 3)
