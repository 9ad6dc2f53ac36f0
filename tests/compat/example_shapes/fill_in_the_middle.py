"""The shape of run_fim.py: new tokens with sampled embeddings, and texts with their middle moved to the end."""

from dataclasses import dataclass, field

import numpy as np
import parts
import torch
from language_data import TextArguments, make_blocks, next_token_accuracy
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, default_data_collator

MARKS = ["<prefix>", "<middle>", "<suffix>"]


@dataclass
class MiddleArguments(TextArguments):
    fim_rate: float = field(default=0.5, metadata={"help": "Share of the samples to change."})
    fim_spm_rate: float = field(default=0.5, metadata={"help": "Share of those with the suffix first."})


def add_marks(model, tokenizer):
    """Give the marks embeddings near the mean of the others."""
    before = model.get_input_embeddings().weight.detach().clone()
    tokenizer.add_tokens(MARKS)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    centred = before - before.mean(dim=0)
    covariance = 1e-5 * (centred.T @ centred / len(before) + 1e-3 * torch.eye(before.shape[1]))
    near = torch.distributions.MultivariateNormal(before.mean(dim=0), covariance_matrix=covariance)
    model.get_input_embeddings().weight.data[-len(MARKS) :] = near.sample((len(MARKS),))


def main():
    model_args, data_args, training_args, checkpoint = parts.begin(
        parts.ModelArguments, MiddleArguments, TrainingArguments
    )
    random = np.random.RandomState(seed=training_args.seed)
    tokenizer = parts.word_tokenizer()
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=model_args.hidden_size, n_layer=2, n_head=2, n_positions=64)
    model = GPT2LMHeadModel(config)
    add_marks(model, tokenizer)
    prefix, middle, suffix = tokenizer.convert_tokens_to_ids(MARKS)

    def move_middle(ids):
        if not random.binomial(1, data_args.fim_rate):
            return ids
        low, high = sorted(random.randint(0, len(ids) + 1, size=2))
        first, between, last = ids[:low], ids[low:high], ids[high:]
        if random.binomial(1, data_args.fim_spm_rate):
            return [prefix, suffix, *last, middle, *first, *between]
        return [prefix, *first, suffix, *last, middle, *between]

    def change(rows):
        moved = [move_middle(ids) for ids in rows["input_ids"]]
        return {"input_ids": moved, "attention_mask": [[1] * len(ids) for ids in moved]}

    blocks = make_blocks(tokenizer, data_args, training_args, between=change)
    trainer = Trainer(
        model=model,
        args=training_args,
        **parts.splits(blocks),
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=next_token_accuracy,
        preprocess_logits_for_metrics=parts.first_logits,
    )
    parts.finish(trainer, checkpoint, "text-generation", perplexity=True)


if __name__ == "__main__":
    main()
