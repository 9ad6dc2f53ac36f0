"""The suite for model states, with a model that no strategy shards."""

from hftrainer.strategies.replicas import ReplicasStrategy
from tests.support.model_states import ModelStatesSuite


class TestWhole(ModelStatesSuite):
    implementation = ReplicasStrategy
