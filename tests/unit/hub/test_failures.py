"""Errors of the Hub: which are worth a retry, what a message says of them, and that it shows no token."""

import errno
from types import SimpleNamespace

import pytest

from hftrainer.hub import failures


def test_messages_hide_tokens_and_signatures(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_ofTheLogin")
    hidden = failures.remove_tokens("a hf_given, b hf_ofTheLogin, https://x.co/y?X-Sig=abc", "hf_given")
    assert hidden == "a <HUB_TOKEN>, b <HUB_TOKEN>, https://x.co/y"


def test_local_error_is_not_taken_for_one_of_the_network():
    local = PermissionError(errno.EACCES, "Permission denied", "secret.log")
    assert not failures.is_transient(local)
    assert "Permission denied" in failures.hub_reason(local)
    assert "cannot be reached" not in failures.hub_reason(local)


def test_error_that_the_client_wraps_is_that_of_its_cause():
    wrapped = RuntimeError("Error while uploading")
    wrapped.__cause__ = TimeoutError("slow")
    assert failures.is_transient(wrapped)
    assert failures.is_transient(RuntimeError("of the client's transfers"))
    late = RuntimeError("cannot schedule new futures after interpreter shutdown")
    assert failures.hub_reason(late).startswith("Python ended before the upload: wait for the result")


class Refused(OSError):
    """An error of the Hub's client, with the status of the response."""

    def __init__(self, status):
        super().__init__("the Hub's words")
        self.response = SimpleNamespace(status_code=status)


@pytest.mark.parametrize(
    ("status", "is_transient", "reason"),
    [
        (500, True, "the Hub failed: try again later"),
        (429, True, "the Hub failed: try again later"),
        (401, False, "the Hub does not accept the token: run `hf auth login`"),
        (403, False, "the token lacks write access"),
        (404, False, "the Hub's words"),
    ],
)
def test_response_of_the_hub_decides_about_a_retry(status, is_transient, reason):
    assert failures.is_transient(Refused(status)) is is_transient
    assert failures.hub_reason(Refused(status), "hf_given").startswith(reason)
