"""What DeepSpeed refuses of a configuration: an error names key, value and reason, before there is an engine."""

import json
import logging

import pytest

from hftrainer import Trainer, TrainingArguments
from hftrainer.errors import InvalidConfig
from tests.adapters.deepspeed.training_cases import STAGES
from tests.support.small_models import make_plain, plain_data

pytestmark = pytest.mark.usefixtures("one_process")
ZERO = {"stage": 2}
ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
#: Sections → words of the error.
REFUSED = [
    ({"compression_training": {}}, "deepspeed: compression_training={} is refused by DeepSpeed (The DeepSpeed compr"),
    ({"elasticity": {"enabled": True}}, "deepspeed: elasticity={'enabled': True} is refused by DeepSpeed (Elastic tra"),
    ({"zero_optimization": {**ZERO, "mics_shard_size": 2}}, "MiCS ZeRO-3 sharding has been removed"),
    ({"zero_optimization": {**ZERO, "stge": 3}}, "deepspeed: zero_optimization.stge=3: DeepSpeed has no such key"),
    (
        {"zero_optimization": {**ZERO, "offload_optimizer": {"device": "gpu"}}},
        "deepspeed: zero_optimization.offload_optimizer.device='gpu' is refused by DeepSpeed (Input should be 'none'",
    ),
    ({"fp16": {"enabled": False, "loss_scal": 3}}, "deepspeed: fp16.loss_scal=3: DeepSpeed has no such key"),
    ({"tensorboard": {"path": "x"}}, "deepspeed: tensorboard.path='x': DeepSpeed has no such key"),
    ({"comms_logger": True}, "deepspeed: comms_logger=True is refused by DeepSpeed"),
    ({"communication_data_type": "fp7"}, "deepspeed: communication_data_type='fp7' is refused by DeepSpeed"),
    ({"optimizer": {"type": 3}}, "deepspeed: optimizer={'type': 3} is refused by DeepSpeed"),
]
#: The same for what DeepSpeed sees when it makes its engine.
NO_ENGINE = [
    ({"optimizer": {**ADAM, "type": "AdamWW"}}, "AdamWW is not a supported DeepSpeed Optimizer"),
    ({"optimizer": {**ADAM, "params": {"learning_rate": 1e-3}}}, "unexpected keyword argument 'learning_rate'"),
    ({"scheduler": {"type": "WarmupLr", "params": {}}}, "does not recognize LR scheduler WarmupLr"),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup": 3}}}, "unexpected keyword argument 'warmup'"),
]


def make_trainer(folder, config, kind=Trainer):
    settings = {"max_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    args = TrainingArguments(str(folder), deepspeed={**STAGES[2], **config}, **settings)
    return kind(make_plain(), args, train_dataset=plain_data(24))


@pytest.mark.parametrize(("config", "words"), REFUSED, ids=json.dumps)
def test_wrong_section_is_refused_before_the_engine_is_made(tmp_path, config, words):
    with pytest.raises(InvalidConfig) as found:
        make_trainer(tmp_path, config)
    assert words in str(found.value)
    assert "pydantic" not in str(found.value)
    assert str(found.value).endswith("correct the value, or remove the key.")


@pytest.mark.parametrize(("config", "words"), NO_ENGINE, ids=json.dumps)
def test_value_that_the_engine_refuses_is_named(tmp_path, config, words):
    trainer = make_trainer(tmp_path, config)
    with pytest.raises(InvalidConfig, match="deepspeed: DeepSpeed cannot create an engine from") as found:
        trainer.train()
    assert words in str(found.value)
    assert str(config) in str(found.value).replace(", 'zero_optimization': {'stage': 2}", "")


def test_errors_of_an_override_are_raised_unchanged(tmp_path):
    class Own(Trainer):
        def create_scheduler(self, num_training_steps, optimizer=None):
            raise TypeError("of the script")

    with pytest.raises(TypeError, match="of the script"):
        make_trainer(tmp_path, {"optimizer": ADAM}, Own).train()


def test_errors_of_the_compiler_are_not_taken_for_config_errors(tmp_path, monkeypatch):
    """On an H100, DeepSpeed 0.19 with torch 2.11 fails to read "10.0a" in a list of architectures."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    source = "def initialize(**kwargs):\n    int('0a')"
    exec(compile(source, OpBuilder.__module__.replace(".", "/"), "exec"), (names := {}))
    monkeypatch.setattr("deepspeed.initialize", names["initialize"])
    with pytest.raises(ValueError, match="invalid literal for int") as found:
        make_trainer(tmp_path, {"optimizer": ADAM}).train()
    assert not isinstance(found.value, InvalidConfig)


def test_ignored_keys_are_named(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    make_trainer(tmp_path, {"gradient_cliping": 1.0})
    assert "DeepSpeed ignores the key 'gradient_cliping': did you mean 'gradient_clipping'?" in caplog.text
    caplog.clear()
    make_trainer(tmp_path, {"optimizer": ADAM, "wall_clock_breakdown": False})
    assert "ignores the key" not in caplog.text
