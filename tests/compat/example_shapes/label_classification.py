"""The shape of run_classification.py: several labels a sample, chosen by problem_type, on columns that are joined."""

from dataclasses import dataclass, field

import numpy as np
import parts
from datasets import ClassLabel, Dataset, DatasetDict, Features, Sequence, Value
from transformers import (
    DataCollatorWithPadding,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    Trainer,
    TrainingArguments,
)

LABELS = ["art", "law", "sport", "war"]


@dataclass
class ColumnArguments(parts.DataArguments):
    text_column_names: str = field(default="title,body", metadata={"help": "Columns to join, with commas."})
    text_column_delimiter: str = field(default=" ", metadata={"help": "What to put between them."})
    shuffle_train_dataset: bool = field(default=False, metadata={"help": "Shuffle before taking the first ones."})
    shuffle_seed: int = field(default=42, metadata={"help": "Seed of that."})


def make_rows(count, start=0):
    numbers = range(start, start + count)
    columns = {
        "title": [parts.sentence(i, 2) for i in numbers],
        "body": [parts.sentence(3 * i, 3 + i % 7) for i in numbers],
        "topics": [sorted({LABELS[i % 4], LABELS[i % 3]}) for i in numbers],
    }
    features = {"title": Value("string"), "body": Value("string"), "topics": Sequence(ClassLabel(names=LABELS))}
    return Dataset.from_dict(columns, features=Features(features))


def main():
    model_args, data_args, training_args, checkpoint = parts.begin(
        parts.ModelArguments, ColumnArguments, TrainingArguments
    )
    raw = DatasetDict(train=make_rows(data_args.train_samples), validation=make_rows(13, 50), test=make_rows(10, 80))
    tokenizer = parts.word_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "dim": model_args.hidden_size, "hidden_dim": 32, "n_layers": 2, "n_heads": 2}
    config = DistilBertConfig(**sizes, num_labels=len(LABELS), problem_type="multi_label_classification")

    def preprocess(examples):
        columns = [examples[name] for name in data_args.text_column_names.split(",")]
        texts = [data_args.text_column_delimiter.join(pieces) for pieces in zip(*columns, strict=True)]
        result = tokenizer(texts, padding=False, max_length=data_args.max_seq_length, truncation=True)
        ones = [[float(number in topics) for number in range(len(LABELS))] for topics in examples["topics"]]
        return result | {"labels": ones}

    def compute_metrics(p):
        found, right = p.predictions > 0, p.label_ids > 0
        return {"f1": float(2 * (found & right).sum() / (found.sum() + right.sum())), "rows": len(found)}

    with training_args.main_process_first(desc="preprocessing"):
        raw = raw.map(preprocess, batched=True, remove_columns=raw["train"].column_names)
    if data_args.shuffle_train_dataset:
        raw["train"] = raw["train"].shuffle(seed=data_args.shuffle_seed)
    trainer = Trainer(
        model=DistilBertForSequenceClassification(config),
        args=training_args,
        train_dataset=raw["train"],
        eval_dataset=raw["validation"].select(range(data_args.max_eval_samples or 13)),
        compute_metrics=compute_metrics,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8 if training_args.fp16 else None),
    )
    parts.train(trainer, checkpoint)
    parts.evaluate(trainer, eval_dataset=trainer.eval_dataset)
    if training_args.do_predict:
        test = raw["test"].remove_columns("labels")
        scores = trainer.predict(test, metric_key_prefix="predict").predictions
        chosen = [[LABELS[number] for number in np.flatnonzero(row > 0)] for row in scores]
        parts.report(trainer, "predict", {"chosen": sum(map(len, chosen))}, len(test))
        parts.write_lines(trainer, "predict_results.txt", (f"{i}\t{labels}" for i, labels in enumerate(chosen)))
    parts.describe(trainer, "text-classification")


if __name__ == "__main__":
    main()
