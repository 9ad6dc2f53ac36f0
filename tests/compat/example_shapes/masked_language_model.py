"""The shape of run_mlm.py: tokens masked by the collator as batches are made."""

import parts
from transformers import BertConfig, BertForMaskedLM, DataCollatorForLanguageModeling, Trainer


def main():
    model_args, data_args, training_args, checkpoint = parts.begin()
    tokenizer = parts.word_tokenizer()

    def tokenize(rows):
        limits = {"truncation": True, "max_length": data_args.max_seq_length}
        return tokenizer(rows["text"], return_special_tokens_mask=True, **limits)

    raw = parts.make_data(data_args, text=lambda i: parts.sentence(i, 5 + i % 9))
    trainer = Trainer(
        model=BertForMaskedLM(BertConfig(**parts.text_sizes(tokenizer, model_args.hidden_size))),
        args=training_args,
        **parts.splits(parts.prepare(training_args, raw, tokenize)),
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(
            tokenizer=tokenizer, mlm_probability=data_args.mlm_probability, pad_to_multiple_of=8
        ),
        compute_metrics=parts.accuracy,
        preprocess_logits_for_metrics=parts.best_tokens,
    )
    parts.finish(trainer, checkpoint, "fill-mask", perplexity=True)
