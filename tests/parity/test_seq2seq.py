"""Sequence to sequence: training, and evaluating by generating, exactly as transformers does it."""

import pytest
import torch
import transformers

from hftrainer.errors import InvalidArgument
from tests.support.parity import EVALUATED, array_bytes, build, comparable, compare, seq2seq
from tests.support.small_models import make_t5, pad_left, t5_data

T5 = (make_t5, t5_data)
GENERATES = {"predict_with_generate": True}


def build_ours(folder, **settings):
    return build("hftrainer", T5, folder, trainer_class=seq2seq, **settings)[0]


def shape(prediction):
    predictions = prediction.predictions
    return {"shape": list((predictions[0] if isinstance(predictions, tuple) else predictions).shape)}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="no generation"),
        pytest.param(GENERATES, id="generate"),
        pytest.param({**GENERATES, "generation_max_length": 7}, id="max length"),
        pytest.param({**GENERATES, "generation_num_beams": 3, "generation_max_length": 6}, id="beams"),
        pytest.param({**GENERATES, "prediction_loss_only": True}, id="loss only"),
    ],
)
def test_train_evaluate_and_predict_are_those_of_transformers(tmp_path, settings):
    def script(trainer):
        trainer.train()
        metrics = trainer.evaluate(**({"max_new_tokens": 4} if settings else {}))
        output = trainer.predict(t5_data(5), **({"num_beams": 2} if settings else {}))
        return comparable([metrics, output.metrics]), array_bytes([output.predictions, output.label_ids])

    options = {"script": script, "trainer": {"compute_metrics": shape}, "max_steps": 4, "learning_rate": 0.05}
    compare(tmp_path, T5, trainer_class=seq2seq, **EVALUATED, **options, **settings)


def make_decoder():
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, **sizes, **tokens))


def uneven_data(count=11):
    return [{key: value[: 3 + i % 5] for key, value in row.items()} for i, row in enumerate(t5_data(count))]


def uneven_decoder_data():
    """The answer of a decoder-only model is as long as its prompt."""
    return [{**row, "labels": row["input_ids"]} for row in uneven_data()]


@pytest.mark.parametrize(
    "model", [(make_t5, uneven_data), (make_decoder, uneven_decoder_data)], ids=["encoder-decoder", "decoder-only"]
)
@pytest.mark.parametrize(
    "arguments",
    [{"max_length": 12}, {"max_new_tokens": 3}, {"max_length": 10, "num_beams": 2}, {"num_beams": None}],
    ids=["max-length", "new-tokens", "beams", "none"],
)
def test_generation_arguments_reach_evaluate_and_predict(tmp_path, model, arguments):
    """Given to evaluate() and predict(); sequences and labels of different lengths are padded."""

    def script(trainer):
        metrics, output = trainer.evaluate(**arguments), trainer.predict(trainer.eval_dataset, **arguments)
        return comparable([metrics, output.metrics]), array_bytes([output.predictions, output.label_ids])

    sums = lambda p: {"sum": int(p.predictions.sum()), "labels": int(p.label_ids.sum())}  # noqa: E731
    trainer_kwargs = {"data_collator": pad_left, "compute_metrics": sums}
    settings = {**GENERATES, "generation_max_length": 11, "per_device_eval_batch_size": 4}
    compare(tmp_path, model, trainer_class=seq2seq, script=script, trainer=trainer_kwargs, **settings)


def test_generation_config_is_an_object_or_a_path(tmp_path):
    config = transformers.GenerationConfig(max_length=6, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
    config.save_pretrained(tmp_path / "config")
    for generation_config in (config, str(tmp_path / "config"), str(tmp_path / "config" / "generation_config.json")):
        trainer = build_ours(tmp_path / "out", **GENERATES, generation_config=generation_config)
        assert trainer.model.generation_config.max_length == 6
        assert trainer.predict(t5_data(3)).predictions.shape == (3, 6)
        assert trainer.model.generation_config is not config
    assert isinstance(trainer.args.to_dict()["generation_config"], str)
    wrong = transformers.GenerationConfig(do_sample=False, temperature=0.3)
    with pytest.raises(InvalidArgument, match="generation_config cannot be saved with the model"):
        build_ours(tmp_path / "out", generation_config=wrong)


def test_padding_without_a_pad_token_is_refused(tmp_path):
    trainer = build_ours(tmp_path)
    trainer.model.config.pad_token_id = None
    with pytest.raises(InvalidArgument, match="pad_token_id"):
        trainer._pad_tensors_to_max_len(torch.ones(1, 2), 3)


def test_sortish_sampler_groups_similar_lengths(tmp_path):
    """transformers has the argument, but never reads it."""
    trainer_kwargs = {"train_dataset": uneven_data(60), "data_collator": pad_left}
    grouped, shuffled = (
        [batch["input_ids"].shape[1] for batch in trainer.get_train_dataloader()]
        for trainer in (build_ours(tmp_path, sortish_sampler=sorts, trainer=trainer_kwargs) for sorts in (True, False))
    )
    assert len(grouped) == len(shuffled) == 15
    assert grouped[0] == 7  # the longest first
    assert sum(grouped) < sum(shuffled)  # less padding
