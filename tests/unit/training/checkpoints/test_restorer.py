"""`CheckpointRestorer` loads weights, batch size and progress of a checkpoint."""

from types import SimpleNamespace

import pytest

from hftrainer import TrainerState
from hftrainer.training.checkpoints import restorer as restorers
from tests.support.checkpoints import make_trainer


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of step 5 with four samples in a batch."""
    TrainerState(global_step=5, train_batch_size=4).save_to_json(str(tmp_path / "trainer_state.json"))
    return str(tmp_path)


@pytest.fixture
def restorer(tmp_path, monkeypatch):
    """Of a run with batches of 8; `restorer.loaded` has the folders that it has loaded."""
    made = make_trainer(tmp_path, per_device_train_batch_size=8)._hftrainer.checkpoint_restorer
    made.loaded = []
    monkeypatch.setattr(made.trainer, "_load_from_checkpoint", made.loaded.append)
    return made


@pytest.mark.parametrize(("is_found", "size"), [(False, 8), (True, 4)])
@pytest.mark.parametrize("shards", [False, True])
def test_batch_size_of_the_checkpoint_is_used_if_it_was_found(restorer, folder, is_found, size, shards):
    restorer.trainer.args.auto_find_batch_size, restorer.parts.strategy.shards_model = is_found, shards
    restorer.load_weights_and_batch_size(folder)
    assert restorer.run.train_batch_size == size
    assert restorer.loaded == ([] if shards else [folder]), "a sharded model loads its shards later"


def test_weights_of_other_shapes_offer_a_new_start(restorer, folder):
    def load(folder):
        raise RuntimeError("size mismatch")

    restorer.trainer._load_from_checkpoint = load
    with pytest.raises(RuntimeError, match="size mismatch") as caught:
        restorer.load_weights_and_batch_size(folder)
    assert "or start without resume_from_checkpoint" in caught.value.__notes__[0]


@pytest.mark.parametrize(("max_steps", "ignores", "adapted"), [(9, False, [True]), (9, True, [False]), (5, False, [])])
def test_progress_is_adapted_if_steps_are_left(restorer, folder, monkeypatch, max_steps, ignores, adapted):
    skips, lengths = [], SimpleNamespace(max_steps=max_steps, num_examples=38)
    progress = SimpleNamespace(adapt_to=lambda settings, skips_data: skips.append(skips_data))
    monkeypatch.setattr(restorers, "load_progress", lambda *of: progress)
    restorer.trainer.args.ignore_data_skip = ignores
    assert restorer.load_adapted_progress(folder, lengths) is progress
    assert skips == adapted
