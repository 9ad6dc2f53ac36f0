"""The shape of run_mlm.py: tokens masked by the collator as batches are made, a sample a line or in blocks."""

import numpy as np
import parts
from language_data import TextArguments, group, make_texts
from transformers import BertConfig, BertForMaskedLM, DataCollatorForLanguageModeling, Trainer, TrainingArguments


def masked_accuracy(prediction):
    labels, found = prediction.label_ids.reshape(-1), prediction.predictions.reshape(-1)
    masked = labels != -100
    return {"accuracy": float(np.mean(labels[masked] == found[masked]))}


def main():
    model_args, data_args, training_args, checkpoint = parts.begin(
        parts.ModelArguments, TextArguments, TrainingArguments
    )
    tokenizer = parts.word_tokenizer()
    texts = make_texts()

    def tokenize(rows):
        kept = [line for line in rows["text"] if line and not line.isspace()]
        settings = {"truncation": True, "max_length": data_args.max_seq_length} if data_args.line_by_line else {}
        return tokenizer(kept, return_special_tokens_mask=True, **settings)

    with training_args.main_process_first(desc="dataset map tokenization"):
        data = texts.map(tokenize, batched=True, remove_columns=["text"], desc="tokenize")
        if not data_args.line_by_line:
            data = data.map(group(data_args.max_seq_length), batched=True, desc="group")
    trainer = Trainer(
        model=BertForMaskedLM(BertConfig(**parts.encoder_sizes(tokenizer, model_args.hidden_size))),
        args=training_args,
        **parts.splits(data),
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(
            tokenizer=tokenizer,
            mlm_probability=data_args.mlm_probability,
            pad_to_multiple_of=8 if data_args.line_by_line and not data_args.pad_to_max_length else None,
        ),
        compute_metrics=masked_accuracy,
        preprocess_logits_for_metrics=parts.first_logits,
    )
    parts.finish(trainer, checkpoint, "fill-mask", perplexity=True)


if __name__ == "__main__":
    main()
