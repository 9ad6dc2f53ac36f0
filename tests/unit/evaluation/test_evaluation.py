"""Evaluation beyond what transformers has: torchmetrics, flat memory, memory-mapped predictions, old loops."""

import gc
import json
import subprocess
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassF1Score

from hftrainer import EvalPrediction, PredictionOutput, TorchMetrics, Trainer, TrainerCallback, TrainingArguments
from hftrainer.data.samplers import LengthGroupedSampler
from hftrainer.data.sharding import ShardedBatchSampler, ShardSpec, batches_of_rank
from hftrainer.errors import InvalidArgument
from hftrainer.evaluation.evaluation_pass import EvaluationPass
from hftrainer.evaluation.growing_array import GrowingArray
from tests.support.tiny import (
    Plain,
    detection_data,
    make_detector,
    make_llama,
    make_plain,
    pad,
    plain_data,
    varied_language_data,
)


@pytest.fixture
def make_trainer(tmp_path):
    def make(model=None, eval_dataset=None, kind=Trainer, trainer=None, **arguments):
        defaults = {"per_device_eval_batch_size": 4, "disable_tqdm": True, "use_cpu": True}
        args = TrainingArguments(str(tmp_path / "out"), **{**defaults, **arguments})
        data = plain_data(19) if eval_dataset is None else eval_dataset
        model = make_plain() if model is None else model
        return kind(model, args, train_dataset=plain_data(), eval_dataset=data, **(trainer or {}))

    return make


# ---- torchmetrics ------------------------------------------------------------------------------------------------


def expected_accuracy(trainer):
    output = Trainer(trainer.model, trainer.args).predict(plain_data(19))
    return float((output.predictions.argmax(-1) == output.label_ids).mean())


@pytest.mark.parametrize(
    ("metrics", "name"),
    [
        (lambda: MulticlassAccuracy(3, average="micro"), "MulticlassAccuracy"),
        (lambda: MetricCollection({"acc": MulticlassAccuracy(3, average="micro")}), "acc"),
        (lambda: {"acc": MulticlassAccuracy(3, average="micro")}, "acc"),
        (lambda: {"all": MetricCollection({"acc": MulticlassAccuracy(3, average="micro")})}, "all_acc"),
        (lambda: TorchMetrics(MulticlassAccuracy(3, average="micro")), "MulticlassAccuracy"),
        (
            lambda: TorchMetrics(
                {"acc": MulticlassAccuracy(3, average="micro")},
                adapter=lambda p: {"preds": p.predictions.argmax(-1), "target": p.label_ids},
            ),
            "acc",
        ),
    ],
    ids=["metric", "collection", "dict", "dict of collections", "wrapped", "adapter"],
)
def test_torchmetrics(make_trainer, metrics, name):
    trainer = make_trainer(trainer={"compute_metrics": metrics()})
    expected = expected_accuracy(trainer)
    for _ in range(2):  # each evaluation begins anew
        found = trainer.evaluate()
        assert found[f"eval_{name}"] == pytest.approx(expected)
        assert next(iter(found)) == "eval_loss"
    output = trainer.predict(plain_data(19))
    assert output.metrics[f"test_{name}"] == pytest.approx(expected)
    assert output.predictions.shape == (19, 3)


def test_torchmetrics_in_training(make_trainer):
    """For the best model, early stopping and each of several sets."""
    metrics = {"acc": MulticlassAccuracy(3), "matrix": MulticlassConfusionMatrix(3)}
    trainer = make_trainer(
        eval_dataset={"a": plain_data(9), "b": plain_data(20)[9:]},
        trainer={"compute_metrics": metrics},
        max_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="best",
        metric_for_best_model="a_acc",
    )
    trainer.train()
    lines = [line for line in trainer.state.log_history if "eval_a_acc" in line]
    assert trainer.state.best_metric == max(line["eval_a_acc"] for line in lines)
    assert all(np.array(line["eval_a_matrix"]).sum() == 9 for line in lines)
    assert json.dumps(trainer.state.log_history)
    last = next(line for line in trainer.state.log_history if "eval_b_matrix" in line)
    assert np.array(last["eval_b_matrix"]).shape == (3, 3)
    assert np.array(last["eval_b_matrix"]).sum() == 11


def test_torchmetrics_keep_no_predictions(make_trainer):
    trainer = make_trainer(trainer={"compute_metrics": MulticlassAccuracy(3)})
    output = trainer.evaluation_loop(trainer.get_eval_dataloader(), "Evaluation")
    assert output.predictions is None and output.label_ids is None
    assert output.num_samples == 19


def test_torchmetrics_get_inputs_and_losses(make_trainer):
    seen = []

    def adapter(prediction):
        seen.append((prediction.inputs.shape, prediction.losses.shape))
        return prediction.predictions, prediction.label_ids

    model = make_plain()
    model.main_input_name = "x"
    metrics = TorchMetrics(MulticlassAccuracy(3), adapter=adapter)
    make_trainer(model, include_for_metrics=["inputs", "loss"], trainer={"compute_metrics": metrics}).evaluate()
    assert seen == [((4, 8), (4,))] * 4 + [((3, 8), (3,))]


def test_torchmetrics_without_labels(make_trainer):
    trainer = make_trainer(trainer={"compute_metrics": MulticlassAccuracy(3)})
    output = trainer.predict([{"x": row["x"]} for row in plain_data(5)])
    assert output.predictions.shape == (5, 3)
    assert not any("Accuracy" in name for name in output.metrics)
    seen = []
    trainer.compute_metrics = TorchMetrics(
        MulticlassAccuracy(3), adapter=lambda p: seen.append(1) or (p.predictions, p.predictions.argmax(-1))
    )
    found = trainer.predict([{"x": row["x"]} for row in plain_data(5)]).metrics
    assert found["test_MulticlassAccuracy"] > 0
    assert len(seen) == 2


def test_torchmetrics_with_loss_only(make_trainer):
    trainer = make_trainer(prediction_loss_only=True, trainer={"compute_metrics": MulticlassAccuracy(3)})
    assert [name for name in trainer.evaluate() if "Accuracy" in name] == []


def test_torchmetrics_are_drawn(make_trainer, tmp_path):
    metrics = MetricCollection({"acc": MulticlassAccuracy(3), "f1": MulticlassF1Score(3)})
    trainer = make_trainer(
        trainer={"compute_metrics": TorchMetrics(metrics, plot=True)},
        max_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
    )
    trainer.train()
    for step in (2, 4):
        drawn = sorted(path.name for path in (tmp_path / "out" / f"plots-{step}").iterdir())
        assert drawn == ["eval_acc.png", "eval_f1.png"]
        assert (tmp_path / "out" / f"plots-{step}" / "eval_acc.png").read_bytes().startswith(b"\x89PNG")


def test_several_outputs_need_an_adapter(make_trainer):
    trainer = make_trainer(make_detector(), detection_data(), trainer={"compute_metrics": MulticlassAccuracy(6)})
    with pytest.raises(InvalidArgument, match=r"outputs are a tuple.*adapter="):
        trainer.evaluate()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("accuracy", "compute_metrics must be a function.*got str"),
        ({"acc": lambda p: {}}, r"compute_metrics\['acc'\] is a function"),
        ({}, "at least one"),
    ],
)
def test_wrong_metrics(make_trainer, wrong, message):
    with pytest.raises(InvalidArgument, match=message):
        make_trainer(trainer={"compute_metrics": wrong})


def test_plots_need_matplotlib(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidArgument, match="pip install matplotlib"):
        TorchMetrics(MulticlassAccuracy(3), plot=True)


def test_batch_eval_metrics_needs_its_argument(make_trainer):
    with pytest.raises(InvalidArgument, match="compute_result"):
        make_trainer(trainer={"compute_metrics": lambda prediction: {}}, batch_eval_metrics=True)
    metrics = {"compute_metrics": MulticlassAccuracy(3)}
    assert "eval_MulticlassAccuracy" in make_trainer(trainer=metrics, batch_eval_metrics=True).evaluate()


# ---- One copy of the predictions -----------------------------------------------------------------------------------


@st.composite
def batches(draw):
    tail = draw(st.sampled_from([None, (), (3,), (2, 2)]))
    dtype = draw(st.sampled_from([np.float32, np.int64, np.float16, np.bool_, np.uint8]))
    found = []
    for _ in range(draw(st.integers(1, 8))):
        shape = (
            (draw(st.integers(0, 5)),) if tail is None else (draw(st.integers(0, 5)), draw(st.integers(0, 9)), *tail)
        )
        found.append(np.arange(np.prod(shape)).reshape(shape).astype(dtype))
    return found


def padded(arrays, padding=-100):
    """The definition: everything at once."""
    if arrays[0].ndim == 1:
        return np.concatenate(arrays)
    longest = max(array.shape[1] for array in arrays)
    rest = [(0, 0)] * (arrays[0].ndim - 2)
    fill = np.asarray(padding).astype(arrays[0].dtype)
    return np.concatenate([np.pad(a, [(0, 0), (0, longest - a.shape[1]), *rest], constant_values=fill) for a in arrays])


@settings(deadline=None, max_examples=150)
@given(arrays=batches(), rows=st.integers(0, 40), mapped=st.booleans())
def test_growing_array(tmp_path_factory, arrays, rows, mapped):
    folder = str(tmp_path_factory.getbasetemp()) if mapped else None
    growing = GrowingArray(arrays[0], rows, folder)
    for array in arrays[1:]:
        growing.add(array)
    result = growing.finish()
    expected = padded(arrays)
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    assert np.array_equal(result, expected)
    assert isinstance(result, np.memmap) is mapped or not result.size


def test_growing_array_moves_rows_in_blocks(monkeypatch):
    monkeypatch.setattr("hftrainer.evaluation.growing_array._BLOCK", 8)
    arrays = [np.arange(6 * width).reshape(6, width) for width in (2, 3, 7, 1, 30)]
    growing = GrowingArray(arrays[0])
    for array in arrays[1:]:
        growing.add(array)
    assert np.array_equal(growing.finish(), padded(arrays))


def test_growing_array_widens_its_type():
    growing = GrowingArray(np.array([[1, 2]], dtype=np.int64))
    growing.add(np.array([[0.5]], dtype=np.float32))
    result = growing.finish()
    assert result.dtype == np.float64
    assert result.tolist() == [[1.0, 2.0], [0.5, -100.0]]


@pytest.mark.parametrize("wrong", [np.zeros((2, 3, 5)), np.zeros(2), np.zeros((2, 3))])
def test_growing_array_refuses_other_shapes(wrong):
    growing = GrowingArray(np.zeros((2, 3, 4)))
    with pytest.raises(ValueError, match="eval_do_concat_batches=False"):
        growing.add(wrong)


def test_memory_mapped_predictions(make_trainer, tmp_path):
    model, data = make_llama(), varied_language_data()
    plain = make_trainer(model, data, trainer={"data_collator": pad}).predict(data)
    mapped = make_trainer(model, data, trainer={"data_collator": pad}, eval_memmap_dir=str(tmp_path)).predict(data)
    assert isinstance(mapped.predictions, np.memmap) and isinstance(mapped.label_ids, np.memmap)
    assert np.array_equal(mapped.predictions, plain.predictions)
    assert np.array_equal(mapped.label_ids, plain.label_ids)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # temporary files have no name
    with pytest.raises(InvalidArgument, match=r"eval_memmap_dir=.*is not a folder"):
        make_trainer(eval_memmap_dir=str(tmp_path / "none"))
    with pytest.raises(InvalidArgument, match="eval_do_concat_batches=False"):
        make_trainer(eval_memmap_dir=str(tmp_path), eval_do_concat_batches=False)


MEASURES = """
import sys, numpy as np, torch
from pathlib import Path
from hftrainer.evaluation.outputs import OutputCollector

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024

kind, folder = sys.argv[1:]
sizes = {"equal": [100] * 100, "varied": [60 + (i * 37) % 41 for i in range(100)], "longer": list(range(1, 101))}[kind]
collector = OutputCollector(rows=100 * 16, folder=folder or None)
Path("/proc/self/clear_refs").write_text("5")
before, peak = status("RssAnon"), 0.0
for size in sizes:
    collector.add(torch.ones(16, size, 128))
    collector.to_host()
    peak = max(peak, status("RssAnon") - before)
array = collector.arrays()
print(max(peak, status("RssAnon") - before) / (array.nbytes / 2**20))
"""


@pytest.mark.parametrize(
    ("kind", "folder", "copies"),
    [("equal", False, 1.15), ("varied", False, 1.3), ("longer", False, 1.4), ("equal", True, 0.2)],
)
def test_memory_is_about_one_copy(tmp_path, kind, folder, copies):
    """Peak memory in copies of the result (up to 82 MB), measured in a process of its own."""
    command = [sys.executable, "-c", MEASURES, kind, str(tmp_path) if folder else ""]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(run.stdout) < copies


# ---- Loops of old releases -------------------------------------------------------------------------------------------


class OldLoop(Trainer):
    """As scripts of v4.4 and before write it."""

    def prediction_loop(self, dataloader, description, prediction_loss_only=None):
        return PredictionOutput(np.ones(3), np.zeros(3), {"eval_mine": 1.0})


def test_prediction_loop_of_old_scripts(make_trainer):
    trainer = make_trainer(kind=OldLoop)
    metrics = trainer.evaluate()
    assert metrics["eval_mine"] == 1.0
    assert metrics["eval_samples_per_second"] > 0
    assert trainer.predict(plain_data(3)).predictions.tolist() == [1, 1, 1]


def test_prediction_loop_by_argument(make_trainer):
    called = []

    class Both(Trainer):
        def prediction_loop(self, *args, **kwargs):
            called.append("old")
            return super().prediction_loop(*args, **kwargs)

        def evaluation_loop(self, *args, **kwargs):
            called.append("new")
            return super().evaluation_loop(*args, **kwargs)

    expected = make_trainer().evaluate()["eval_loss"]
    assert make_trainer(kind=Both).evaluate()["eval_loss"] == expected
    assert called == ["new"]
    assert make_trainer(kind=Both, use_legacy_prediction_loop=True).evaluate()["eval_loss"] == expected
    assert called == ["new", "old", "new"]


def test_prediction_step_of_v4_0(make_trainer):
    class Old(Trainer):
        def prediction_step(self, model, inputs, prediction_loss_only):
            return super().prediction_step(model, inputs, prediction_loss_only)

    assert make_trainer(kind=Old).evaluate()["eval_loss"] == make_trainer().evaluate()["eval_loss"]


# ---- Odds and ends ---------------------------------------------------------------------------------------------------


def test_outputs_that_are_no_tensors(make_trainer):
    class Talks(Plain):
        def forward(self, x, labels=None):
            return {**super().forward(x, labels), "comment": None}

    trainer = make_trainer(Talks(), trainer={"compute_metrics": lambda p: {}})
    with pytest.raises(TypeError, match=r"cannot concatenate a NoneType.*ignore_keys"):
        trainer.evaluate()
    assert "eval_loss" in trainer.evaluate(ignore_keys=["comment"])


def test_shapes_that_do_not_fit(make_trainer):
    class Grows(Plain):
        def forward(self, x, labels=None):
            return {**super().forward(x, labels), "square": torch.zeros(len(x), 2, len(x))}

    trainer = make_trainer(Grows(), trainer={"compute_metrics": lambda p: {}})
    with pytest.raises(ValueError, match=r"\(3, 2, 3\) cannot be appended to.*\(batch, length, 4\)"):
        trainer.evaluate()


def test_run_time_is_positive(make_trainer):
    """What preparing the model took is taken off the first evaluation only; later ones report it."""
    trainer = make_trainer()
    first, second = trainer.evaluate(), trainer.evaluate()
    assert first["eval_runtime"] > 0 and second["eval_runtime"] > 0
    assert first["eval_model_preparation_time"] == second["eval_model_preparation_time"]


def test_warnings_of_lightning_stay_out(make_trainer):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = make_trainer(prediction_loss_only=True)
        trainer.evaluate()
        trainer.predict(plain_data(5))


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 8])
def test_shares(count, processes):
    """Every batch once, in turn; the others get the first as a filler."""
    whole = [[2 * i, 2 * i + 1] for i in range(count)]
    rounds = -(-count // processes)
    for rank in range(processes):
        sampler = ShardedBatchSampler(whole, ShardSpec(rank, processes))
        mine = list(sampler)
        assert len(mine) == len(sampler) == rounds
        own = whole[rank::processes]
        assert mine[: len(own)] == own
        assert mine[len(own) :] == whole[:1] * (rounds - len(own))
        assert sampler.ends_with_filler is (len(own) < rounds)
        assert sampler.owns_last is (count > 0 and (count - 1) % processes == rank)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 9])
def test_shares_of_a_stream(count):
    shares = [list(batches_of_rank(range(count), ShardSpec(rank, 3))) for rank in range(3)]
    rounds = list(zip(*shares, strict=True))  # as many batches in each process
    assert [batch for together in rounds for batch, filler in together if not filler] == list(range(count))
    assert {batch for together in rounds for batch, filler in together if filler} <= {0}


def test_length_grouped_sampler():
    lengths = [3, 9, 1, 7, 5, 8, 2, 6, 4, 0] * 10
    sampler = LengthGroupedSampler(4, lengths=lengths, generator=torch.Generator().manual_seed(0))
    first, second = list(sampler), list(sampler)
    assert sorted(first) == sorted(second) == list(range(100)) and first != second
    assert lengths[first[0]] == 9
    spread = [max(group) - min(group) for i in range(0, 100, 4) if (group := [lengths[j] for j in first[i : i + 4]])]
    assert sum(spread) / len(spread) < 4 < 9
    for wrong in ({"batch_size": 2}, {"batch_size": 2, "dataset": [{"x": 1}]}, {"batch_size": 2, "dataset": [3]}):
        with pytest.raises(InvalidArgument, match="length"):
            LengthGroupedSampler(**wrong)


def test_eval_prediction_parts():
    assert EvalPrediction(1, 2, losses=3).elements == (1, 2, 3)


def test_predictions_are_let_go(make_trainer):
    """Nothing of an evaluation stays behind when its result is gone, alone and within training."""
    trainer = make_trainer(max_steps=4, eval_strategy="steps", eval_steps=2)
    left = []

    class Sees(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            gc.collect()
            left.append(sum(isinstance(thing, EvaluationPass) for thing in gc.get_objects()))

    trainer.add_callback(Sees)
    trainer.evaluate()
    trainer.predict(plain_data(5))
    trainer.train()
    assert left == [0] * 4


def test_predict_in_training_is_not_limited(make_trainer):
    seen = []

    class Predicts(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append((len(trainer.predict(plain_data(18)).predictions), trainer.evaluate()["eval_loss"]))

    trainer = make_trainer(max_steps=1, lightning_config={"limit_val_batches": 2})
    trainer.add_callback(Predicts)
    trainer.train()
    assert seen[0][0] == 18
    assert trainer.evaluate()["eval_loss"] == seen[0][1]  # of two batches


def test_evaluation_loop_may_return_any_object(make_trainer):
    class Own(Trainer):
        def evaluation_loop(self, *args, **kwargs):
            return SimpleNamespace(predictions=None, label_ids=None, metrics={"eval_own": 1.0}, num_samples=3)

    assert make_trainer(kind=Own).evaluate()["eval_own"] == 1.0


@pytest.mark.parametrize("how", [{"dataloader_drop_last": True}, {"lightning_config": {"limit_val_batches": 0}}])
def test_no_batch_at_all(make_trainer, how):
    with pytest.raises(InvalidArgument, match="smaller than a batch with dataloader_drop_last, or lightning_config"):
        make_trainer(**how).evaluate(plain_data(3))
