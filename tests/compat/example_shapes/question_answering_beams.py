"""The shape of run_qa_beam_search.py: XLNet, whose logits are five arrays, one of them for "no answer"."""

import answers
import parts
from answer_trainers import AnswerTrainer
from transformers import TrainingArguments, XLNetConfig, XLNetForQuestionAnswering, default_data_collator


def prepare(tokenizer, rows, data_args, with_answers):
    encoded, parents = answers.encode(tokenizer, rows, data_args)
    places = range(len(parents))
    encoded["cls_index"] = [ids.index(tokenizer.cls_token_id) for ids in encoded["input_ids"]]
    encoded["p_mask"] = [[0.0 if kind == 1 else 1.0 for kind in encoded.sequence_ids(place)] for place in places]
    for place in places:
        encoded["p_mask"][place][encoded["cls_index"][place]] = 0.0
    if with_answers:
        spans = [
            answers.answer_tokens(encoded, k, rows["answers"][parent], encoded["cls_index"][k])
            for k, parent in enumerate(parents)
        ]
        encoded["start_positions"], encoded["end_positions"] = map(list, zip(*spans, strict=True))
        encoded["is_impossible"] = [float(not rows["answers"][parent]["text"]) for parent in parents]
        encoded.pop("offset_mapping")
    else:
        encoded["example_id"] = [rows["id"][parent] for parent in parents]
        encoded["offset_mapping"] = [answers.context_offsets(encoded, place) for place in places]
    return encoded


def main():
    _, data_args, training_args, checkpoint = parts.begin(
        parts.ModelArguments, answers.AnswerArguments, TrainingArguments
    )
    tokenizer = parts.word_tokenizer(
        single="$A:0 [SEP]:0 [CLS]:2", pair="$A:0 [SEP]:0 $B:1 [SEP]:1 [CLS]:2", padding_side="left"
    )
    raw = answers.make_questions(data_args)
    names = raw["train"].column_names

    def post_process(examples, features, predictions, stage="eval"):
        start_scores, start_index, end_scores, end_index, nulls = predictions
        starts, ends = start_index.shape[1], end_index.shape[1] // start_index.shape[1]
        chosen, kept = [], {}
        for number, places in answers.features_of(examples, features).items():
            example, spans = examples[number], [(-1e9, "")]
            for place in places:
                offsets = features[place]["offset_mapping"]
                for i, j in ((i, j) for i in range(starts) for j in range(ends)):
                    first, last = int(start_index[place][i]), int(end_index[place][j * starts + i])
                    if None in (offsets[first], offsets[last]) or not 0 <= last - first < data_args.max_answer_length:
                        continue
                    score = float(start_scores[place][i] + end_scores[place][j * starts + i])
                    spans.append((score, example["context"][offsets[first][0] : offsets[last][1]]))
            kept[example["id"]] = [max(spans), min(float(nulls[place]) for place in places)]
            chosen.append({"id": example["id"], "prediction_text": max(spans)[1]})
        parts.write_json(training_args.output_dir, f"{stage}_null_odds.json", kept)
        return answers.Answers(chosen, [{"id": row["id"], "answers": row["answers"]} for row in examples])

    trained, evaluated, tested = (
        raw[name].map(
            lambda rows, known=name == "train": prepare(tokenizer, rows, data_args, known),
            batched=True,
            remove_columns=names,
        )
        for name in ("train", "validation", "test")
    )
    config = XLNetConfig(
        vocab_size=len(tokenizer), d_model=16, n_layer=2, n_head=2, d_inner=32, start_n_top=3, end_n_top=3
    )
    trainer = AnswerTrainer(
        model=XLNetForQuestionAnswering(config),
        args=training_args,
        train_dataset=trained,
        eval_dataset=evaluated,
        eval_examples=raw["validation"],
        processing_class=tokenizer,
        data_collator=default_data_collator,
        post_process_function=post_process,
        compute_metrics=answers.answer_metric,
    )
    parts.train(trainer, checkpoint)
    if training_args.do_eval:
        parts.report(trainer, "eval", trainer.evaluate(), len(evaluated))
    if training_args.do_predict:
        parts.report(trainer, "predict", trainer.predict(tested, raw["test"]).metrics, len(tested))
    parts.describe(trainer, "question-answering", language="en")


if __name__ == "__main__":
    main()
