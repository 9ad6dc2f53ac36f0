"""`bf16_full_eval`: an evaluation outside of training leaves the weights as they were."""

import pytest
import torch

from hftrainer.evaluation.evaluation_runner import cast_weights
from tests.support.parity import assert_same_weights, build
from tests.support.small_models import make_bert, make_plain, text_data, without_dropout


@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_float32_weights_are_restored_exactly(tmp_path, method):
    trainer, _ = build("hftrainer", "bert", tmp_path, bf16_full_eval=True, max_steps=3)
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    getattr(trainer, method)(text_data(4))
    assert {weight.dtype for weight in trainer.model.state_dict().values()} == {torch.float32}
    assert_same_weights(trainer.model.state_dict(), before)


def test_training_after_an_evaluation_is_unchanged(tmp_path):
    def weights(evaluates):
        trainer_kwargs = {"model": without_dropout(make_bert)()}  # an evaluation draws a random number
        trainer, _ = build("hftrainer", "bert", tmp_path, trainer=trainer_kwargs, bf16_full_eval=True, max_steps=3)
        if evaluates:
            trainer.evaluate()
        trainer.train()
        return trainer.model.state_dict()

    assert_same_weights(weights(True), weights(False))


def test_weights_are_restored_after_a_failed_evaluation(tmp_path):
    def fail(prediction):
        raise RuntimeError("in compute_metrics")

    trainer_kwargs = {"compute_metrics": fail}
    trainer, _ = build("hftrainer", "bert", tmp_path, trainer=trainer_kwargs, bf16_full_eval=True)
    with pytest.raises(RuntimeError, match="in compute_metrics"):
        trainer.evaluate()
    assert {weight.dtype for weight in trainer.model.state_dict().values()} == {torch.float32}


def test_tied_and_bfloat16_weights_are_restored():
    model = make_bert("BertForMaskedLM")
    model.bert.pooler = make_plain().to(torch.bfloat16)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with cast_weights(model, torch.bfloat16):
        assert {value.dtype for value in model.parameters()} == {torch.bfloat16}
    assert_same_weights(model.state_dict(), before)
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
