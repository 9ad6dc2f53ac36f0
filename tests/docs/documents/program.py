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
from dataclasses import asdict, make_dataclass
from pathlib import Path

import torch
import transformers

import hftrainer
from tests.support.small_models import make_bert, make_plain, make_t5, plain_data, t5_data, text_data, without_dropout

if "INSTALL" in os.environ:
    hftrainer.install()
LIBRARY = transformers if "INSTALL" in os.environ else hftrainer
PARSERS = (transformers.HfArgumentParser, hftrainer.HfArgumentParser)
TEXTS = "task task_name data_dir src_lang tgt_lang dataset_name dataset_config_name source_lang target_lang final_model"
NUMBERS = "max_seq_length n_train max_train_samples"
#: Arguments of the documents' scripts; here they choose a tiny model and its data.
ScriptArguments = make_dataclass(
    "ScriptArguments",
    [("model_name_or_path", str, "plain"), ("freeze_embeds", bool, False)]
    + [(name, str | None, None) for name in TEXTS.split()]
    + [(name, int | None, None) for name in NUMBERS.split()],
)


def make_model_and_data(name):
    """A tiny model of the kind that was named, and data for it."""
    kinds = {"bert": (make_bert, text_data), "t5": (make_t5, t5_data), "mbart": (make_t5, t5_data)}
    make_model, make_data = next((kinds[kind] for kind in kinds if kind in name), (make_plain, plain_data))
    return without_dropout(make_model)(), make_data(8)


@functools.cache
def make_parser(kind, arguments):
    return kind((ScriptArguments, arguments))


def parse(words):
    """Parse with both parsers, which must agree."""
    found = [make_parser(kind, LIBRARY.Seq2SeqTrainingArguments).parse_args_into_dataclasses(words) for kind in PARSERS]
    (script, args), (others, same) = found
    assert (script, args.to_dict()) == (others, same.to_dict())
    return script, args


def logs_of_release(words):
    """What the installed transformers itself logs, in the same processes."""
    script, args = make_parser(PARSERS[0], transformers.Seq2SeqTrainingArguments).parse_args_into_dataclasses(words)
    model, data = make_model_and_data(script.model_name_or_path)
    trainer = transformers.Seq2SeqTrainer(model, args, train_dataset=data, eval_dataset=data)
    trainer.train()
    return trainer.state.log_history


def run(words):
    script, args = parse(words)
    model, data = make_model_and_data(script.model_name_or_path)
    trainer = LIBRARY.Seq2SeqTrainer(model, args, train_dataset=data, eval_dataset=data)
    devices = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")}
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
        "kind": trainer.accelerator.distributed_type.value,
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
        from tests.adapters.deepspeed.training_cases import without_compiler

        without_compiler()
    main()
