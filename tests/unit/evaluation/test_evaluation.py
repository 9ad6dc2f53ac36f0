"""Evaluation beyond what transformers has: torchmetrics, flat memory, memory-mapped predictions, old loops."""

import gc
import json
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from hftrainer import PredictionOutput, TorchMetrics, Trainer, TrainerCallback
from hftrainer.errors import InvalidArgument
from hftrainer.evaluation.collecting import GrowingArray
from hftrainer.evaluation.evaluation_pass import EvaluationPass
from tests.support import small_models
from tests.support.checkpoints import AtStep
from tests.support.small_models import detection_data, make_detector, make_plain, pad, plain_data

EVALUATED = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2}
METRICS = {
    "MulticlassAccuracy": lambda metric: metric,
    "acc": lambda metric: MetricCollection({"acc": metric}),
    "in_a_dict": lambda metric: {"in_a_dict": metric},
    "all_acc": lambda metric: MappingProxyType({"all": MetricCollection({"acc": metric})}),
    "adapted": lambda metric: TorchMetrics(
        {"adapted": metric}, adapter=lambda p: {"preds": p.predictions.argmax(-1), "target": p.label_ids}
    ),
}


@pytest.mark.parametrize("name", METRICS)
def test_torchmetrics_match_values_by_hand(make_trainer, name):
    metrics = METRICS[name](MulticlassAccuracy(3, average="micro"))
    trainer = make_trainer(compute_metrics=metrics)
    output = Trainer(trainer.model, trainer.args).predict(plain_data(19))
    expected = float((output.predictions.argmax(-1) == output.label_ids).mean())
    for _ in range(2):  # each evaluation begins anew
        found = trainer.evaluate()
        assert found[f"eval_{name}"] == pytest.approx(expected)
        assert next(iter(found)) == "eval_loss"
    output = trainer.predict(plain_data(19))
    assert output.metrics[f"test_{name}"] == pytest.approx(expected)
    assert output.predictions.shape == (19, 3)
    output = trainer.evaluation_loop(trainer.get_eval_dataloader(), "Evaluation")
    assert output.predictions is None and output.label_ids is None  # nothing needs them
    assert output.num_samples == 19


def test_torchmetrics_of_several_sets_are_logged_in_training(make_trainer):
    metrics = {"acc": MulticlassAccuracy(3), "matrix": MulticlassConfusionMatrix(3)}
    data = {"a": plain_data(9), "b": plain_data(20)[9:]}
    best = {"save_strategy": "best", "metric_for_best_model": "a_acc"}
    trainer = make_trainer(eval_dataset=data, compute_metrics=metrics, **EVALUATED, **best)
    trainer.train()
    history = json.loads(json.dumps(trainer.state.log_history))
    of_a, of_b = ([line for line in history if f"eval_{name}_matrix" in line] for name in "ab")
    assert trainer.state.best_metric == max(line["eval_a_acc"] for line in of_a)
    assert [np.array(line["eval_a_matrix"]).sum() for line in of_a] == [9, 9]
    assert np.array(of_b[0]["eval_b_matrix"]).shape == (3, 3)
    assert [np.array(line["eval_b_matrix"]).sum() for line in of_b] == [11, 11]


def test_torchmetrics_get_inputs_and_losses(make_trainer):
    seen = []

    def adapter(prediction):
        seen.append((prediction.inputs.shape, prediction.losses.shape))
        return prediction.predictions, prediction.label_ids

    model = make_plain()
    model.main_input_name = "x"
    metrics = TorchMetrics(MulticlassAccuracy(3), adapter=adapter)
    make_trainer(model, include_for_metrics=["inputs", "loss"], compute_metrics=metrics).evaluate()
    assert seen == [((4, 8), (4,))] * 4 + [((3, 8), (3,))]


def test_torchmetrics_need_labels_or_an_adapter(make_trainer):
    """They are not computed with prediction_loss_only either; an adapter may do without labels."""
    trainer, data = make_trainer(compute_metrics=MulticlassAccuracy(3)), plain_data(5)
    unlabelled = [{"x": row["x"]} for row in data]
    output = trainer.predict(unlabelled)
    assert output.predictions.shape == (5, 3)
    assert not any("Accuracy" in name for name in output.metrics)
    trainer.args.prediction_loss_only = True
    assert not any("Accuracy" in name for name in trainer.evaluate(data))
    trainer.args.prediction_loss_only = False
    own = TorchMetrics(MulticlassAccuracy(3), adapter=lambda p: (p.predictions, p.predictions.argmax(-1)))
    trainer.compute_metrics = own
    assert trainer.predict(unlabelled).metrics["test_MulticlassAccuracy"] == 1


def test_torchmetrics_of_several_outputs_need_an_adapter(make_trainer):
    trainer = make_trainer(make_detector(), eval_dataset=detection_data(), compute_metrics=MulticlassAccuracy(6))
    with pytest.raises(InvalidArgument, match=r"outputs are a tuple.*adapter="):
        trainer.evaluate()


@pytest.mark.parametrize(
    ("wrong", "arguments", "message"),
    [
        ("accuracy", {}, "compute_metrics must be one function.*got str"),
        ({"acc": lambda p: {}}, {}, r"compute_metrics\['acc'\] is a function"),
        ({"acc": MulticlassAccuracy}, {}, r"s\['acc'\] is the class MulticlassAccuracy: pass an instance, Mult"),
        ({}, {}, "at least one"),
        (lambda prediction: {}, {"batch_eval_metrics": True}, "compute_result"),
    ],
)
def test_invalid_compute_metrics_is_refused(make_trainer, wrong, arguments, message):
    with pytest.raises(InvalidArgument, match=message):
        make_trainer(compute_metrics=wrong, **arguments)


def test_torchmetrics_work_with_batch_eval_metrics(make_trainer):
    trainer = make_trainer(compute_metrics=MulticlassAccuracy(3), batch_eval_metrics=True)
    assert "eval_MulticlassAccuracy" in trainer.evaluate()


@st.composite
def array_batches(draw):
    tail = draw(st.sampled_from([None, (), (3,), (2, 2)]))
    dtype = draw(st.sampled_from([np.float32, np.int64, np.float16, np.bool_, np.uint8]))
    shapes = st.tuples(st.integers(0, 5)) if tail is None else st.tuples(st.integers(0, 5), st.integers(0, 9))
    found = draw(st.lists(shapes.map(lambda shape: (*shape, *(tail or ()))), min_size=1, max_size=8))
    return [np.arange(np.prod(shape)).reshape(shape).astype(dtype) for shape in found]


def concatenate_padded(arrays, padding=-100):
    if arrays[0].ndim == 1:
        return np.concatenate(arrays)
    longest = max(array.shape[1] for array in arrays)
    rest = [(0, 0)] * (arrays[0].ndim - 2)
    fill = np.asarray(padding).astype(arrays[0].dtype)
    return np.concatenate([np.pad(a, [(0, 0), (0, longest - a.shape[1]), *rest], constant_values=fill) for a in arrays])


def grow(arrays, *how):
    growing = GrowingArray(arrays[0], *how)
    for array in arrays[1:]:
        growing.add(array)
    return growing.finish()


@settings(deadline=None, max_examples=150)
@given(arrays=array_batches(), rows=st.integers(0, 40), mapped=st.booleans())
def test_growing_array_concatenates_and_pads(tmp_path_factory, arrays, rows, mapped):
    result = grow(arrays, rows, str(tmp_path_factory.getbasetemp()) if mapped else None)
    expected = concatenate_padded(arrays)
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    assert np.array_equal(result, expected)
    assert isinstance(result, np.memmap) is mapped or not result.size


def test_growing_array_widens_its_type():
    result = grow([np.array([[1, 2]], dtype=np.int64), np.array([[0.5]], dtype=np.float32)])
    assert result.dtype == np.float64
    assert result.tolist() == [[1.0, 2.0], [0.5, -100.0]]


@pytest.mark.parametrize("shape", [(2, 3, 5), (2,), (2, 3)])
def test_growing_array_refuses_other_shapes(shape):
    with pytest.raises(ValueError, match="eval_do_concat_batches=False"):
        grow([np.zeros((2, 3, 4)), np.zeros(shape)])


def test_memory_mapped_predictions_equal_those_in_memory(make_trainer, tmp_path):
    model, data = small_models.make_llama(), small_models.varied_language_data()
    plain = make_trainer(model, eval_dataset=data, data_collator=pad).predict(data)
    mapped = make_trainer(model, eval_dataset=data, data_collator=pad, eval_memmap_dir=str(tmp_path)).predict(data)
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
from hftrainer.evaluation.collecting import OutputCollector

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
    collector.move_to_cpu()
    peak = max(peak, status("RssAnon") - before)
array = collector.arrays()
print(max(peak, status("RssAnon") - before) / (array.nbytes / 2**20))
"""


@pytest.mark.parametrize(
    ("kind", "folder", "copies"),
    [("equal", False, 1.15), ("varied", False, 1.3), ("longer", False, 2.1), ("equal", True, 0.2)],
)
def test_collecting_outputs_needs_memory_for_about_one_copy(tmp_path, processes, kind, folder, copies):
    run = processes.run("-c", MEASURES, kind, tmp_path if folder else "")
    assert float(run.stdout or "nan") < copies, run.stderr


def test_overridden_prediction_loop_is_used(make_trainer):
    class OldLoop(Trainer):
        def prediction_loop(self, dataloader, description, prediction_loss_only=None):
            return PredictionOutput(np.ones(3), np.zeros(3), {"eval_mine": 1.0})

    trainer = make_trainer(kind=OldLoop)
    metrics = trainer.evaluate()
    assert metrics["eval_mine"] == 1.0
    assert metrics["eval_samples_per_second"] > 0
    assert trainer.predict(plain_data(3)).predictions.tolist() == [1, 1, 1]


def test_overridden_loops_and_steps_may_call_super(make_trainer):
    """`prediction_loop` by its argument, and `prediction_step` with the parameters of v4.0."""
    called = []

    class Both(Trainer):
        def prediction_loop(self, *args, **kwargs):
            called.append("old")
            return super().prediction_loop(*args, **kwargs)

        def evaluation_loop(self, *args, **kwargs):
            called.append("new")
            return super().evaluation_loop(*args, **kwargs)

        def prediction_step(self, model, inputs, prediction_loss_only):
            return super().prediction_step(model, inputs, prediction_loss_only)

    trainers = make_trainer(), make_trainer(kind=Both), make_trainer(kind=Both, use_legacy_prediction_loop=True)
    expected, *found = [trainer.evaluate()["eval_loss"] for trainer in trainers]
    assert found == [expected, expected]
    assert called == ["new", "old", "new"]


@pytest.mark.parametrize(
    ("make_more", "error", "message"),
    [
        (lambda x: [x] * len(x), TypeError, "a list of 4 and a list of 3; eval_do_concat_batches=False"),
        (lambda x: object(), TypeError, r"cannot concatenate an object.*ignore_keys"),
        (lambda x: torch.zeros(len(x), 2, len(x)), ValueError, r"\(3, 2, 3\) cannot be appended to.*, 4\)"),
    ],
)
def test_outputs_that_cannot_be_concatenated_are_named(make_trainer, make_more, error, message):
    class Own(Trainer):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            more = () if ignore_keys else (make_more(inputs["x"]),)
            loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only)
            return loss, (logits, *more), labels

    trainer = make_trainer(kind=Own, compute_metrics=lambda p: {})
    with pytest.raises(error, match=message):
        trainer.evaluate()
    assert "eval_loss" in trainer.evaluate(ignore_keys=["more"])


def test_eval_runtime_is_positive(make_trainer):
    """What preparing the model took is taken off the first evaluation only; later ones report it."""
    trainer = make_trainer()
    first, second = trainer.evaluate(), trainer.evaluate()
    assert first["eval_runtime"] > 0 and second["eval_runtime"] > 0
    assert first["eval_model_preparation_time"] == second["eval_model_preparation_time"]


def test_evaluation_leaves_nothing_in_memory(make_trainer):
    """Nothing of an evaluation stays behind when its result is gone, alone and within training."""
    trainer, left = make_trainer(**EVALUATED), []

    def look(*_, **__):
        gc.collect()
        left.append(sum(isinstance(thing, EvaluationPass) for thing in gc.get_objects()))

    class Looks(TrainerCallback):
        on_step_end = staticmethod(look)

    trainer.add_callback(Looks)
    for work in (trainer.evaluate, lambda: trainer.predict(plain_data(5)), trainer.train):
        work()
        look()
    assert left == [0] * 7


def test_predict_ignores_limit_val_batches(make_trainer):
    seen = []

    def predict():
        seen.append((len(trainer.predict(plain_data(18)).predictions), trainer.evaluate()["eval_loss"]))

    trainer = make_trainer(max_steps=1, lightning_config={"limit_val_batches": 2})
    trainer.add_callback(AtStep(1, predict))
    trainer.train()
    assert seen[0][0] == 18
    assert trainer.evaluate()["eval_loss"] == seen[0][1]  # of two batches


def test_evaluation_loop_may_return_any_object(make_trainer):
    class Own(Trainer):
        def evaluation_loop(self, *args, **kwargs):
            return SimpleNamespace(predictions=None, label_ids=None, metrics={"eval_own": 1.0}, num_samples=3)

    assert make_trainer(kind=Own).evaluate()["eval_own"] == 1.0


@pytest.mark.parametrize("how", [{"dataloader_drop_last": True}, {"lightning_config": {"limit_val_batches": 0}}])
def test_evaluation_without_batches_names_the_arguments(make_trainer, how):
    with pytest.raises(InvalidArgument, match="smaller than a batch with dataloader_drop_last, or lightning_config"):
        make_trainer(**how).evaluate(plain_data(3))
