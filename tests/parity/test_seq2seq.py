"""Sequence to sequence: training, and evaluating by generating, exactly as transformers does it."""

import importlib

import pytest
import torch

from hftrainer.errors import InvalidArgument
from tests.support.parity import assert_same, comparable, make_recorder, record

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


def make_decoder():
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=50, **sizes, pad_token_id=0, eos_token_id=1, bos_token_id=2)
    )


def uneven_data(count=19):
    """Prompts and answers of different lengths, those of a decoder-only model of the same length."""
    return [{key: value[: 3 + i % 5] for key, value in row.items()} for i, row in enumerate(make_data(count))]


def pad_left(samples):
    """As decoders generate: prompts end together."""
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    longest = max(len(sample["input_ids"]) for sample in samples)

    def pad(key, value):
        return torch.nn.functional.pad(value, (longest - len(value), 0), value=fill[key])

    return {key: torch.stack([pad(key, sample[key]) for sample in samples]) for key in samples[0]}


@pytest.mark.parametrize("kind", ["encoder-decoder", "decoder-only"])
@pytest.mark.parametrize(
    "gen_kwargs",
    [{"max_length": 12}, {"max_new_tokens": 3}, {"max_length": 10, "num_beams": 2}, {"num_beams": None}],
    ids=["max-length", "new-tokens", "beams", "none"],
)
def test_generation_arguments(tmp_path, kind, gen_kwargs):
    """Given to evaluate() and predict(); sequences and labels of different lengths are padded."""
    results = []
    for name in ("hftrainer", "transformers"):
        library = importlib.import_module(name)
        args = library.Seq2SeqTrainingArguments(
            str(tmp_path / name),
            predict_with_generate=True,
            generation_max_length=11,
            per_device_eval_batch_size=4,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        rows, decodes = uneven_data(11), kind == "decoder-only"
        labels = (lambda row: row["input_ids"]) if decodes else (lambda row: row["labels"])
        trainer = library.Seq2SeqTrainer(
            make_decoder() if decodes else make_model(),
            args,
            data_collator=pad_left,
            compute_metrics=lambda p: {"sum": int(p.predictions.sum()), "labels": int(p.label_ids.sum())},
        )
        data = [{**row, "labels": labels(row)} for row in rows]
        metrics = trainer.evaluate(data, **gen_kwargs)
        output = trainer.predict(data, **gen_kwargs)
        results.append((comparable([metrics, output.metrics]), output.predictions, output.label_ids))
    assert results[0][0] == results[1][0]
    for ours, theirs in zip(results[0][1:], results[1][1:], strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert (ours == theirs).all()


def test_generation_arguments_by_position(tmp_path):
    """As v4.15 documents `evaluate` and `predict`; their keywords are those of `test_generation_arguments`."""
    trainer, _ = build("hftrainer", tmp_path, predict_with_generate=True)
    rows, seen = make_data()[:4], []
    generate = trainer.model.generate

    def watched(**kwargs):
        seen.append((kwargs.get("max_length"), kwargs.get("num_beams")))
        return generate(**kwargs)

    trainer.model.generate = watched
    by_position = trainer.predict(rows, None, "test", 7, 2).predictions
    assert (by_position == trainer.predict(rows, max_length=7, num_beams=2).predictions).all()
    trainer.evaluate(rows, None, "eval", 6, 3)
    trainer.evaluate(rows)
    assert seen == [(7, 2), (7, 2), (6, 3), (None, None)]


def test_sortish_sampler(tmp_path):
    """Training samples of similar length together: transformers has the argument, and has never read it."""
    orders = []
    for sortish in (True, False):
        library = importlib.import_module("hftrainer")
        args = library.Seq2SeqTrainingArguments(
            str(tmp_path), sortish_sampler=sortish, per_device_train_batch_size=4, use_cpu=True, disable_tqdm=True
        )
        trainer = library.Seq2SeqTrainer(make_model(), args, train_dataset=uneven_data(60), data_collator=pad_left)
        assert trainer.get_train_dataloader().batch_sampler.sampler is not None
        orders.append([batch["input_ids"].shape[1] for batch in trainer.get_train_dataloader()])
    grouped, shuffled = orders
    assert len(grouped) == len(shuffled) == 15
    assert grouped[0] == 7  # the longest first
    assert sum(grouped) < sum(shuffled)  # less padding
