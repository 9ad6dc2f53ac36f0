import logging

import pytest
import torch

from hftrainer.hub import repository
from tests.support.hub_runs import READ_TOKEN, TOKEN, hub as hub, make_uploading


@pytest.fixture(autouse=True)
def assert_no_token_is_shown(request, tmp_path, monkeypatch, caplog, capfd):
    """After the test, search every upload, file, log line and printed line for the tokens. Tests print their errors."""
    monkeypatch.setattr(repository, "_WAITS", (0.01,))
    repos = request.getfixturevalue("hub").repos if "hub" in request.fixturenames else {}
    with caplog.at_level(logging.DEBUG):
        yield
    commits = [commit for repo in repos.values() for branch in repo.branches.values() for commit in branch]
    shown = [item for commit in commits for item in commit.files.items()]
    shown += [(path, path.read_bytes()) for path in tmp_path.rglob("*") if path.is_file()]
    shown += [("the log", caplog.handler.format(record).encode()) for record in caplog.get_records("call")]
    shown += [("what was printed", printed.encode()) for printed in capfd.readouterr()]
    assert not [where for where, data in shown if TOKEN.encode() in data or READ_TOKEN.encode() in data]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    torch.set_num_threads(1)
    trainer = make_uploading(tmp_path_factory.mktemp("undisturbed"), push_to_hub=False)
    trainer.train()
    return trainer.model.state_dict()
