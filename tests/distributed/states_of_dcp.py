"""Run by test_model_states.py in two ranks: FSDP and replicas, in the format of torch's distributed checkpoints."""

import pytest

from hftrainer.strategies.ddp import DdpStrategy
from hftrainer.strategies.fsdp import FsdpStrategy
from tests.support.checkpoints import BACKGROUND
from tests.support.model_states import ModelStatesSuite

DCP = {"checkpoint_format": "dcp"}
#: The last one writes FSDP's own format in the background.
WAYS = {
    "replicas": DCP,
    "replicas, background": {**DCP, **BACKGROUND},
    "fsdp1": {**DCP, "fsdp": "full_shard", "fsdp_config": {"version": 1}},
    "fsdp2, background": {**DCP, **BACKGROUND, "fsdp": "full_shard"},
    "sharded, background": {**BACKGROUND, "fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}},
}


@pytest.mark.parametrize("way", WAYS)
class TestDcp(ModelStatesSuite):
    @pytest.fixture(autouse=True)
    def _strategy(self, way):
        self.settings = WAYS[way]
        self.implementation = FsdpStrategy if "fsdp" in self.settings else DdpStrategy
