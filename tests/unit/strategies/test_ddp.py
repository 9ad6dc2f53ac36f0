"""The suite for model states, with a model that no strategy shards."""

from hftrainer.strategies.ddp import DdpStrategy
from tests.support.model_states import ModelStatesSuite


class TestWhole(ModelStatesSuite):
    implementation = DdpStrategy
