"""The shape of run_glue.py: pairs of sentences, two sets to evaluate on, predictions into a file."""

import numpy as np
import parts
from datasets import Dataset, DatasetDict
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    Trainer,
    TrainingArguments,
    default_data_collator,
)


def make_rows(count, regression, start=0):
    numbers = range(start, start + count)
    label = [i % 7 / 7 if regression else i % 3 for i in numbers]
    return Dataset.from_dict(
        {
            "premise": [parts.sentence(i, 4 + i % 5) for i in numbers],
            "hypothesis": [parts.sentence(2 * i, 3) for i in numbers],
        }
        | {"label": label, "idx": list(numbers)}
    )


def main():
    model_args, data_args, training_args, checkpoint = parts.begin(
        parts.ModelArguments, parts.DataArguments, TrainingArguments
    )
    regression = data_args.task_name == "stsb"
    raw = DatasetDict(
        train=make_rows(data_args.train_samples, regression),
        validation_matched=make_rows(11, regression, 100),
        validation_mismatched=make_rows(9, regression, 200),
        test_matched=make_rows(10, regression, 300).remove_columns("label"),
    )
    tokenizer = parts.word_tokenizer()
    config = BertConfig(**parts.encoder_sizes(tokenizer, model_args.hidden_size), num_labels=1 if regression else 3)
    if not regression:
        config.label2id = {"no": 0, "maybe": 1, "yes": 2}
        config.id2label = {number: label for label, number in config.label2id.items()}
    padding = "max_length" if data_args.pad_to_max_length else False

    def preprocess(examples):
        pair = (examples["premise"], examples["hypothesis"])
        return tokenizer(*pair, padding=padding, max_length=data_args.max_seq_length, truncation=True)

    def compute_metrics(p: EvalPrediction):
        scores = p.predictions[0] if isinstance(p.predictions, tuple) else p.predictions
        if regression:
            return {"pearson": float(np.corrcoef(np.squeeze(scores), p.label_ids)[0, 1])}
        result = {"accuracy": float((np.argmax(scores, axis=1) == p.label_ids).mean()), "f1": float(scores.std())}
        return result | {"combined_score": np.mean(list(result.values())).item()}

    with training_args.main_process_first(desc="dataset map pre-processing"):
        raw = raw.map(preprocess, batched=True, load_from_cache_file=not data_args.overwrite_cache)
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=training_args,
        train_dataset=raw["train"],
        eval_dataset=raw["validation_matched"],
        compute_metrics=compute_metrics,
        processing_class=tokenizer,
        data_collator=default_data_collator if data_args.pad_to_max_length else DataCollatorWithPadding(tokenizer),
    )
    parts.train(trainer, checkpoint)
    parts.evaluate(trainer, eval_dataset=raw["validation_matched"])
    if training_args.do_eval:
        metrics = trainer.evaluate(eval_dataset=raw["validation_mismatched"])
        parts.report(trainer, "eval", {f"{name}_mm": value for name, value in metrics.items()}, 9)
    if training_args.do_predict:
        scores = trainer.predict(raw["test_matched"], metric_key_prefix="predict").predictions
        found = np.squeeze(scores) if regression else np.argmax(scores, axis=1)
        parts.write_lines(trainer, "predict_results.txt", (f"{i}\t{value}" for i, value in enumerate(found)))
    parts.describe(trainer, "text-classification", language="en", dataset_args="mnli")


if __name__ == "__main__":
    main()
