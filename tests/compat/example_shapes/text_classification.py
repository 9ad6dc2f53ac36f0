"""The shape of run_glue.py: pairs of sentences, two sets to evaluate on, predictions into a file."""

import parts
from transformers import BertConfig, BertForSequenceClassification, EvalPrediction, Trainer, default_data_collator


def compute_metrics(prediction: EvalPrediction):
    result = {**parts.accuracy(prediction), "spread": float(prediction.predictions.std())}
    return {**result, "combined_score": sum(result.values()) / 2}


def main():
    model_args, data_args, training_args, checkpoint = parts.begin()
    tokenizer = parts.word_tokenizer()
    config = BertConfig(**parts.text_sizes(tokenizer, model_args.hidden_size), num_labels=3)
    config.label2id = {"no": 0, "maybe": 1, "yes": 2}
    config.id2label = {number: label for label, number in config.label2id.items()}

    def tokenize(rows):
        limits = {"max_length": data_args.max_seq_length, "truncation": True}
        return tokenizer(*(rows[name] for name in data_args.columns), padding="max_length", **limits)

    texts = {"premise": lambda i: parts.sentence(i, 4 + i % 5), "hypothesis": lambda i: parts.sentence(2 * i, 3)}
    raw = parts.make_data(data_args, **texts, label=lambda i: i % 3, idx=int)
    data = parts.prepare(training_args, raw, tokenize, keep=True)
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=training_args,
        **parts.splits(data),
        compute_metrics=compute_metrics,
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    parts.train(trainer, checkpoint)
    parts.evaluate(trainer, eval_dataset=data["validation"])
    metrics = trainer.evaluate(eval_dataset=data["test"])
    parts.report(trainer, "eval", {f"{name}_mm": value for name, value in metrics.items()}, len(data["test"]))
    scores = parts.predict(trainer, data["test"].remove_columns("label"))
    parts.write(trainer, "predictions.json", scores.argmax(axis=1).tolist())
    parts.describe(trainer, "text-classification", language="en", dataset_args="mnli")
