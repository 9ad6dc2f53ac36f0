"""The shape of run_seq2seq_qa.py: the answer is generated."""

import parts
from answers import AnswerTrainer, answer_metric, features_of, make_questions
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments


class AnswerSeq2SeqTrainer(AnswerTrainer, Seq2SeqTrainer):
    """The steps are those that generate."""


def main():
    model_args, data_args, training_args, checkpoint = parts.begin(Seq2SeqTrainingArguments)
    tokenizer = parts.word_tokenizer()
    model = parts.make_t5(tokenizer, model_args.hidden_size)

    def prepare(rows):
        limits = {"truncation": True, "max_length": data_args.max_seq_length}
        encoded = tokenizer(rows["question"], rows["context"], return_overflowing_tokens=True, **limits)
        parents = encoded.pop("overflow_to_sample_mapping")
        labels = tokenizer(text_target=[answer["text"] for answer in rows["answer"]])["input_ids"]
        encoded["labels"] = [labels[parent] for parent in parents]
        encoded["example_id"] = [rows["id"][parent] for parent in parents]
        return encoded

    def post_process(examples, features, predictions, stage):
        texts = parts.decode(tokenizer, predictions)
        chosen = [texts[places[-1]] for places in features_of(examples, features).values()]
        parts.write(trainer, f"{stage}_predictions.json", chosen)
        return chosen

    raw = make_questions(data_args)
    data = parts.prepare(training_args, raw, prepare)
    trainer = AnswerSeq2SeqTrainer(
        model=model,
        args=training_args,
        **parts.splits(data),
        eval_examples=raw["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        compute_metrics=answer_metric,
        post_process_function=post_process,
    )
    parts.train(trainer, checkpoint)
    settings = {"max_length": data_args.max_target_length, "num_beams": data_args.num_beams}
    parts.evaluate(trainer, **settings)
    parts.predict(trainer, data["test"], raw["test"], **settings)
    parts.describe(trainer, "question-answering")
