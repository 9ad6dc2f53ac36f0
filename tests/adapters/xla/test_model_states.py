"""How torch_xla's FSDP keeps the states of model and optimizer, by the suite that all strategies pass."""

from hftrainer_xla.strategy import XlaFsdpStrategy, name_in_full_model
from tests.adapters.xla.support import without_dropout
from tests.support.model_states import ModelStatesSuite


class TestXla(ModelStatesSuite):
    implementation = XlaFsdpStrategy
    settings = {"use_cpu": False, "fsdp": True, "fsdp_config": {"xla": True}}

    def make_model(self):
        return without_dropout(super().make_model())

    def weights(self, trainer):
        return {name: value.cpu() for name, value in super().weights(trainer).items()}

    def decayed(self, trainer):
        return [name_in_full_model(name) for name in super().decayed(trainer)]
