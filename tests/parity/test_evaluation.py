"""Evaluation and prediction: metrics, predictions, labels, shapes and dtypes, exactly as transformers has them."""

import importlib
import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from tests.support.parity import (
    alike,
    assert_equal,
    assert_same,
    assert_same_weights,
    comparable,
    leaves,
    make_recorder,
    record,
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
    varied_language_data,
)

transformers = importlib.import_module("transformers")


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


def make_answerer():
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    return transformers.BertForQuestionAnswering(config)


def answer_data(count=19):
    rows = MODELS["bert"][1](count)
    keys = ("input_ids", "attention_mask")
    return [
        {**{key: row[key] for key in keys}, "start_positions": 2, "end_positions": 3 + i % 4}
        for i, row in enumerate(rows)
    ]


CASES = {
    **MODELS,
    "detector": (make_detector, detection_data),
    "clip": (make_clip, lambda count=19: [{"x": row["x"]} for row in plain_data(count)]),
    "answerer": (make_answerer, answer_data),
    "t5": (make_t5, t5_data),
    "varied": (make_llama, varied_language_data),
}


def assert_same_arrays(ours, theirs):
    """The same nesting, and each array of the same dtype, shape and values."""
    ours, theirs = leaves(ours), leaves(theirs)
    assert list(ours) == list(theirs)
    for path, array in theirs.items():
        if array is None:
            assert ours[path] is None
            continue
        assert (ours[path].dtype, ours[path].shape) == (array.dtype, array.shape), path
        assert np.array_equal(ours[path], array, equal_nan=array.dtype.kind == "f"), path


def summary(prediction):
    """Numbers that change with any entry, of any nesting."""
    found = {
        f"{name}{path}": float(np.nan_to_num(np.asarray(leaf, dtype=np.float64)).sum())
        for name in ("predictions", "label_ids", "inputs", "losses")
        for path, leaf in leaves(getattr(prediction, name)).items()
        if leaf is not None
    }
    return {**found, "elements": len(prediction.elements)}


def build(name, case, folder, trainer_class=None, **settings):
    library = importlib.import_module(name)
    make_model, make_data = CASES[case]
    given = {"compute_metrics": summary, "eval_dataset": make_data(19), **settings.pop("trainer", {})}
    if case == "varied":
        given["data_collator"] = pad
    defaults = {"per_device_eval_batch_size": 4, "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    args = library.TrainingArguments(str(folder), **{**defaults, **settings})
    recorder = make_recorder(library)
    kind = library.Trainer if trainer_class is None else trainer_class(library)
    return kind(make_model(), args, callbacks=[recorder], **given), recorder


def run(name, case, folder, *, evaluate=None, predict=None, **settings):
    """Evaluate and predict; returns all that can be compared."""
    trainer, recorder = build(name, case, folder, **settings)
    metrics = trainer.evaluate(**(evaluate or {}))
    output = trainer.predict(CASES[case][1](11), **(predict or {}))
    assert json.dumps(metrics)  # JSON-safe
    extra = {"evaluated": comparable([metrics]), "predicted": comparable([output.metrics])}
    return record(trainer, recorder, folder, **extra), output


def assert_same_outputs(ours, theirs):
    assert_same(ours["record"], theirs["record"])
    assert_same_arrays(ours["predictions"], theirs["predictions"])
    assert_same_arrays(ours["label_ids"], theirs["label_ids"])


def compare(tmp_path, case, **settings):
    """Our record and output, after asserting that those of transformers are the same."""
    outputs = []

    def run_one(name):
        found, output = run(name, case, tmp_path / name, **settings)
        outputs.append(output)
        return {"record": found, "predictions": output.predictions, "label_ids": output.label_ids}

    return alike(run_one, assert_same_outputs)["record"], outputs[0]


@pytest.mark.parametrize("case", sorted(CASES.keys() - {"peft"}))
def test_models(tmp_path, case):
    compare(tmp_path, case)


SETTINGS = [
    pytest.param(
        {"evaluate": {"ignore_keys": ["levels"]}, "predict": {"ignore_keys": ["boxes", "levels"]}}, id="ignore-keys"
    ),
    pytest.param({"evaluate": {"metric_key_prefix": "valid"}, "predict": {"metric_key_prefix": "p"}}, id="prefix"),
    pytest.param({"prediction_loss_only": True}, id="loss-only"),
    pytest.param({"label_names": ["labels"]}, id="one-label"),
    pytest.param({"label_names": ["missing"]}, id="label-missing"),
    pytest.param({"include_for_metrics": ["loss"]}, id="losses"),
    pytest.param({"eval_accumulation_steps": 1}, id="accumulation-1"),
    pytest.param({"eval_accumulation_steps": 2}, id="accumulation-2"),
    pytest.param({"eval_do_concat_batches": False, "include_for_metrics": ["loss"]}, id="batches-apart"),
    pytest.param({"eval_use_gather_object": True}, id="gather-object"),
    pytest.param({"per_device_eval_batch_size": 64}, id="one-batch"),
    pytest.param({"dataloader_drop_last": True}, id="drop-last"),
    pytest.param({"dataloader_num_workers": 1}, id="worker"),
    pytest.param({"trainer": {"compute_metrics": None}}, id="no-metrics"),
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_settings(tmp_path, settings):
    compare(tmp_path, "detector", **settings)


@pytest.mark.parametrize("settings", [{}, {"eval_do_concat_batches": False}, {"eval_accumulation_steps": 2}])
@pytest.mark.parametrize("wanted", [["inputs"], ["inputs", "loss"]], ids=["inputs", "both"])
def test_inputs_for_metrics(tmp_path, wanted, settings):
    compare(tmp_path, "varied", include_for_metrics=wanted, **settings)


def test_named_and_several_sets(tmp_path):
    sets = {"first": plain_data(9), "second": plain_data(20)[9:]}
    compare(tmp_path, "plain", trainer={"eval_dataset": sets})
    compare(tmp_path, "plain", trainer={"eval_dataset": sets}, evaluate={"eval_dataset": "second"})
    compare(tmp_path, "plain", evaluate={"eval_dataset": sets, "metric_key_prefix": "other"})


def test_no_labels(tmp_path):
    data = [{"x": row["x"]} for row in plain_data(11)]
    outputs = []
    for name in ("hftrainer", "transformers"):
        trainer, _ = build(name, "plain", tmp_path / name)
        outputs.append(trainer.predict(data))
        assert outputs[-1].label_ids is None
        metrics = trainer.evaluate(data)
        assert not any(key.endswith(("_loss", "elements")) for key in metrics)
    assert_same_arrays(outputs[0].predictions, outputs[1].predictions)
    assert list(outputs[0].metrics) == list(outputs[1].metrics)


@pytest.mark.parametrize("count", [3, 8, 19])
def test_unsized_stream(tmp_path, count):
    compare(tmp_path, "plain", trainer={"eval_dataset": Stream(count)})


def keep_best(logits, labels):
    return logits.topk(2, dim=-1).indices if isinstance(logits, torch.Tensor) else logits[0].argmax(-1)


@pytest.mark.parametrize("case", ["bert", "varied", "t5"])
def test_preprocess_logits(tmp_path, case):
    _, output = compare(tmp_path, case, trainer={"preprocess_logits_for_metrics": keep_best})
    assert output.predictions.dtype == np.int64


class Running:
    """A metric that adds up batch by batch."""

    def __init__(self):
        self.total, self.batches, self.seen = 0.0, 0, []

    def __call__(self, prediction, compute_result=False):
        self.total += float(prediction.predictions.sum()) + float(prediction.label_ids.sum())
        self.batches += 1
        self.seen.append((type(prediction.predictions).__name__, len(prediction.elements)))
        if not compute_result:
            return {"total": -1.0}
        result = {"total": self.total, "batches": self.batches}
        self.total, self.batches = 0.0, 0
        return result


def with_main_input(library):
    class Named(library.Trainer):
        def __init__(self, model, *args, **kwargs):
            model.main_input_name = "x"
            super().__init__(model, *args, **kwargs)

    return Named


@pytest.mark.parametrize("wanted", [[], ["loss"], ["inputs", "loss"]], ids=["neither", "loss", "both"])
@pytest.mark.parametrize("source", ["dataset", "stream"])
def test_batch_eval_metrics(tmp_path, source, wanted):

    def run_one(name):
        running = Running()
        trainer = {"compute_metrics": running}
        if source == "stream":
            trainer["eval_dataset"] = Stream(19)
        settings = {"trainer": trainer, "batch_eval_metrics": True, "include_for_metrics": wanted}
        found, output = run(name, "plain", tmp_path / name, trainer_class=with_main_input, **settings)
        found.extra["seen"] = running.seen
        return {"record": found, "predictions": output.predictions, "label_ids": output.label_ids}

    alike(run_one, assert_same_outputs)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("case", ["bert", "plain"])
def test_half_precision_evaluation(tmp_path, case, dtype):
    settings = {f"{dtype}_full_eval": True}
    if case == "plain":  # a module of float32 inputs: they are not cast, as in transformers
        trainer, _ = build("hftrainer", case, tmp_path, **settings)
        with pytest.raises(RuntimeError, match="dtype"):
            trainer.evaluate()
        return
    _, output = compare(tmp_path, case, **settings)
    assert output.predictions.dtype == (np.float32 if dtype == "bf16" else np.float16)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_waits_for_the_end_of_training(tmp_path, dtype):
    settings = {"eval_strategy": "steps", "eval_steps": 4, "max_steps": 8, f"{dtype}_full_eval": True}
    ours = train("hftrainer", "bert", tmp_path / "ours", **settings)
    assert_same(ours, train("transformers", "bert", tmp_path / "theirs", **settings))
    assert {tensor.dtype for tensor in ours.weights.values() if tensor.is_floating_point()} == {torch.float32}


@pytest.mark.parametrize("how", ["all", "non_padding", True])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_input_tokens(tmp_path, how, accumulation):
    data = [{**row, "attention_mask": (torch.arange(12) < 5 + i % 8).long()} for i, row in enumerate(language_data())]
    settings = {
        "include_num_input_tokens_seen": how,
        "gradient_accumulation_steps": accumulation,
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "save_steps": 5,
        "trainer": {"train_dataset": data},
    }
    resumed = {}

    def run_one(name):
        result = train(name, "llama", tmp_path / name, **settings)
        checkpoint = str(tmp_path / name / "checkpoint-5")
        resumed[name] = train(name, "llama", tmp_path / name, resume=checkpoint, **settings)
        result.extra["after resuming"] = [line["num_input_tokens_seen"] for line in resumed[name].logs]
        return result

    ours = alike(run_one)
    assert_same_weights(resumed["hftrainer"].weights, ours.weights)  # which theirs are not
    assert ours.logs[-1]["num_input_tokens_seen"] == ours.extra["after resuming"][-1] > 0


@pytest.mark.parametrize("how", ["all", "non_padding"])
def test_input_tokens_without_a_mask(tmp_path, how):
    data = [{key: row[key] for key in ("input_ids", "labels")} for row in language_data()]
    settings = {"include_num_input_tokens_seen": how, "trainer": {"train_dataset": data}}
    ours = train("hftrainer", "llama", tmp_path / "ours", **settings)
    assert_same(ours, train("transformers", "llama", tmp_path / "theirs", **settings))


OVERRIDES = {
    "prediction_step": lambda base: (
        lambda self, *args, **kwargs: (
            None if (out := base.prediction_step(self, *args, **kwargs)) is None else (out[0] * 2, out[1], out[2])
        )
    ),
    "evaluation_loop": lambda base: (
        lambda self, *args, **kwargs: base.evaluation_loop(self, *args, **{**kwargs, "metric_key_prefix": "mine"})
    ),
    "evaluate": lambda base: lambda self, *args, **kwargs: {**base.evaluate(self, *args, **kwargs), "eval_own": 1.0},
    "get_eval_dataloader": lambda base: lambda self, dataset=None: base.get_eval_dataloader(self, plain_data(7)),
}


@pytest.mark.parametrize("method", sorted(OVERRIDES))
def test_overrides_in_fit_and_alone(tmp_path, method):
    def own(library):
        return type("Own", (library.Trainer,), {method: OVERRIDES[method](library.Trainer)})

    def run_one(name):
        trainer, recorder = build(
            name,
            "plain",
            tmp_path / name,
            trainer_class=own,
            trainer={"train_dataset": plain_data(), "compute_metrics": None},
            max_steps=6,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="no",
        )
        trainer.train()
        alone = trainer.evaluate()
        return record(trainer, recorder, tmp_path / name, alone=comparable([alone]))

    alike(run_one)


def collate_columns(samples):
    return pad([{key: torch.tensor(value) for key, value in sample.items()} for sample in samples])


def columns_of(rows):
    return {key: [row[key].tolist() for row in rows] for key in rows[0]}


@pytest.mark.parametrize("kind", ["rows", "columns"])
def test_grouped_by_length(tmp_path, kind):
    """Lengths counted from the samples; evaluation goes by length too."""
    from datasets import Dataset

    rows = varied_language_data(38)
    held, collate = (rows, pad) if kind == "rows" else (Dataset.from_dict(columns_of(rows)), collate_columns)
    evaluated = held[:19] if kind == "rows" else held.select(range(19))
    settings = {
        "train_sampling_strategy": "group_by_length",
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2,
        "eval_strategy": "epoch",
        "trainer": {"train_dataset": held, "eval_dataset": evaluated, "data_collator": collate},
    }
    ours = train("hftrainer", "llama", tmp_path / "ours", **settings)
    assert_same(ours, train("transformers", "llama", tmp_path / "theirs", **settings))


def test_lengths(tmp_path):
    """A column of lengths is taken at its word, also when it is no argument of the model."""
    from datasets import Dataset

    library = importlib.import_module("hftrainer")
    rows = varied_language_data(38)
    data = Dataset.from_dict({**columns_of(rows), "tokens": [100 + i for i in range(38)]})

    def longest_first(column):
        args = library.TrainingArguments(
            str(tmp_path), train_sampling_strategy="group_by_length", length_column_name=column, use_cpu=True
        )
        trainer = library.Trainer(make_llama(), args, train_dataset=data, data_collator=collate_columns)
        return next(iter(trainer.get_train_dataloader().batch_sampler))[0]

    assert longest_first("tokens") == 37
    assert len(rows[longest_first("length")]["input_ids"]) == 12 > len(rows[37]["input_ids"])


def test_predictions_are_in_the_order_of_the_dataset(tmp_path):
    settings = {"train_sampling_strategy": "group_by_length", "trainer": {"compute_metrics": None}}
    grouped, _ = build("hftrainer", "varied", tmp_path, **settings)
    plain, _ = build("hftrainer", "varied", tmp_path, trainer={"compute_metrics": None})
    data = varied_language_data(19)
    assert_same_arrays(grouped.predict(data).predictions, plain.predict(data).predictions)


def test_batches_of_another_kind(tmp_path):
    class Fickle(Plain):
        def forward(self, x, labels=None):
            outputs = super().forward(x, labels)
            return {**outputs, "logits": [outputs["logits"]] * len(x)}

    library = importlib.import_module("hftrainer")
    args = library.TrainingArguments(str(tmp_path), report_to="none", disable_tqdm=True, use_cpu=True)
    trainer = library.Trainer(Fickle(), args, eval_dataset=plain_data(11), compute_metrics=lambda p: {})
    with pytest.raises(TypeError, match="a list of 8 and a list of 3; eval_do_concat_batches=False"):
        trainer.evaluate()


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


@pytest.mark.parametrize(("length", "workers"), [(18, 2), (8, 0), (30, 0)])
def test_streams_whose_length_is_wrong(tmp_path, length, workers):
    """Every batch that comes is evaluated."""
    found = []
    for name in ("hftrainer", "transformers"):
        trainer, _ = build(name, "plain", tmp_path / name, dataloader_num_workers=workers)
        output = trainer.predict(HalfStream(18, length))
        found.append((output.predictions, comparable([output.metrics])))
    assert len(found[0][0]) == 18
    assert_same_arrays(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_gradients_in_metrics_and_collators(tmp_path):
    """Both may need them; only the forward pass of a prediction step has none."""

    def probes(prediction):
        probe = torch.nn.Linear(3, 3)
        loss = probe(torch.from_numpy(prediction.predictions)).square().mean()
        loss.backward()
        return {"gradient": bool(probe.weight.grad.abs().sum() > 0)}

    def collates(samples):
        x = torch.stack([sample["x"] for sample in samples]).requires_grad_()
        (gradient,) = torch.autograd.grad(x.square().sum(), x)
        return {"x": x.detach() + gradient, "labels": torch.stack([sample["labels"] for sample in samples])}

    settings = {"trainer": {"compute_metrics": probes, "data_collator": collates}}
    ours, _ = compare(tmp_path, "plain", **settings)
    assert ours.extra["evaluated"][0]["eval_gradient"] is True


def test_unreduced_losses(tmp_path):
    def unreduced(library):
        class Own(library.Trainer):
            def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
                _, logits, labels = super().prediction_step(model, inputs, False, ignore_keys)
                return torch.nn.functional.cross_entropy(logits, labels, reduction="none"), logits, labels

        return Own

    compare(tmp_path, "plain", trainer_class=unreduced)


def test_lengths_of_another_set(tmp_path):
    """The column of the set that is evaluated counts, not that of the Trainer's own."""
    from datasets import Dataset

    rows = varied_language_data(12)

    def with_lengths(lengths):
        return Dataset.from_dict({**columns_of(rows), "length": lengths})

    def run(name):
        own, other = with_lengths([3] * 6 + [9] * 6), with_lengths([9, 3] * 6)
        settings = {"train_sampling_strategy": "group_by_length", "remove_unused_columns": False}
        given = {"eval_dataset": own, "data_collator": collate_columns, "compute_metrics": None}
        trainer, _ = build(name, "llama", tmp_path / name, **settings, trainer=given)
        return [list(trainer.get_eval_dataloader(data).batch_sampler) for data in (other, own, None)]

    ours = alike(run, assert_equal)
    assert ours[0] != ours[1] == ours[2]
