"""Subclasses may take every name that no release of transformers has, for a purpose of their own."""

import json
from pathlib import Path

import pytest
import torch

import hftrainer
from tests.support.parity import accuracy
from tests.support.tiny import make_plain, plain_data

#: Methods of Trainer and Seq2SeqTrainer, v4.1 to v5.23, and attributes set on them by v4.48, v4.57 and v5.23.
FACTS = Path(__file__).parent / "hf_names.json"
#: What the README documents beside the names of transformers.
DOCUMENTED = {"lightning_trainer", "lightning_module", "loggers", "log_metric", "save_lightning_checkpoint", "hp_study"}
#: The one attribute that holds everything else.
OWN = {"_hftrainer"}
KINDS = {
    "Trainer": (hftrainer.Trainer, hftrainer.TrainingArguments),
    "Seq2SeqTrainer": (hftrainer.Seq2SeqTrainer, hftrainer.Seq2SeqTrainingArguments),
}


def make(trainer_class, arguments_class, folder, **settings):
    args = arguments_class(
        str(folder),
        max_steps=4,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        logging_steps=1,
        load_best_model_at_end=True,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **settings,
    )
    data = plain_data(20)
    return trainer_class(make_plain(), args, train_dataset=data, eval_dataset=data[:7], compute_metrics=accuracy)


def names_of(kind: str, folder) -> set[str]:
    """Names on a Trainer that was trained and evaluated, which no release of transformers has."""
    trainer = make(*KINDS[kind], folder)
    trainer.train()
    known = json.loads(FACTS.read_text())
    return {name for name in {*dir(trainer), *vars(trainer)} if name not in known and not name.startswith("__")}


@pytest.mark.parametrize("kind", KINDS)
def test_one_attribute_beside_the_documented_ones(tmp_path, kind):
    assert names_of(kind, tmp_path) == OWN | DOCUMENTED


def run_all(trainer, folder) -> tuple:
    """All that a script does with a Trainer."""
    output = trainer.train()
    metrics = trainer.evaluate()
    predictions = trainer.predict(plain_data(9)).predictions
    trainer.save_model(str(folder / "final"))
    trainer.save_state()
    logs = [
        {name: value for name, value in line.items() if "_per_second" not in name and "runtime" not in name}
        for line in trainer.state.log_history
    ]
    return output.global_step, metrics["eval_loss"], predictions, logs


#: Names that ours had, or that a class of this kind is likely to use.
LIKELY = """
    _engine _loop _agree _draw _run_loop _training_loss _metric _search _announce _trackers _uploads _interruption
    _checkpoint_writer _bare_model _report_to _set_model counts_last_batch_by_size own setup run saver loaders engine
    _internals _state _cache _logger _step _metrics metric plan _plan loop _run
""".split()


def attributes(base):
    class Taken(base):
        def __init__(self, *args, **kwargs):
            for name in {*DOCUMENTED, *LIKELY}:
                setattr(self, name, f"before {name}")
            super().__init__(*args, **kwargs)
            for name in {*DOCUMENTED, *LIKELY}:
                setattr(self, name, f"mine {name}")

    return Taken


def methods(base):
    def fail(self, *args, **kwargs):
        raise AssertionError("a method that only the subclass knows was called")

    return type("Taken", (base,), dict.fromkeys({*DOCUMENTED, *LIKELY}, fail))


@pytest.mark.parametrize("taking", [attributes, methods])
@pytest.mark.parametrize("kind", KINDS)
def test_subclass_takes_the_names(tmp_path, kind, taking):
    ours, arguments = KINDS[kind]
    plain = make(ours, arguments, tmp_path / "plain")
    expected = run_all(plain, tmp_path / "plain")
    taken = make(taking(ours), arguments, tmp_path / "taken")
    found = run_all(taken, tmp_path / "taken")
    assert found[:2] == expected[:2]
    assert (found[2] == expected[2]).all()
    assert found[3] == expected[3]
    for name, weight in plain.model.state_dict().items():
        assert torch.equal(weight, taken.model.state_dict()[name])
    if taking is attributes:
        assert taken.loggers == "mine loggers"


def test_documented_names_of_a_trainer_itself(tmp_path):
    trainer = make(hftrainer.Trainer, hftrainer.TrainingArguments, tmp_path)
    trainer.train()
    assert trainer.lightning_trainer.global_step == 8 // 2
    assert trainer.lightning_module.model is trainer.model
    assert trainer.loggers == []
    assert "Lightning loggers" in hftrainer.Trainer.loggers.__doc__
