"""The shape of run_seq2seq_qa.py: the answer is generated."""

from dataclasses import dataclass, field

import numpy as np
import parts
from answer_trainers import AnswerSeq2SeqTrainer
from answers import AnswerArguments, Answers, answer_metric, features_of, make_questions
from generation import make_t5
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainingArguments


@dataclass
class GeneratedArguments(AnswerArguments):
    max_answer_length: int = field(default=6, metadata={"help": "Tokens at most in the target."})
    num_beams: int | None = field(default=None, metadata={"help": "Beams in evaluation and prediction."})
    ignore_pad_token_for_loss: bool = field(default=True, metadata={"help": "No loss for padding."})


def main():
    _, data_args, training_args, checkpoint = parts.begin(
        parts.ModelArguments, GeneratedArguments, Seq2SeqTrainingArguments
    )
    tokenizer = parts.word_tokenizer()
    raw = make_questions(data_args)
    model = make_t5(tokenizer)

    def prepare(rows, split):
        texts = [f"{q} {c}" for q, c in zip(rows["question"], rows["context"], strict=True)]
        targets = [(answer["text"] or [""])[0] for answer in rows["answers"]]
        limits = {"truncation": True, "max_length": data_args.max_seq_length}
        more = {} if split == "train" else {"return_overflowing_tokens": True}
        encoded = tokenizer(texts, padding=False, **limits, **more)
        parents = encoded.pop("overflow_to_sample_mapping", range(len(texts)))
        labels = tokenizer(text_target=targets, max_length=data_args.max_answer_length, truncation=True)["input_ids"]
        encoded["labels"] = [labels[parent] for parent in parents]
        if split != "train":
            encoded["example_id"] = [rows["id"][parent] for parent in parents]
        return encoded

    def post_process(examples, features, outputs, stage="eval"):
        ids = outputs.predictions[0] if isinstance(outputs.predictions, tuple) else outputs.predictions
        texts = tokenizer.batch_decode(np.where(ids != -100, ids, tokenizer.pad_token_id), skip_special_tokens=True)
        places = features_of(examples, features)
        chosen = [{"id": row["id"], "prediction_text": texts[places[n][-1]]} for n, row in enumerate(examples)]
        parts.write_json(training_args.output_dir, f"{stage}_predictions.json", chosen)
        return Answers(chosen, [{"id": row["id"], "answers": row["answers"]} for row in examples])

    data = {
        name: split.map(prepare, batched=True, remove_columns=split.column_names, fn_kwargs={"split": name})
        for name, split in raw.items()
    }
    trainer = AnswerSeq2SeqTrainer(
        model=model,
        args=training_args,
        **parts.splits(data),
        eval_examples=raw["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(
            tokenizer,
            model=model,
            label_pad_token_id=-100 if data_args.ignore_pad_token_for_loss else tokenizer.pad_token_id,
        ),
        compute_metrics=answer_metric if training_args.predict_with_generate else None,
        post_process_function=post_process,
    )
    parts.train(trainer, checkpoint)
    length = training_args.generation_max_length or data_args.max_answer_length
    beams = data_args.num_beams or training_args.generation_num_beams
    if training_args.do_eval:
        metrics = trainer.evaluate(max_length=length, num_beams=beams, metric_key_prefix="eval")
        parts.report(trainer, "eval", metrics, len(data["validation"]))
    if training_args.do_predict:
        parts.report(trainer, "predict", trainer.predict(data["test"], raw["test"]).metrics, len(data["test"]))
    parts.describe(trainer, "question-answering")


if __name__ == "__main__":
    main()
