"""A model that is whole in each process."""

from hftrainer.checkpointing.states.whole import WholeStates
from tests.model_states import ModelStatesSuite


class TestWhole(ModelStatesSuite):
    implementation = WholeStates
