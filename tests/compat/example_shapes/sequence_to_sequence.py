"""The shape of run_summarization.py and run_translation.py: texts generated in evaluation and in prediction."""

import numpy as np
import parts
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments


def main():
    model_args, data_args, training_args, checkpoint = parts.begin(Seq2SeqTrainingArguments)
    tokenizer = parts.word_tokenizer()
    model = parts.make_t5(tokenizer, model_args.hidden_size)
    model.generation_config.forced_bos_token_id = tokenizer.convert_tokens_to_ids("w1")

    def preprocess(rows):
        encoded = tokenizer(
            rows["source"], max_length=data_args.max_seq_length, truncation=True, padding=data_args.padding
        )
        labels = tokenizer(
            text_target=rows["target"],
            max_length=data_args.max_target_length,
            truncation=True,
            padding=data_args.padding,
        )["input_ids"]
        return {**encoded, "labels": [[-100 if number == 0 else number for number in row] for row in labels]}

    def compute_metrics(prediction):
        ids, labels = prediction
        rows = list(zip(parts.decode(tokenizer, ids), parts.decode(tokenizer, labels), strict=True))
        common = sum(len(set(found.split()) & set(right.split())) for found, right in rows)
        return {"common": common / len(rows), "gen_len": float(np.mean([np.count_nonzero(row) for row in ids]))}

    texts = {"source": lambda i: parts.sentence(i, 8 + i % 7), "target": lambda i: parts.sentence(i, 3 + i % 4)}
    data = parts.prepare(training_args, parts.make_data(data_args, **texts), preprocess)
    trainer = Seq2SeqTrainer(
        model=model,
        args=training_args,
        **parts.splits(data),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model, label_pad_token_id=-100),
        compute_metrics=compute_metrics if training_args.predict_with_generate else None,
    )
    parts.train(trainer, checkpoint)
    parts.evaluate(trainer)  # length and beams are those of the arguments
    settings = {"max_length": data_args.max_target_length, "num_beams": data_args.num_beams}
    ids = parts.predict(trainer, data["test"], **settings)
    parts.write(trainer, "predictions.json", parts.decode(tokenizer, ids))
    parts.describe(trainer, "translation", language=["en", data_args.language])
