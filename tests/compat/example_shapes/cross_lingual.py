"""The shape of run_xnli.py: entailment, trained in one language and evaluated in another; predictions have labels."""

from dataclasses import dataclass, field

import numpy as np
import parts
from datasets import Dataset
from transformers import RobertaConfig, RobertaForSequenceClassification, Trainer, TrainingArguments

FIRST_NUMBER = {"en": 0, "de": 500}


@dataclass
class LanguageArguments(parts.ModelArguments):
    language: str | None = field(default=None, metadata={"help": "Language to evaluate in.", "choices": ["en", "de"]})
    train_language: str | None = field(default=None, metadata={"help": "Language to train in, if another."})


def main():
    data_args, model_args, training_args, checkpoint = parts.begin(
        parts.DataArguments, LanguageArguments, TrainingArguments
    )
    tokenizer = parts.word_tokenizer()

    def load(language, count, shift):
        numbers = range(FIRST_NUMBER[language] + shift, FIRST_NUMBER[language] + shift + count)
        columns = {
            "premise": [parts.sentence(i, 5 + i % 4) for i in numbers],
            "hypothesis": [parts.sentence(i, 3) for i in numbers],
        }
        return Dataset.from_dict(columns | {"label": [i // 2 % 3 for i in numbers]}).map(
            lambda rows: tokenizer(
                rows["premise"],
                rows["hypothesis"],
                padding="max_length" if data_args.pad_to_max_length else False,
                max_length=data_args.max_seq_length,
                truncation=True,
                return_token_type_ids=False,
            ),
            batched=True,
            desc=f"tokenize {language}",
        )

    trainer = Trainer(
        model=RobertaForSequenceClassification(
            RobertaConfig(**parts.encoder_sizes(tokenizer), num_labels=3, pad_token_id=0)
        ),
        args=training_args,
        train_dataset=load(model_args.train_language or model_args.language, data_args.train_samples, 0),
        eval_dataset=load(model_args.language, 10, 100),
        compute_metrics=parts.accuracy,
        processing_class=tokenizer,
    )
    parts.train(trainer, checkpoint)
    parts.evaluate(trainer)
    if training_args.do_predict:
        test = load(model_args.language, 7, 200)
        scores, _, metrics = trainer.predict(test, metric_key_prefix="predict")
        parts.report(trainer, "predict", metrics, len(test))
        parts.write_lines(
            trainer, "predictions.txt", (f"{i}\t{row}" for i, row in enumerate(np.argmax(scores, axis=1)))
        )
    parts.describe(trainer, "text-classification", language=model_args.language)


if __name__ == "__main__":
    main()
