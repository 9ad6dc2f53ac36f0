"""URLs that cannot be an output folder are refused before a run, and no message shows a secret."""

import json
import re

import pytest

from hftrainer import TrainingArguments
from hftrainer.errors import InvalidArgument, MissingPackage, StorageError
from hftrainer.storage import remote
from tests.support.checkpoints import make_trainer

EMPTY = "names no bucket, repository or folder"


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        (
            {"storage_url": "bucket/run"},
            InvalidArgument,
            "'bucket/run' has no scheme. Use a URL such as 's3://bucket/run'",
        ),
        (
            {"storage_url": "/there/run"},
            InvalidArgument,
            "'/there/run' is a path, but must be a URL: 'file:///there/run', or use output_dir.",
        ),
        ({"storage_url": "ftp://me:secret@host/run"}, InvalidArgument, "a password or a signature in a URL"),
        ({"storage_url": "https://host/run?X-Signature=secret"}, InvalidArgument, "a signature in a URL"),
        ({"storage_url": "nosuch://bucket"}, InvalidArgument, "has the scheme 'nosuch', which is unknown or read-only"),
        ({"storage_url": "gs://bucket/run"}, MissingPackage, "pip install gcsfs"),
        ({"keep_local": 0, "storage_url": "memory://run"}, InvalidArgument, "keep_local=0"),
    ],
)
def test_wrong_storage_settings_are_refused(tmp_path, settings, error, words):
    with pytest.raises(error, match=words) as raised:
        make_trainer(tmp_path, **settings)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        *((url, EMPTY) for url in ("s3://", "s3:///run", "gs://", "file://", "hf://", "hf://datasets/user")),
        ("://run", "has no scheme"),
        ("S3://bucket/run", "has the scheme 'S3', which is unknown"),
    ],
)
def test_malformed_output_urls_are_refused_at_once(url, problem):
    message = re.escape(f"output_dir={url!r} {problem}") + r"\b.*Use a URL such as 's3:"
    with pytest.raises(InvalidArgument, match=message):
        TrainingArguments(url)


def test_hub_url_in_offline_mode_is_refused_without_a_request(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(remote, "call_with_retries", None)
    message = "since HF_HUB_OFFLINE=1 is set: unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE"
    with pytest.raises(StorageError, match=message):
        make_trainer(tmp_path, storage_url="hf://datasets/user/name")
    with pytest.raises(StorageError, match=message):
        make_trainer(tmp_path).train(resume_from_checkpoint="hf://datasets/user/name/checkpoint-1")


def test_output_url_beside_storage_url_is_refused():
    with pytest.raises(InvalidArgument, match="set only one"):
        TrainingArguments("s3://a/b", storage_url="s3://c/d")
    with pytest.raises(InvalidArgument, match="like a URL without '://': use 's3://a/b'"):
        TrainingArguments("s3:/a/b")
    args = TrainingArguments("s3://a/b", report_to="none")
    again = TrainingArguments(output_dir=args.output_dir, storage_url=args.storage_url, report_to="none")
    assert json.loads(again.to_json_string())["storage_url"] == "s3://a/b"


def test_keep_local_without_a_url_warns(tmp_path, caplog):
    make_trainer(tmp_path, keep_local=2)
    assert "keep_local=2 has no effect without storage_url" in caplog.text
