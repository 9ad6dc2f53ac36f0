"""Resumed runs end as undisturbed ones, also from a checkpoint of the other library.

`tests/compat/test_interchange.py` does this with v4.57.
"""

import functools
import json

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file

from hftrainer.checkpointing import weights
from tests.compat.interchange import make_adapters, make_tied
from tests.support import parity
from tests.support.known_differences import OWN_FILES
from tests.support.parity import assert_agree, assert_same_weights, build, copy_checkpoint, train
from tests.support.small_models import MODELS, language_data, make_llama, make_peft

#: Way → writer and reader.
WAYS = {
    "ours-ours": ("hftrainer", "hftrainer"),
    "theirs-ours": ("transformers", "hftrainer"),
    "ours-theirs": ("hftrainer", "transformers"),
}
every_way = pytest.mark.parametrize(("writer", "reader"), WAYS.values(), ids=WAYS)
#: Micro-batches in a step, and the step to resume from. An epoch has 10 micro-batches: with 3 in a step it has 4 steps,
#: the last of one micro-batch. In the middle of an epoch, at its end, and in the middle of the second.
PLACES = [(1, 4), (1, 10), (1, 13), (3, 2), (3, 4), (3, 6)]


def settings_of(accumulation, step, **settings):
    saved = {"save_strategy": "steps", "save_steps": step, "eval_strategy": "steps", "eval_steps": 3}
    return {"gradient_accumulation_steps": accumulation, "logging_steps": 1, **saved, **settings}


@pytest.fixture(scope="module")
def whole_runs(tmp_path_factory):
    @functools.cache
    def run(writer, accumulation, step):
        folder = tmp_path_factory.mktemp("whole")
        return train(writer, "plain", folder, **settings_of(accumulation, step)), folder

    return run


def resume(reader, written, folder, accumulation, step, **settings):
    copy_checkpoint(written, folder, step)
    return train(reader, "plain", folder, resume=True, **settings_of(accumulation, step, **settings))


@pytest.mark.parametrize(("accumulation", "step"), PLACES)
def test_transformers_resumes_our_checkpoints(tmp_path, whole_runs, accumulation, step):
    undisturbed, written = whole_runs("hftrainer", accumulation, step)
    resumed = resume("transformers", written, tmp_path, accumulation, step)
    assert_same_weights(resumed.weights, undisturbed.weights)
    assert resumed.logs[:-1] == undisturbed.logs[:-1]  # the last line has the mean loss of this call alone
    assert resumed.extra["global_step"] == undisturbed.extra["global_step"]


@pytest.mark.parametrize(("accumulation", "step"), PLACES)
def test_both_resume_a_checkpoint_of_transformers_alike(tmp_path, whole_runs, accumulation, step):
    undisturbed, written = whole_runs("transformers", accumulation, step)
    resumed = assert_agree(lambda name: resume(name, written, tmp_path / name, accumulation, step))
    assert_same_weights(resumed.weights, undisturbed.weights)
    assert resumed.logs[:-1] == undisturbed.logs[:-1]


def test_ignore_data_skip_resumes_alike(tmp_path, whole_runs):
    _, written = whole_runs("transformers", 1, 4)
    assert_agree(lambda name: resume(name, written, tmp_path / name, 1, 4, ignore_data_skip=True))


def test_complete_run_resumed_with_eval_on_start(tmp_path):
    def run(name):
        settings = {"save_strategy": "epoch", "num_train_epochs": 1, "eval_on_start": True}
        return [train(name, "plain", tmp_path / name, resume, **settings) for resume in (None, True)][1]

    assert_agree(run, parity.assert_same)


ACCUMULATING = {**settings_of(3, 2), "eval_steps": 2, "learning_rate": 5e-2}
BEST = {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
KINDS = {**MODELS, "adapters": (make_adapters, language_data), "tied": (make_tied, language_data)}


def run(name, model, folder, resume=None, **settings):
    return train(name, KINDS[model], folder, resume, **ACCUMULATING, **settings)


def read(path):
    if path.suffix == ".safetensors":
        return load_file(path)
    if path.suffix == ".json":
        return json.loads(path.read_text())
    return torch.load(path, weights_only=path.name != "rng_state.pth")


def structure(value):
    if isinstance(value, dict):
        return {key: structure(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [structure(inner) for inner in value[:3]]
    return (str(value.dtype), tuple(value.shape)) if hasattr(value, "shape") else type(value).__name__


@pytest.mark.parametrize("model", ["plain", "bert", "llama", "tied", "peft", "adapters"])
def test_checkpoint_files_hold_the_same_keys(tmp_path, model):
    def held(name):
        run(name, model, tmp_path / name)
        folder = tmp_path / name / "checkpoint-4"
        files = {str(path.relative_to(folder)): path for path in folder.rglob("*.*") if path.name not in OWN_FILES}
        unread = (".md", "training_args.bin")
        return {name: name.endswith(unread) or structure(read(path)) for name, path in files.items()}

    assert len(assert_agree(held)) >= 6


#: Name → model and settings.
RESUMED_CASES = {
    **{f"{model}-best": (model, BEST) for model in ("bert", "llama", "peft")},
    **{f"{model}-bf16": (model, {"bf16": True}) for model in ("llama", "adapters")},
}


def run_case(name, folder, resume, case):
    model, more = RESUMED_CASES[case]
    if more is BEST:
        stopper = lambda library: library.EarlyStoppingCallback(9, early_stopping_threshold=5.0)  # noqa: E731
        more = {**BEST, "restore_callback_states_from_checkpoint": True, "callback": stopper}

    def script(trainer):
        trainer.train(resume_from_checkpoint=resume)
        counters = [vars(each).get("early_stopping_patience_counter") for each in trainer.callback_handler.callbacks]
        state = trainer.state
        return counters, state.best_metric, state.best_global_step, state.total_flos, state.epoch

    return run(name, model, folder, script=script, **more)


@pytest.fixture(scope="module")
def interrupted_runs(tmp_path_factory):
    @functools.cache
    def begin(writer, case):
        folder = tmp_path_factory.mktemp("begun")
        return run_case(writer, folder, None, case), folder

    return begin


@every_way
@pytest.mark.parametrize("case", RESUMED_CASES)
def test_resume_restores_best_metric_log_flos_and_patience(tmp_path, interrupted_runs, case, writer, reader):
    whole, folder = interrupted_runs(writer, case)
    copy_checkpoint(folder, tmp_path, 2)
    resumed = run_case(reader, tmp_path, True, case)
    assert (resumed.extra, resumed.logs[:-1]) == (whole.extra, whole.logs[:-1])
    assert_same_weights(resumed.weights, whole.weights)


#: Layout → beginnings of file names, settings of ours, the limit of a file's size.
LAYOUTS = {
    "safetensors": (["model.safetensors"], {}, None),
    "bin": (["pytorch_model.bin"], {"save_safetensors": False}, None),
    "sharded": (["model-00001-of", "model.safetensors.index.json"], {}, 8000),
    "sharded bin": (["pytorch_model-00001-of", "pytorch_model.bin.index.json"], {"save_safetensors": False}, 8000),
}
AUTO = {"bert": transformers.AutoModelForSequenceClassification}
#: `RESUMED_CASES` has the usual layout of the others; each of the remaining layouts is here once.
OF_MODELS = [*(("tied", layout) for layout in LAYOUTS), ("plain", "bin"), ("plain", "sharded")]
OF_MODELS += [("bert", "sharded bin"), ("bert", "sharded"), ("llama", "bin")]


@pytest.mark.parametrize(("model", "layout"), OF_MODELS)
def test_each_layout_of_weights_resumes_and_loads(tmp_path, monkeypatch, model, layout):
    """Written by ours, resumed in both with the best model loaded at the end, and read by `from_pretrained`."""
    expected, more, size = LAYOUTS[layout]
    if size:
        size = 600 if model == "plain" else size  # a few files: transformers takes long to read many
        monkeypatch.setattr(weights, "MAX_SHARD_SIZE", size)
        for kind in (transformers.BertForSequenceClassification, transformers.LlamaForCausalLM):
            limited = functools.partialmethod(kind.save_pretrained, max_shard_size=size)
            monkeypatch.setattr(kind, "save_pretrained", limited)
    whole = run("hftrainer", model, tmp_path, **more, **BEST)
    files = whole.files["checkpoint-2"]
    assert all(any(file.startswith(start) for file in files) for start in expected)
    assert not {"model.safetensors", "pytorch_model.bin"}.difference(expected).intersection(files)
    for reader, settings in (("hftrainer", more), ("transformers", {})):
        copy_checkpoint(tmp_path, tmp_path / reader, 2)
        resumed = run(reader, model, tmp_path / reader, True, **settings, **BEST)
        assert_same_weights(resumed.weights, whole.weights)
    if model != "plain":
        best = read(tmp_path / "checkpoint-8" / "trainer_state.json")["best_model_checkpoint"]
        loaded = AUTO.get(model, transformers.AutoModelForCausalLM).from_pretrained(best)
        assert_same_weights(loaded.state_dict(), whole.weights)
        assert model != "tied" or loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_adapter_added_by_transformers_is_saved_alone(tmp_path, monkeypatch):
    """`model.add_adapter` of transformers, without PEFT's wrapper."""
    # transformers 5.24 asks for a PEFT that had not been released when it appeared, and works with the one before.
    monkeypatch.setattr(transformers.integrations.peft, "MIN_PEFT_VERSION", "0.20.0")
    model = make_llama()
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))
    held = []
    for safe in (True, False):
        weights.save_weights(model, str(tmp_path / str(safe)), safe=safe)
        file = "adapter_model.safetensors" if safe else "adapter_model.bin"
        assert [path.name for path in (tmp_path / str(safe)).glob("*model*")] == [file]
        held.append(read(tmp_path / str(safe) / file))
    assert_same_weights(*held)


@every_way
@pytest.mark.parametrize("as_bin", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize("model", ["peft", "adapters"])
def test_adapters_are_saved_alone_and_resume(tmp_path, model, as_bin, writer, reader):
    """Each is where PEFT looks for it, and `PeftModel.from_pretrained` reads it."""
    settings = {"hftrainer": {"save_safetensors": False} if as_bin else {}, "transformers": {}}
    whole = run(writer, model, tmp_path, **settings[writer])
    copy_checkpoint(tmp_path, tmp_path / "resumed", 2)
    resumed = run(reader, model, tmp_path / "resumed", True, **settings[reader])
    assert_same_weights(resumed.weights, whole.weights)
    written = tmp_path / "checkpoint-8"
    file = "adapter_model.bin" if settings[writer] else "adapter_model.safetensors"
    for folder in [written] if model == "peft" else [written, written / "second"]:
        assert [path.name for path in folder.glob("*model.*")] == [file]
    loaded = PeftModel.from_pretrained(make_llama(), written)
    if model == "adapters":
        loaded.load_adapter(written / "second", "second")
    adapters = {name: value for name, value in whole.weights.items() if "lora" in name}
    assert_same_weights({name: loaded.state_dict()[name] for name in adapters}, adapters)


def make_partly_frozen():
    """Both adapters are active, and of the second a part is frozen; its weights are in bfloat16."""
    model = make_adapters()
    model.base_model.set_adapter(["default", "second"])
    for name, parameter in model.named_parameters():
        if "second" in name:
            parameter.data = parameter.data.bfloat16()
            parameter.requires_grad_("lora_B" in name)
    return model


def flags(model):
    return {name: (parameter.requires_grad, parameter.dtype) for name, parameter in model.named_parameters()}


def test_resume_keeps_requires_grad_and_dtype_of_adapters(tmp_path):
    def train_one(resume=None, **settings):
        model = make_partly_frozen()
        train("hftrainer", "peft", tmp_path, resume, trainer={"model": model}, **ACCUMULATING, **settings)
        assert flags(model) == flags(make_partly_frozen())
        assert model.active_adapters == ["default", "second"]
        return model.state_dict()

    train_one(**BEST)
    assert_same_weights(train_one(), train_one(str(tmp_path / "checkpoint-2")))


def test_adapter_that_the_model_lacks_is_loaded_frozen(tmp_path):
    run("hftrainer", "adapters", tmp_path)
    trainer, _ = build("hftrainer", "peft", tmp_path, **ACCUMULATING)
    trainer._load_from_checkpoint(str(tmp_path / "checkpoint-2"))
    model, expected = trainer.model, flags(make_peft())
    assert set(model.peft_config) == {"default", "second"} and model.active_adapters == ["default"]
    assert {name: each for name, each in flags(model).items() if each[0]} == {n: f for n, f in expected.items() if f[0]}
    saved = load_file(tmp_path / "checkpoint-2" / "second" / "adapter_model.safetensors")
    held = {name.replace(".second", ""): value for name, value in model.state_dict().items() if ".second" in name}
    assert_same_weights(held, saved)


def test_v4_weights_with_renamed_parameters_resume(tmp_path):
    """`pytorch_model.bin` has names that v5 changed, and a buffer that it dropped."""
    whole = run("hftrainer", "bert", tmp_path)
    folder = copy_checkpoint(tmp_path, tmp_path / "resumed", 2)
    held = {"bert.embeddings.position_ids": torch.arange(32)[None]}
    for name, value in load_file(folder / "model.safetensors").items():
        name = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        held[name] = value
    torch.save(held, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    (folder / "hftrainer_manifest.json").unlink()
    resumed = run("hftrainer", "bert", tmp_path / "resumed", True)
    assert_same_weights(resumed.weights, whole.weights)
