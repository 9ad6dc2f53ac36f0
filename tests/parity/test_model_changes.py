"""Kinds of models, and arguments that change a model (NEFTune, checkpointing, compilation), beside transformers."""

import functools
import sys
import types

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hftrainer.errors import InvalidArgument, MissingPackage
from tests.support.parity import EVALUATED, EVERY_STEP, assert_same_weights, build, compare, train
from tests.support.small_models import Plain, language_data, make_llama, make_plain, plain_data


@pytest.mark.parametrize("accumulation", [1, 3])
def test_model_with_tuple_outputs_trains_alike(tmp_path, accumulation):
    compare(tmp_path, "tuple", gradient_accumulation_steps=accumulation, **EVERY_STEP, load_best_model_at_end=True)


@pytest.mark.parametrize("model_init", [Plain, lambda trial: Plain()])
def test_model_init_makes_a_new_model_for_each_run(tmp_path, model_init):
    def script(trainer):
        return [trainer.train().training_loss for _ in range(2)]

    first, second = compare(tmp_path, "plain", script=script, trainer={"model_init": model_init}).extra["script"]
    assert first == second


class Remembers(Plain):
    """Gets its own output back as `mems`, as XLNet does."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x, labels=None, mems=None):
        self.seen.append(mems is not None)
        outputs = super().forward(x, labels)
        state = outputs["logits"].detach()
        return (outputs["loss"], state) if labels is not None else (state, state)


@pytest.mark.parametrize(("index", "again"), [(1, True), (-1, False)])
def test_past_index_feeds_an_output_into_the_next_step(tmp_path, index, again):
    """As documented until v4.57; each epoch begins without one."""
    trainer_kwargs = {"model": Remembers(), "train_dataset": plain_data(8), "eval_dataset": plain_data(16)}
    trainer, _ = build("hftrainer", "plain", tmp_path, trainer=trainer_kwargs, past_index=index)
    trainer.train()
    trainer.evaluate()
    assert trainer.model.seen == [False, again] * 3  # two epochs of two steps, and two batches


def test_torch_empty_cache_steps_empties_the_cache(tmp_path, monkeypatch):
    emptied = []
    monkeypatch.setattr("hftrainer.parallel.devices.empty_cache", lambda: emptied.append(1))
    compare(tmp_path, "plain", torch_empty_cache_steps=3, max_steps=7)
    assert len(emptied) == 4  # when training begins, and before steps 1, 4 and 7


def test_include_tokens_per_second_reports_all_input_tokens(tmp_path):
    """As v4.48 does, at the end of training."""
    included, without = (
        build("hftrainer", "llama", tmp_path, include_tokens_per_second=value, max_steps=3)[0].train().metrics
        for value in (True, False)
    )
    tokens = 3 * 4 * 12  # steps, samples, tokens of each
    assert included["train_tokens_per_second"] == pytest.approx(tokens / included["train_runtime"], rel=0.05)
    assert "train_tokens_per_second" not in without


@pytest.mark.parametrize("model", ["bert", "llama", "peft"])
def test_neftune_noise_trains_alike_and_its_hook_is_removed(tmp_path, model):
    def script(trainer):
        embeddings = trainer.model.get_input_embeddings()
        trainer.train()
        return len(embeddings._forward_hooks)

    noisy = compare(tmp_path, model, script=script, neftune_noise_alpha=5.0, **EVALUATED)
    quiet = train("hftrainer", model, tmp_path / "quiet", **EVALUATED)
    assert noisy.logs[0]["loss"] != quiet.logs[0]["loss"]
    assert noisy.extra["script"] == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"neftune_noise_alpha": 5.0}, "Plain has no get_input_embeddings"),
        ({"gradient_checkpointing": True}, "which Plain lacks: add it"),
    ],
)
def test_model_without_the_needed_method_is_refused(tmp_path, settings, message):
    with pytest.raises(InvalidArgument, match=message):
        train("hftrainer", "plain", tmp_path, **settings)


@pytest.mark.parametrize(
    ("model", "kwargs"),
    [
        ("bert", None),
        ("llama", {"use_reentrant": False}),
        *((model, {"use_reentrant": False, "every_n_layers": 2}) for model in ("bert", "llama")),
    ],
)
def test_activation_checkpointing_keeps_weights(tmp_path, model, kwargs):
    settings = {"activation_checkpointing": True, "activation_checkpointing_kwargs": kwargs}
    checkpointed = compare(tmp_path, model, **settings)
    kept = train("hftrainer", model, tmp_path / "kept")
    assert_same_weights(checkpointed.weights, kept.weights)  # only memory and time differ


def test_gradient_checkpointing_recomputes_activations(tmp_path):
    """Also by the argument's name in v4."""
    calls = []
    trainer, _ = build("hftrainer", "llama", tmp_path, gradient_checkpointing=True, max_steps=1)
    trainer.model.model.layers[0].mlp.act_fn.register_forward_hook(lambda *_: calls.append(1))
    trainer.train()
    assert len(calls) == 2  # forward, and again in backward


def test_model_compiled_in_place_trains_alike(tmp_path):
    model = make_plain()
    model.compile(backend="eager")
    trained = train("hftrainer", "plain", tmp_path / "compiled", trainer={"model": model}, max_steps=3)
    plain = train("hftrainer", "plain", tmp_path / "plain", max_steps=3)
    assert trained.logs == plain.logs


def test_compiled_model_is_saved_under_plain_names_and_resumes(tmp_path):
    """transformers writes the names with the prefix `_orig_mod.`."""
    settings = {**EVERY_STEP, "max_steps": 4}

    def run(folder, resume=None, compiled=True):
        model = torch.compile(make_llama(), backend="eager") if compiled else make_llama()
        return train("hftrainer", "llama", tmp_path / folder, resume, trainer={"model": model}, **settings)

    whole, plain = run("compiled"), run("plain", compiled=False)
    assert whole.logs == plain.logs
    files = [load_file(tmp_path / name / "checkpoint-4/model.safetensors") for name in ("compiled", "plain")]
    assert files[0].keys() == files[1].keys()
    resumed = run("again", str(tmp_path / "compiled/checkpoint-2"))
    assert_same_weights(resumed.weights, whole.weights)


@pytest.mark.parametrize(
    ("settings", "mode"),
    [({"torch_compile": True}, None), ({"torch_compile_mode": "reduce-overhead"}, "reduce-overhead")],
)
def test_torch_compile_arguments_reach_module_compile(tmp_path, monkeypatch, settings, mode):
    asked = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **kwargs: asked.append(kwargs))
    train("hftrainer", "plain", tmp_path, max_steps=1, **settings)
    assert asked == [{"backend": "inductor", "mode": mode, "fullgraph": False, "dynamic": None}]


def test_liger_kernel_is_applied_or_its_package_asked_for(tmp_path, monkeypatch):
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


@pytest.mark.parametrize(("release", "skips"), [("5.22", [False, False]), ("5.23", [True, False])])
def test_liger_kernel_skips_logits_in_evaluations_since_v5_23(tmp_path, monkeypatch, release, skips):
    """The loss alone is computed without the logits, since v5.23."""
    monkeypatch.setattr("hftrainer.model.apply_arguments.apply_liger_kernel", lambda model, config: None)
    more = {"use_liger_kernel": True, "lightning_config": {"behaviour": release}}
    trainer, _ = build("hftrainer", "llama", tmp_path, **more)
    got, forward = [], trainer.model.forward
    trainer.model.forward = functools.wraps(forward)(
        lambda *args, skip_logits=False, **kwargs: got.append(skip_logits) or forward(*args, **kwargs)
    )
    trainer.evaluate()
    asked = got[0]
    got.clear()
    trainer.predict(language_data(4))
    assert [asked, got[0]] == skips
