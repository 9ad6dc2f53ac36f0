"""What the documents call trainer-program.py, my_app.py, finetune_trainer.py, run_translation.py and run_glue.py.

Its command line is the document's; several, with `+` between them, are runs one after the other in the same processes.
Each process writes what it found into the folder FOUND. With INSTALL, the script imports transformers, and hftrainer is
installed in it; it is imported otherwise. RELEASE is a command line for the Trainer of transformers itself.
"""

import contextlib
import functools
import gc
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers

import hftrainer
from tests.support.tiny import make_bert, make_plain, plain_data, text_data

if "INSTALL" in os.environ:
    hftrainer.install()
LIBRARY = transformers if "INSTALL" in os.environ else hftrainer
PARSERS = (transformers.HfArgumentParser, hftrainer.HfArgumentParser)


@dataclass
class ScriptArguments:
    """Those of the documents' scripts, which make a tiny model and data of them here."""

    model_name_or_path: str = "plain"
    task: str | None = None
    task_name: str | None = None
    max_seq_length: int | None = None
    data_dir: str | None = None
    n_train: int | None = None
    freeze_embeds: bool = False
    src_lang: str | None = None
    tgt_lang: str | None = None
    max_train_samples: int | None = None
    dataset_name: str | None = None
    dataset_config_name: str | None = None
    source_lang: str | None = None
    target_lang: str | None = None
    final_model: str | None = None


def make_t5():
    torch.manual_seed(1)
    sizes = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
    return transformers.T5ForConditionalGeneration(config)


def pairs(count):
    ids = torch.randint(2, 50, (count, 9), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row[:5]} for row in ids]


def choose(name):
    """A tiny model of the kind that was named, and data for it."""
    kind = next((each for each in ("bert", "t5", "mbart") if each in name), "plain")
    make_model, make_data = {"bert": (make_bert, text_data), "plain": (make_plain, plain_data)}.get(
        kind, (make_t5, pairs)
    )
    model = make_model()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model, make_data(8)


@functools.cache
def make_parser(kind, arguments):
    return kind((ScriptArguments, arguments))


def parse(words):
    """By both parsers, which must agree."""
    found = [make_parser(kind, LIBRARY.Seq2SeqTrainingArguments).parse_args_into_dataclasses(words) for kind in PARSERS]
    (script, args), (others, same) = found
    assert (script, args.to_dict()) == (others, same.to_dict())
    return script, args


def logs_of_release(words):
    """What the installed transformers itself logs, in the same processes."""
    script, args = make_parser(PARSERS[0], transformers.Seq2SeqTrainingArguments).parse_args_into_dataclasses(words)
    model, data = choose(script.model_name_or_path)
    trainer = transformers.Seq2SeqTrainer(model, args, train_dataset=data, eval_dataset=data)
    trainer.train()
    return trainer.state.log_history


def run(words):
    script, args = parse(words)
    model, data = choose(script.model_name_or_path)
    trainer = LIBRARY.Seq2SeqTrainer(model, args, train_dataset=data, eval_dataset=data)
    devices = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER")
    found = {"script": asdict(script), "environment": devices, "device": str(args.device)}
    trainer.train()
    if args.do_eval:
        found["metrics"] = trainer.evaluate()
    if args.predict_with_generate:
        found["tokens"] = trainer.predict(data).predictions.tolist()
    if script.final_model:
        if trainer.is_fsdp_enabled:
            trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        trainer.save_model(script.final_model)
    weights = trainer.accelerator.get_state_dict(trainer.model)
    sharding = trainer._hftrainer.resolved.sharding
    return found | {
        "place": [args.process_index, args.local_process_index, args.world_size],
        "kind": str(trainer.accelerator.distributed_type),
        "sharding": None if sharding is None else asdict(sharding),
        "precision": trainer.accelerator.mixed_precision,
        "deepspeed": getattr(getattr(args, "hf_deepspeed_config", None), "config", None),
        "trainer": type(trainer).__module__,
        "logs": trainer.state.log_history,
        "weights": {name: value.float().sum().item() for name, value in (weights or {}).items()},
    }


def main():
    torch.set_num_threads(1)
    gc.freeze()  # transformers and accelerate collect garbage: not among all that was imported
    words, lines = sys.argv[1:], []
    while words:
        end = words.index("+") if "+" in words else len(words)
        lines.append(words[:end])
        words = words[end + 1 :]
    found = [run(line) for line in lines]
    if "RELEASE" in os.environ:
        found.append(logs_of_release(os.environ["RELEASE"].split()))
    Path(os.environ["FOUND"], f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found, default=str))


if __name__ == "__main__":
    with contextlib.suppress(ImportError):  # DeepSpeed would compile something faster for the CPU
        from tests.adapters.deepspeed.sets import without_compiler

        without_compiler()
    main()
