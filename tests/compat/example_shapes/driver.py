"""Runs scripts of this folder one after the other in one process, each in a folder of its own.

`python -m hftrainer run driver.py FOLDER NAME [NAME ...] --both-parsers` has hftrainer's HfArgumentParser parse each
script's arguments too. An error ends its script only: the script's folder has it in `error.txt`.
"""

import argparse
import gc
import importlib
import json
import os
import re
import sys
import traceback
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

COMMON = """
    --output_dir out --do_train --do_eval --per_device_train_batch_size 4 --per_device_eval_batch_size 4
    --learning_rate 0.005 --num_train_epochs 2 --logging_steps 1 --save_steps 3 --report_to none --use_cpu
    --optim adamw_torch --seed 7
"""
BEST = "--eval_strategy steps --eval_steps 3 --load_best_model_at_end True"
#: Script → what its command line has besides COMMON.
SHAPES = {
    "text_classification": f"--do_predict {BEST} --metric_for_best_model combined_score --save_total_limit 1 "
    "--warmup_steps 2 --columns premise hypothesis",
    "causal_language_model": "--gradient_accumulation_steps 2 --eval_strategy epoch --lr_scheduler_type cosine "
    "--config_overrides attention_dropout=0.1 --include_num_input_tokens_seen True --eval_accumulation_steps 2 "
    "--weight_decay 0.1",
    "sequence_to_sequence": "--do_predict --predict_with_generate --language de --label_smoothing_factor 0.1 "
    "--eval_strategy steps --eval_steps 4 --padding False --generation_max_length 6 --num_beams 2",
    "question_answering_generated": "--do_predict --predict_with_generate --generation_max_length 8 --num_beams 2 "
    f"{BEST} --metric_for_best_model common",
    "object_detection": "--remove_unused_columns False --eval_do_concat_batches False --eval_strategy epoch "
    "--max_grad_norm 0.01 --save_total_limit 1",
    "contrastive": "--remove_unused_columns False --freeze_text_model --warmup_steps 2 --base_learning_rate 0.1 "
    "--eval_strategy epoch --save_strategy epoch --dataloader_drop_last True --lr_scheduler_type polynomial",
    "speech_letters": "--eval_strategy steps --eval_steps 4 --gradient_checkpointing",
}
#: Script → flags of a second run in the same folder, which goes on from the last checkpoint there.
AGAIN = {"causal_language_model": "--num_train_epochs 3 --eval_strategy no"}
#: The scripts whose arguments are in a JSON file.
IN_JSON = {"sequence_to_sequence"}
#: Script → modules without which its model does not train.
NEEDS = {"object_detection": ("scipy", "PIL")}


def as_json(line):
    """What a JSON file says for a command line of flags with one value or none."""

    def value(word):
        known = {"": True, "True": True, "False": False}
        return known[word] if word in known else json.loads(word) if word[0].isdigit() else word

    return {name: value(word) for name, word in re.findall(r"--(\w+)(?:\s+([^-\s]\S*))?", line)}


def run(name, flags):
    sys.argv = [f"{name}.py", *COMMON.split(), *flags.split()]
    if name in IN_JSON:
        Path("arguments.json").write_text(json.dumps(as_json(f"{COMMON} {flags}")))
        sys.argv = [f"{name}.py", "arguments.json"]
    importlib.import_module(name).main()


def use_both_parsers():
    """Have the scripts take what hftrainer's parser finds, which must be what transformers' does."""
    theirs, ours = transformers.HfArgumentParser, importlib.import_module("hftrainer").HfArgumentParser

    class BothParsers(ours):
        def __init__(self, classes):
            super().__init__(classes)
            self.other = theirs(classes)

        def parse_args_into_dataclasses(self):
            return same(super().parse_args_into_dataclasses(), self.other.parse_args_into_dataclasses())

        def parse_json_file(self, json_file):
            return same(super().parse_json_file(json_file), self.other.parse_json_file(json_file))

    def same(found, expected):
        assert [type(each) for each in found] == [type(each) for each in expected]
        # Until v4.57 the default of logging_dir has the second in which the arguments were parsed.
        texts = [re.sub(r"\d\d-\d\d-\d\d", "now", str([asdict(each) for each in both])) for both in (found, expected)]
        assert texts[0] == texts[1]
        return found

    transformers.HfArgumentParser = BothParsers


def main():
    options = argparse.ArgumentParser()
    options.add_argument("folder", type=Path)
    options.add_argument("names", nargs="+")
    options.add_argument("--both-parsers", action="store_true")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # accelerate collects garbage whenever it frees memory: not among all that was imported
    sys.modules["matplotlib.figure"] = None  # drawing the plot of a card takes longer than training
    if chosen.both_parsers:
        use_both_parsers()
    folder = chosen.folder.resolve()
    for name in chosen.names:
        (folder / name).mkdir()
        os.chdir(folder / name)
        try:
            run(name, SHAPES[name])
            if name in AGAIN:
                run(name, f"{SHAPES[name]} {AGAIN[name]}")
        except Exception:
            (folder / name / "error.txt").write_text(traceback.format_exc())


if __name__ == "__main__":
    main()
