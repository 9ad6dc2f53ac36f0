"""A model that is whole in each process."""

from hftrainer.checkpointing.states.whole import WholeStates
from tests.support.model_states import ModelStatesSuite


class TestWhole(ModelStatesSuite):
    implementation = WholeStates
