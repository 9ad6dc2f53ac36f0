"""What users have reported: an argument without effect gets a warning, what does not fit an error with its cause.

The numbers are issues of huggingface/transformers; most of these are silent there, or end with an error of Python.
"""

import copy
import logging
import re

import pytest
import torch
from torch import nn

import hftrainer
from hftrainer import EarlyStoppingCallback, TrainerCallback
from hftrainer.errors import InvalidSetup
from tests.support.small_models import (
    Stream,
    language_data,
    make_bert,
    make_llama,
    make_plain,
    pad,
    plain_data,
    text_data,
    varied_language_data,
)

EVALUATED = {"eval_strategy": "steps", "eval_steps": 1}
SAVED = {"save_strategy": "steps", "save_steps": 1}
BEST = {**EVALUATED, **SAVED, "load_best_model_at_end": True}
ONE_ROW_EACH = [{"input_ids": torch.ones(1, 3, dtype=torch.long)}] * 4


@pytest.fixture
def warnings_text(caplog):
    return lambda: "\n".join(line.message for line in caplog.records if line.levelno >= logging.WARNING)


class Embedding(nn.Module):
    def __init__(self, further=lambda hidden: {}):
        super().__init__()
        self.table, self.further = nn.Embedding(50, 4), further

    def forward(self, input_ids, attention_mask=None, labels=None):
        hidden = self.table(input_ids)
        return {"loss": hidden.pow(2).mean(), "logits": hidden, **self.further(hidden)}


class Actions(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x, actions):
        logits = self.layer(x)
        return {"loss": nn.functional.cross_entropy(logits, actions), "logits": logits}


def actions_in_place_of_labels():
    rows = [{"x": row["x"], "actions": row["labels"]} for row in plain_data()]
    return {"model": Actions(), "data": rows, "eval_dataset": rows[:9]}


def with_optimizer(make_optimizer):
    model = make_plain()
    return {"model": model, "optimizers": (make_optimizer(model), None)}


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)


def one(prediction):
    return {"one": 1.0}


SILENT = {
    "#13255, no labels of that name": (
        lambda: {"label_smoothing_factor": 0.1, **actions_in_place_of_labels()},
        "label_smoothing_factor=0.1 has no effect: it needs 'labels'",
    ),
    "smoothing beside another loss": (
        lambda: {
            "label_smoothing_factor": 0.1,
            "compute_loss_func": lambda outputs, labels, **_: nn.functional.cross_entropy(outputs["logits"], labels),
        },
        "label_smoothing_factor has no effect: compute_loss_func",
    ),
    "#28530, labels that are not found": (
        lambda: {"compute_metrics": one, **EVALUATED, **actions_in_place_of_labels()},
        r"compute_metrics is not called: no batch has all of the labels \[\]; add them, or correct label_names",
    ),
    "#10908, names of classes": (
        lambda: {"compute_metrics": one, "label_names": ["good", "bad"], **EVALUATED},
        r"all of the labels \['good', 'bad'\]; add them, or correct label_names",
    ),
    "an evaluation without labels": (
        lambda: {"compute_metrics": one, **EVALUATED, "eval_dataset": [{"x": torch.zeros(8)}] * 4},
        r"no batch has all of the labels \['labels'\]; add them, or correct label_names",
    ),
    "metrics of the loss only": (
        lambda: {"compute_metrics": one, "prediction_loss_only": True, **EVALUATED},
        "compute_metrics is not called: prediction_loss_only=True",
    ),
    "#15418, a stream": (
        lambda: {"train_sampling_strategy": "group_by_length", "data": Stream(16)},
        "train_sampling_strategy='group_by_length' has no effect",
    ),
    "#43363, one row of tokens": (
        lambda: {"train_sampling_strategy": "group_by_length", "data": ONE_ROW_EACH, "model": Embedding()},
        r"first dimension of 'input_ids' \(shape \(1, 3\)\), 1 in the first sample",
    ),
    "a column of lengths that is missing": (
        lambda: (
            {"train_sampling_strategy": "group_by_length", "length_column_name": "size"}
            | {"data": text_data(), "model": make_bert()}
        ),
        "length_column_name='size' has no effect",
    ),
    "warm-up of a constant rate": (
        lambda: {"lr_scheduler_type": "constant", "warmup_steps": 5},
        "warmup_steps=5 has no effect: lr_scheduler_type='constant'.*'constant_with_warmup' has",
    ),
    "a long warm-up": (lambda: {"warmup_steps": 50}, r"warmup_steps=50, but the run has only \d steps: the learning"),
    "betas of SGD": (lambda: {"optim": "sgd", "adam_beta1": 0.3}, "adam_beta1=0.3 has no effect: optim='sgd'"),
    "the rate of another optimizer": (
        lambda: {**with_optimizer(sgd), "learning_rate": 0.3, "weight_decay": 0.1},
        r"(?s)learning_rate=0.3 has no effect: .* \[0.5\].*weight_decay=0.1 has no effect: .* \[0.0\]",
    ),
    "an optimizer of another model": (lambda: with_optimizer(lambda _: sgd(make_plain())), "no parameter of the model"),
    "#28500, nothing is the best": (lambda: {**BEST, "eval_delay": 9}, "load_best_model_at_end has no effect"),
}


@pytest.mark.parametrize("case", SILENT)
def test_argument_without_effect_warns(make_trainer, warnings_text, case):
    make_settings, expected = SILENT[case]
    make_trainer(**make_settings()).train()
    assert re.search(expected, warnings_text())


def test_changed_patience_warns_on_resume(make_trainer, warnings_text, tmp_path):
    """#28544: the callback starts anew."""
    settings = {**BEST, "compute_metrics": one, "metric_for_best_model": "one"}
    for steps, resume in ((2, None), (3, str(tmp_path / "out" / "checkpoint-2"))):
        assert "from scratch" not in warnings_text()
        trainer = make_trainer(**settings, callbacks=[EarlyStoppingCallback(9)], max_steps=steps)
        trainer.train(resume_from_checkpoint=resume)
    assert re.search(r"EarlyStoppingCallback starts from scratch \(.*counter=0, 1 in the checkpoint", warnings_text())


def test_resume_from_another_model_is_refused(make_trainer, tmp_path):
    make_trainer(**SAVED).train()
    then = make_trainer(model=torch.nn.Sequential(torch.nn.Linear(8, 3)))
    folder = str(tmp_path / "out" / "checkpoint-2")
    with pytest.raises(InvalidSetup, match=f"None of the model's 2 weights is in {folder} .it has .*another model's"):
        then.train(resume_from_checkpoint=folder)


class Returns(TrainerCallback):
    def on_log(self, args, state, control, **kwargs):
        return "x"


def regression():
    rows = [{"x": row["x"], "labels": float(row["labels"])} for row in plain_data()]
    return {"label_smoothing_factor": 0.1, "data": rows}


def collated(make_batch):
    return {"data_collator": lambda rows: make_batch(hftrainer.default_data_collator(rows))}


MISFITS = {
    "no metrics": (lambda: {"compute_metrics": lambda p: None}, "compute_metrics returned None: it must return a dict"),
    "no names": (lambda: {"compute_metrics": lambda p: {1: 2.0}}, "a dict with a name for each metric"),
    "of each batch": (
        lambda: {"compute_metrics": lambda p, compute_result: 0.5, "batch_eval_metrics": True},
        "compute_metrics returned 0.5",
    ),
    "two arguments": (
        lambda: {"compute_metrics": lambda logits, labels: {}},
        r"compute_metrics is called with one argument.*yours takes \(logits, labels\)",
    ),
    "#24933, the main input": (
        lambda: {"compute_metrics": one, "include_for_metrics": ["inputs"]},
        "keeps the model's main input, 'input_ids', but the batch has only x, labels",
    ),
    "peft#782, a text": (lambda: {"label_names": "labels"}, r"label_names='labels' is text: use a list"),
    "smoothed numbers": (regression, "label_smoothing_factor=0.1 needs a class for each label"),
    "#9636, several sets": (
        lambda: {"data": {"train": plain_data(), "test": plain_data()}},
        "The training dataset is of type dict, with the keys train, test: pass one of its sets",
    ),
    "no samples": (lambda: {"data": []}, "The training dataset has no samples: check its filters"),
    "samples of several lengths": (
        lambda: {"data": [{"input_ids": [1] * count, "labels": 0} for count in (3, 4, 5, 6)], "model": make_bert()},
        "values of 'input_ids' do not fit into one tensor .*: pass processing_class=tokenizer",
    ),
    "a list as batch": (lambda: collated(lambda batch: [*batch.values()]), "The batch is a list"),
    "no batch": (lambda: collated(lambda batch: None), "data_collator returned None"),
    "no batch for a model that counts labels": (
        lambda: {"data_collator": lambda _: None, "data": language_data(), "model": make_llama()},
        "data_collator returned None",
    ),
    "another key": (
        lambda: collated(lambda batch: {**batch, "names": []}),
        "The batch has 'names', which Plain.forward does not accept: let data_collator drop it",
    ),
    "a model as function": (lambda: {"model_init": make_plain()}, "model_init is a Plain"),
    "what a callback returns": (lambda: {"callbacks": [Returns]}, "Returns.on_log returned 'x': return the control"),
    "a class": (lambda: {"optimizers": (torch.optim.SGD, None)}, "SGD.>: pass optimizer_cls_and_kwargs"),
    "no keywords": (lambda: {"optimizer_cls_and_kwargs": (torch.optim.SGD,)}, "optimizer_cls_and_kwargs is .* a pair"),
    "a name": (lambda: {"optimizer_cls_and_kwargs": ("sgd", {})}, r"is \('sgd', \{\}\), but must be a pair: \(class"),
    "a schedule alone": (
        lambda: {"optimizers": (None, torch.optim.lr_scheduler.ConstantLR(sgd(make_plain())))},
        "ConstantLR was created for another optimizer",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_error_of_a_wrong_argument_names_the_cause(make_trainer, case):
    make_settings, expected = MISFITS[case]
    settings = make_settings()
    with pytest.raises((ValueError, TypeError), match=expected):
        make_trainer(**{**EVALUATED, "logging_steps": 1, **settings}).train()


class Short(TrainerCallback):
    def on_step_end(self, args, state, control):
        self.steps = state.global_step

    def on_evaluate(self, args, state, control, metrics):
        self.metrics = metrics


def test_user_functions_get_the_parameters_they_accept(make_trainer):
    short = Short()
    shapes = []
    settings = {"compute_metrics": lambda p: shapes.append(p.predictions.shape) or {}, "callbacks": [short]}
    trainer = make_trainer(**EVALUATED, **settings, preprocess_logits_for_metrics=lambda x: x.argmax(-1))
    trainer.train()
    assert short.steps == 2 and "eval_loss" in short.metrics
    assert shapes == [(9,), (9,)]


def test_sparse_outputs_become_dense_predictions(make_trainer):
    model = Embedding(lambda hidden: {"square": torch.eye(len(hidden), 4).to_sparse()})
    data = varied_language_data(8)
    trainer = make_trainer(model, data, eval_dataset=copy.copy(data), data_collator=pad)
    assert trainer.predict(data).predictions[1].tolist() == torch.eye(4).repeat(2, 1).tolist()


class PassesOn(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *args, **kwargs):
        return self.model(*args, **kwargs)


@pytest.mark.parametrize("wrap", [PassesOn, nn.DataParallel, lambda model: PassesOn(PassesOn(model))])
def test_wrapper_module_takes_the_inner_models_arguments(make_trainer, wrap):
    settings = {"eval_dataset": text_data(9), "compute_metrics": one, **EVALUATED}
    trainer = make_trainer(wrap(make_bert()), text_data(), **settings)
    trainer.train()
    assert trainer.label_names == ["labels"] and trainer.evaluate()["eval_one"] == 1.0


@pytest.mark.parametrize("name", [1, ("f1", 0), None])
def test_log_keys_that_are_no_strings_survive_a_resume(make_trainer, tmp_path, name):
    class Logs(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            state.log_history.append({name: 2.0, "step": state.global_step})

    trainer = make_trainer(**SAVED, callbacks=[Logs])
    trainer.train()
    trainer.save_metrics("test", {name: 2.0, "loss": 1.0})
    trainer = make_trainer(max_steps=3)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert trainer.state.global_step == 3


def test_model_config_with_objects_is_logged(make_trainer):
    """#37518: TensorBoard's text of the configuration ended the run."""
    pytest.importorskip("tensorboard")
    model = make_bert()
    model.config.further = {"dtype of a script": torch.Size([1]), "set": {1}}
    trainer = make_trainer(model, text_data(), report_to="tensorboard")
    trainer.train()
    assert trainer.state.global_step == 2
