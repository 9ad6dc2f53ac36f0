"""When a rank hangs, the other ends within `ddp_timeout`, and names the rank and the operation it waited for."""

import re
import threading
from datetime import timedelta

import pytest

from hftrainer.errors import RanksLost
from hftrainer.parallel import process_group
from tests.support.jobs import JobGroup

#: Kind of operation → what the message says the rank waited for.
AWAITED = {
    "barrier": "a barrier",
    "vote": "the maximum over all ranks",
    "decision": "a decision of rank 0",
    "scatter": "its item from rank 0",
    "rows": "the rows of all ranks",
    "numbers": "the numbers of all ranks",
    "objects": "the objects of all ranks",
    "reduction": "a reduction over all ranks",
    "sizes": "the sizes on all ranks",
    "metrics": "the metrics of all ranks",
    "gradients": "gradients or weights of all ranks",
    "shards": "gradients or weights of all ranks",
    "evaluation": "",
}
#: And when rank 0 hangs, which has the store through which ranks meet. It alone decides and scatters, and a broadcast
#: needs nobody to have received it.
OF_RANK_0 = ("barrier", "decision", "scatter", "objects", "gradients", "evaluation")
HANGS = [(kind, 1) for kind in AWAITED if kind not in ("decision", "scatter")] + [(kind, 0) for kind in OF_RANK_0]


def start_hanging(folder, kind, victim, **settings):
    return JobGroup(folder / f"{kind}-{victim}", job="hang_job", kind=kind, victim=victim, **settings)


def output_of_waiting_rank(group, victim):
    """Of the rank that waits for the victim, once it has ended with an error."""
    waiting = group.jobs[1 - victim]
    waiting.process.join()
    group.jobs[victim].kill()
    printed = waiting.output.read_text()
    assert waiting.process.exitcode not in (None, 0), printed
    return printed


@pytest.mark.parametrize("first", range(0, len(HANGS), 6))
def test_hung_rank_and_awaited_operation_are_named(tmp_path, first):
    """Six at a time, since they mostly wait."""
    groups = [(start_hanging(tmp_path, *case), *case) for case in HANGS[first : first + 6]]
    for group, kind, victim in groups:
        printed = output_of_waiting_rank(group, victim)
        assert f"Rank {1 - victim} has lost rank {victim} while it waited for {AWAITED[kind]}" in printed


@pytest.mark.parametrize("victim", [0, 1])
def test_rank_that_never_connects_is_named(tmp_path, victim):
    printed = output_of_waiting_rank(start_hanging(tmp_path, "meeting", victim), victim)
    assert f"Rank {1 - victim} could not connect to the other 1 at 127.0.0.1:" in printed


def test_rank_that_hangs_while_connecting_is_named(tmp_path):
    """At each of six milliseconds, in some of which gloo waits without end."""
    after = [0.001 * number for number in range(6)]
    groups = [start_hanging(tmp_path / f"{each}", "connecting", 1, after=each) for each in after]
    printed = [output_of_waiting_rank(group, 1) for group in groups]
    lost = re.compile("Rank 0 (could not connect to the other|has lost rank 1)")
    assert all(map(lost.search, printed)), printed


def test_wait_for_ranks_times_out_and_passes_on_errors(monkeypatch):
    monkeypatch.setattr(process_group, "_GRACE", 0.1)
    with pytest.raises(RanksLost, match="have not met"):
        process_group.wait_for_ranks(threading.Event().wait, timedelta(seconds=0.1), "The ranks have not met.")
    with pytest.raises(ZeroDivisionError):
        process_group.wait_for_ranks(lambda: 1 / 0, timedelta(hours=1), "The ranks have not met.")
    assert process_group.wait_for_ranks(lambda: 1, timedelta(hours=1), "The ranks have not met.") == 1
