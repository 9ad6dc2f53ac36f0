"""Several processes on one study: neither too many trials nor too few. Random kills are in `test_soak.py`."""

import os

from hftrainer.search.studies import INTERRUPTED, OWNER
from tests.reliability.search_job import check
from tests.support.jobs import Job, let_go


def start_pair(folder):
    """Two processes, each within its first trial until it is let go."""
    os.mkfifo(folder / "out.go")
    jobs = [Job(folder, place, job="search_job", n_trials=10, waits_at=1) for place in (None, {"RANK": "1"})]
    for job in jobs:
        job.wait_for("waiting")
    return jobs


def test_two_processes_share_a_study(tmp_path):
    jobs = start_pair(tmp_path)
    with let_go(tmp_path / "out"):
        for job in jobs:
            assert job.finish()[-1].startswith("done")
    complete, _ = check(tmp_path, 10)
    assert len({trial.user_attrs[OWNER] for trial in complete}) == 2
    begun = [line for job in jobs for line in job.output.read_text().splitlines() if line.startswith("trial")]
    assert len(begun) == len(set(begun)) == 10


def test_surviving_process_completes_the_trials_of_a_killed_one(tmp_path):
    survivor, victim = start_pair(tmp_path)
    victim.kill()
    with let_go(tmp_path / "out"):
        assert survivor.finish()[-1].startswith("done")
    _, (lost,) = check(tmp_path, 10)
    assert str(victim.process.pid) in lost.user_attrs[INTERRUPTED]
