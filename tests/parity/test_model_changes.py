"""What arguments change about a model: NEFTune, checkpointed activations, compilation, liger kernels."""

import sys
import types

import pytest
import torch
from torch import nn

from hftrainer.errors import InvalidArgument, MissingPackage
from tests.support.parity import EVALUATED, alike, assert_same_weights, build, compare, train
from tests.support.tiny import make_plain


def test_compiling_in_place(tmp_path):
    """What is advised while torch_compile is planned."""

    def make():
        model = make_plain()
        model.compile(backend="eager")
        return {"model": model}

    trained = train("hftrainer", "plain", tmp_path / "compiled", trainer=make(), max_steps=3)
    plain = train("hftrainer", "plain", tmp_path / "plain", max_steps=3)
    assert trained.logs == plain.logs


@pytest.mark.parametrize("model", ["bert", "llama", "peft"])
def test_neftune(tmp_path, model):
    noisy = compare(tmp_path, model, neftune_noise_alpha=5.0, **EVALUATED)
    quiet = train("hftrainer", model, tmp_path / "quiet", **EVALUATED)
    assert noisy.logs[0]["loss"] != quiet.logs[0]["loss"]


def test_neftune_is_taken_off(tmp_path):
    trainer, _ = build("hftrainer", "bert", tmp_path, neftune_noise_alpha=5.0, max_steps=1)
    embeddings = trainer.model.get_input_embeddings()
    trainer.train()
    assert not embeddings._forward_hooks
    plain, _ = build("hftrainer", "plain", tmp_path, neftune_noise_alpha=5.0)
    with pytest.raises(InvalidArgument, match="Plain has no get_input_embeddings"):
        plain.train()


@pytest.mark.parametrize("kwargs", [None, {"use_reentrant": False}, {"use_reentrant": False, "every_n_layers": 2}])
@pytest.mark.parametrize("model", ["bert", "llama"])
def test_activation_checkpointing(tmp_path, model, kwargs):
    settings = {"activation_checkpointing": True, "activation_checkpointing_kwargs": kwargs}
    checkpointed = compare(tmp_path, model, **settings)
    kept = train("hftrainer", model, tmp_path / "kept")
    assert_same_weights(checkpointed.weights, kept.weights)  # only memory and time differ


def test_activations_are_computed_again(tmp_path):
    """By the name of v4 too; and a model without it says so."""
    calls = []
    trainer, _ = build("hftrainer", "llama", tmp_path, gradient_checkpointing=True, max_steps=1)
    trainer.model.model.layers[0].mlp.act_fn.register_forward_hook(lambda *_: calls.append(1))
    trainer.train()
    assert len(calls) == 2  # forward, and again in backward
    plain, _ = build("hftrainer", "plain", tmp_path, gradient_checkpointing=True)
    with pytest.raises(InvalidArgument, match=r"which Plain lacks: add it"):
        plain.train()


@pytest.mark.parametrize("model", ["plain", "bert"])
@pytest.mark.parametrize("bf16", [False, True])
def test_compilation(tmp_path, model, bf16):
    settings = {"torch_compile_backend": "aot_eager", "max_steps": 4, "bf16": bf16, "logging_steps": 1}

    def run(library):
        torch._dynamo.reset()
        return train(library, model, tmp_path / library, **settings)

    alike(run)


def test_compilation_settings(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **kwargs: asked.append(kwargs))
    for settings in ({"torch_compile": True}, {"torch_compile_mode": "reduce-overhead"}):
        trainer, _ = build("hftrainer", "plain", tmp_path, max_steps=1, **settings)
        trainer.train()
    assert asked == [
        {"backend": "inductor", "mode": None, "fullgraph": False, "dynamic": None},
        {"backend": "inductor", "mode": "reduce-overhead", "fullgraph": False, "dynamic": None},
    ]


def test_liger_kernel(tmp_path, monkeypatch):
    trainer, _ = build("hftrainer", "llama", tmp_path, use_liger_kernel=True, max_steps=1)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    with pytest.raises(MissingPackage, match="pip install liger-kernel"):
        trainer.train()
    stand_in, applied = types.ModuleType("liger_kernel.transformers"), []
    stand_in._apply_liger_kernel_to_instance = lambda model, **config: applied.append((model, config))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", stand_in)
    trainer.args.liger_kernel_config = {"rope": False}
    trainer.train()
    assert applied == [(trainer.model, {"rope": False})]
    adapted, _ = build("hftrainer", "peft", tmp_path, use_liger_kernel=True, max_steps=1)
    adapted.train()
    assert applied[-1] == (adapted.model.get_base_model(), {})
