"""Evaluation and prediction: metrics, predictions, labels, shapes and dtypes, exactly as transformers has them."""

import json
import math

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset
from torch import nn
from torch.utils.data import IterableDataset

from hftrainer import Trainer, TrainingArguments
from tests.support.parity import (
    EVALUATED,
    accuracy,
    alike,
    assert_equal,
    assert_same_weights,
    build,
    comparable,
    compare,
    exactly,
    leaves,
    subclass,
    train,
)
from tests.support.tiny import (
    MODELS,
    Plain,
    Stream,
    detection_data,
    language_data,
    make_detector,
    make_llama,
    make_t5,
    pad,
    plain_data,
    t5_data,
    text_data,
    varied_language_data,
)


class Clip(nn.Module):
    """Computes a loss without labels, as CLIP does."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x, return_loss=True):
        out = self.layer(x)
        return {"loss": out.square().mean(), "embeds": out} if return_loss else {"embeds": out}


def make_clip():
    torch.manual_seed(1)
    return Clip()


def without_labels(count=19):
    return [{"x": row["x"]} for row in plain_data(count)]


def make_answerer():
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return transformers.BertForQuestionAnswering(transformers.BertConfig(vocab_size=50, **sizes))


def answer_data(count=19):
    for i, row in enumerate(rows := text_data(count)):
        del row["label"]
        row |= {"start_positions": 2, "end_positions": 3 + i % 4}
    return rows


CASES = {
    **{name: MODELS[name] for name in ("plain", "tuple", "bert", "llama")},
    "detector": (make_detector, detection_data),
    "clip": (make_clip, without_labels),
    "answerer": (make_answerer, answer_data),
    "t5": (make_t5, t5_data),
    "varied": (make_llama, varied_language_data),
}


def summary(prediction):
    """Numbers that change with any entry, of any nesting."""
    found = {
        f"{name}{path}": float(np.nan_to_num(np.asarray(leaf, dtype=np.float64)).sum())
        for name in ("predictions", "label_ids", "inputs", "losses")
        for path, leaf in leaves(getattr(prediction, name)).items()
        if leaf is not None
    }
    return {**found, "elements": len(prediction.elements)}


def settings_of(case, trainer=None, **settings):
    given = {"compute_metrics": summary, **({"data_collator": pad} if case == "varied" else {}), **(trainer or {})}
    return {"per_device_eval_batch_size": 4, "trainer": given, **settings}


def compare_evaluations(tmp_path, case, evaluate=None, predict=None, data=None, **settings):
    """Metrics and arrays of ours by path, after asserting that evaluating and predicting are as in transformers."""

    def script(trainer):
        metrics = trainer.evaluate(**(evaluate or {}))
        output = trainer.predict(CASES[case][1](11) if data is None else data, **(predict or {}))
        assert json.dumps(metrics)  # JSON-safe
        arrays = exactly({"predictions": output.predictions, "labels": output.label_ids})
        return comparable([metrics, output.metrics]), arrays

    return compare(tmp_path, CASES[case], script=script, **settings_of(case, **settings)).extra["script"]


@pytest.mark.parametrize("case", CASES)
def test_models(tmp_path, case):
    compare_evaluations(tmp_path, case)


SETTINGS = {
    "ignore keys": {"evaluate": {"ignore_keys": ["levels"]}, "predict": {"ignore_keys": ["boxes", "levels"]}},
    "prefix": {"evaluate": {"metric_key_prefix": "valid"}, "predict": {"metric_key_prefix": "p"}},
    "loss only": {"prediction_loss_only": True},
    "one label": {"label_names": ["labels"]},
    "label missing": {"label_names": ["missing"]},
    "losses": {"include_for_metrics": ["loss"]},
    "accumulation 1": {"eval_accumulation_steps": 1},
    "accumulation 2": {"eval_accumulation_steps": 2},
    "batches apart": {"eval_do_concat_batches": False, "include_for_metrics": ["loss"]},
    "gather object": {"eval_use_gather_object": True},
    "one batch": {"per_device_eval_batch_size": 64},
    "drop last": {"dataloader_drop_last": True},
    "worker": {"dataloader_num_workers": 1},
    "no metrics": {"trainer": {"compute_metrics": None}},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(tmp_path, name):
    compare_evaluations(tmp_path, "detector", **SETTINGS[name])


INPUTS = ["inputs", "loss"]


@pytest.mark.parametrize(
    "settings",
    [
        {"include_for_metrics": ["inputs"]},
        {"include_for_metrics": INPUTS},
        {"include_for_metrics": INPUTS, "eval_do_concat_batches": False},
        {"include_for_metrics": INPUTS, "eval_accumulation_steps": 2},
    ],
)
def test_inputs_for_metrics(tmp_path, settings):
    compare_evaluations(tmp_path, "varied", **settings)


SETS = {"first": plain_data(9), "second": plain_data(20)[9:]}


@pytest.mark.parametrize(
    "settings",
    [
        {"trainer": {"eval_dataset": SETS}},
        {"trainer": {"eval_dataset": SETS}, "evaluate": {"eval_dataset": "second"}},
        {"evaluate": {"eval_dataset": SETS, "metric_key_prefix": "other"}},
    ],
)
def test_named_and_several_sets(tmp_path, settings):
    compare_evaluations(tmp_path, "plain", **settings)


def test_no_labels(tmp_path):
    data = without_labels(11)
    (evaluated, _), arrays = compare_evaluations(tmp_path, "plain", evaluate={"eval_dataset": data}, data=data)
    assert arrays[".labels"] is None
    assert not any(key.endswith(("_loss", "elements")) for key in evaluated)


class HalfStream(IterableDataset):
    """A stream whose workers share it, and whose length is that of the samples, not of its batches."""

    def __init__(self, count, length):
        self.count, self.length = count, length

    def __len__(self):
        return self.length

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        rows = plain_data(self.count)
        return iter(rows if worker is None else rows[worker.id :: worker.num_workers])


@pytest.mark.parametrize("count", [3, 8, 19])
def test_unsized_stream(tmp_path, count):
    compare_evaluations(tmp_path, "plain", trainer={"eval_dataset": Stream(count)})


@pytest.mark.parametrize(("length", "workers"), [(18, 2), (8, 0), (30, 0)])
def test_streams_whose_length_is_wrong(tmp_path, length, workers):
    """Every batch that comes is evaluated."""
    data = HalfStream(18, length)
    _, arrays = compare_evaluations(tmp_path, "plain", data=data, dataloader_num_workers=workers)
    assert arrays[".predictions"][1] == (18, 3)


def keep_best(logits, labels):
    return logits.topk(2, dim=-1).indices if isinstance(logits, torch.Tensor) else logits[0].argmax(-1)


@pytest.mark.parametrize("case", ["bert", "varied", "t5"])
def test_preprocess_logits(tmp_path, case):
    _, arrays = compare_evaluations(tmp_path, case, trainer={"preprocess_logits_for_metrics": keep_best})
    assert arrays[".predictions"][0] == "int64"


class Running:
    """A metric that adds up batch by batch."""

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


def make_named():
    """A model whose main input is known."""
    model = MODELS["plain"][0]()
    model.main_input_name = "x"
    return model


@pytest.mark.parametrize("wanted", [[], ["loss"], INPUTS], ids=["neither", "loss", "both"])
@pytest.mark.parametrize("source", ["dataset", "stream"])
def test_batch_eval_metrics(tmp_path, source, wanted):
    def make():
        streams = {"eval_dataset": Stream(19)} if source == "stream" else {}
        return {"model": make_named(), "compute_metrics": Running(), **streams}

    def script(trainer):
        output = trainer.predict(plain_data(11))
        return comparable([trainer.evaluate(), output.metrics]), exactly([output.predictions, output.label_ids])

    settings = {"trainer": make, "batch_eval_metrics": True, "include_for_metrics": wanted}
    compare(tmp_path, "plain", script=script, per_device_eval_batch_size=4, **settings)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_evaluation(tmp_path, dtype):
    """Inputs are not cast, as in transformers: a module of float32 inputs fails."""
    settings = {f"{dtype}_full_eval": True}
    _, arrays = compare_evaluations(tmp_path, "bert", **settings)
    assert arrays[".predictions"][0] == ("float32" if dtype == "bf16" else "float16")
    trainer, _ = build("hftrainer", "plain", tmp_path, **settings)
    with pytest.raises(RuntimeError, match="dtype"):
        trainer.evaluate()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_waits_for_the_end_of_training(tmp_path, dtype):
    ours = compare(tmp_path, "bert", **EVALUATED, max_steps=4, **{f"{dtype}_full_eval": True})
    assert {tensor.dtype for tensor in ours.weights.values() if tensor.is_floating_point()} == {torch.float32}


@pytest.mark.parametrize("how", ["all", "non_padding", True])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_input_tokens(tmp_path, how, accumulation):
    data = [{**row, "attention_mask": (torch.arange(12) < 5 + i % 8).long()} for i, row in enumerate(language_data())]
    settings = {"include_num_input_tokens_seen": how, "gradient_accumulation_steps": accumulation}
    settings |= {
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "save_steps": 5,
        "trainer": {"train_dataset": data},
    }
    whole = compare(tmp_path / "whole", "llama", **settings)

    def resume(name):
        checkpoint = str(tmp_path / "whole" / name / "checkpoint-5")
        resumed = train(name, "llama", tmp_path / name, checkpoint, **settings)
        if name == "hftrainer":
            assert_same_weights(resumed.weights, whole.weights)  # which theirs are not
        return [line["num_input_tokens_seen"] for line in resumed.logs]

    assert whole.logs[-1]["num_input_tokens_seen"] == alike(resume, assert_equal)[-1] > 0


@pytest.mark.parametrize("how", ["all", "non_padding"])
def test_input_tokens_without_a_mask(tmp_path, how):
    data = [{key: row[key] for key in ("input_ids", "labels")} for row in language_data()]
    compare(tmp_path, "llama", include_num_input_tokens_seen=how, trainer={"train_dataset": data})


# ---- Overrides ---------------------------------------------------------------------------------------------------


def prediction_step(self, *args, **kwargs):
    loss, *rest = super(type(self), self).prediction_step(*args, **kwargs)
    return loss * 2, *rest


def evaluation_loop(self, *args, **kwargs):
    return super(type(self), self).evaluation_loop(*args, **{**kwargs, "metric_key_prefix": "mine"})


def evaluate(self, *args, **kwargs):
    return {**super(type(self), self).evaluate(*args, **kwargs), "eval_own": 1.0}


def get_eval_dataloader(self, dataset=None):
    return super(type(self), self).get_eval_dataloader(plain_data(7))


@pytest.mark.parametrize("method", [prediction_step, evaluation_loop, evaluate, get_eval_dataloader])
def test_overrides_in_fit_and_alone(tmp_path, method):
    def script(trainer):
        trainer.train()
        return comparable([trainer.evaluate()])

    own = subclass(**{method.__name__: method})
    compare(tmp_path, "plain", script=script, trainer_class=own, max_steps=6, **EVALUATED)


def test_unreduced_losses(tmp_path):
    def unreduced(self, model, inputs, prediction_loss_only, ignore_keys=None):
        _, logits, labels = super(type(self), self).prediction_step(model, inputs, False, ignore_keys)
        return nn.functional.cross_entropy(logits, labels, reduction="none"), logits, labels

    compare_evaluations(tmp_path, "plain", trainer_class=subclass(prediction_step=unreduced))


def test_gradients_in_metrics_and_collators(tmp_path):
    """Both may need them; only the forward pass of a prediction step has none."""

    def probes(prediction):
        probe = nn.Linear(3, 3)
        probe(torch.from_numpy(prediction.predictions)).square().mean().backward()
        return {"gradient": bool(probe.weight.grad.abs().sum() > 0)}

    def collates(samples):
        x = torch.stack([sample["x"] for sample in samples]).requires_grad_()
        (gradient,) = torch.autograd.grad(x.square().sum(), x)
        return {"x": x.detach() + gradient, "labels": torch.stack([sample["labels"] for sample in samples])}

    given = {"compute_metrics": probes, "data_collator": collates}
    (evaluated, _), _ = compare_evaluations(tmp_path, "plain", trainer=given)
    assert evaluated["eval_gradient"] is True


def test_batches_of_another_kind(tmp_path):
    class Fickle(Plain):
        def forward(self, x, labels=None):
            outputs = super().forward(x, labels)
            return {**outputs, "logits": [outputs["logits"]] * len(x)}

    given = {"model": Fickle(), "eval_dataset": plain_data(11), "compute_metrics": accuracy}
    trainer, _ = build("hftrainer", "plain", tmp_path, trainer=given)
    with pytest.raises(TypeError, match="a list of 8 and a list of 3; eval_do_concat_batches=False"):
        trainer.evaluate()


SCORES = (math.nan, 0.5, 0.5, 0.7, math.nan, 0.7, 0.3, 0.3, math.inf, -math.inf)


@pytest.mark.parametrize("greater", [True, False])
def test_which_is_the_best(tmp_path, greater):
    """Not one that equals the best, and none that is not a number."""
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


# ---- By length ---------------------------------------------------------------------------------------------------

BY_LENGTH = {"train_sampling_strategy": "group_by_length"}


def collate_columns(samples):
    return pad([{key: torch.tensor(value) for key, value in sample.items()} for sample in samples])


def columns_of(rows, **more):
    return Dataset.from_dict({**{key: [row[key].tolist() for row in rows] for key in rows[0]}, **more})


@pytest.mark.parametrize("kind", ["rows", "columns"])
def test_grouped_by_length(tmp_path, kind):
    """Lengths counted from the samples; evaluation goes by length too."""
    rows = varied_language_data(38)
    held, collate = (rows, pad) if kind == "rows" else (columns_of(rows), collate_columns)
    evaluated = held[:19] if kind == "rows" else held.select(range(19))
    given = {"train_dataset": held, "eval_dataset": evaluated, "data_collator": collate}
    settings = {**BY_LENGTH, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    compare(tmp_path, "llama", trainer=given, eval_strategy="epoch", **settings)


def test_lengths(tmp_path):
    """A column of lengths is taken at its word, also when it is no argument of the model."""
    rows = varied_language_data(38)
    data = columns_of(rows, tokens=[100 + i for i in range(38)])

    def longest_first(column):
        args = TrainingArguments(str(tmp_path), length_column_name=column, use_cpu=True, **BY_LENGTH)
        trainer = Trainer(make_llama(), args, train_dataset=data, data_collator=collate_columns)
        return next(iter(trainer.get_train_dataloader().batch_sampler))[0]

    assert longest_first("tokens") == 37
    assert len(rows[longest_first("length")]["input_ids"]) == 12 > len(rows[37]["input_ids"])


def test_predictions_are_in_the_order_of_the_dataset(tmp_path):
    given = {"eval_dataset": varied_language_data(19), "data_collator": pad}
    grouped, plain = (
        build("hftrainer", "llama", tmp_path, trainer=given, **settings)[0].predict(given["eval_dataset"]).predictions
        for settings in (BY_LENGTH, {})
    )
    assert exactly(grouped) == exactly(plain)


def test_lengths_of_another_set(tmp_path):
    """The column of the set that is evaluated counts, not that of the Trainer's own."""
    own, other = (columns_of(varied_language_data(12), length=each) for each in ([3] * 6 + [9] * 6, [9, 3] * 6))

    def script(trainer):
        return [list(trainer.get_eval_dataloader(data).batch_sampler) for data in (other, own, None)]

    given = {"eval_dataset": own, "data_collator": collate_columns}
    ours = compare(tmp_path, "llama", script=script, trainer=given, remove_unused_columns=False, **BY_LENGTH)
    of_other, of_own, of_none = ours.extra["script"]
    assert of_other != of_own == of_none
