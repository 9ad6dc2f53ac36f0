"""What the Trainer asks of the states of a sharded model, whoever shards it."""

import pytest

from hftrainer.checkpointing.sharded import ShardedStates
from hftrainer.checkpointing.xla_parts import XlaParts
from hftrainer.deepspeed import PartitionedStates

ASKED = ("gather", "whole_weights", "whole_files", "write_parts", "save_beside", "finish", "only_parts")


@pytest.mark.parametrize("kind", [ShardedStates, PartitionedStates, XlaParts])
def test_each_kind_answers_all(kind):
    assert not [name for name in ASKED if not hasattr(kind, name)]
