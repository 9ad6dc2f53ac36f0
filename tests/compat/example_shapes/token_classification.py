"""The shape of run_ner.py: words that are several tokens, labels of the first one, metrics by kind of entity."""

import numpy as np
import parts
from transformers import BertConfig, BertForTokenClassification, DataCollatorForTokenClassification, Trainer

LABELS = ["O", "B-PER", "I-PER", "B-LOC"]


def main():
    model_args, data_args, training_args, checkpoint = parts.begin()
    tokenizer = parts.word_tokenizer()
    config = BertConfig(**parts.text_sizes(tokenizer, model_args.hidden_size), num_labels=len(LABELS))

    def align(rows):
        encoded = tokenizer(rows["tokens"], truncation=True, max_length=32, is_split_into_words=True)
        encoded["labels"] = []
        for number, tags in enumerate(rows["tags"]):
            ids = encoded.word_ids(batch_index=number)
            first = [word is not None and word not in ids[:place] for place, word in enumerate(ids)]
            encoded["labels"].append([tags[word] if yes else -100 for yes, word in zip(first, ids, strict=True)])
        return encoded

    def compute_metrics(prediction):
        found, labels = prediction.predictions.argmax(axis=2), prediction.label_ids
        kinds = {f"{name}_recall": (found == labels)[labels == number] for number, name in enumerate(LABELS)}
        return {**parts.accuracy(prediction), **{name: float(np.mean(right)) for name, right in kinds.items()}}

    def words(i):
        return [f"{word}.{word}" for word in parts.sentence(i, 4 + i % 5).split()]

    raw = parts.make_data(data_args, tokens=words, tags=lambda i: [(i + len(word)) % 4 for word in words(i)])
    data = parts.prepare(training_args, raw, align, keep=True)
    trainer = Trainer(
        model=BertForTokenClassification(config),
        args=training_args,
        **parts.splits(data),
        processing_class=tokenizer,
        data_collator=DataCollatorForTokenClassification(tokenizer),
        compute_metrics=compute_metrics,
    )
    parts.train(trainer, checkpoint)
    parts.evaluate(trainer)
    parts.write(trainer, "predictions.json", parts.predict(trainer, data["test"]).argmax(axis=2).tolist())
    parts.describe(trainer, "token-classification")
