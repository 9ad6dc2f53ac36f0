"""The shape of run_clm.py: texts joined and cut into blocks, the best tokens kept for the metric, perplexity."""

from dataclasses import dataclass, field

import parts
from language_data import TextArguments, make_blocks, next_token_accuracy
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, default_data_collator


@dataclass
class LlamaArguments(parts.ModelArguments):
    config_overrides: str | None = field(default=None, metadata={"help": "Changes of the config: a=1,b=2."})


def main():
    model_args, data_args, training_args, checkpoint = parts.begin(LlamaArguments, TextArguments, TrainingArguments)
    tokenizer = parts.word_tokenizer()
    config = LlamaConfig(**parts.encoder_sizes(tokenizer, model_args.hidden_size), num_key_value_heads=1)
    if model_args.config_overrides is not None:
        config.update_from_string(model_args.config_overrides)
    model = LlamaForCausalLM(config)
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))
    blocks = make_blocks(tokenizer, data_args, training_args)
    trainer = Trainer(
        model=model,
        args=training_args,
        **parts.splits(blocks),
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=next_token_accuracy if training_args.do_eval else None,
        preprocess_logits_for_metrics=parts.first_logits if training_args.do_eval else None,
    )
    parts.finish(trainer, checkpoint, "text-generation", perplexity=True)


if __name__ == "__main__":
    main()
