"""The shape of run_swag.py: four endings of a sentence, flattened for the tokenizer, put together by the collator."""

from dataclasses import dataclass
from itertools import chain

import parts
import torch
from datasets import Dataset, DatasetDict
from transformers import (
    BertConfig,
    BertForMultipleChoice,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

ENDINGS = [f"ending{i}" for i in range(4)]


@dataclass
class ChoiceCollator:
    """Pads the endings of all samples together; until v4.48 each script brought its own."""

    tokenizer: PreTrainedTokenizerBase

    def __call__(self, features):
        labels = [feature.pop("label") for feature in features]
        flat = [{name: values[i] for name, values in row.items()} for row in features for i in range(len(ENDINGS))]
        batch = self.tokenizer.pad(flat, padding=True, return_tensors="pt")
        shaped = {name: values.view(len(features), len(ENDINGS), -1) for name, values in batch.items()}
        return shaped | {"labels": torch.tensor(labels, dtype=torch.int64)}


def make_rows(count, start=0):
    numbers = range(start, start + count)
    columns = {name: [parts.sentence(i + 7 * place, 2 + place) for i in numbers] for place, name in enumerate(ENDINGS)}
    columns |= {
        "context": [parts.sentence(i, 6) for i in numbers],
        "header": [parts.sentence(5 * i, 2) for i in numbers],
    }
    return Dataset.from_dict(columns | {"label": [i % 4 for i in numbers]})


def main():
    model_args, data_args, training_args, checkpoint = parts.begin(
        parts.ModelArguments, parts.DataArguments, TrainingArguments
    )
    tokenizer = parts.word_tokenizer()
    raw = DatasetDict(train=make_rows(data_args.train_samples), validation=make_rows(10, 40))

    def preprocess(rows):
        firsts = list(chain(*([context] * len(ENDINGS) for context in rows["context"])))
        seconds = [f"{rows['header'][i]} {rows[name][i]}" for i in range(len(rows["header"])) for name in ENDINGS]
        padding = "max_length" if data_args.pad_to_max_length else False
        flat = tokenizer(firsts, seconds, truncation=True, max_length=data_args.max_seq_length, padding=padding)
        return {name: [row[i : i + 4] for i in range(0, len(row), 4)] for name, row in flat.items()}

    data = raw.map(preprocess, batched=True)
    trainer = Trainer(
        model=BertForMultipleChoice(BertConfig(**parts.encoder_sizes(tokenizer, model_args.hidden_size))),
        args=training_args,
        **parts.splits(data),
        processing_class=tokenizer,
        data_collator=default_data_collator if data_args.pad_to_max_length else ChoiceCollator(tokenizer),
        compute_metrics=parts.accuracy,
    )
    parts.finish(trainer, checkpoint, "multiple-choice", language="en")


if __name__ == "__main__":
    main()
