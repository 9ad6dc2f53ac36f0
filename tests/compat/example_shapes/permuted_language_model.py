"""The shape of run_plm.py: XLNet on permuted spans, no metric."""

from dataclasses import dataclass, field

import parts
from language_data import TextArguments, group, make_texts
from transformers import (
    DataCollatorForPermutationLanguageModeling,
    Trainer,
    TrainingArguments,
    XLNetConfig,
    XLNetLMHeadModel,
)


@dataclass
class PermutationArguments(TextArguments):
    plm_probability: float = field(default=1 / 6, metadata={"help": "Masked length by context length."})
    max_span_length: int = field(default=5, metadata={"help": "Tokens at most in a masked span."})


def main():
    model_args, data_args, training_args, checkpoint = parts.begin(
        parts.ModelArguments, PermutationArguments, TrainingArguments
    )
    tokenizer = parts.word_tokenizer()
    data = make_texts().map(lambda rows: tokenizer(rows["text"]), batched=True, remove_columns=["text"])
    with training_args.main_process_first(desc="grouping texts together"):
        data = data.map(group(data_args.max_seq_length), batched=True)
    config = XLNetConfig(vocab_size=len(tokenizer), d_model=model_args.hidden_size, n_layer=2, n_head=2, d_inner=32)
    trainer = Trainer(
        model=XLNetLMHeadModel(config),
        args=training_args,
        **parts.splits(data),
        processing_class=tokenizer,
        data_collator=DataCollatorForPermutationLanguageModeling(
            tokenizer, plm_probability=data_args.plm_probability, max_span_length=data_args.max_span_length
        ),
    )
    parts.finish(trainer, checkpoint, "language-modeling", perplexity=True)


if __name__ == "__main__":
    main()
