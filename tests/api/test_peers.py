"""Recordings of peers: used where they hold, and nowhere else."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import peer_code, peers, warm
from tests.peers import StaleRecording, assert_as_peer, condensed

ROOT = Path(__file__).parents[2]
needs_recordings = pytest.mark.skipif(
    not peers.recordings().exists(), reason="nothing was recorded in this environment"
)
CASE = "tests/parity/test_matrix.py::test_same_run[plain-1-max_steps-fp32-no-eval]"


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """No recordings yet; what the test asks for is that of a case of its own."""
    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    monkeypatch.setattr(peers, "STATUS", peers.STATUS.copy())  # these do not count
    peers._book.cache_clear()
    yield tmp_path
    peers._book.cache_clear()


def compare(monkeypatch, mode, ours, theirs):
    """One comparison as a test makes it; how often the peer ran."""
    runs = []

    def peer():
        runs.append(None)
        return theirs

    monkeypatch.setenv("PEERS", mode)
    peers._calls.clear()
    assert_as_peer(ours, peer)
    return len(runs)


def test_a_recording_stands_for_the_peer(empty, monkeypatch):
    value = {"loss": 0.25, "weights": [1.0, 2.0], "names": "x" * 1000}
    assert compare(monkeypatch, "recorded", value, value) == 1  # there is none yet, and none is written
    assert not list(empty.rglob("*.json"))
    assert compare(monkeypatch, "record", value, value) == 1
    assert compare(monkeypatch, "recorded", value, value) == 0
    assert compare(monkeypatch, "live", value, value) == 1
    (file,) = empty.rglob("test_peers.json")
    (case,) = json.loads(file.read_text()).values()
    assert case["peers"] == [{"loss": "0.25", "weights": "[1.0, 2.0]", "names": condensed(value)["names"]}]
    assert len(case["peers"][0]["names"]) < 50


def test_no_failure_comes_from_a_recording_alone(empty, monkeypatch):
    """Ours differs: the peer runs. It has not changed, so ours is wrong; it has, so the recording is."""
    compare(monkeypatch, "record", {"loss": 0.25}, {"loss": 0.25})
    with pytest.raises(AssertionError) as wrong:
        compare(monkeypatch, "recorded", {"loss": 0.5}, {"loss": 0.25})
    assert not isinstance(wrong.value, StaleRecording)
    assert compare(monkeypatch, "recorded", {"loss": 0.5}, {"loss": 0.5}) == 1
    assert any("stale" in line for line in peers.lines())


def test_live_runs_find_what_is_stale(empty, monkeypatch):
    compare(monkeypatch, "record", {"loss": 0.25}, {"loss": 0.25})
    with pytest.raises(StaleRecording, match=r"recorded .*0\.25.*\n.*0\.5"):
        compare(monkeypatch, "live", {"loss": 0.5}, {"loss": 0.5})


def test_live_runs_find_what_nobody_has_recorded(empty, monkeypatch):
    """A recording of another processor will do: one computer cannot record for both."""
    compare(monkeypatch, "record", {"loss": 0.25}, {"loss": 0.25})
    (file,) = empty.rglob("test_peers.json")
    other = empty / "another" / file.relative_to(peers.recordings())
    other.parent.mkdir(parents=True)
    other.write_text(file.read_text())
    file.write_text("{}")
    peers._book.cache_clear()
    assert compare(monkeypatch, "live", {"loss": 0.25}, {"loss": 0.25}) == 1
    other.write_text("{}")
    peers._book.cache_clear()
    with pytest.raises(StaleRecording, match="recorded in no environment"):
        compare(monkeypatch, "live", {"loss": 0.25}, {"loss": 0.25})


@pytest.mark.parametrize("name", ["transformers", "torch", "instructions", "arithmetic"])
def test_another_environment(empty, monkeypatch, name):
    compare(monkeypatch, "record", {"loss": 0.25}, {"loss": 0.25})
    other = {**peers.environment(), name: "another"}
    monkeypatch.setattr(peers, "environment", lambda: other)
    peers._book.cache_clear()
    assert compare(monkeypatch, "recorded", {"loss": 0.25}, {"loss": 0.25}) == 1
    assert compare(monkeypatch, "live", {"loss": 0.25}, {"loss": 0.25}) == 1  # and nothing is missed there


@needs_recordings
def test_recordings_are_of_the_tests_as_they_are():
    assert peers.outdated(peers.recordings()) == [], "make record-peers"


def test_outdated_recordings_are_found(empty, monkeypatch):
    compare(monkeypatch, "record", 1, 1)
    assert peers.outdated(peers.recordings()) == []
    (file,) = empty.rglob("test_peers.json")
    file.write_text(file.read_text().replace("test_outdated", "test_gone_and_outdated"))
    (found,) = peers.outdated(peers.recordings())
    assert "test_gone_and_outdated" in found


def test_an_unknown_mode(monkeypatch):
    with pytest.raises(ValueError, match="PEERS='lively': choose recorded, live or record"):
        compare(monkeypatch, "lively", 1, 1)


@needs_recordings
@pytest.mark.parametrize("capability", ["avx2", "default"])
def test_another_instruction_set(capability):
    """The same case with the instructions of the recordings, and with fewer, which is another environment."""
    environment = {**warm.environment(), "ATEN_CPU_CAPABILITY": capability, "PEERS": "recorded"}
    if capability == "default":
        environment |= {"DNNL_MAX_CPU_ISA": "SSE41"}
    command = [warm.PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", CASE]  # warm with the first alone
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    counted = "1 recorded" if capability == "avx2" else "1 live: no recording that holds"
    assert counted in done.stdout


def test_arithmetic_is_part_of_the_environment():
    """It is the same each time, and another one where one bit is."""
    assert peers.arithmetic() == peers.arithmetic() == peers.environment()["arithmetic"]
    before = torch.nn.functional.gelu
    torch.nn.functional.gelu = lambda x: before(x) * (1 + 2**-20)
    try:
        assert peers.arithmetic() != peers.environment()["arithmetic"]
    finally:
        torch.nn.functional.gelu = before


# ---- Values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.ones(3), torch.ones(3, dtype=torch.float64)),
        (torch.ones(3), torch.ones(3, 1)),
        (torch.ones(3), torch.tensor([1.0, 1.0, 1.0 + 2**-23])),
        (torch.ones(3), np.ones(3, dtype=np.float32)),
        ((1, 2), [1, 2]),
        ([{"a": 1, "b": 2}], [{"b": 2, "a": 1}]),
        ("1", 1),
        (1, 1.0),
        ([0.1 + 0.2], [0.3]),
    ],
)
def test_values_that_differ(one, other):
    assert condensed(one) != condensed(other)
    assert condensed({"nested": [one]}) != condensed({"nested": [other]})


def test_values_that_do_not():
    assert condensed(torch.tensor([0.0, -0.0])) == condensed(torch.tensor([-0.0, 0.0]))
    assert condensed(torch.ones(2, 3).T) == condensed(torch.ones(3, 2))
    assert condensed({1, 2}) == condensed({2, 1})
    folders = [f"/tmp/pytest-of-me/pytest-{i}/popen-gw{i}/test_x0/ours/checkpoint-2" for i in (1, 2)]
    assert condensed(folders[0]) == condensed(folders[1]) == {"value": "'<folder>/ours/checkpoint-2'"}


def test_a_value_that_no_text_stands_for():
    with pytest.raises(TypeError, match="object cannot be recorded"):
        condensed({"model": object()})


# ---- Code -----------------------------------------------------------------------------------------------------------

CODE = '''
from tests.tiny import make_plain

LIMIT = 3

def helper(limit=LIMIT):
    return make_plain(), limit

def test_one(folder):
    """A comment of a test."""
    assert helper()

def test_other():
    assert 1
'''


@pytest.mark.parametrize(
    ("old", "new", "matters"),
    [
        ("LIMIT = 3", "LIMIT = 4", True),
        ("make_plain(), limit", "make_plain()", True),
        ("assert helper()", "assert not helper()", True),
        ("assert 1", "assert 2", False),
        ("LIMIT = 3", "LIMIT = 3  # samples", False),
        ("import make_plain", "import make_plain, make_bert", False),
    ],
)
def test_which_code_counts(tmp_path, old, new, matters):
    for cached in (peer_code._module, peer_code.digest):
        cached.cache_clear()  # pytest gives the folder of a test that has passed to the next one
    first, second = tmp_path / "test_a.py", tmp_path / "test_b.py"
    first.write_text(CODE)
    second.write_text(CODE.replace(old, new))
    assert (peer_code.digest(first, "test_one") != peer_code.digest(second, "test_one")) == matters


def test_code_of_other_files_counts():
    reached = {file.name for file, _ in peer_code._reached(ROOT / "tests/parity/test_matrix.py", "test_same_run")}
    assert {"test_matrix.py", "matrix.py", "support.py", "tiny.py"} <= reached
    assert not {"test_hub.py", "peers.py"} & reached
