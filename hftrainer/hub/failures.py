"""What has gone wrong with the Hub, in words that hold no token; and trying again."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import huggingface_hub
from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: Names of errors of the network, and of classes above them: of Python and of what the client speaks HTTP with.
_OF_NETWORK = frozenset({"ConnectionError", "TimeoutError", "TransportError", "Timeout", "ChunkedEncodingError"})
#: Answers that may be different the next time, of those that say that the request was wrong.
_PASSING = frozenset({408, 409, 412, 425, 429})


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def status_of(error: BaseException) -> int | None:
    """The status that the Hub has answered with, or None."""
    for cause in _chain(error):
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
    return None


def is_passing(error: BaseException) -> bool:
    """Whether it makes sense to try again: the network or the Hub has failed, and nobody has refused."""
    if isinstance(error, (OfflineModeIsEnabled, ValueError, FileNotFoundError)):
        return False
    status = status_of(error)
    return _is_of_network(error) if status is None else status >= 500 or status in _PASSING


def _is_of_network(error: BaseException) -> bool:
    """Whether the Hub was not reached; else, without an answer of it, something here has failed, such as a file."""
    telling = _telling(error)
    if type(telling) is RuntimeError:  # all that the client's own transfers say
        return True
    return any(kind.__name__ in _OF_NETWORK for cause in _chain(telling) for kind in type(cause).__mro__)


def _telling(error: BaseException) -> BaseException:
    """The error that the client has wrapped."""
    return next((cause for cause in _chain(error) if type(cause) is not RuntimeError), error)


def without_tokens(text: str, token: str | None = None) -> str:
    """The text with the given token, the one of `hf auth login`, and what is signed into addresses left out."""
    text = re.sub(r"(https?://[^\s?'\"]+)\?[^\s'\"]+", r"\1", text)
    for secret in (token, huggingface_hub.get_token()):
        if secret and secret.strip():
            text = text.replace(secret.strip(), "<HUB_TOKEN>")
    return text


def reason(error: BaseException, token: str | None = None) -> str:
    """What has gone wrong and what to do, as the end of a sentence."""
    telling = _telling(error)
    said = without_tokens(" ".join(str(telling).split()) or type(telling).__name__, token)
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE=1 is set: unset it"
    if isinstance(error, (HFValidationError, ValueError)):
        return said
    status = status_of(error)
    if status is None and not _is_of_network(error):
        return said
    if status is None:
        return f"the Hub cannot be reached: check the network ({said})"
    if status >= 500 or status in _PASSING:
        return f"the Hub has failed: try again later ({said})"
    code = next((code for cause in _chain(error) if (code := _error_code(cause))), None)
    if code == "RevisionNotFound":
        return (
            "there is no such revision: make the branch with huggingface_hub.create_branch, or leave hub_revision out"
        )
    if status == 401:
        return f"the Hub does not accept the token: run `hf auth login`, or give another hub_token ({said})"
    if status == 403:
        return f"the token may not write there: use one with the right to write, or another hub_model_id ({said})"
    return said


def _error_code(error: BaseException) -> str | None:
    headers = getattr(getattr(error, "response", None), "headers", None)
    return headers.get("X-Error-Code") if headers is not None else None


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return True


def with_retries(act: Callable[[], T], waits: Sequence[float], pause: Callable[[float], bool] = _sleep) -> T:
    """What `act` returns, called again after each of `waits` (seconds) while the network or the Hub fails.

    Args:
        act: what to do.
        waits: how long to wait before each further attempt.
        pause: waits so long, and says whether to go on.
    """
    for wait in waits:
        try:
            return act()
        except Exception as error:
            if not is_passing(error) or not pause(wait):
                raise
            logger.debug("Trying again after %g seconds.", wait)
    return act()
