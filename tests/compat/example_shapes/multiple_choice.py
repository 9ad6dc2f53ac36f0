"""The shape of run_swag.py: four endings of a sentence, flattened for the tokenizer, put together by the collator."""

from dataclasses import dataclass

import parts
import torch
from transformers import BertConfig, BertForMultipleChoice, PreTrainedTokenizerBase, Trainer

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
        return {**shaped, "labels": torch.tensor(labels, dtype=torch.int64)}


def main():
    model_args, data_args, training_args, checkpoint = parts.begin()
    tokenizer = parts.word_tokenizer()

    def preprocess(rows):
        contexts = [context for context in rows["context"] for _ in ENDINGS]
        endings = [ending for choices in zip(*(rows[name] for name in ENDINGS), strict=True) for ending in choices]
        flat = tokenizer(contexts, endings, truncation=True, max_length=data_args.max_seq_length)
        return {name: [row[i : i + 4] for i in range(0, len(row), 4)] for name, row in flat.items()}

    columns = {name: lambda i, k=place: parts.sentence(i + 7 * k, 2 + k) for place, name in enumerate(ENDINGS)}
    columns |= {"context": lambda i: parts.sentence(i, 6), "label": lambda i: i % 4}
    data = parts.prepare(training_args, parts.make_data(data_args, **columns), preprocess, keep=True)
    trainer = Trainer(
        model=BertForMultipleChoice(BertConfig(**parts.text_sizes(tokenizer, model_args.hidden_size))),
        args=training_args,
        **parts.splits(data),
        processing_class=tokenizer,
        data_collator=ChoiceCollator(tokenizer),
        compute_metrics=parts.accuracy,
    )
    parts.finish(trainer, checkpoint, "multiple-choice", language="en")
