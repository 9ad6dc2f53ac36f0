"""An output folder at a URL with two processes: one uploads, and each reads what was fetched."""

import pytest

from tests.distributed.cases_storage import train
from tests.support.jobs import SHARDED, assert_same
from tests.support.storages import complete_checkpoints


@pytest.mark.parametrize("settings", [{}, SHARDED], ids=["DDP", "shards of FSDP"])
def test_two_processes_resume_from_the_url_on_other_disks(processes, tmp_path, settings):
    url = f"file://{tmp_path}/bucket"
    run = processes.run_ranks
    whole = run(train, 2, tmp_path / "whole", None, 9, None, settings)
    run(train, 2, tmp_path / "a", url, 6, None, settings)
    assert complete_checkpoints(url) == ["checkpoint-3", "checkpoint-6"]
    resumed = run(train, 2, tmp_path / "b", url, 9, True, settings)
    assert [of_rank[1] for of_rank in resumed] == [str(tmp_path / "b" / "checkpoint-6")] * 2
    assert complete_checkpoints(url) == ["checkpoint-3", "checkpoint-6", "checkpoint-9"]
    assert_same(resumed[0][0], whole[0][0])
