"""Errors of the Hub: which to retry, and messages that do not reveal tokens."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import huggingface_hub
from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled

T = TypeVar("T")

#: Names of network error classes and of their base classes, in Python and in the client's HTTP libraries.
_NETWORK_ERRORS = frozenset({"ConnectionError", "TimeoutError", "TransportError", "Timeout", "ChunkedEncodingError"})
#: HTTP statuses below 500 after which the same request may succeed later.
_TRANSIENT_STATUSES = frozenset({408, 409, 412, 425, 429})


def _error_chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _http_status(error: BaseException) -> int | None:
    """The HTTP status of the Hub's response; None without a response."""
    statuses = (getattr(getattr(cause, "response", None), "status_code", None) for cause in _error_chain(error))
    return next((status for status in statuses if isinstance(status, int)), None)


def is_transient(error: BaseException) -> bool:
    """Whether a retry may succeed: the network or the Hub failed, without a refusal."""
    if isinstance(error, (OfflineModeIsEnabled, ValueError, FileNotFoundError)):
        return False
    status = _http_status(error)
    return _is_network_error(error) if status is None else status >= 500 or status in _TRANSIENT_STATUSES


def _is_network_error(error: BaseException) -> bool:
    """Whether the Hub was not reached. Any other error without a response is local, such as a missing file."""
    cause = _unwrap(error)
    # The client's transfers raise nothing more specific.
    if type(cause) is RuntimeError:
        return True
    return any(kind.__name__ in _NETWORK_ERRORS for link in _error_chain(cause) for kind in type(link).__mro__)


def _unwrap(error: BaseException) -> BaseException:
    """The error inside the RuntimeErrors that the client wraps around it."""
    return next((cause for cause in _error_chain(error) if type(cause) is not RuntimeError), error)


def remove_tokens(text: str, token: str | None = None) -> str:
    """The text without `token`, the token of `hf auth login` and the signatures in URLs."""
    text = re.sub(r"(https?://[^\s?'\"]+)\?[^\s'\"]+", r"\1", text)
    for secret in (token, huggingface_hub.get_token()):
        if secret and secret.strip():
            text = text.replace(secret.strip(), "<HUB_TOKEN>")
    return text


def hub_reason(error: BaseException, token: str | None = None) -> str:
    """What went wrong and what to do about it, as the end of a sentence."""
    cause = _unwrap(error)
    text = remove_tokens(" ".join(str(cause).split()) or type(cause).__name__, token)
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE=1 is set: unset it"
    # Python ends the client's thread pools before our thread.
    if "interpreter shutdown" in text:
        return "Python ended before the upload: wait for the result of push_to_hub(blocking=False)"
    if isinstance(error, (HFValidationError, ValueError)):
        return text
    status = _http_status(error)
    if status is not None:
        has_token = token is not None or huggingface_hub.get_token() is not None
        return _reason_of_response(error, status, text, has_token)
    return f"the Hub cannot be reached: check the network ({text})" if _is_network_error(error) else text


def _reason_of_response(error: BaseException, status: int, text: str, has_token: bool) -> str:
    if status >= 500 or status in _TRANSIENT_STATUSES:
        return f"the Hub failed: try again later ({text})"
    responses = [getattr(cause, "response", None) for cause in _error_chain(error)]
    if "RevisionNotFound" in [(getattr(response, "headers", None) or {}).get("X-Error-Code") for response in responses]:
        return "the revision does not exist: create the branch with huggingface_hub.create_branch, or omit hub_revision"
    if status == 401 and not has_token:
        return f"the Hub needs a token: run `hf auth login`, or pass hub_token ({text})"
    if status == 401:
        return f"the Hub does not accept the token: run `hf auth login`, or pass another hub_token ({text})"
    if status == 403:
        return f"the token lacks write access: use a token that has it, or another hub_model_id ({text})"
    return text


def call_with_retries(
    operation: Callable[[], T], waits: Sequence[float], is_retryable: Callable[[Exception], bool] = is_transient
) -> T:
    """Call `operation`, and retry it after each of `waits` seconds as long as `is_retryable`.

    The client itself retries most requests, but not the one that creates a repository.
    """
    for wait in waits:
        try:
            return operation()
        except Exception as error:
            if not is_retryable(error):
                raise
            time.sleep(wait)
    return operation()
