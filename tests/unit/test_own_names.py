"""Subclasses may take every name that no release of transformers has, for a purpose of their own."""

import json
from pathlib import Path

import pytest

import hftrainer
from tests.support.changed_trainers import run_changed
from tests.support.parity import EVERY_STEP, accuracy, assert_same, build

#: Methods of Trainer and Seq2SeqTrainer, v4.1 to v5.24, and attributes set on them by v4.48, v4.57 and v5.24.
FACTS = Path(__file__).parent / "hf_names.json"
#: What the README documents beside the names of transformers.
DOCUMENTED = {"lightning_trainer", "lightning_module", "loggers", "log_metric", "save_lightning_checkpoint", "hp_study"}
#: Names that ours had, or that a class of this kind is likely to use.
LIKELY = """
    _engine _loop _agree _draw _run_loop _training_loss _metric _search _announce _trackers _uploads _interruption
    _checkpoint_writer _bare_model _report_to _set_model counts_last_batch_by_size own setup run saver loaders engine
    _internals _state _cache _logger _step _metrics metric plan _plan loop _run
""".split()
TAKEN = {"fit", *DOCUMENTED, *LIKELY}
SETTINGS = {**EVERY_STEP, "max_steps": 4, "gradient_accumulation_steps": 2, "load_best_model_at_end": True}
SETTINGS["trainer"] = {"compute_metrics": accuracy}


@pytest.mark.parametrize("kind", ["Trainer", "Seq2SeqTrainer"])
def test_trainer_adds_only_documented_attributes(tmp_path, kind):
    trainer, _ = build("hftrainer", "plain", tmp_path, trainer_class=lambda library: getattr(library, kind), **SETTINGS)
    trainer.train()
    known = json.loads(FACTS.read_text())
    unknown = {name for name in {*dir(trainer), *vars(trainer)} if name not in known and not name.startswith("__")}
    assert unknown == {"_hftrainer", "fit"} | DOCUMENTED
    assert trainer.lightning_trainer.global_step == trainer.state.global_step == 4
    assert trainer.lightning_module.model is trainer.model
    assert trainer.loggers == [] and dir(hftrainer) == hftrainer.__all__
    assert "Lightning loggers" in hftrainer.Trainer.loggers.__doc__


def take_as_attributes(base):
    class Taken(base):
        def __init__(self, *args, **kwargs):
            for name in TAKEN:
                setattr(self, name, f"before {name}")
            super().__init__(*args, **kwargs)
            for name in TAKEN:
                setattr(self, name, f"mine {name}")

    return Taken


def take_as_methods(base):
    def fail(self, *args, **kwargs):
        raise AssertionError("a method that only the subclass knows was called")

    return type("Taken", (base,), dict.fromkeys(TAKEN, fail))


@pytest.mark.parametrize("taking", [take_as_attributes, take_as_methods])
@pytest.mark.parametrize("kind", ["Trainer", "Seq2SeqTrainer"])
def test_subclass_may_use_any_other_name(tmp_path, kind, taking):
    classes = {"plain": getattr(hftrainer, kind), "taken": taking(getattr(hftrainer, kind))}
    made = []
    plain, taken = (
        run_changed("hftrainer", tmp_path / name, made.append, trainer_class=lambda _, kind=kind: kind, **SETTINGS)
        for name, kind in classes.items()
    )
    assert_same(taken, plain)
    if taking is take_as_attributes:
        assert made[1].loggers == "mine loggers"
