"""The shape of run_ner.py: words that are several tokens, labels of the first one, metrics by kind of entity."""

from dataclasses import dataclass, field

import numpy as np
import parts
from datasets import ClassLabel, Dataset, DatasetDict, Features, Sequence, Value
from transformers import (
    BertConfig,
    BertForTokenClassification,
    DataCollatorForTokenClassification,
    Trainer,
    TrainingArguments,
)

LABELS = ["O", "B-PER", "I-PER", "B-LOC"]


@dataclass
class EntityArguments(parts.DataArguments):
    label_all_tokens: bool = field(default=False, metadata={"help": "Label every token of a word."})
    return_entity_level_metrics: bool = field(default=False, metadata={"help": "Metrics of each kind, too."})


def make_rows(count, start=0):
    words = [[f"{word}.{word}" for word in parts.sentence(i, 4 + i % 5).split()] for i in range(start, start + count)]
    tags = [[(parts.WORDS.index(word.split(".")[0]) + 1) % 4 for word in row] for row in words]
    features = {"tokens": Sequence(Value("string")), "ner_tags": Sequence(ClassLabel(names=LABELS))}
    return Dataset.from_dict({"tokens": words, "ner_tags": tags}, features=Features(features))


def kept_labels(found, labels):
    return [
        [(LABELS[p], LABELS[t]) for p, t in zip(*rows, strict=True) if t != -100]
        for rows in zip(found, labels, strict=True)
    ]


def main():
    model_args, data_args, training_args, checkpoint = parts.begin(
        parts.ModelArguments, EntityArguments, TrainingArguments
    )
    tokenizer = parts.word_tokenizer()
    raw = DatasetDict(train=make_rows(data_args.train_samples), validation=make_rows(10, 40), test=make_rows(7, 60))
    config = BertConfig(**parts.encoder_sizes(tokenizer, model_args.hidden_size), num_labels=len(LABELS))

    def align(rows):
        encoded = tokenizer(rows["tokens"], truncation=True, max_length=32, is_split_into_words=True)
        encoded["labels"] = []
        for number, tags in enumerate(rows["ner_tags"]):
            ids = encoded.word_ids(batch_index=number)
            first = [word is not None and word not in ids[:place] for place, word in enumerate(ids)]
            keep = [
                yes or (data_args.label_all_tokens and word is not None) for yes, word in zip(first, ids, strict=True)
            ]
            encoded["labels"].append([tags[word] if yes else -100 for yes, word in zip(keep, ids, strict=True)])
        return encoded

    def compute_metrics(p):
        predictions, labels = p
        pairs = [pair for row in kept_labels(np.argmax(predictions, axis=2), labels) for pair in row]
        by_kind = {kind: float(np.mean([a == b for a, b in pairs if b == kind])) for kind in LABELS}
        result = {"overall_accuracy": float(np.mean([a == b for a, b in pairs]))}
        return result | (
            {f"{kind}_recall": v for kind, v in by_kind.items()} if data_args.return_entity_level_metrics else {}
        )

    with training_args.main_process_first(desc="train dataset map pre-processing"):
        data = raw.map(align, batched=True)
    trainer = Trainer(
        model=BertForTokenClassification(config),
        args=training_args,
        **parts.splits(data),
        processing_class=tokenizer,
        data_collator=DataCollatorForTokenClassification(
            tokenizer, pad_to_multiple_of=8 if training_args.fp16 else None
        ),
        compute_metrics=compute_metrics,
    )
    parts.train(trainer, checkpoint)
    parts.evaluate(trainer)
    if training_args.do_predict:
        predictions, labels, metrics = trainer.predict(data["test"], metric_key_prefix="predict")
        parts.report(trainer, "predict", metrics, len(data["test"]))
        rows = kept_labels(np.argmax(predictions, axis=2), labels)
        parts.write_lines(trainer, "predictions.txt", (" ".join(found for found, _ in row) for row in rows))
    parts.describe(trainer, "token-classification")


if __name__ == "__main__":
    main()
