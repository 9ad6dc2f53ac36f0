"""Evaluation and prediction: metrics, predictions, labels, shapes and dtypes, exactly as transformers has them."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import nn

from hftrainer import Trainer, TrainingArguments
from tests.support import parity, small_models
from tests.support.parity import EVALUATED, array_bytes, build, comparable, compare, leaves, subclass, train
from tests.support.small_models import SizedStream, Stream, make_llama, pad, plain_data, varied_language_data


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x, return_loss=True):
        out = self.layer(x)
        return {"loss": out.square().mean(), "embeds": out} if return_loss else {"embeds": out}


def make_clip():
    torch.manual_seed(1)
    return Clip()


def data_without_labels(count=19):
    return [{"x": row["x"]} for row in plain_data(count)]


def answer_data(count=19):
    for i, row in enumerate(rows := small_models.text_data(count)):
        del row["label"]
        row |= {"start_positions": 2, "end_positions": 3 + i % 4}
    return rows


CASES = {
    **{name: small_models.MODELS[name] for name in ("plain", "tuple", "bert", "llama")},
    "detector": (small_models.make_detector, small_models.detection_data),
    "clip": (make_clip, data_without_labels),
    "answerer": (lambda: small_models.make_bert("BertForQuestionAnswering", 2), answer_data),
    "t5": (small_models.make_t5, small_models.t5_data),
    "varied": (make_llama, varied_language_data),
}


def summary(prediction):
    found = {
        f"{name}{path}": float(np.nan_to_num(np.asarray(leaf, dtype=np.float64)).sum())
        for name in ("predictions", "label_ids", "inputs", "losses")
        for path, leaf in leaves(getattr(prediction, name)).items()
        if leaf is not None
    }
    return {**found, "elements": len(prediction.elements)}


def compare_evaluations(tmp_path, case, evaluate=None, predict=None, data=None, trainer=None, **settings):
    """Metrics and arrays of ours by path, after asserting that evaluating and predicting are as in transformers."""

    def script(trainer):
        metrics = trainer.evaluate(**(evaluate or {}))
        output = trainer.predict(CASES[case][1](11) if data is None else data, **(predict or {}))
        assert json.dumps(metrics)  # JSON-safe
        arrays = array_bytes({"predictions": output.predictions, "labels": output.label_ids})
        return comparable([metrics, output.metrics]), arrays

    trainer_kwargs = {"compute_metrics": summary}
    if case == "varied":
        trainer_kwargs["data_collator"] = pad
    trainer_kwargs |= trainer or {}
    settings = {"per_device_eval_batch_size": 4, "trainer": trainer_kwargs, "script": script, **settings}
    return compare(tmp_path, CASES[case], **settings).extra["script"]


def keep_best(logits, labels):
    return logits.topk(2, dim=-1).indices if isinstance(logits, torch.Tensor) else logits[0].argmax(-1)


def unreduced_prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
    _, logits, labels = super(type(self), self).prediction_step(model, inputs, False, ignore_keys)
    return nn.functional.cross_entropy(logits, labels, reduction="none"), logits, labels


KEYS = {"evaluate": {"ignore_keys": ["levels"]}, "predict": {"ignore_keys": ["boxes", "levels"]}}
INPUTS = {"include_for_metrics": ["inputs", "loss"]}
SETS = {"first": plain_data(9), "second": plain_data(20)[9:]}
BEST_ROWS = {"trainer": {"preprocess_logits_for_metrics": keep_best}}
#: Name of a case → its model, and settings for `compare_evaluations`.
RUNS = {
    **{f"model {case}": (case, {}) for case in CASES},
    "ignore keys": ("detector", KEYS),
    "prefix": ("detector", {"evaluate": {"metric_key_prefix": "valid"}, "predict": {"metric_key_prefix": "p"}}),
    "loss only": ("detector", {"prediction_loss_only": True}),
    "one label": ("detector", {"label_names": ["labels"]}),
    "label missing": ("detector", {"label_names": ["missing"]}),
    "losses": ("detector", {"include_for_metrics": ["loss"]}),
    "accumulation 1": ("detector", {"eval_accumulation_steps": 1}),
    "accumulation 2": ("detector", {"eval_accumulation_steps": 2}),
    "batches apart": ("detector", {"eval_do_concat_batches": False, "include_for_metrics": ["loss"]}),
    "gather object": ("detector", {"eval_use_gather_object": True}),
    "one batch": ("detector", {"per_device_eval_batch_size": 64}),
    "drop last": ("detector", {"dataloader_drop_last": True}),
    "worker": ("detector", {"dataloader_num_workers": 1}),
    "no metrics": ("detector", {"trainer": {"compute_metrics": None}}),
    "inputs alone": ("varied", {"include_for_metrics": ["inputs"]}),
    "inputs": ("varied", INPUTS),
    "inputs of batches apart": ("varied", {**INPUTS, "eval_do_concat_batches": False}),
    "inputs with accumulation": ("varied", {**INPUTS, "eval_accumulation_steps": 2}),
    "sets": ("plain", {"trainer": {"eval_dataset": SETS}}),
    "one of the sets": ("plain", {"trainer": {"eval_dataset": SETS}, "evaluate": {"eval_dataset": "second"}}),
    "sets given later": ("plain", {"evaluate": {"eval_dataset": SETS, "metric_key_prefix": "other"}}),
    **{f"stream of {count}": ("plain", {"trainer": {"eval_dataset": Stream(count)}}) for count in (3, 8, 19)},
    **{f"processed logits of {case}": (case, BEST_ROWS) for case in ("bert", "varied", "t5")},
    "unreduced losses": ("plain", {"trainer_class": subclass(prediction_step=unreduced_prediction_step)}),
}


@pytest.mark.parametrize("name", RUNS)
def test_evaluate_and_predict_are_those_of_transformers(tmp_path, name):
    case, settings = RUNS[name]
    compare_evaluations(tmp_path, case, **settings)


def test_data_without_labels_has_no_loss_and_no_metrics(tmp_path):
    data = data_without_labels(11)
    (evaluated, _), arrays = compare_evaluations(tmp_path, "plain", evaluate={"eval_dataset": data}, data=data)
    assert arrays[".labels"] is None
    assert not any(key.endswith(("_loss", "elements")) for key in evaluated)


class HalfStream(SizedStream):
    """A stream of 18 samples that its workers share, and that claims another length."""

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        rows = plain_data(18)
        return iter(rows if worker is None else rows[worker.id :: worker.num_workers])


@pytest.mark.parametrize(("length", "workers"), [(18, 2), (8, 0), (30, 0)])
def test_streams_of_wrong_length_are_predicted_whole(tmp_path, length, workers):
    _, arrays = compare_evaluations(tmp_path, "plain", data=HalfStream(length), dataloader_num_workers=workers)
    assert arrays[".predictions"][1] == (18, 3)


class Running:
    def __init__(self):
        self.total, self.batches = 0.0, 0

    def __call__(self, prediction, compute_result=False):
        self.total += float(prediction.predictions.sum()) + float(prediction.label_ids.sum())
        self.batches += 1
        seen = f"{type(prediction.predictions).__name__} {len(prediction.elements)}"
        if not compute_result:
            return {"total": -1.0}
        result = {"total": self.total, "batches": self.batches, "seen": seen}
        self.__init__()
        return result


@pytest.mark.parametrize("wanted", [[], ["loss"], ["inputs", "loss"]], ids=["neither", "loss", "both"])
@pytest.mark.parametrize("source", ["dataset", "stream"])
def test_batch_eval_metrics_are_those_of_transformers(tmp_path, source, wanted):
    def script(trainer):
        trainer.compute_metrics = Running()
        trainer.model.main_input_name = "x"
        output = trainer.predict(plain_data(11))
        return comparable([trainer.evaluate(), output.metrics]), array_bytes([output.predictions, output.label_ids])

    trainer_kwargs = {"compute_metrics": Running(), **({"eval_dataset": Stream(19)} if source == "stream" else {})}
    settings = {"batch_eval_metrics": True, "include_for_metrics": wanted, "per_device_eval_batch_size": 4}
    compare(tmp_path, "plain", script=script, trainer=trainer_kwargs, **settings)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_full_eval_in_half_precision(tmp_path, dtype):
    """Weights are cast outside training only. Inputs are not cast, as in transformers: float32 modules fail.

    transformers leaves the weights in that precision afterwards; ours gives them back.
    """
    settings = {f"{dtype}_full_eval": True}
    _, arrays = compare_evaluations(tmp_path, "bert", same=parity.assert_same_but_for_weights, **settings)
    assert arrays[".predictions"][0] == ("float32" if dtype == "bf16" else "float16")
    trained = compare(tmp_path / "trained", "bert", **EVALUATED, max_steps=4, **settings)
    assert {tensor.dtype for tensor in trained.weights.values() if tensor.is_floating_point()} == {torch.float32}
    with pytest.raises(RuntimeError, match="dtype"):
        build("hftrainer", "plain", tmp_path, **settings)[0].evaluate()


@pytest.mark.parametrize(
    ("how", "masked", "accumulation"),
    [*itertools.product(["all", "non_padding", True], [True], [1, 3]), ("all", False, 1), ("non_padding", False, 1)],
)
def test_input_tokens_are_counted_alike_also_after_resuming(tmp_path, how, masked, accumulation):
    data = small_models.language_data()
    for i, row in enumerate(data):
        row["attention_mask"] = (torch.arange(12) < 5 + i % 8).long()
        if not masked:
            del row["attention_mask"]
    settings = {"include_num_input_tokens_seen": how, "gradient_accumulation_steps": accumulation}
    settings |= {**EVALUATED, "save_strategy": "steps", "save_steps": 5, "trainer": {"train_dataset": data}}
    whole = compare(tmp_path / "whole", "llama", **settings)

    def resume(name):
        checkpoint = str(tmp_path / "whole" / name / "checkpoint-5")
        resumed = train(name, "llama", tmp_path / name, checkpoint, **settings)
        if name == "hftrainer":
            parity.assert_same_weights(resumed.weights, whole.weights)  # which theirs are not
        return [line["num_input_tokens_seen"] for line in resumed.logs]

    assert whole.logs[-1]["num_input_tokens_seen"] == parity.assert_agree(resume)[-1] > 0


def prediction_step(self, *args, **kwargs):
    loss, *rest = super(type(self), self).prediction_step(*args, **kwargs)
    return loss * 2, *rest


METHODS = {
    "prediction_step": prediction_step,
    "evaluation_loop": lambda self, *args, **kwargs: super(type(self), self).evaluation_loop(
        *args, **{**kwargs, "metric_key_prefix": "mine"}
    ),
    "evaluate": lambda self, *args, **kwargs: {**super(type(self), self).evaluate(*args, **kwargs), "eval_own": 1.0},
    "get_eval_dataloader": lambda self, _=None: super(type(self), self).get_eval_dataloader(plain_data(7)),
}


@pytest.mark.parametrize("name", METHODS)
def test_overrides_apply_during_training_and_in_evaluate(tmp_path, name):
    def script(trainer):
        trainer.train()
        return comparable([trainer.evaluate()])

    own = subclass(**{name: METHODS[name]})
    compare(tmp_path, "plain", script=script, trainer_class=own, max_steps=6, **EVALUATED)


def test_metrics_and_collators_can_compute_gradients(tmp_path):
    """Only the forward pass of a prediction step runs without gradients."""

    def probes(prediction):
        probe = nn.Linear(3, 3)
        probe(torch.from_numpy(prediction.predictions)).square().mean().backward()
        return {"gradient": bool(probe.weight.grad.abs().sum() > 0)}

    def collates(samples):
        x = torch.stack([sample["x"] for sample in samples]).requires_grad_()
        (gradient,) = torch.autograd.grad(x.square().sum(), x)
        return {"x": x.detach() + gradient, "labels": torch.stack([sample["labels"] for sample in samples])}

    trainer_kwargs = {"compute_metrics": probes, "data_collator": collates}
    (evaluated, _), _ = compare_evaluations(tmp_path, "plain", trainer=trainer_kwargs)
    assert evaluated["eval_gradient"] is True


SCORES = (math.nan, 0.5, 0.5, 0.7, math.nan, 0.7, 0.3, 0.3, math.inf, -math.inf)


@pytest.mark.parametrize("greater", [True, False])
def test_best_metric_is_not_replaced_by_ties_or_nan(tmp_path, greater):
    settings = {"metric_for_best_model": "score", "greater_is_better": greater, "save_strategy": "best"}

    def judge(trainer):
        found = []
        for step, score in enumerate(SCORES):
            trainer.state.global_step = step
            is_new = trainer._determine_best_metric({"eval_score": score}, None)
            found.append([is_new, str(trainer.state.best_metric), trainer.state.best_global_step])
        return found

    ours = compare(tmp_path, "plain", script=judge, eval_strategy="steps", **settings)
    assert any(is_new for is_new, _, _ in ours.extra["script"])


BY_LENGTH = {"train_sampling_strategy": "group_by_length"}


def collate_columns(samples):
    return pad([{key: torch.tensor(value) for key, value in sample.items()} for sample in samples])


def columns_of(rows, **columns):
    return Dataset.from_dict({**{key: [row[key].tolist() for row in rows] for key in rows[0]}, **columns})


@pytest.mark.parametrize("make", [list, columns_of], ids=["rows", "columns"])
def test_group_by_length_counts_lengths_from_samples(tmp_path, make):
    """Evaluation batches are grouped by length too."""
    rows = varied_language_data(38)
    trainer_kwargs = {"train_dataset": make(rows), "eval_dataset": make(rows[:19])}
    trainer_kwargs["data_collator"] = pad if make is list else collate_columns
    settings = {**BY_LENGTH, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    compare(tmp_path, "llama", trainer=trainer_kwargs, eval_strategy="epoch", **settings)


def test_group_by_length_uses_the_column_of_lengths(tmp_path):
    """The column is trusted, also if it is no argument of the model."""
    rows = varied_language_data(38)
    data = columns_of(rows, tokens=[100 + i for i in range(38)])

    def longest_first(column):
        args = TrainingArguments(str(tmp_path), length_column_name=column, use_cpu=True, **BY_LENGTH)
        trainer = Trainer(make_llama(), args, train_dataset=data, data_collator=collate_columns)
        return next(iter(trainer.get_train_dataloader().batch_sampler))[0]

    assert longest_first("tokens") == 37
    assert len(rows[longest_first("length")]["input_ids"]) == 12 > len(rows[37]["input_ids"])


def test_predictions_are_in_the_order_of_the_dataset(tmp_path):
    data, trainer_kwargs = varied_language_data(19), {"data_collator": pad}
    grouped, plain = (
        build("hftrainer", "llama", tmp_path, trainer=trainer_kwargs, **settings)[0].predict(data).predictions
        for settings in (BY_LENGTH, {})
    )
    assert array_bytes(grouped) == array_bytes(plain)


def test_group_by_length_uses_lengths_of_the_evaluated_set(tmp_path):
    own, other = (columns_of(varied_language_data(12), length=each) for each in ([3] * 6 + [9] * 6, [9, 3] * 6))

    def script(trainer):
        return [list(trainer.get_eval_dataloader(data).batch_sampler) for data in (other, own, None)]

    trainer_kwargs = {"eval_dataset": own, "data_collator": collate_columns}
    ours = compare(tmp_path, "llama", script=script, trainer=trainer_kwargs, remove_unused_columns=False, **BY_LENGTH)
    of_other, of_own, of_none = ours.extra["script"]
    assert of_other != of_own == of_none
