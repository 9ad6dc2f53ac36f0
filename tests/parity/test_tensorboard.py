"""The event files of both libraries, read by TensorBoard's own reader: same tags, steps and values."""

import json

import pytest

from tests.support.parity import LIBRARIES
from tests.support.tracking import make_trainer, scalars, texts


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A folder of event files for each library."""
    found = {}
    for library in LIBRARIES:
        found[library] = tmp_path / library / "logs"
    return found


def run_both(folders, monkeypatch, run, **settings):
    for library in LIBRARIES:
        monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(folders[library]))
        run(
            lambda library=library, **more: make_trainer(
                library, folders[library].parent, report_to="tensorboard", **{**settings, **more}
            )
        )
    return scalars(folders["hftrainer"]), scalars(folders["transformers"])


def test_train_evaluate_predict(folders, monkeypatch):
    def run(make):
        trainer = make()
        trainer.train()
        trainer.evaluate()
        trainer.predict(trainer.eval_dataset)
        trainer.train()

    ours, theirs = run_both(folders, monkeypatch, run)
    assert ours == theirs
    assert ours["train/loss"][0][0] == 2
    assert [step for step, _ in ours["eval/loss"]] == [3, 6, 8, 8, 3, 6, 8]
    assert "train/train_loss" in ours
    ours, theirs = texts(folders["hftrainer"]), texts(folders["transformers"])
    assert ours.keys() == theirs.keys() == {"args/text_summary", "model_config/text_summary"}
    assert ours["model_config/text_summary"][0] == theirs["model_config/text_summary"][0]
    assert json.loads(ours["args/text_summary"][0][1])["max_steps"] == 8


def test_resume_into_the_same_folder(folders, monkeypatch):
    def run(make):
        make(save_strategy="steps", save_steps=4, max_steps=4).train()
        make(save_strategy="steps", save_steps=4).train(resume_from_checkpoint=True)

    ours, theirs = run_both(folders, monkeypatch, run)
    assert ours == theirs
    assert [step for step, _ in ours["train/loss"]] == [2, 4, 6, 8]


def test_evaluation_alone(folders, monkeypatch):
    ours, theirs = run_both(folders, monkeypatch, lambda make: make().evaluate())
    assert ours == theirs
    assert texts(folders["hftrainer"]) == texts(folders["transformers"]) == {}


def test_texts_and_what_cannot_be_written(folders, monkeypatch, caplog):
    logs = {"loss": 1.0, "eval_note": "words", "other": [1, 2], "flag": True}
    ours, theirs = run_both(folders, monkeypatch, lambda make: make().log(dict(logs)))
    assert ours == theirs
    assert ours["train/flag"] == [(0, 1.0)]
    assert texts(folders["hftrainer"]) == texts(folders["transformers"])
    assert texts(folders["hftrainer"])["eval/note/text_summary"] == [(0, "words")]
    assert "train/other=[1, 2] (list) is not a number" in caplog.text
