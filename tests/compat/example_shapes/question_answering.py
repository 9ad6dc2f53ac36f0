"""The shape of run_qa.py: a long text gives several samples, and the answer is the best span of all of them."""

import parts
from answers import AnswerTrainer, answer_metric, features_of, make_questions
from transformers import BertConfig, BertForQuestionAnswering, DataCollatorWithPadding


def main():
    model_args, data_args, training_args, checkpoint = parts.begin()
    tokenizer = parts.word_tokenizer()

    def prepare(rows):
        limits = {"truncation": "only_second", "max_length": data_args.max_seq_length, "stride": 6}
        more = {"return_overflowing_tokens": True, "return_offsets_mapping": True}
        encoded = tokenizer(rows["question"], rows["context"], **limits, **more)
        parents = encoded.pop("overflow_to_sample_mapping")
        spans = [span_of(encoded, place, rows["answer"][parent]) for place, parent in enumerate(parents)]
        encoded["start_positions"], encoded["end_positions"] = map(list, zip(*spans, strict=True))
        encoded["example_id"] = [rows["id"][parent] for parent in parents]
        return encoded

    def span_of(encoded, place, answer):
        """The first and the last token of the answer; those of [CLS] where it is not in this part of the text."""
        last = answer["start"] + len(answer["text"])
        inside = [
            token
            for token, (low, high) in enumerate(encoded["offset_mapping"][place])
            if encoded.sequence_ids(place)[token] == 1 and answer["start"] <= low and high <= last
        ]
        return (inside[0], inside[-1]) if len(inside) == 2 else (0, 0)

    def post_process(examples, features, predictions, stage):
        starts, ends = predictions
        chosen, places = {}, features_of(examples, features)
        for identity, context in zip(examples["id"], examples["context"], strict=True):
            spans = []
            for place in places[identity]:
                offsets = features[place]["offset_mapping"]
                first = 1 + int(starts[place][1 : len(offsets)].argmax())
                last = first + int(ends[place][first : len(offsets)].argmax())
                score = float(starts[place][first] + ends[place][last])
                spans.append((score, context[offsets[first][0] : offsets[last][1]]))
            chosen[identity] = max(spans)
        parts.write(trainer, f"{stage}_predictions.json", chosen)
        return [text for _, text in chosen.values()]

    raw = make_questions(data_args)
    data = parts.prepare(training_args, raw, prepare)
    trainer = AnswerTrainer(
        model=BertForQuestionAnswering(BertConfig(**parts.text_sizes(tokenizer, model_args.hidden_size))),
        args=training_args,
        **parts.splits(data),
        eval_examples=raw["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        post_process_function=post_process,
        compute_metrics=answer_metric,
    )
    parts.train(trainer, checkpoint)
    parts.evaluate(trainer)
    parts.predict(trainer, data["test"], raw["test"])
    parts.describe(trainer, "question-answering")
