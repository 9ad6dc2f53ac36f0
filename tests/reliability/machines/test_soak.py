"""Some of the random kills, stops and full disks of `make soak`: each run goes on to the undisturbed end."""

import os
from unittest import mock

import pytest

from tests.reliability import soak

#: Scenario → how many kills.
KILLS = {
    "plain": 25,
    "background": 12,
    "files of the script": 12,
    "search": 6,
    "two processes": 8,
    "sharded": 6,
    "elastic": 6,
}


@pytest.mark.parametrize("name", KILLS)
def test_runs_disturbed_at_random_reach_the_undisturbed_end(name):
    with mock.patch.dict(os.environ):  # it writes into it
        found = soak.run_all(KILLS[name], [name], seed=7)[name]
    assert not found.findings
    assert found.kills >= KILLS[name]
