"""Question answering: find the first and the last token of the answer in a text, with a small BERT.

    python examples/question_answering.py

Texts such as "on monday anna sold red shoes in new york" and questions such as "where was it ?" are made on the spot.
Pointing at any of the four parts would be right in 25% of the cases; the trained model is right in nearly all, after
ten seconds.
"""

import random

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import BertConfig, BertForQuestionAnswering, PreTrainedTokenizerFast, default_data_collator

from hftrainer import HfArgumentParser, Trainer, TrainingArguments, set_seed

PARTS = {
    "who": ["anna", "ben", "carla bloom", "the old baker", "emma", "felix stone"],
    "what": ["shoes", "red shoes", "two bread rolls", "a lamp", "a green lamp", "ink"],
    "where": ["in rome", "in new york", "near oslo", "at home", "in the market of lima"],
    "when": ["on monday", "yesterday", "last winter", "at noon on sunday"],
}
ORDERS = [
    "when who sold what where",
    "who sold what where when",
    "where who sold what when",
    "when where who sold what",
]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "was", "it", "?", "sold"]
LENGTH = 24


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word."""
    words = SPECIAL + sorted({*PARTS, *(word for texts in PARTS.values() for text in texts for word in text.split())})
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


def make_sample(rng: random.Random, tokenizer: PreTrainedTokenizerFast) -> dict:
    """A question with its text, and where in the tokens the answer begins and ends."""
    asked = rng.choice(list(PARTS))
    words = f"[CLS] {asked} was it ? [SEP]".split()
    for place in rng.choice(ORDERS).split():
        text = rng.choice(PARTS[place]) if place in PARTS else place
        if place == asked:
            span = (len(words), len(words) + len(text.split()) - 1)
        words += text.split()
    tokens = tokenizer(" ".join(words), padding="max_length", max_length=LENGTH)
    return {**tokens, "start_positions": span[0], "end_positions": span[1]}


def exact_match(prediction) -> dict[str, float]:
    """How often both ends are right."""
    (starts, ends), (true_starts, true_ends) = prediction.predictions[:2], prediction.label_ids
    return {"exact_match": ((starts.argmax(-1) == true_starts) & (ends.argmax(-1) == true_ends)).mean()}


def main() -> None:
    parser = HfArgumentParser(TrainingArguments)
    parser.set_defaults(
        output_dir="demo_output/question_answering",
        num_train_epochs=4,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=128,
        learning_rate=2e-3,
        warmup_steps=20,
        lr_scheduler_type="cosine",
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        logging_steps=50,
        use_cpu=True,
    )
    (args,) = parser.parse_args_into_dataclasses()

    set_seed(args.seed)
    tokenizer = make_tokenizer()
    rng = random.Random(0)
    samples = [make_sample(rng, tokenizer) for _ in range(2400)]
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=LENGTH,
        initializer_range=0.1,  # small models learn sooner from larger weights
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    trainer = Trainer(
        model=BertForQuestionAnswering(config),
        args=args,
        data_collator=default_data_collator,
        train_dataset=samples[:2000],
        eval_dataset=samples[2000:],
        processing_class=tokenizer,
        compute_metrics=exact_match,
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    print(f"Answers that match exactly: {trainer.evaluate()['eval_exact_match']:.3f}")


if __name__ == "__main__":
    main()
