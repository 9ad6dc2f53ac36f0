"""Two processes: one uploads, both go on from the Hub, and what one is refused both raise."""

import torch

from tests.support import warm
from tests.support.hub_server import HubServer
from tests.support.launching import TORCHRUN, python

TOKEN = "hf_aVeryPrivateTokenIndeed"
SCRIPT = """
import sys
import torch
from hftrainer.errors import HubError
from tests.support.hub_runs import At, make_uploading

folder = sys.argv[1]
torch.set_num_threads(1)
undisturbed = make_uploading(f"{folder}/undisturbed", push_to_hub=False)
undisturbed.train()
rank = undisturbed.args.process_index
stopped = make_uploading(f"{folder}/run", hub_strategy="checkpoint", hub_always_push=True)
stopped.add_callback(At(4, lambda: setattr(stopped.control, "should_training_stop", True)))
stopped.train()
committed = stopped.push_to_hub() is not None
resumed = make_uploading(f"{folder}/resumed", push_to_hub=False)
resumed.train(resume_from_checkpoint="hub:me/run")
weights = [trainer.accelerator.get_state_dict(trainer.model) for trainer in (undisturbed, resumed)]
try:
    make_uploading(f"{folder}/refused", hub_token="hf_wrong")
except HubError as error:
    torch.save([committed, weights, str(error)], f"{folder}/{rank}.pt")
"""


def test_two_processes(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    with HubServer({TOKEN: ("me", "write")}).running() as hub:
        environment = {**hub.environment(tmp_path / "home"), **warm.LIBRARIES}
        run = python(*TORCHRUN, str(tmp_path / "script.py"), str(tmp_path), **environment)
    assert run.returncode == 0, run.stderr[-3000:]
    assert TOKEN not in run.stdout + run.stderr
    during = [f"Training in progress, step {step}{part}" for step in (2, 4) for part in ("", ", checkpoint")]
    assert [message for message, _ in hub.repos["me/run"].commits()] == [*during, "End of training"]
    downloaded = [path for method, path in hub.requests if method == "GET" and path.endswith("checkpoint/optimizer.pt")]
    assert len(downloaded) == 1
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert [first[0], second[0]] == [True, False]
    for _, (undisturbed, resumed), refused in (first, second):
        assert not [name for name, value in undisturbed.items() if not torch.equal(value, resumed[name])]
        assert "the Hub does not accept the token" in refused
