"""What the scripts that generate text share: pairs of texts, a small T5, the metric, and the end of the run."""

from dataclasses import dataclass, field

import numpy as np
import parts
from datasets import Dataset, DatasetDict
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, T5Config, T5ForConditionalGeneration


@dataclass
class PairArguments(parts.DataArguments):
    source_lang: str | None = field(default=None, metadata={"help": "Language to translate from."})
    target_lang: str | None = field(default=None, metadata={"help": "Language to translate to."})
    source_prefix: str | None = field(default=None, metadata={"help": "Put before every source."})
    max_target_length: int = field(default=10, metadata={"help": "Tokens at most in a target."})
    val_max_target_length: int | None = field(default=None, metadata={"help": "The same in evaluation."})
    num_beams: int | None = field(default=None, metadata={"help": "Beams in evaluation and prediction."})
    ignore_pad_token_for_loss: bool = field(default=True, metadata={"help": "No loss for padding."})

    def __post_init__(self):
        self.val_max_target_length = self.val_max_target_length or self.max_target_length


def make_t5(tokenizer, hidden_size=16):
    sizes = {"vocab_size": len(tokenizer), "d_model": hidden_size, "d_kv": 8, "d_ff": 32}
    ends = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": tokenizer.sep_token_id}
    return T5ForConditionalGeneration(T5Config(**sizes, **ends, num_layers=2, num_heads=2))


def make_pairs(count, start=0):
    numbers = range(start, start + count)
    columns = {
        "source": [parts.sentence(i, 8 + i % 7) for i in numbers],
        "target": [parts.sentence(i, 3 + i % 4) for i in numbers],
    }
    return Dataset.from_dict(columns)


def prepare_pairs(tokenizer, data_args, training_args, read=lambda rows: (rows["source"], rows["target"])):
    """Tokenized pairs of each split; `read` takes sources and targets out of a batch of rows."""
    raw = DatasetDict(train=make_pairs(data_args.train_samples), validation=make_pairs(10, 40), test=make_pairs(7, 60))
    padding = "max_length" if data_args.pad_to_max_length else False

    def preprocess(rows, target_length):
        sources, targets = read(rows)
        sources = [(data_args.source_prefix or "") + text for text in sources]
        encoded = tokenizer(sources, max_length=data_args.max_seq_length, padding=padding, truncation=True)
        labels = tokenizer(text_target=targets, max_length=target_length, padding=padding, truncation=True)["input_ids"]
        ignored = {tokenizer.pad_token_id: -100} if data_args.ignore_pad_token_for_loss else {}
        encoded["labels"] = [[ignored.get(number, number) for number in row] for row in labels]
        return encoded

    lengths = {"train": data_args.max_target_length}
    with training_args.main_process_first(desc="dataset map pre-processing"):
        return {
            name: split.map(
                preprocess,
                batched=True,
                remove_columns=split.column_names,
                fn_kwargs={"target_length": lengths.get(name, data_args.val_max_target_length)},
            )
            for name, split in raw.items()
        }


def decode(tokenizer, ids):
    kept = np.where(ids != -100, ids, tokenizer.pad_token_id)
    return [text.strip() for text in tokenizer.batch_decode(kept, skip_special_tokens=True)]


def make_metric(tokenizer, name):
    def compute_metrics(prediction):
        ids, labels = prediction
        ids = ids[0] if isinstance(ids, tuple) else ids
        rows = list(zip(decode(tokenizer, ids), decode(tokenizer, labels), strict=True))
        common = [len(set(found.split()) & set(right.split())) for found, right in rows]
        length = float(np.mean([np.count_nonzero(row != tokenizer.pad_token_id) for row in ids]))
        return {name: round(sum(common) / len(rows), 4), "gen_len": length}

    return compute_metrics


def make_trainer(model, tokenizer, data_args, training_args, data, metric):
    training_args.generation_max_length = training_args.generation_max_length or data_args.val_max_target_length
    training_args.generation_num_beams = data_args.num_beams or training_args.generation_num_beams
    ignored = -100 if data_args.ignore_pad_token_for_loss else tokenizer.pad_token_id
    return Seq2SeqTrainer(
        model=model,
        args=training_args,
        **parts.splits(data),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(
            tokenizer, model=model, label_pad_token_id=ignored, pad_to_multiple_of=8 if training_args.fp16 else None
        ),
        compute_metrics=make_metric(tokenizer, metric) if training_args.predict_with_generate else None,
    )


def predict(trainer, tokenizer, test, **settings):
    results = trainer.predict(test, metric_key_prefix="predict", **settings)
    parts.report(trainer, "predict", results.metrics, len(test))
    if trainer.args.predict_with_generate:
        parts.write_lines(trainer, "generated_predictions.txt", decode(tokenizer, results.predictions))
