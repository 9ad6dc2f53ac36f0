"""What transformers does in a test, recorded: its runs were half the time of all tests.

`assert_as_peer(ours, peer)` compares with the recording of `peer()`, in `tests/recordings/`. A recording is used only
where it holds: for the same case, the same code of the test, the same versions, and a processor that computes the same
bits; each such environment has a folder. Elsewhere, and when ours differs from it, the peer runs for real and is
compared with: no failure comes from a recording alone.

The environment variable `PEERS` is `recorded` (the default), `record` (what runs is written down) or `live` (all peers
run; a recording that is not what the peer does is an error, and so is a case without any).
"""

import collections
import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests import peer_code

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "recordings"
#: What can change what a peer does.
LIBRARIES = (
    *("transformers", "accelerate", "torch", "numpy", "tokenizers", "safetensors", "huggingface_hub", "peft"),
    *("datasets", "optuna", "bitsandbytes", "torchao", "galore-torch", "apollo-torch", "lomo-optim", "grokadamw"),
    *("schedulefree", "torch-optimi", "scikit-learn"),
)
#: Longer texts are kept as their digest.
_SHOWN = 160
#: What became of each comparison: printed when the tests have run.
STATUS: collections.Counter[str] = collections.Counter()


def lines() -> list[str]:
    """The counts, a line each."""
    return [f"{count:5d} {what}" for what, count in sorted(STATUS.items())]


class StaleRecording(AssertionError):
    """A recording that is not what the peer does, or a case that no environment has a recording of."""


def mode() -> str:
    """How peers are compared with."""
    found = os.environ.get("PEERS", "recorded")
    if found not in ("recorded", "live", "record"):
        raise ValueError(f"PEERS={found!r}: choose recorded, live or record")
    return found


def assert_equal(ours: Any, theirs: Any) -> None:
    """Plain equality."""
    assert ours == theirs


def assert_as_peer(
    ours: Any, peer: Callable[[], Any], same: Callable[[Any, Any], None] = assert_equal, *, script: Path | None = None
) -> None:
    """Assert that `same(ours, peer())` holds; the peer is not run where its recording tells.

    Args:
        ours: what this library has done.
        peer: does the same with the peer.
        same: raises AssertionError where the two differ.
        script: what the peer runs in processes of its own: a file, or a folder of them.

    Raises:
        AssertionError: where they differ.
        StaleRecording: in live runs, when the recording is not what the peer does.
    """
    case, number = _current_case(script)
    book = _book(case.path, recordings())
    kept = book.find(case, number)
    if mode() != "live" and kept is not None and kept == condensed(ours):
        STATUS["recorded"] += 1
        return
    STATUS[f"live: {_why(kept)}"] += 1
    theirs = peer()
    same(ours, theirs)
    now = condensed(theirs)
    if mode() == "live" and kept is not None and kept != now:
        raise StaleRecording(
            f"{case.name}: recorded {kept}\nthe peer does {now}\nDelete {book.file}; make record-peers"
        )
    if mode() == "live" and kept is None and recordings().exists() and not _is_recorded(case, number):
        raise StaleRecording(f"{case.name}: recorded in no environment\nmake record-peers")
    if mode() == "record" and kept is None:
        book.keep(case, number, now)
    elif kept is not None and kept != now:
        STATUS["stale: make test-parity-live names them"] += 1


def _why(kept: dict[str, str] | None) -> str:
    if mode() == "live":
        return "asked for"
    return "no recording that holds" if kept is None else "ours differs from the recording"


# ---- Values ---------------------------------------------------------------------------------------------------------


def condensed(value: Any) -> dict[str, str]:
    """A value as short texts, equal for equal values: one for each field of a dataclass or mapping.

    Raises:
        TypeError: for a value whose equality no text can stand for.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = _fields(value)
    elif isinstance(value, dict) and all(isinstance(key, str) for key in value):
        fields = value
    else:
        fields = {"value": value}
    return {name: _shortened(_text(each)) for name, each in fields.items()}


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{len(text)} characters, {_digest(text.encode())}"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _text(value: Any) -> str:
    if isinstance(value, str) and not isinstance(value, enum.Enum):
        return repr(_without_folders(value))
    if value is None or type(value) in (bool, int, float, complex, bytes):
        return repr(value)
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return _text_of_array(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_text(key)}: {_text(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        name = "" if type(value) in (tuple, list) else type(value).__name__
        opened, closed = "()" if isinstance(value, tuple) else "[]"
        return f"{name}{opened}{', '.join(map(_text, value))}{closed}"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    if isinstance(value, (torch.dtype, torch.device, np.dtype, enum.Enum)):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__name__}({_text(_fields(value))})"
    if isinstance(value, Path):
        return _text(str(value))
    if isinstance(value, type):
        return value.__qualname__
    raise TypeError(f"{type(value).__name__} cannot be recorded: compare what it holds")


def _text_of_array(value: Any) -> str:
    """Kind, type, shape and a digest of the bytes, in which the zeros are alike: -0.0 equals 0.0."""
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        whole = value.detach().cpu().contiguous()
        whole = whole + 0.0 if whole.is_floating_point() else whole
        data, shape, of = whole.reshape(-1).view(torch.uint8).numpy().tobytes(), list(whole.shape), whole.dtype
    else:
        whole = np.ascontiguousarray(value)
        whole = whole + np.zeros((), whole.dtype) if np.issubdtype(whole.dtype, np.floating) else whole
        data, shape, of = whole.tobytes(), list(np.shape(value)), whole.dtype
    return f"{kind}({of}, {shape}, {_digest(data)})"


def _without_folders(text: str) -> str:
    """A text without the folder of the test, which is another one each time."""
    return re.sub(r"/\S*?/pytest-\d+/(popen-gw\d+/)?[^/\s'\"]+", "<folder>", text)


# ---- Where a recording holds ----------------------------------------------------------------------------------------


@functools.cache
def environment() -> dict[str, str]:
    """What a peer's results depend on, beside the test: the versions, and how this processor computes."""
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    python = ".".join(platform.python_version_tuple()[:2])
    instructions = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return {"python": python, **versions, "instructions": instructions, "arithmetic": arithmetic()}


def arithmetic() -> str:
    """A digest of what this processor makes of the operations of tiny models.

    The order of sums depends on the width of vectors, on the kernels that torch, MKL and oneDNN choose for a
    processor, and on their versions; a name for all of that does not exist, so it is tried.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the tests do
    try:
        return _digest("".join(map(_text_of_array, _results())).encode())
    finally:
        torch.set_num_threads(threads)


def _results() -> list[torch.Tensor]:
    """Of forward and backward passes, clipping and an optimizer's step, in the sizes and precisions of the tests."""
    found: list[torch.Tensor] = []
    with torch.random.fork_rng(devices=()), torch.enable_grad():
        torch.manual_seed(0)
        for size, dtype in ((8, torch.float32), (16, torch.float32), (50, torch.float32), (16, torch.bfloat16)):
            layer = torch.nn.Linear(size, size).to(dtype)
            x = torch.randn(4, 12, size, dtype=dtype, requires_grad=True)
            mixed = torch.nn.functional.scaled_dot_product_attention(layer(x), x, x)
            normed = torch.nn.functional.layer_norm(torch.nn.functional.gelu(mixed), (size,))
            curved = (
                normed.sigmoid() * normed.tanh()
                + normed.exp().log1p()
                + normed.cos()
                + normed.square().mean(-1, True).rsqrt()
            )
            loss = torch.nn.functional.cross_entropy(curved.reshape(-1, size), torch.arange(48) % size)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(layer.parameters(), 0.1)
            torch.optim.AdamW(layer.parameters()).step()
            found += [mixed, curved, loss, x.grad, norm, layer.weight, layer.bias]
    return found


@dataclasses.dataclass(frozen=True)
class _Case:
    """A test with its parameters, and a digest of its code."""

    path: Path
    name: str
    code: str


_calls: collections.Counter[str] = collections.Counter()


def _current_case(script: Path | None) -> tuple[_Case, int]:
    """The test that runs, and how many comparisons it has made before."""
    node, _, phase = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")
    if phase != "(call)":
        raise RuntimeError("peers are compared with in tests: a fixture is set up for whichever test comes first")
    path, _, name = node.partition("::")
    file = ROOT / path
    _calls[node] += 1
    code = peer_code.digest(file, name.partition("[")[0])
    if script is not None and script.is_dir():
        code = f"{code} {_digest(b''.join(each.read_bytes() for each in sorted(script.glob('*.py'))))}"
    elif script is not None:
        code = f"{code} {peer_code.digest(script, None)}"
    return _Case(file, name, code), _calls[node] - 1


class _Book:
    """The recordings of one file of tests.

    Args:
        path: the file with the tests.
        folder: of the environment.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        self.file = folder / path.relative_to(ROOT / "tests").with_suffix(".json")
        self.cases: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}

    def find(self, case: _Case, number: int) -> dict[str, str] | None:
        """The recording, if it holds here."""
        kept = self.cases.get(case.name, {"code": None, "peers": []})
        return kept["peers"][number] if kept["code"] == case.code and number < len(kept["peers"]) else None

    def keep(self, case: _Case, number: int, peer: dict[str, str]) -> None:
        """Write a recording."""
        before = self.cases.get(case.name, {"peers": []})["peers"][:number]
        self.cases[case.name] = {"code": case.code, "peers": [*before, peer]}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        (recordings() / "environment.json").write_text(json.dumps(environment(), indent=1) + "\n")
        self.file.write_text(json.dumps(dict(sorted(self.cases.items())), indent=1) + "\n")


def _is_recorded(case: _Case, number: int) -> bool:
    """In any environment: who adds a test records it on one kind of processor, and others find it live."""
    return any(_book(case.path, folder).find(case, number) is not None for folder in FOLDER.iterdir())


def recordings() -> Path:
    """The folder of the recordings that hold in this environment; there is none for most."""
    return FOLDER / _digest(json.dumps(environment()).encode())


@functools.cache
def _book(path: Path, folder: Path) -> _Book:
    return _Book(path, folder)


def is_outdated(path: Path, case: str, kept: dict[str, Any]) -> bool:
    """Whether a recording is of a test as it was."""
    return kept["code"].split()[0] != peer_code.digest(path, case.partition("[")[0])


def outdated(folder: Path, *, delete: bool = False) -> list[str]:
    """The cases in a folder of recordings that are not those of the tests as they are now."""
    found = []
    for file in sorted(folder.rglob("test_*.json")):
        path = (ROOT / "tests" / file.relative_to(folder)).with_suffix(".py")
        cases = json.loads(file.read_text())
        old = [case for case, kept in cases.items() if is_outdated(path, case, kept)]
        if delete and old:
            file.write_text(json.dumps({case: cases[case] for case in cases if case not in old}, indent=1) + "\n")
        found += [f"{path.relative_to(ROOT)}::{case}" for case in old]
    return found


if __name__ == "__main__":
    if sys.argv[1:] == ["prune"]:
        for each in FOLDER.iterdir():
            outdated(each, delete=True)
    else:  # the files of tests that compare with recordings, as arguments for pytest
        recorded = {file.relative_to(FOLDER).parts[1:] for file in FOLDER.rglob("test_*.json")}
        print(*sorted(str(Path("tests", *parts).with_suffix(".py")) for parts in recorded))
