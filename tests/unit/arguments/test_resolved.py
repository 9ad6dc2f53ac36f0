"""What training arguments mean is parsed once for a Trainer, and once for each trial of a search."""

import copy
import pickle

import pytest

from hftrainer.arguments.resolved import ResolvedArguments


def test_config_file_is_not_read_again_after_construction(make_trainer, tmp_path):
    path = tmp_path / "lightning.yaml"
    path.write_text("precision: bf16-mixed")
    trainer = make_trainer(lightning_config=str(path))
    path.write_text("no: such: thing")
    assert trainer.args.world_size == 1
    trainer.train()
    assert trainer.accelerator.mixed_precision == "bf16"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda args: pickle.loads(pickle.dumps(args))])
def test_copied_arguments_are_resolved_anew(make_trainer, monkeypatch, copied):
    """What was parsed belongs to one Trainer and to this process."""
    trainer = make_trainer()
    args = trainer.args
    assert ResolvedArguments.from_args(args) is trainer._hftrainer.resolved
    other = copied(args)
    assert other == args
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert (args.world_size, other.world_size) == (1, 3)
