"""Sentence embeddings: train on pairs that mean the same, with sentence-transformers on this Trainer.

    pip install 'sentence-transformers[train]'
    python -m hftrainer run examples/embeddings.py

The script knows nothing of hftrainer: `run` gives sentence-transformers its Trainer. Sentences about weekday and city
are worded in four ways, such as "on monday in rome" and "the town is rome , the day monday". Of 28 sentences worded
in one way, the nearest to one worded in another is the right one in almost all cases, and in about 60% before;
guessing is right in 4%.
"""

import os
import random

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import BertConfig, BertModel, HfArgumentParser, PreTrainedTokenizerFast, set_seed

DAYS = ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"]
CITIES = ["rome", "oslo", "lima", "paris"]
WORDINGS = [
    "on {0} in {1}",
    "the town is {1} , the day {0}",
    "{1} was where we met last {0}",
    "see you {0} at {1} station",
]


def make_model(folder: str) -> SentenceTransformer:
    """A small BERT whose tokens are words, saved for sentence-transformers to load."""
    words = ["[PAD]", "[UNK]", *sorted({word for text in [*DAYS, *CITIES, *WORDINGS] for word in text.split()})]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "model_max_length": 16}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=len(words), max_position_embeddings=16, **shape)).save_pretrained(folder)
    body = Transformer(folder)
    return SentenceTransformer(modules=[body, Pooling(32)], device="cpu")


def nearest_is_right(model: SentenceTransformer) -> float:
    """How often the nearest of all sentences in the second wording is that of the same day and city."""
    facts = [(day, city) for day in DAYS for city in CITIES]
    first, second = (
        model.encode([wording.format(*fact) for fact in facts], convert_to_tensor=True, show_progress_bar=False)
        for wording in WORDINGS[:2]
    )
    return (model.similarity(first, second).argmax(1) == torch.arange(len(facts))).float().mean().item()


def main() -> None:
    parser = HfArgumentParser(SentenceTransformerTrainingArguments)
    parser.set_defaults(
        output_dir="demo_output/embeddings",
        max_steps=150,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        eval_strategy="steps",
        eval_steps=50,
        save_steps=50,
        logging_steps=25,
        use_cpu=True,
    )
    (args,) = parser.parse_args_into_dataclasses()

    set_seed(args.seed)
    model = make_model(os.path.join(args.output_dir, "start"))
    rng = random.Random(0)
    pairs = []
    for _ in range(2000):
        day, city = rng.choice(DAYS), rng.choice(CITIES)
        anchor, positive = (wording.format(day, city) for wording in rng.sample(WORDINGS, 2))
        pairs.append({"anchor": anchor, "positive": positive})
    before = nearest_is_right(model)
    trainer = SentenceTransformerTrainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_list(pairs[:1900]),
        eval_dataset=Dataset.from_list(pairs[1900:]),
        loss=MultipleNegativesRankingLoss(model),
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    print(f"Nearest sentence is the right one: {before:.2f} before, {nearest_is_right(model):.2f} after")


if __name__ == "__main__":
    main()
