"""Run by test_model_states.py in two ranks: FSDP and replicas, in the format of torch's distributed checkpoints."""

import pytest

from hftrainer.strategies.fsdp import FsdpStrategy
from hftrainer.strategies.strategy import ReplicasStrategy
from tests.support.model_states import ModelStatesSuite


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("version", [0, 1, 2])
class TestDcp(ModelStatesSuite):
    @pytest.fixture(autouse=True)
    def _strategy(self, version, background):
        self.implementation = FsdpStrategy if version else ReplicasStrategy
        fsdp = {"fsdp": "full_shard", "fsdp_config": {"version": version}} if version else {}
        self.settings = {"checkpoint_format": "dcp", "lightning_config": {"async_checkpoint": background}, **fsdp}
