"""A share of `make soak`: each scenario is disturbed once."""

import subprocess
import sys

from tests import warm
from tests.reliability.soak import SCENARIOS


def test_soak():
    """In a process of its own: the jobs inherit the environment in which the first of them was started."""
    words = [sys.executable, "-m", "tests.reliability.soak", "--kills", str(len(SCENARIOS)), "--seed", "7"]
    run = subprocess.run(words, env=warm.environment(), capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr[-5000:]
    assert "hit while" in run.stdout
