"""Token classification: tag names in a sentence as person or place, with a small BERT.

    python examples/token_classification.py

The same word is either, as the sentence has it: "florence travels to sydney with jordan". Guessing gives an F1 of
about 0.5, the words alone tell nothing, and the trained model gets above 0.95 in ten seconds.
"""

import random

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    BertConfig,
    BertForTokenClassification,
    DataCollatorForTokenClassification,
    PreTrainedTokenizerFast,
)

from hftrainer import HfArgumentParser, Trainer, TrainingArguments, set_seed

NAMES = ["florence", "sydney", "jordan", "georgia", "austin", "chelsea", "paris", "victoria", "lincoln", "israel"]
SENTENCES = [
    "PER lives in LOC",
    "PER and PER met near LOC",
    "in LOC it rains while PER sleeps",
    "yesterday PER travelled from LOC to LOC",
    "PER travels to LOC with PER",
    "the mayor of LOC thanked PER",
    "a letter to PER came from LOC",
]
TAGS = ["O", "PER", "LOC"]


def make_sample(rng: random.Random) -> tuple[list[str], list[int]]:
    """Words and their tags; one or two sentences."""
    places = " and ".join(rng.choices(SENTENCES, k=rng.randint(1, 2))).split()
    words = [rng.choice(NAMES) if word in TAGS else word for word in places]
    return words, [TAGS.index(word) if word in TAGS else 0 for word in places]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word."""
    words = ["[PAD]", "[UNK]", *NAMES, *sorted({word for sentence in SENTENCES for word in sentence.split()})]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


def f1(prediction) -> dict[str, float]:
    """Of the names; -100 marks what the collator has filled up."""
    known = prediction.label_ids != -100
    guessed, true = prediction.predictions.argmax(-1)[known], prediction.label_ids[known]
    right = ((guessed == true) & (true > 0)).sum()
    return {"f1": 2 * right / max((guessed > 0).sum() + (true > 0).sum(), 1)}


def main() -> None:
    parser = HfArgumentParser(TrainingArguments)
    parser.set_defaults(
        output_dir="demo_output/token_classification",
        num_train_epochs=6,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=128,
        learning_rate=2e-3,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        logging_steps=40,
        use_cpu=True,
    )
    (args,) = parser.parse_args_into_dataclasses()

    set_seed(args.seed)
    tokenizer = make_tokenizer()
    rng = random.Random(0)
    sentences = [make_sample(rng) for _ in range(1400)]
    samples = [{**tokenizer(words, is_split_into_words=True), "labels": tags} for words, tags in sentences]
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=32,
        id2label=dict(enumerate(TAGS)),
        label2id={tag: i for i, tag in enumerate(TAGS)},
    )
    trainer = Trainer(
        model=BertForTokenClassification(config),
        args=args,
        data_collator=DataCollatorForTokenClassification(tokenizer),
        train_dataset=samples[:1200],
        eval_dataset=samples[1200:],
        processing_class=tokenizer,
        compute_metrics=f1,
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    print(f"F1 of names in sentences not seen in training: {trainer.evaluate()['eval_f1']:.3f}")


if __name__ == "__main__":
    main()
