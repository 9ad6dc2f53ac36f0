"""Run by test_model_states.py in two ranks: both generations of FSDP, with full states and with shards."""

import pytest

from hftrainer.strategies.fsdp import FsdpStrategy
from tests.support.model_states import ModelStatesSuite


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
class TestSharded(ModelStatesSuite):
    implementation = FsdpStrategy

    @pytest.fixture(autouse=True)
    def _strategy(self, version, kind):
        self.settings = {"fsdp": "full_shard", "fsdp_config": {"version": version, "state_dict_type": kind}}
