"""What the scripts have in common: the command line, generated data, and the start and the end of a run."""

import json
import logging
import math
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import datasets
import numpy as np
import tokenizers
import transformers
from tokenizers import models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

logger = logging.getLogger(__name__)
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [f"w{i}" for i in range(60)]


@dataclass
class ModelArguments:
    hidden_size: int = field(default=16, metadata={"help": "Width of the model."})
    config_overrides: str | None = field(default=None, metadata={"help": "Changes of the config: a=1,b=2."})
    freeze_text_model: bool = field(default=False, metadata={"help": "Train the other parts."})


@dataclass
class DataArguments:
    train_samples: int = field(default=10, metadata={"help": "How many samples to make for training."})
    columns: list[str] = field(default_factory=lambda: ["premise"], metadata={"help": "With texts."})
    max_seq_length: int = field(default=24, metadata={"help": "Tokens at most in a sample."})
    padding: bool = field(default=True, metadata={"help": "Pad the samples before the collator does."})
    language: str | None = field(default=None, metadata={"help": "Of the targets.", "choices": ["en", "de"]})
    max_target_length: int = field(default=8, metadata={"help": "Tokens at most in a target or an answer."})
    num_beams: int | None = field(default=None, metadata={"help": "Beams in prediction."})


def begin(arguments=TrainingArguments):
    """Parse the arguments; set up logs and the seed; find a checkpoint to resume from."""
    parser = transformers.HfArgumentParser((ModelArguments, DataArguments, arguments))
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        model_args, data_args, training_args = parser.parse_json_file(json_file=os.path.abspath(sys.argv[1]))
    else:
        model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    logging.basicConfig(format="%(asctime)s - %(levelname)s - %(message)s", handlers=[logging.StreamHandler()])
    if training_args.should_log:
        transformers.utils.logging.set_verbosity_info()
    level = training_args.get_process_log_level()
    for library in (logger.setLevel, datasets.utils.logging.set_verbosity, transformers.utils.logging.set_verbosity):
        library(level)
    transformers.utils.logging.enable_default_handler()
    transformers.utils.logging.enable_explicit_format()
    place = (training_args.local_process_index, training_args.device, training_args.n_gpu, training_args.parallel_mode)
    logger.warning("Process %s on %s, %s GPUs, %s, fp16: %s", *place, training_args.fp16)
    logger.info("Arguments: %s", training_args)
    last_checkpoint = None
    if os.path.isdir(training_args.output_dir) and training_args.do_train:
        last_checkpoint = get_last_checkpoint(training_args.output_dir)
    set_seed(training_args.seed)
    return model_args, data_args, training_args, training_args.resume_from_checkpoint or last_checkpoint


def sentence(number, length):
    return " ".join(WORDS[(number * (place + 3) + place * place) % len(WORDS)] for place in range(length))


def make_data(data_args, **columns):
    """Samples for training, evaluation and prediction; a column is a function of the sample's number."""
    numbers = {"train": range(data_args.train_samples), "validation": range(100, 106), "test": range(200, 205)}
    return datasets.DatasetDict(
        {
            split: datasets.Dataset.from_dict({name: list(map(make, chosen)) for name, make in columns.items()})
            for split, chosen in numbers.items()
        }
    )


def prepare(training_args, raw, function, keep=False):
    """The data as `function` makes it of batches of rows; `keep` leaves the columns there are to the Trainer."""
    with training_args.main_process_first(desc="dataset map pre-processing"):
        return raw.map(function, batched=True, remove_columns=[] if keep else raw["train"].column_names)


def splits(data):
    return {"train_dataset": data["train"], "eval_dataset": data["validation"]}


def word_tokenizer():
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    core = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    forms = {"single": "[CLS] $A [SEP]", "pair": "[CLS] $A [SEP] $B:1 [SEP]:1"}
    core.post_processor = processors.TemplateProcessing(**forms, special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=core, mask_token="[MASK]", model_max_length=64, **names)


def decode(tokenizer, ids):
    return tokenizer.batch_decode(np.where(ids != -100, ids, tokenizer.pad_token_id), skip_special_tokens=True)


def encoder_sizes(hidden_size=16):
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2}
    return {"hidden_size": hidden_size, "intermediate_size": 2 * hidden_size, **layers}


def text_sizes(tokenizer, hidden_size=16):
    return {"vocab_size": len(tokenizer), "max_position_embeddings": 64, **encoder_sizes(hidden_size)}


def make_t5(tokenizer, hidden_size=16):
    sizes = {"vocab_size": len(tokenizer), "d_model": hidden_size, "d_kv": 8, "d_ff": 32}
    ends = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": tokenizer.sep_token_id}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **ends, num_layers=2, num_heads=2))


def accuracy(prediction):
    found, labels = prediction
    found = found.argmax(axis=-1) if found.ndim > labels.ndim else found
    return {"accuracy": float((found == labels)[labels != -100].mean())}


def best_tokens(logits, labels):
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(dim=-1)


def report(trainer, split, metrics, samples):
    metrics[f"{split}_samples"] = samples
    trainer.log_metrics(split, metrics)
    trainer.save_metrics(split, metrics)


def train(trainer, checkpoint):
    result = trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    report(trainer, "train", result.metrics, len(trainer.train_dataset))
    trainer.save_state()


def evaluate(trainer, perplexity=False, **keywords):
    metrics = trainer.evaluate(**{"metric_key_prefix": "eval", **keywords})
    if perplexity:
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
    report(trainer, "eval", metrics, len(trainer.eval_dataset))


def predict(trainer, *data, **keywords):
    output = trainer.predict(*data, **{"metric_key_prefix": "predict", **keywords})
    report(trainer, "predict", output.metrics, len(data[0]))
    return output.predictions


def describe(trainer, task, **kwargs):
    trainer.create_model_card(tasks=task, dataset="generated", dataset_tags="generated", **kwargs)


def finish(trainer, checkpoint, task, perplexity=False, **card):
    train(trainer, checkpoint)
    evaluate(trainer, perplexity)
    describe(trainer, task, **card)


def write(trainer, name, value):
    if trainer.is_world_process_zero():
        Path(trainer.args.output_dir, name).write_text(json.dumps(value, indent=1))
