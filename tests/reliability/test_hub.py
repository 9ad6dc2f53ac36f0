"""What a run does with the Hub besides its uploads: refusals at the start, tokens, and checkpoints from there."""

import traceback

import pytest
import torch

from hftrainer import Trainer, TrainingArguments
from hftrainer.errors import CheckpointNotFound, HubError, InvalidArgument
from tests.support.checkpoints import AtStep, OnSave
from tests.support.hub_runs import (
    READ_TOKEN,
    STEPS,
    TOKEN,
    assert_no_token_is_shown as assert_no_token_is_shown,
    head,
    hub as hub,
    make_uploading,
    messages,
    undisturbed as undisturbed,
)
from tests.support.hub_server import Commit, Repo, cut, fail
from tests.support.parity import assert_same_weights
from tests.support.small_models import make_plain


def test_files_of_sagemaker_are_not_uploaded(hub, tmp_path):
    trainer = make_uploading(tmp_path / "run", max_steps=2, hub_strategy="checkpoint")
    trainer.add_callback(OnSave(lambda folder: (folder / "x.sagemaker-uploading").touch()))
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "y.sagemaker-uploaded").touch()
    trainer.train()
    trainer.push_to_hub()
    assert not [name for name in head(hub).files if "sagemaker" in name]


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ("does not accept the token: run `hf auth login`", {"hub_token": "hf_wrong"}),
        ("needs a token: run `hf auth login`, or pass hub_token", {"hub_token": None}),
        ("contains a space or a line break", {"hub_token": f"{TOKEN}\n"}),
        ("hub_token is empty: pass a token", {"hub_token": ""}),
        ("hub_model_id='a/b/c' is not a valid repository name", {"hub_model_id": "a/b/c"}),
        ("lacks write access", {"hub_model_id": "other/run"}),
        ("lacks write access", {"hub_token": READ_TOKEN, "hub_model_id": "me/there"}),
        ("the revision does not exist: create the branch", {"hub_revision": "dev", "hub_model_id": "me/there"}),
    ],
)
def test_wrong_token_or_repository_is_refused_at_the_start(hub, tmp_path, words, settings):
    hub.repos["me/there"] = Repo()
    with pytest.raises((HubError, InvalidArgument)) as caught:
        make_uploading(tmp_path / "run", **settings)
    assert words in str(caught.value)
    traceback.print_exception(caught.value)


def test_unreachable_hub_is_retried_once_then_refused_at_the_start(hub, tmp_path, monkeypatch):
    hub.disturb(fail, times=1)
    assert make_uploading(tmp_path / "run").hub_model_id == "me/run"
    hub.disturb(cut)
    away = r"push_to_hub to 'run': the Hub cannot be reached: .* You can train without push_to_hub"
    with pytest.raises(HubError, match=away):
        make_uploading(tmp_path / "run")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match=r"HF_HUB_OFFLINE=1 is set: unset it\. You can train without push_to_hub"):
        make_uploading(tmp_path / "run")
    with pytest.raises(HubError, match=r"HF_HUB_OFFLINE=1 is set: unset it\.$"):
        make_uploading(tmp_path / "run", push_to_hub=False).push_to_hub()


def test_push_with_a_wrong_token_names_the_cause(hub, tmp_path):
    trainer = make_uploading(tmp_path / "run", hub_strategy="end", max_steps=1)
    with pytest.raises(InvalidArgument, match="contains a space or a line break") as caught:
        trainer.push_to_hub(token=TOKEN + "\n")
    traceback.print_exception(caught.value)
    hub.tokens[TOKEN] = ("me", "read")
    with pytest.raises(HubError, match=r"lacks write access.*Forbidden: you don't have the required permissions"):
        trainer.push_to_hub()


def test_tokens_are_not_saved(tmp_path):
    args = TrainingArguments(str(tmp_path / "run"), hub_token=TOKEN, use_cpu=True)
    Trainer(make_plain(), args).save_model()
    saved = torch.load(tmp_path / "run" / "training_args.bin", weights_only=False)
    assert saved.hub_token is None
    assert args.hub_token == TOKEN
    print(args, args.to_dict(), args.to_json_string(), args.to_sanitized_dict())
    with pytest.raises(InvalidArgument) as caught:
        TrainingArguments(hub_token=TOKEN, push_to_hub_token=READ_TOKEN)
    traceback.print_exception(caught.value)


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
