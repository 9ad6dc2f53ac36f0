"""Run by test_model_states.py in two ranks: the stages of ZeRO that partition, gathered when they are saved."""

import pytest

from hftrainer_deepspeed.strategy import DeepSpeedStrategy
from tests.support.model_states import ModelStatesSuite


@pytest.mark.parametrize("stage", [2, 3])
class TestDeepSpeed(ModelStatesSuite):
    implementation = DeepSpeedStrategy

    @pytest.fixture(autouse=True)
    def _strategy(self, stage):
        zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
        self.settings = {"deepspeed": {"zero_optimization": zero}}
