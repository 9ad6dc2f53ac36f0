"""What the scripts have in common: the command line, the start and the end of a run, words and tokens."""

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
from transformers import HfArgumentParser, PreTrainedTokenizerFast, set_seed
from transformers.trainer_utils import get_last_checkpoint

logger = logging.getLogger(__name__)

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [f"w{i}" for i in range(60)]


@dataclass
class DataArguments:
    """What the data arguments of most examples have."""

    task_name: str | None = field(default=None, metadata={"help": "Which of the tasks of this script."})
    max_seq_length: int = field(default=24, metadata={"help": "Tokens at most in a sample."})
    pad_to_max_length: bool = field(default=True, metadata={"help": "Pad each sample to max_seq_length."})
    overwrite_cache: bool = field(default=False, metadata={"help": "Ignore what datasets has cached."})
    preprocessing_num_workers: int | None = field(default=None, metadata={"help": "Processes of map()."})
    train_samples: int = field(default=18, metadata={"help": "How many samples to make for training."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on the first ones only."})


@dataclass
class ModelArguments:
    """What the model arguments of most examples have."""

    model_name_or_path: str | None = field(default=None, metadata={"help": "Not used: models are made here."})
    hidden_size: int = field(default=16, metadata={"help": "Width of the model."})
    use_fast_tokenizer: bool = field(default=True, metadata={"help": "As in the originals; always true here."})


def parse(*kinds):
    """The arguments of a JSON file, if that is all there is on the command line, or of the command line."""
    parser = HfArgumentParser(kinds)
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        return parser.parse_json_file(json_file=os.path.abspath(sys.argv[1]))
    return parser.parse_args_into_dataclasses()


def begin(*kinds):
    """Parse the arguments, the training arguments last; set up logs and the seed; find a checkpoint to resume from."""
    *others, training_args = parse(*kinds)
    logging.basicConfig(format="%(asctime)s - %(levelname)s - %(message)s", handlers=[logging.StreamHandler()])
    if training_args.should_log:
        transformers.utils.logging.set_verbosity_info()
    level = training_args.get_process_log_level()
    logger.setLevel(level)
    datasets.utils.logging.set_verbosity(level)
    transformers.utils.logging.set_verbosity(level)
    transformers.utils.logging.enable_default_handler()
    transformers.utils.logging.enable_explicit_format()
    logger.warning(
        "Process %s on %s, %s GPUs, distributed: %s, fp16: %s",
        training_args.local_process_index,
        training_args.device,
        training_args.n_gpu,
        training_args.parallel_mode.value == "distributed",
        training_args.fp16,
    )
    logger.info("Arguments: %s", training_args)
    last_checkpoint = None
    if os.path.isdir(training_args.output_dir) and training_args.do_train:
        last_checkpoint = get_last_checkpoint(training_args.output_dir)
        if last_checkpoint is not None and training_args.resume_from_checkpoint is None:
            logger.info("Resuming from %s", last_checkpoint)
    set_seed(training_args.seed)
    return *others, training_args, training_args.resume_from_checkpoint or last_checkpoint


def splits(data):
    """What a Trainer is trained and evaluated on, as keywords."""
    first, second = list(data)[:2]
    return {"train_dataset": data[first], "eval_dataset": data[second]}


def report(trainer, split, metrics, samples):
    """Write the metrics of one split, with the number of its samples."""
    metrics[f"{split}_samples"] = samples
    trainer.log_metrics(split, metrics)
    trainer.save_metrics(split, metrics)


def train(trainer, checkpoint):
    """Train, save the model, and write metrics and state."""
    if not trainer.args.do_train:
        return
    result = trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    report(trainer, "train", result.metrics, len(trainer.train_dataset))
    trainer.save_state()


def evaluate(trainer, perplexity=False, **keywords):
    """Evaluate, and write the metrics."""
    if not trainer.args.do_eval:
        return
    metrics = trainer.evaluate(metric_key_prefix="eval", **keywords)
    if perplexity:
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
    report(trainer, "eval", metrics, len(keywords.get("eval_dataset", trainer.eval_dataset)))


def describe(trainer, task, **more):
    """Write the model card, or upload."""
    card = {"finetuned_from": None, "tasks": task, "dataset": "generated", "dataset_tags": "generated", **more}
    if trainer.args.push_to_hub:
        trainer.push_to_hub(**card)
    else:
        trainer.create_model_card(**card)


def finish(trainer, checkpoint, task, perplexity=False, **card):
    """Train, evaluate and describe: the end of the scripts that do not predict."""
    train(trainer, checkpoint)
    evaluate(trainer, perplexity)
    describe(trainer, task, **card)


def write_lines(trainer, name, lines):
    """Write predictions into the output folder, from the main process."""
    if trainer.is_world_process_zero():
        Path(trainer.args.output_dir, name).write_text("\n".join(map(str, lines)) + "\n")


def write_json(folder, name, value):
    Path(folder, name).write_text(json.dumps(value, indent=1))


def accuracy(prediction):
    """The share of right classes, of a prediction whose logits come first."""
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    return {"accuracy": (np.argmax(logits, axis=1) == prediction.label_ids).astype(np.float32).mean().item()}


def sentence(number, length):
    """Words that follow from a number."""
    return " ".join(WORDS[(number * (place + 3) + place * place) % len(WORDS)] for place in range(length))


def first_logits(logits, labels):
    """What is kept of each batch's logits: the best token."""
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(dim=-1)


def word_tokenizer(*more, single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", **settings):
    """A tokenizer with one token a word, built as BERT's."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS, *more])}
    core = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])]
    core.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ends)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=core, mask_token="[MASK]", model_max_length=64, **names, **settings)


def encoder_sizes(tokenizer, hidden_size=16):
    """The sizes of a small encoder, in the words of most configs."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 2 * hidden_size,
        "max_position_embeddings": 64,
    }
