"""Several processes on one study: neither too many trials nor too few. Random kills are in `test_soak.py`."""

from hftrainer.search.studies import INTERRUPTED, OWNER
from tests.reliability.search_job import check
from tests.support.jobs import Job


def start(folder, number=0, **settings):
    return Job(folder, {"RANK": str(number)} if number else None, job="search_job", **settings)


def test_two_processes_share_a_study(tmp_path):
    folder = tmp_path / "search"
    jobs = [start(folder, number, n_trials=10, pause=0.03) for number in (0, 1)]
    for job in jobs:
        assert job.finish()[-1].startswith("done")
    complete, _ = check(folder, 10)
    assert len({trial.user_attrs[OWNER] for trial in complete}) == 2
    begun = [line for job in jobs for line in job.output.read_text().splitlines() if line.startswith("trial")]
    assert len(begun) == len(set(begun)) == 10


def test_surviving_process_completes_the_trials_of_a_killed_one(tmp_path):
    folder = tmp_path / "search"
    survivor, victim = (start(folder, number, n_trials=10, pause=0.05) for number in (0, 1))
    victim.wait_for("trial")
    victim.kill()
    assert survivor.finish()[-1].startswith("done")
    _, (lost,) = check(folder, 10)
    assert str(victim.process.pid) in lost.user_attrs[INTERRUPTED]
