"""Batches made by the user's tokenizer or collator."""

import importlib

import pytest
import torch

from tests.support.parity import EVERY_STEP, alike, compare, train


def make_tokenizer():
    tokenizers = importlib.import_module("tokenizers")
    transformers = importlib.import_module("transformers")
    vocabulary = {"[PAD]": 0, "[UNK]": 1, **{f"w{i}": i for i in range(2, 50)}}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, pad_token="[PAD]", unk_token="[UNK]")


@pytest.mark.parametrize("model", ["bert", "llama"])
def test_tokenizer_pads_batches(tmp_path, model):
    """Samples of different lengths: batches are padded by the tokenizer, predictions with -100."""
    rows = [{"input_ids": [2 + (i * j) % 47 for j in range(3 + i % 6)], "label": i % 3} for i in range(30)]
    if model == "llama":
        rows = [{"input_ids": row["input_ids"]} for row in rows]
    collator = None
    if model == "llama":
        library = importlib.import_module("transformers")
        collator = library.DataCollatorForLanguageModeling(make_tokenizer(), mlm=False)
    given = {"train_dataset": rows, "eval_dataset": rows[:11], "processing_class": make_tokenizer()}
    given |= {"data_collator": collator, "compute_metrics": lambda p: {"shape": list(p.predictions.shape)}}
    compare(tmp_path, model, trainer=given, gradient_accumulation_steps=3, **EVERY_STEP)


def test_masked_language_collator(tmp_path):
    """A collator that draws the mask from the global generator."""
    library = importlib.import_module("transformers")

    def make_model():
        torch.manual_seed(1)
        config = library.BertConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
        )
        return library.BertForMaskedLM(config)

    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "w49"})
    rows = [{"input_ids": [2 + (i * j) % 40 for j in range(9)]} for i in range(30)]
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()

    def run(name):
        given = {
            "model": make_model(),
            "train_dataset": rows,
            "eval_dataset": rows[:9],
            "data_collator": library.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.4),
        }
        return train(name, "plain", tmp_path / name, trainer=given, **EVERY_STEP)

    alike(run)
