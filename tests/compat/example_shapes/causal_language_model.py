"""The shape of run_clm.py: texts joined and cut into blocks, the best tokens kept for the metric, perplexity."""

from itertools import chain

import parts
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, default_data_collator

BLOCK = 16


def next_token_accuracy(prediction):
    """The share of right tokens, where the prediction at one place is for the next."""
    return parts.accuracy((prediction.predictions[:, :-1], prediction.label_ids[:, 1:]))


def main():
    model_args, data_args, training_args, checkpoint = parts.begin()
    tokenizer = parts.word_tokenizer()
    config = LlamaConfig(**parts.text_sizes(tokenizer, model_args.hidden_size), num_key_value_heads=1)
    config.update_from_string(model_args.config_overrides)
    model = LlamaForCausalLM(config)
    tokenizer.add_tokens(["<prefix>", "<suffix>"])
    model.resize_token_embeddings(len(tokenizer))

    def to_blocks(rows):
        joined = list(chain(*tokenizer(rows["text"])["input_ids"]))
        blocks = [joined[start : start + BLOCK] for start in range(0, len(joined) // BLOCK * BLOCK, BLOCK)]
        return {"input_ids": blocks, "attention_mask": [[1] * BLOCK] * len(blocks), "labels": blocks}

    raw = parts.make_data(data_args, text=lambda i: parts.sentence(i, 5 + i % 9))
    trainer = Trainer(
        model=model,
        args=training_args,
        **parts.splits(parts.prepare(training_args, raw, to_blocks)),
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=next_token_accuracy,
        preprocess_logits_for_metrics=parts.best_tokens,
    )
    parts.finish(trainer, checkpoint, "text-generation", perplexity=True)
