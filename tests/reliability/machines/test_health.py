"""Rank 0 reports a hung rank, and shows where it hangs; tests/unit/monitoring has the seconds after which it does."""

import socket
import time
import urllib.error

from tests.support.health_client import ask, read_health, wait_until
from tests.support.jobs import JobGroup
from tests.support.launchers import free_port

#: Way to hang → the function in the reported stack; a stopped process has none.
HANGS = {
    "forward": "in hang_for_good",
    "collator": "in hang_in_the_collator",
    "c code": "in hang_in_c_code",
    "stopped": "",
}


def start(folder, kind):
    number = free_port()
    return JobGroup(folder / kind, job="health_job", kind=kind, port=number), number


def check_hang(folder, kind, group, number):
    while not (folder / f"{kind}.hangs").exists():
        assert group.jobs[0].process.is_alive(), group.printed()
        time.sleep(0.05)
    answer = wait_until(number, lambda answer: answer["status"] == "stalled")
    (late,) = answer["late_ranks"]
    assert (late["rank"], late["host"], late["pid"]) == (1, socket.gethostname(), group.jobs[1].process.pid)
    assert HANGS[kind] in late["stack"]
    assert bool(late["stack"]) == (kind != "stopped")
    assert (answer["step"], answer["phase"], answer["max_steps"]) == (5, "training", 9)
    assert answer["last_checkpoint"] == str(folder / kind / "checkpoint-3")
    assert "hftrainer_ranks_late 1.0" in ask(number, "metrics")[1]


def test_hung_rank_is_reported_with_its_stack(tmp_path):
    """All ways at once, since they mostly wait."""
    groups = {kind: start(tmp_path, kind) for kind in HANGS}
    try:
        for kind, (group, number) in groups.items():
            check_hang(tmp_path, kind, group, number)
    finally:
        for group, _ in groups.values():
            for job in group.jobs:
                job.kill()


def test_slow_ranks_are_not_reported_as_hung(tmp_path):
    """Neither a rank that saves or begins an epoch slowly, nor one that waits for it."""
    group, number = start(tmp_path, "slow")
    longest = {}
    while group.jobs[0].process.is_alive():
        try:
            answer = read_health(number)
        except (urllib.error.URLError, ConnectionError):  # before the beginning, and after the end
            continue
        assert answer["status"] != "stalled", answer
        for rank in answer["ranks"]:
            key = rank["rank"], rank["phase"]
            longest[key] = max(longest.get(key, 0), rank["seconds_since_sign"])
        time.sleep(0.1)
    assert group.end() == [0, 0], group.printed()
    assert min(longest[0, "training"], longest[1, "training"], longest[0, "saving"]) > 15, longest


def test_port_in_use_ends_all_ranks(tmp_path):
    """Only rank 0 would listen there."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        group = JobGroup(tmp_path / "out", job="health_job", kind="none", port=other.getsockname()[1])
        for job in group.jobs:
            job.process.join()
        assert all("cannot listen on 127.0.0.1:" in printed for printed in group.printed()), group.printed()
    assert not (tmp_path / "out" / "_health").exists()
