"""With two processes one uploads, both resume from the Hub, and both raise what one is refused."""

from tests.distributed.cases_hub import find_all
from tests.support.hub_runs import TOKEN, environment
from tests.support.hub_server import HubServer
from tests.support.parity import assert_same_weights


def test_one_rank_uploads_and_both_resume_from_the_hub(processes, tmp_path):
    with HubServer({TOKEN: ("me", "write")}) as hub:
        found = processes.run_ranks(find_all, 2, tmp_path, fresh=True, **environment(hub, tmp_path / "home"))
    during = [f"Training in progress, step {step}{part}" for step in (2, 4) for part in ("", ", checkpoint")]
    assert hub.repos["me/run"].messages() == [*during, "End of training"]
    assert [request[:3] for request in hub.requests if request.endswith("checkpoint/optimizer.pt")].count("GET") == 1
    assert [committed for committed, _, _ in found] == [True, False]
    for _, (undisturbed, resumed), refused in found:
        assert_same_weights(resumed, undisturbed)
        assert "the Hub does not accept the token" in refused
