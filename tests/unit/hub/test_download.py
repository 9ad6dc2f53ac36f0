"""A run resumes from a checkpoint on the Hub, and uploads what is missing there."""

import pytest

from hftrainer.errors import CheckpointNotFound
from tests.support.checkpoints import AtStep
from tests.support.hub_runs import STEPS, head, make_uploading, messages
from tests.support.hub_server import Commit, Repo, cut
from tests.support.parity import assert_same_weights


@pytest.mark.parametrize("strategy", ["checkpoint", "all_checkpoints"])
def test_resume_from_a_reference_to_the_hub(hub, tmp_path, undisturbed, strategy):
    """A reference names the newest checkpoint, that of a revision, or a folder; it is downloaded once."""
    trainer = make_uploading(tmp_path / "run", hub_strategy=strategy, hub_always_push=True)
    trainer.add_callback(AtStep(4, lambda: setattr(trainer.control, "should_training_stop", True)))
    trainer.train()
    references = ["hub:me/run", f"hub:me/run@{head(hub).oid}", "hub:me/run/checkpoint-2"]
    for reference in references if strategy == "all_checkpoints" else references[:2]:
        hub.requests.clear()
        resumed = make_uploading(tmp_path / "resumed", push_to_hub=False)
        resumed.train(resume_from_checkpoint=reference)
        assert_same_weights(resumed.model.state_dict(), undisturbed)
        downloads = [request for request in hub.requests if request[:3] == "GET" and request.endswith("/optimizer.pt")]
        assert len(downloads) == ("@" not in reference)
    hub.disturb(cut)
    resumed.train(resume_from_checkpoint="hub:me/run")  # from the cache
    assert resumed.state.global_step == STEPS


@pytest.mark.parametrize(
    ("strategy", "prefix"),
    [("every_save", None), ("checkpoint", "last-checkpoint/"), ("all_checkpoints", "checkpoint-6/")],
)
def test_complete_run_started_again_uploads_what_is_missing_once(hub, tmp_path, strategy, prefix):
    make_uploading(tmp_path / "run", push_to_hub=False).train()  # as one that was killed with its uploads still to come
    for _ in range(2):
        again = make_uploading(tmp_path / "run", hub_strategy=strategy)
        again.train(resume_from_checkpoint="auto")
        assert again._initial_global_step == STEPS
        for path in ("model.safetensors", *([f"{prefix}optimizer.pt"] if prefix else [])):
            expected = (tmp_path / "run" / "checkpoint-6" / path.rpartition("/")[2]).read_bytes()
            assert head(hub).files[path] == expected
    assert len(messages(hub)) == (2 if prefix else 1)  # the model, and a checkpoint


def test_resume_from_the_branch_of_the_run(hub, tmp_path):
    hub.repos["me/run"] = Repo()
    hub.repos["me/run"].branches["dev"] = list(hub.repos["me/run"].branches["main"])
    there = {"hub_model_id": "me/run", "hub_revision": "dev", "hub_strategy": "checkpoint"}
    make_uploading(tmp_path / "run", **there, max_steps=2).train()
    resumed = make_uploading(tmp_path / "resumed", **there, max_steps=3, push_to_hub=False)
    resumed.train(resume_from_checkpoint="hub:me/run")
    assert resumed._initial_global_step == 2
    with pytest.raises(CheckpointNotFound, match="has no checkpoint"):
        resumed.train(resume_from_checkpoint="hub:me/run@main")


def test_reference_without_a_checkpoint_is_refused(hub, tmp_path):
    hub.repos["me/weights"] = Repo(branches={"main": [Commit("m", {"model.safetensors": b"x"})]})
    hub.repos["me/private"] = Repo(private=True)
    trainer = make_uploading(tmp_path / "run", push_to_hub=False, hub_token=None)
    for reference, words in {
        "hub:me/none": "the repository does not exist, or the token has no read access",
        "hub:me/private": "the repository does not exist, or the token has no read access",
        "hub:me/weights": "has no checkpoint, neither last-checkpoint nor checkpoint-xxx",
        "hub:me/weights@dev": "the revision does not exist",
        "hub:me/weights/checkpoint-2": "the repository has no folder 'checkpoint-2'",
        "hub:": "pass 'hub:owner/name'",
    }.items():
        with pytest.raises(CheckpointNotFound, match=words):
            trainer.train(resume_from_checkpoint=reference)
    hub.disturb(cut)
    with pytest.raises(CheckpointNotFound, match="the Hub cannot be reached: check the network"):
        trainer.train(resume_from_checkpoint="hub:me/weights")
