"""A repository is opened when the Trainer is made, or refused with the cause; tokens are neither saved nor shown."""

import traceback

import pytest
import torch

from hftrainer import Trainer, TrainingArguments
from hftrainer.errors import HubError, InvalidArgument
from hftrainer.hub import repository
from tests.support.checkpoints import OnSave
from tests.support.hub_runs import READ_TOKEN, TOKEN, head, make_uploading
from tests.support.hub_server import Repo, cut, fail
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


def test_progress_bars_stay_off_until_the_last_upload_has_ended():
    quiet, hidden = repository._without_progress_bars, repository.are_progress_bars_disabled
    before = hidden()
    with quiet():
        with quiet():
            pass
        assert hidden()
    assert hidden() == before
