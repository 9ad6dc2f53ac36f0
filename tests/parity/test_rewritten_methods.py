"""Tools that rewrite the source text of Trainer's methods are refused with that reason; a copied `train` works."""

import functools
import importlib
import inspect
import textwrap

import pytest
import transformers

import hftrainer
from hftrainer.errors import UnsupportedArgument
from tests.support.parity import LIBRARIES, assert_same, build, record
from tests.support.tiny import make_plain, plain_data


def rewritten(function, name, old="", new=""):
    """A function made of the text of another, in the namespace of a tool: the shape of what Unsloth and Axolotl do."""
    text = (
        textwrap.dedent(inspect.getsource(function))
        .replace(old, new)
        .replace(f"def {function.__name__}(", f"def {name}(", 1)
    )
    namespace = {"__name__": "a_tool.patches", "torch": importlib.import_module("torch")}
    exec("from __future__ import annotations\n" + text, namespace)
    return namespace[name]


def make(folder, kind=hftrainer.Trainer):
    args = hftrainer.TrainingArguments(
        str(folder), max_steps=2, per_device_train_batch_size=4, use_cpu=True, report_to="none", save_strategy="no"
    )
    return kind(make_plain(), args, train_dataset=plain_data())


@pytest.fixture
def patched(monkeypatch):
    """The class itself with its loop rewritten."""
    fast = rewritten(hftrainer.Trainer._inner_training_loop, "_fast_inner_training_loop")
    monkeypatch.setattr(hftrainer.Trainer, "_inner_training_loop", fast)


WHY = r"_inner_training_loop \(by a_tool.patches\).*Tools that rewrite the text"


def test_class_patched_before_construction(tmp_path, patched):
    with pytest.raises(UnsupportedArgument, match=WHY):
        make(tmp_path)
    with pytest.raises(UnsupportedArgument, match=WHY):
        make(tmp_path, type("Sub", (hftrainer.Trainer,), {}))


def test_patched_after_construction(tmp_path, monkeypatch):
    trainer = make(tmp_path)
    fast = rewritten(hftrainer.Trainer._inner_training_loop, "_fast")
    monkeypatch.setattr(hftrainer.Trainer, "_inner_training_loop", fast)
    with pytest.raises(UnsupportedArgument, match=WHY):
        trainer.train()


def test_instance_patched(tmp_path):
    trainer = make(tmp_path)
    trainer._inner_training_loop = functools.partial(
        rewritten(hftrainer.Trainer._inner_training_loop, "_fast"), trainer
    )
    trainer._save = rewritten(hftrainer.Trainer._save, "_fast_save").__get__(trainer)
    with pytest.raises(
        UnsupportedArgument, match=r"(?s)(?=.*_save \(by a_tool.patches\))(?=.*_inner_training_loop \(by a_tool)"
    ):
        trainer.train()


def test_text_of_transformers_loop(tmp_path, monkeypatch):
    """A tool that took the text before `install()` puts transformers' loop into our class."""
    fast = rewritten(transformers.Trainer._inner_training_loop, "_fast")
    fast.__globals__.update({name: value for name, value in vars(transformers.trainer).items() if name != "__name__"})
    monkeypatch.setattr(hftrainer.Trainer, "_inner_training_loop", fast)
    with pytest.raises(UnsupportedArgument, match="a copy of transformers' own loop cannot run"):
        make(tmp_path).train()


def test_others_are_not_refused(tmp_path):
    """Overrides that are executed from text, that wrap, or that look behind `_hftrainer` and call super()."""
    namespace = {"Trainer": hftrainer.Trainer, "__name__": "a_script"}
    exec(
        "class Own(Trainer):\n"
        "    def training_step(self, *args, **kwargs):\n"
        "        assert self._hftrainer.run.loop is not None\n"
        "        return super().training_step(*args, **kwargs)\n",
        namespace,
    )

    def log(self, logs, *args, **kwargs):
        assert self._hftrainer.run.loop is not None
        return hftrainer.Trainer.log(self, logs, *args, **kwargs)

    namespace["Own"].log = log
    trainer = make(tmp_path, namespace["Own"])
    trainer.compute_loss = functools.partial(hftrainer.Trainer.compute_loss, trainer)
    original = trainer.log
    trainer.log = lambda *args, **kwargs: original(*args, **kwargs)
    assert trainer.train().global_step == 2


COPIED = [
    {},
    {"neftune_noise_alpha": 5.0, "model": "bert"},
    {"trainer": {"model_init": make_plain}},
    {
        "gradient_accumulation_steps": 3,
        "eval_strategy": "epoch",
        "load_best_model_at_end": True,
        "save_strategy": "epoch",
    },
]


@pytest.mark.parametrize("settings", COPIED, ids=["plain", "neftune", "model-init", "best-model"])
def test_copied_train(tmp_path, settings):
    """A subclass with transformers' own `train`, as one that was copied, does the same on ours."""
    settings, found = dict(settings), {}
    model = settings.pop("model", "plain")
    for library in LIBRARIES:
        kind = type("Copied", (importlib.import_module(library).Trainer,), {"train": transformers.Trainer.train})
        trainer, recorder = build(
            library,
            model,
            tmp_path / library,
            trainer_class=lambda _, kind=kind: kind,
            **{"save_strategy": "no", **settings},
        )
        before = trainer.is_in_train
        output = trainer.train()
        hooks = [len(module._forward_hooks) for module in trainer.model.modules()]
        found[library] = record(
            trainer,
            recorder,
            tmp_path / library,
            loss=output.training_loss,
            hooks=hooks,
            in_train=(before, trainer.is_in_train),
        )
    assert_same(found["hftrainer"], found["transformers"])


def test_copied_train_resumes(tmp_path):
    found = {}
    for library in LIBRARIES:
        kind = type("Copied", (importlib.import_module(library).Trainer,), {"train": transformers.Trainer.train})
        settings = {"trainer_class": lambda _, kind=kind: kind, "save_strategy": "steps", "save_steps": 5}
        build(library, "plain", tmp_path / library, **settings)[0].train()
        trainer, recorder = build(library, "plain", tmp_path / library, **settings)
        trainer.train(resume_from_checkpoint=str(tmp_path / library / "checkpoint-10"))
        found[library] = record(trainer, recorder, tmp_path / library)
    assert found["hftrainer"].weights.keys() == found["transformers"].weights.keys()
    for name, weight in found["hftrainer"].weights.items():
        assert weight.equal(found["transformers"].weights[name])
