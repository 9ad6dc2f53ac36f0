"""What an evaluation cannot do without or cannot use is named."""

import pytest
from torchmetrics.classification import MulticlassAccuracy

from hftrainer import Trainer
from hftrainer.errors import InvalidArgument
from tests.support.tiny import make_plain, plain_data


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            [1],
            r"'valud': Trainer has no evaluation dataset of that name, its eval_dataset is a list\. Pass a dataset",
        ),
        (None, "its eval_dataset is a NoneType"),
        ({"valid": [1], "other": [1]}, "it has 'valid', 'other'; did you mean 'valid'"),
    ],
)
def test_unknown_evaluation_set(make_args, own, message):
    with pytest.raises(KeyError, match=message) as caught:
        Trainer(make_plain(), make_args(), eval_dataset=own).evaluate("valud")
    assert isinstance(caught.value, TypeError)  # as in transformers for a list


def test_evaluation_without_data(make_args):
    with pytest.raises(InvalidArgument, match="needs an eval_dataset"):
        Trainer(make_plain(), make_args()).evaluate()
    with pytest.raises(InvalidArgument, match="Evaluation has no batches"):
        Trainer(make_plain(), make_args(), eval_dataset=[]).evaluate()


def test_a_loss_without_its_outputs(make_args):
    class Alone(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            return model(**inputs)["loss"]

    with pytest.raises(
        InvalidArgument, match=r"Alone.compute_loss returned a Tensor .*: return \(loss, outputs\) in that case"
    ):
        Alone(make_plain(), make_args(), eval_dataset=plain_data(8)).evaluate()


def test_predictions_that_do_not_fit(make_args):
    def fail(_):
        raise MemoryError("too large")

    with pytest.raises(MemoryError) as caught:
        Trainer(make_plain(), make_args(), eval_dataset=plain_data(8), compute_metrics=fail).evaluate()
    assert any("eval_memmap_dir keeps predictions on disk" in note for note in caught.value.__notes__)


def test_a_metric_that_does_not_fit(make_args):
    metrics = {"accuracy": MulticlassAccuracy(4)}
    with pytest.raises(ValueError, match="preds") as caught:
        Trainer(make_plain(), make_args(), eval_dataset=plain_data(8), compute_metrics=metrics).evaluate()
    note = "got (float32 (8, 3), int64 (8,)). Select other tensors with TorchMetrics(metrics, adapter=...)."
    assert note in caught.value.__notes__[0]
