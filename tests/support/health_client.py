"""Questions to the server of `metrics_port`, and waiting for what it says."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable


def ask(port: str, path: str = "health") -> tuple[int, str]:
    """The status and the text of the answer."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=300) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def read_health(port: str) -> dict:
    status, text = ask(port)
    answer = json.loads(text)
    assert status == (503 if answer["status"] == "stalled" else 200)
    return answer


def wait_until(port: str, holds: Callable[[dict], bool], seconds: float = 300.0) -> dict:
    """Ask until the answer is as wanted; the answer. `holds` may assert what no answer may be."""
    deadline = time.monotonic() + seconds
    while not holds(answer := read_health(port)):
        assert time.monotonic() < deadline, answer
        time.sleep(0.02)
    return answer
