"""Texts for the language models: tokenized, joined, and cut into blocks of the same length."""

from dataclasses import dataclass, field
from itertools import chain

import parts
from datasets import Dataset, DatasetDict


@dataclass
class TextArguments(parts.DataArguments):
    block_size: int = field(default=16, metadata={"help": "Tokens in a block."})
    line_by_line: bool = field(default=False, metadata={"help": "A sample a line, instead of blocks."})
    mlm_probability: float = field(default=0.15, metadata={"help": "Share of the tokens to mask."})


def make_texts(count=40):
    return DatasetDict(
        train=Dataset.from_dict({"text": [parts.sentence(i, 5 + i % 9) for i in range(count)]}),
        validation=Dataset.from_dict({"text": [parts.sentence(i, 5 + i % 8) for i in range(100, 120)]}),
    )


def group(block_size):
    """A function for `map` that joins samples and cuts them into blocks; what is left over is dropped."""

    def group_texts(examples):
        joined = {name: list(chain(*values)) for name, values in examples.items()}
        total = len(joined["input_ids"]) // block_size * block_size
        return {
            name: [values[i : i + block_size] for i in range(0, total, block_size)] for name, values in joined.items()
        }

    return group_texts


def make_blocks(tokenizer, data_args, training_args, between=None):
    """Blocks with labels; `between` changes the tokenized samples before they are joined."""
    with training_args.main_process_first(desc="dataset map tokenization"):
        data = make_texts().map(
            lambda rows: tokenizer(rows["text"], return_token_type_ids=False), batched=True, remove_columns=["text"]
        )
    if between is not None:
        data = data.map(between, batched=True, load_from_cache_file=False)
    with training_args.main_process_first(desc="grouping texts together"):
        data = data.map(group(data_args.block_size), batched=True, num_proc=data_args.preprocessing_num_workers)
    return data.map(lambda rows: {"labels": [list(ids) for ids in rows["input_ids"]]}, batched=True)


def next_token_accuracy(prediction):
    """The share of right tokens, where the prediction at one place is for the next."""
    found, labels = prediction.predictions[:, :-1].reshape(-1), prediction.label_ids[:, 1:].reshape(-1)
    return {"accuracy": float((found == labels).mean())}
