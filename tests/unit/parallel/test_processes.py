"""The error of a job in a thread is raised."""

from concurrent import futures

import pytest

from hftrainer.parallel.process_group import start_in_thread
from hftrainer.parallel.processes import _wait_for_job as has_ended


def test_timeout_error_of_the_work_is_raised():
    """It does not mean that the work is unfinished."""

    def time_out():
        raise TimeoutError("of the work")

    failed, succeeded = jobs = [start_in_thread(work) for work in (time_out, lambda: None)]
    futures.wait(jobs)
    assert has_ended(succeeded)
    with pytest.raises(TimeoutError, match="of the work"):
        has_ended(failed)
