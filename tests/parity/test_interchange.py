"""Checkpoints of one library in the other: every file, every layout of weights, every kind of model.

`test_resume.py` goes through the places in an epoch; `tests/compat/test_interchange.py` does this with v4.57.
"""

import functools
import importlib
import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file

from hftrainer.checkpointing import weights
from tests.compat.interchange import make_adapters, make_tied
from tests.support.differences import OWN_FILES
from tests.support.parity import assert_same_weights, build, train
from tests.support.tiny import make_llama, make_peft

WAYS = [("hftrainer", "hftrainer"), ("transformers", "hftrainer"), ("hftrainer", "transformers")]
every_way = pytest.mark.parametrize(("writer", "reader"), WAYS, ids=["ours-ours", "theirs-ours", "ours-theirs"])
STEPS = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "logging_steps": 1}
ACCUMULATING = {**STEPS, "gradient_accumulation_steps": 3, "learning_rate": 5e-2}
BEST = {"load_best_model_at_end": True, "metric_for_best_model": "loss"}


def settings_of(model, **more):
    """The data that a model takes, and the model."""
    own = {"adapters": make_adapters, "tied": make_tied}
    trainer = {"model": own[model]()} if model in own else {}
    return {**ACCUMULATING, "trainer": trainer, **more}


def run(name, model, folder, resume=None, **more):
    like = {"adapters": "peft", "tied": "llama"}.get(model, model)
    return train(name, like, folder, resume, **settings_of(model, **more))


def copy_checkpoint(source, target, step=2):
    shutil.copytree(source / f"checkpoint-{step}", target / f"checkpoint-{step}")


def read(path):
    if path.suffix == ".safetensors":
        return load_file(path)
    if path.suffix == ".json":
        return json.loads(path.read_text())
    return torch.load(path, weights_only=path.name != "rng_state.pth")


def structure(value):
    """Keys, types and shapes of what a file holds."""
    if isinstance(value, dict):
        return {key: structure(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [structure(inner) for inner in value[:3]]
    return (str(value.dtype), tuple(value.shape)) if hasattr(value, "shape") else type(value).__name__


@pytest.mark.parametrize("model", ["plain", "bert", "llama", "tied", "peft", "adapters"])
def test_every_file_holds_the_same_keys(tmp_path, model):
    folders = [tmp_path / name / "checkpoint-4" for name in ("hftrainer", "transformers")]
    for folder in folders:
        run(folder.parent.name, model, folder.parent)
    found = [{str(path.relative_to(folder)) for path in folder.rglob("*.*")} for folder in folders]
    ours, theirs = (sorted(files - OWN_FILES) for files in found)
    assert ours == theirs
    compared = [name for name in ours if not name.endswith((".md", "training_args.bin"))]
    assert len(compared) >= 5
    for name in compared:
        assert structure(read(folders[0] / name)) == structure(read(folders[1] / name)), name


@every_way
@pytest.mark.parametrize("more", [{"bf16": True}, {**BEST, "restore_callback_states_from_checkpoint": True}])
@pytest.mark.parametrize("model", ["bert", "llama", "peft", "adapters"])
def test_what_goes_on(tmp_path, model, more, writer, reader):
    """The best metric, the log, the operations counted, the patience of early stopping, beside the weights."""
    if model == "adapters" and BEST.keys() <= more.keys():
        pytest.skip("transformers loads the first adapter into the second one")
    results = []
    for name, folder in ((writer, tmp_path / "whole"), (reader, tmp_path / "resumed")):
        if folder.name == "resumed":
            copy_checkpoint(tmp_path / "whole", folder)
        like = {"adapters": "peft"}.get(model, model)
        trainer, _ = build(name, like, folder, **settings_of(model, **more))
        stopper = importlib.import_module(name).EarlyStoppingCallback(9, early_stopping_threshold=5.0)
        if BEST.keys() <= more.keys():
            trainer.add_callback(stopper)
        trainer.train(resume_from_checkpoint=folder.name == "resumed")
        counters = [
            getattr(found, "early_stopping_patience_counter", None) for found in trainer.callback_handler.callbacks
        ]
        state = trainer.state
        known = [
            state.best_metric,
            state.best_global_step,
            state.total_flos,
            state.epoch,
            max(c or 0 for c in counters),
        ]
        logs = [
            {k: v for k, v in line.items() if "_per_second" not in k and "runtime" not in k}
            for line in state.log_history
        ]
        results.append((known, logs[:-1], {key: value.clone() for key, value in trainer.model.state_dict().items()}))
    whole, resumed = results
    assert resumed[:2] == whole[:2]
    assert_same_weights(resumed[2], whole[2])


LAYOUTS = {
    "bin": (["pytorch_model.bin"], {"save_safetensors": False}, None),
    "sharded": (["model-00001-of", "model.safetensors.index.json"], {}, 8000),
    "sharded bin": (["pytorch_model-00001-of", "pytorch_model.bin.index.json"], {"save_safetensors": False}, 8000),
}


@pytest.fixture
def small_shards(monkeypatch):
    def shrink(size):
        monkeypatch.setattr(weights, "MAX_SHARD_SIZE", size)
        for kind in (transformers.BertForSequenceClassification, transformers.LlamaForCausalLM):
            monkeypatch.setattr(
                kind, "save_pretrained", functools.partialmethod(kind.save_pretrained, max_shard_size=size)
            )

    return shrink


@pytest.fixture(scope="module")
def runs_of_ours(tmp_path_factory):
    """A run of ours from beginning to end, and its folder, made once for each kind of model and layout."""

    @functools.cache
    def run_once(model, layout):
        folder = tmp_path_factory.mktemp("run")
        more = BEST if layout is None else LAYOUTS[layout][1]
        return run("hftrainer", model, folder, **more), folder

    return run_once


@pytest.mark.parametrize("reader", ["hftrainer", "transformers"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", ["plain", "bert", "llama", "tied"])
def test_layouts(tmp_path, small_shards, runs_of_ours, model, layout, reader):
    """Written here, resumed in both, with the best model loaded at the end."""
    expected, more, size = LAYOUTS[layout]
    if (model, layout) == ("plain", "sharded bin"):
        pytest.skip("a plain module is one .bin file, as in v4")
    undisturbed, _ = runs_of_ours(model, None)
    if size:
        small_shards(600 if model == "plain" else size)  # a few files: transformers takes long to read many
    _, begun = runs_of_ours(model, layout)
    copy_checkpoint(begun, tmp_path / "resumed")
    files = [path.name for path in (tmp_path / "resumed" / "checkpoint-2").iterdir()]
    assert all(any(file.startswith(start) for file in files) for start in expected)
    assert not {"model.safetensors", "pytorch_model.bin"}.difference(expected).intersection(files)
    given = {**more, **BEST} if reader == "hftrainer" else BEST
    resumed = run(reader, model, tmp_path / "resumed", True, **given)
    assert_same_weights(resumed.weights, undisturbed.weights)


@pytest.mark.parametrize("layout", ["safetensors", *LAYOUTS])
@pytest.mark.parametrize("model", ["bert", "llama", "tied"])
def test_from_pretrained(tmp_path, small_shards, model, layout):
    _, more, size = LAYOUTS.get(layout, (None, {}, None))
    if size:
        small_shards(size)
    trained = run("hftrainer", model, tmp_path, num_train_epochs=1, **more)
    auto = transformers.AutoModelForSequenceClassification if model == "bert" else transformers.AutoModelForCausalLM
    loaded = auto.from_pretrained(tmp_path / "checkpoint-4")
    assert_same_weights(loaded.state_dict(), trained.weights)
    if model == "tied":
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_adapters_inside_a_pretrained_model(tmp_path):
    """`model.add_adapter` of transformers, without PEFT's wrapper."""
    from peft import LoraConfig

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
def test_adapters(tmp_path, model, as_bin, writer, reader):
    """Adapters alone are written, each to where PEFT looks for it, and `PeftModel.from_pretrained` reads them."""
    from peft import PeftModel

    def given(name):
        return {"save_safetensors": False} if as_bin and name == "hftrainer" else {}

    undisturbed = run(writer, model, tmp_path / "whole", **given(writer))
    copy_checkpoint(tmp_path / "whole", tmp_path / "resumed")
    resumed = run(reader, model, tmp_path / "resumed", True, **given(reader))
    assert_same_weights(resumed.weights, undisturbed.weights)
    written = tmp_path / "whole" / "checkpoint-8"
    file = "adapter_model.bin" if given(writer) else "adapter_model.safetensors"
    folders = [written] if model == "peft" else [written, written / "second"]
    assert all((folder / file).is_file() for folder in folders)
    assert not (written / "model.safetensors").exists() and not (written / "pytorch_model.bin").exists()
    loaded = PeftModel.from_pretrained(make_llama(), written)
    if model == "adapters":
        loaded.load_adapter(written / "second", "second")
    adapters = {name: value for name, value in undisturbed.weights.items() if "lora" in name}
    assert_same_weights({name: loaded.state_dict()[name] for name in adapters}, adapters)


@pytest.mark.parametrize("resumes", [True, False], ids=["resumed", "best model"])
def test_flags_of_adapters_stay(tmp_path, resumes):
    """Both adapters are active, and of the second a part is frozen; its weights are in bfloat16."""

    def make():
        model = make_adapters()
        model.base_model.set_adapter(["default", "second"])
        for name, parameter in model.named_parameters():
            if "second" in name:
                parameter.data = parameter.data.bfloat16()
                parameter.requires_grad_("lora_B" in name)
        return model

    def flags(model):
        return {name: (parameter.requires_grad, parameter.dtype) for name, parameter in model.named_parameters()}

    more = {} if resumes else BEST
    model = make()
    build("hftrainer", "peft", tmp_path, trainer={"model": model}, **ACCUMULATING, **more)[0].train()
    assert flags(model) == flags(make())
    if resumes:
        again = make()
        trainer, _ = build("hftrainer", "peft", tmp_path, trainer={"model": again}, **ACCUMULATING)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert flags(again) == flags(make())
        assert again.active_adapters == ["default", "second"]
        assert_same_weights(again.state_dict(), model.state_dict())


def test_an_adapter_that_the_model_lacks_comes_frozen(tmp_path):
    run("hftrainer", "adapters", tmp_path)
    model = make_peft()
    trainer, _ = build("hftrainer", "peft", tmp_path, trainer={"model": model}, **ACCUMULATING)
    trainer._load_from_checkpoint(str(tmp_path / "checkpoint-2"))
    assert set(model.peft_config) == {"default", "second"} and model.active_adapters == ["default"]
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trainable == {name for name, parameter in make_peft().named_parameters() if parameter.requires_grad}
    saved = load_file(tmp_path / "checkpoint-2" / "second" / "adapter_model.safetensors")
    held = {name.replace(".second", ""): value for name, value in model.state_dict().items() if ".second" in name}
    assert_same_weights(held, saved)


def test_v4_files_of_an_architecture_renamed_since(tmp_path):
    """A v4 folder: `pytorch_model.bin` in names that v5 has changed, and a buffer that it has dropped."""
    undisturbed = run("hftrainer", "bert", tmp_path / "whole")
    copy_checkpoint(tmp_path / "whole", tmp_path / "resumed")
    folder = tmp_path / "resumed" / "checkpoint-2"
    held = load_file(folder / "model.safetensors")
    held = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): value for name, value in held.items()}
    held = {name.replace("LayerNorm.bias", "LayerNorm.beta"): value for name, value in held.items()}
    torch.save({**held, "bert.embeddings.position_ids": torch.arange(32)[None]}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    (folder / "hftrainer_manifest.json").unlink()
    resumed = run("hftrainer", "bert", tmp_path / "resumed", True)
    assert_same_weights(resumed.weights, undisturbed.weights)
