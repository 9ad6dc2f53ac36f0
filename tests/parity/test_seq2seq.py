"""Sequence to sequence: training, and evaluating by generating, exactly as transformers does it."""

import importlib

import pytest
import torch

from hftrainer.errors import InvalidArgument
from tests.parity.support import assert_same, comparable, make_recorder, record

transformers = importlib.import_module("transformers")


def make_model():
    torch.manual_seed(1)
    config = transformers.T5Config(
        vocab_size=50,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    return transformers.T5ForConditionalGeneration(config)


def make_data(count=19):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 50, (count, 9), generator=generator)
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row[:5]} for row in ids]


def build(name, folder, **settings):
    library = importlib.import_module(name)
    defaults = {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 8,
        "learning_rate": 0.05,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    args = library.Seq2SeqTrainingArguments(str(folder), **{**defaults, **settings})
    recorder = make_recorder(library)
    trainer = library.Seq2SeqTrainer(
        model=make_model(),
        args=args,
        train_dataset=make_data(),
        eval_dataset=make_data()[:11],
        compute_metrics=lambda p: {
            "shape": [list(p.predictions[0].shape if isinstance(p.predictions, tuple) else p.predictions.shape)]
        },
        callbacks=[recorder],
    )
    return trainer, recorder


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="no-generation"),
        pytest.param({"predict_with_generate": True}, id="generate"),
        pytest.param({"predict_with_generate": True, "generation_max_length": 7}, id="max-length"),
        pytest.param(
            {"predict_with_generate": True, "generation_num_beams": 3, "generation_max_length": 6}, id="beams"
        ),
        pytest.param({"predict_with_generate": True, "prediction_loss_only": True}, id="loss-only"),
    ],
)
def test_train_evaluate_predict(tmp_path, settings):
    results = []
    for name in ("hftrainer", "transformers"):
        trainer, recorder = build(name, tmp_path / name, eval_strategy="steps", eval_steps=2, **settings)
        trainer.train()
        metrics = trainer.evaluate(max_new_tokens=4) if "predict_with_generate" in settings else trainer.evaluate()
        output = trainer.predict(make_data()[:5], num_beams=2) if settings else trainer.predict(make_data()[:5])
        results.append((record(trainer, recorder, tmp_path / name, metrics=comparable([metrics])), output))
    assert_same(results[0][0], results[1][0])
    ours, theirs = results[0][1], results[1][1]
    if ours.predictions is None or isinstance(ours.predictions, tuple):
        assert type(ours.predictions) is type(theirs.predictions)
    else:
        assert (ours.predictions == theirs.predictions).all()
        assert (ours.label_ids == theirs.label_ids).all()


def test_generation_config(tmp_path):
    config = transformers.GenerationConfig(max_length=6, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
    config.save_pretrained(tmp_path / "config")
    for given in (config, str(tmp_path / "config"), str(tmp_path / "config" / "generation_config.json")):
        trainer, _ = build("hftrainer", tmp_path / "out", predict_with_generate=True, generation_config=given)
        assert trainer.model.generation_config.max_length == 6
        assert trainer.predict(make_data()[:3]).predictions.shape == (3, 6)
        assert trainer.model.generation_config is not config
    assert isinstance(trainer.args.to_dict()["generation_config"], str)
    wrong = transformers.GenerationConfig(do_sample=False, temperature=0.3)
    with pytest.raises(InvalidArgument, match="generation_config cannot be used"):
        build("hftrainer", tmp_path / "out", generation_config=wrong)


def test_padding_needs_a_token(tmp_path):
    trainer, _ = build("hftrainer", tmp_path)
    trainer.model.config.pad_token_id = None
    with pytest.raises(InvalidArgument, match="pad_token_id"):
        trainer._pad_tensors_to_max_len(torch.ones(1, 2), 3)
