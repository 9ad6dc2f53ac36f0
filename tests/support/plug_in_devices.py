"""What tests of devices share that no test machine has."""

import json

import pytest
from torch.utils import backend_registration

from hftrainer.parallel.xla import devices as xla
from tests.support.processes import ROOT

#: The second of two processes.
SECOND = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29501"}


needs_python_device = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no device made of Python",
)


def run_on_plug_in(processes, script, folder):
    """What a script found that trains on a device made of Python."""
    done = processes.run(ROOT / script, folder, cwd=ROOT, fresh=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


#: Those that say something of TPUs.
VARIABLES = ("PJRT_DEVICE", "PJRT_LOCAL_PROCESS_COUNT", "USE_TORCH_XLA", *xla._OF_TPUS)
