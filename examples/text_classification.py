"""Text classification: which side does a short review come down on? With a small BERT.

    python examples/text_classification.py            # any training argument may follow: --num_train_epochs 3

The reviews are made on the spot, such as "the plot was dull , but the songs were not bad". What counts is the last
part, and "not" turns it around: words alone give 50% accuracy, the trained model nearly 100%, in some ten seconds.
"""

import random

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import BertConfig, BertForSequenceClassification, DataCollatorWithPadding, PreTrainedTokenizerFast

from hftrainer import HfArgumentParser, Trainer, TrainingArguments, set_seed

THINGS = ["plot", "cast", "music", "ending", "pace", "camera", "dialogue", "humour"]
GOOD = ["great", "good", "clever", "moving", "fresh", "brilliant"]
BAD = ["dull", "bad", "silly", "cold", "stale", "terrible"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def make_review(rng: random.Random) -> tuple[str, int]:
    """A sentence of one to three parts, and whether the last of them is praise."""
    parts = []
    for _ in range(rng.randint(1, 3)):
        praise, negated = rng.random() < 0.5, rng.random() < 0.5
        adjective = rng.choice(GOOD if praise != negated else BAD)
        parts.append(f"the {rng.choice(THINGS)} was {'not ' if negated else ''}{adjective}")
    return " , but ".join(parts), int(praise)


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """One token a word."""
    words = sorted({word for text in texts for word in text.split()})
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(SPECIAL + words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


def accuracy(prediction) -> dict[str, float]:
    return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}


def main() -> None:
    parser = HfArgumentParser(TrainingArguments)
    parser.set_defaults(
        output_dir="demo_output/text_classification",
        num_train_epochs=6,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=128,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        logging_steps=50,
        use_cpu=True,
    )
    (args,) = parser.parse_args_into_dataclasses()

    set_seed(args.seed)
    rng = random.Random(0)
    reviews = [make_review(rng) for _ in range(2400)]
    tokenizer = make_tokenizer([text for text, _ in reviews])
    samples = [{**tokenizer(text), "labels": label} for text, label in reviews]
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=32,
        num_labels=2,
    )
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=args,
        data_collator=DataCollatorWithPadding(tokenizer),
        train_dataset=samples[:2000],
        eval_dataset=samples[2000:],
        processing_class=tokenizer,
        compute_metrics=accuracy,
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    print(f"Accuracy on reviews not seen in training: {trainer.evaluate()['eval_accuracy']:.3f}")


if __name__ == "__main__":
    main()
