"""In which order a call of `train` is prepared."""

import pytest

from hftrainer.releases import followed
from tests.support.checkpoints import make_trainer


@pytest.mark.parametrize(("release", "order"), [("4.48", ["values", "model"]), ("5.20", ["model", "values"])])
def test_call_is_prepared_in_the_order_of_the_release(tmp_path, monkeypatch, release, order):
    """The saves of an earlier call end first; a checkpoint replaces the weights last."""
    trainer = make_trainer(tmp_path)
    parts, calls = trainer._hftrainer, []
    monkeypatch.setattr(parts, "policy", followed.from_text(release))
    noted = {
        (parts.checkpoint_writer, "close_ignoring_errors"): "saves",
        (parts.checkpoint_restorer, "find_resume_folder"): "folder",
        (parts.model_setup, "remake_model"): "model",
        (trainer, "_hp_search_setup"): "values",
        (parts.trainer_setup, "apply_changed_arguments"): "arguments",
        (parts.checkpoint_restorer, "load_weights_and_batch_size"): "weights",
    }
    for (owner, name), word in noted.items():
        monkeypatch.setattr(owner, name, lambda *_, word=word: calls.append(word) or word)
    parts.training_runner.prepare_train(True, None)
    assert parts.run.resume_folder == "folder"
    assert calls == ["saves", "folder", *order, "arguments", "weights"]
