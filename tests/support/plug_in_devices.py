"""What tests of devices share that no test machine has."""

import json

import pytest
from torch.utils import backend_registration

from tests.support.processes import ROOT

needs_python_device = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no device made of Python",
)


def run_on_plug_in(processes, script, folder):
    """What a script found that trains on a device made of Python."""
    done = processes.run(ROOT / script, folder, cwd=ROOT, fresh=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
