"""The shape of run_qa.py: answers are the best spans of all parts of a context."""

import answers
import numpy as np
import parts
from answer_trainers import AnswerTrainer
from transformers import BertConfig, BertForQuestionAnswering, DataCollatorWithPadding, TrainingArguments


def best_spans(start, end, offsets, context, data_args):
    """The best spans of one feature, as score and text."""
    firsts, lasts = (np.argsort(scores)[: -data_args.n_best_size - 1 : -1].tolist() for scores in (start, end))
    return [
        (float(start[first] + end[last]), context[offsets[first][0] : offsets[last][1]])
        for first in firsts
        for last in lasts
        if max(first, last) < len(offsets) and offsets[first] is not None and offsets[last] is not None
        if 0 <= last - first < data_args.max_answer_length
    ]


def main():
    model_args, data_args, training_args, checkpoint = parts.begin(
        parts.ModelArguments, answers.AnswerArguments, TrainingArguments
    )
    tokenizer = parts.word_tokenizer()
    raw = answers.make_questions(data_args)
    names = raw["train"].column_names

    def prepare_train(rows):
        encoded, parents = answers.encode(tokenizer, rows, data_args)
        spans = [answers.answer_tokens(encoded, k, rows["answers"][parent], 0) for k, parent in enumerate(parents)]
        encoded["start_positions"], encoded["end_positions"] = map(list, zip(*spans, strict=True))
        encoded.pop("offset_mapping")
        return encoded

    def prepare_eval(rows):
        encoded, parents = answers.encode(tokenizer, rows, data_args)
        encoded["example_id"] = [rows["id"][parent] for parent in parents]
        encoded["offset_mapping"] = [answers.context_offsets(encoded, place) for place in range(len(parents))]
        return encoded

    def post_process(examples, features, predictions, stage="eval"):
        starts, ends = predictions
        assert len(starts) == len(features)
        chosen, all_best = [], {}
        for number, places in answers.features_of(examples, features).items():
            example = examples[number]
            spans = []
            for place in places:
                offsets = features[place]["offset_mapping"]
                spans += best_spans(starts[place], ends[place], offsets, example["context"], data_args)
            spans = sorted(spans, reverse=True)[: data_args.n_best_size] or [(0.0, "empty")]
            if data_args.version_2_with_negative:
                null = min(float(starts[place][0] + ends[place][0]) for place in places)
                spans = [(null, ""), *spans] if null - spans[0][0] > data_args.null_score_diff_threshold else spans
            all_best[example["id"]] = spans
            chosen.append({"id": example["id"], "prediction_text": spans[0][1]})
        parts.write_json(training_args.output_dir, f"{stage}_nbest_predictions.json", all_best)
        return answers.Answers(chosen, [{"id": row["id"], "answers": row["answers"]} for row in examples])

    eval_features, test_features = (
        raw[name].map(prepare_eval, batched=True, remove_columns=names) for name in ("validation", "test")
    )
    trainer = AnswerTrainer(
        model=BertForQuestionAnswering(BertConfig(**parts.encoder_sizes(tokenizer, model_args.hidden_size))),
        args=training_args,
        train_dataset=raw["train"].map(prepare_train, batched=True, remove_columns=names),
        eval_dataset=eval_features,
        eval_examples=raw["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        post_process_function=post_process,
        compute_metrics=answers.answer_metric,
    )
    parts.train(trainer, checkpoint)
    if training_args.do_eval:
        parts.report(trainer, "eval", trainer.evaluate(), len(eval_features))
    if training_args.do_predict:
        results = trainer.predict(test_features, raw["test"])
        parts.report(trainer, "predict", results.metrics, len(test_features))
    parts.describe(trainer, "question-answering")


if __name__ == "__main__":
    main()
