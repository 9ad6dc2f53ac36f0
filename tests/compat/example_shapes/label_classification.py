"""The shape of run_classification.py: several labels a sample, chosen by problem_type, on columns that are joined."""

import numpy as np
import parts
from transformers import DataCollatorWithPadding, DistilBertConfig, DistilBertForSequenceClassification, Trainer

LABELS = ["art", "law", "sport", "war"]


def compute_metrics(prediction):
    found, right = prediction.predictions > 0, prediction.label_ids > 0
    return {"f1": float(2 * (found & right).sum() / (found.sum() + right.sum())), "rows": len(found)}


def main():
    model_args, data_args, training_args, checkpoint = parts.begin()
    tokenizer = parts.word_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "dim": model_args.hidden_size, "hidden_dim": 32, "n_layers": 2, "n_heads": 2}
    config = DistilBertConfig(**sizes, num_labels=len(LABELS), problem_type="multi_label_classification")

    def preprocess(rows):
        texts = [" ".join(pieces) for pieces in zip(*(rows[name] for name in data_args.text_columns), strict=True)]
        labels = [[float(number in (i % 4, i % 3)) for number in range(len(LABELS))] for i in rows["number"]]
        return {**tokenizer(texts, max_length=data_args.max_seq_length, truncation=True), "labels": labels}

    texts = {"title": lambda i: parts.sentence(i, 2), "body": lambda i: parts.sentence(3 * i, 3 + i % 7)}
    data = parts.prepare(training_args, parts.make_data(data_args, **texts, number=int), preprocess)
    trainer = Trainer(
        model=DistilBertForSequenceClassification(config),
        args=training_args,
        train_dataset=data["train"].shuffle(seed=training_args.data_seed),
        eval_dataset=data["validation"].select(range(data_args.max_eval_samples)),
        compute_metrics=compute_metrics,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    parts.train(trainer, checkpoint)
    parts.evaluate(trainer, eval_dataset=trainer.eval_dataset)
    scores = parts.predict(trainer, data["test"].remove_columns("labels"))
    parts.write(trainer, "predictions.json", [np.flatnonzero(row > 0).tolist() for row in scores])
    parts.describe(trainer, "text-classification")
