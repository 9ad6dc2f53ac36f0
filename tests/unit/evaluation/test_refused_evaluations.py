"""An evaluation names the data, loss or metric that is missing or that it cannot use."""

import numpy as np
import pytest
from torchmetrics.classification import MulticlassAccuracy

from hftrainer import Trainer
from hftrainer.errors import InvalidArgument
from tests.support.small_models import make_plain, plain_data


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ([1], r"'valud': Trainer has no evaluation dataset of that name, its eval_dataset is a list\. Pass a dataset"),
        (None, "its eval_dataset is None"),
        ({"valid": [1], "other": [1]}, "it has 'valid', 'other'; did you mean 'valid'"),
    ],
)
def test_unknown_evaluation_set_is_named(make_args, own, message):
    with pytest.raises(KeyError, match=message) as caught:
        Trainer(make_plain(), make_args(), eval_dataset=own).evaluate("valud")
    assert isinstance(caught.value, TypeError)  # as in transformers for a list


def test_evaluation_without_data_is_refused(make_args, recwarn):
    with pytest.raises(InvalidArgument, match="needs an eval_dataset"):
        Trainer(make_plain(), make_args()).evaluate()
    with pytest.raises(InvalidArgument, match="Evaluation has no batches"):
        Trainer(make_plain(), make_args(), eval_dataset=[]).evaluate()
    assert not any("_EvaluationBatches" in str(each.message) for each in recwarn)  # by Lightning


def test_compute_loss_without_outputs_is_named(make_args):
    class Alone(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            return model(**inputs)["loss"]

    with pytest.raises(
        InvalidArgument, match=r"Alone.compute_loss returned a Tensor .*: return \(loss, outputs\) in that case"
    ):
        Alone(make_plain(), make_args(), eval_dataset=plain_data(8)).evaluate()


def test_memory_error_suggests_eval_memmap_dir(make_args):
    def fail(_):
        raise MemoryError("too large")

    with pytest.raises(MemoryError) as caught:
        Trainer(make_plain(), make_args(), eval_dataset=plain_data(8), compute_metrics=fail).evaluate()
    assert any("eval_memmap_dir keeps predictions on disk" in note for note in caught.value.__notes__)


def test_failing_torchmetric_is_named_with_its_inputs(make_args):
    metrics = {"of 3": MulticlassAccuracy(3), "accuracy": MulticlassAccuracy(4)}
    with pytest.raises(ValueError, match="preds") as caught:
        Trainer(make_plain(), make_args(), eval_dataset=plain_data(8), compute_metrics=metrics).evaluate()
    note = "got (float32 (8, 3), int64 (8,)). Select other tensors with TorchMetrics(metrics, adapter=...)."
    assert caught.value.__notes__[-2] == f"accuracy (MulticlassAccuracy) {note}"


def test_metric_that_is_an_array_warns_once(make_args, caplog):
    metrics = {"acc": np.zeros(8), "loss": np.float32(1), "one": np.zeros(1), "each": [1.0, 2.0]}
    trainer = Trainer(make_plain(), make_args(), eval_dataset=plain_data(8), compute_metrics=lambda _: metrics)
    for _ in range(2):
        assert (trainer.evaluate()["eval_acc"] == 0).all()
    found = [message for message in caplog.messages if "compute_metrics" in message]
    assert found == ["compute_metrics['acc'] is an array of 8: return a number."]


@pytest.mark.parametrize(
    ("data", "settings", "message"),
    [
        ([], {"eval_strategy": "steps", "eval_steps": 2}, "eval_dataset is empty: add samples, or use eval_strategy="),
        ({"a": plain_data(4), "b": []}, {"eval_strategy": "epoch"}, r"eval_dataset\['b'\] is empty"),
    ],
)
def test_empty_evaluation_set_is_refused_before_training(make_args, data, settings, message):
    trainer = Trainer(make_plain(), make_args(**settings), train_dataset=plain_data(), eval_dataset=data)
    with pytest.raises(InvalidArgument, match=message):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("settings", [{}, {"eval_strategy": "steps", "eval_delay": 9}])
def test_unused_empty_evaluation_set_is_accepted(make_args, settings):
    trainer = Trainer(make_plain(), make_args(**settings), train_dataset=plain_data(), eval_dataset=[])
    assert trainer.train().global_step == 2
