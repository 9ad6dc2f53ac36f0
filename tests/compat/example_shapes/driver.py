"""Runs scripts of this folder one after the other in one process, each in a folder of its own.

python driver.py FOLDER NAME [NAME ...]                               with transformers
python -m hftrainer run driver.py FOLDER NAME [NAME ...]              with hftrainer
python -m hftrainer run driver.py --own-parser FOLDER NAME [...]      and with its HfArgumentParser

An error ends its script only; `error.txt` in the script's folder has the traceback.
"""

import argparse
import gc
import json
import os
import runpy
import sys
import traceback
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from shapes import COMMON, SHAPES  # noqa: E402


def as_json(words):
    """What a JSON file says for these words of a command line."""
    values = {}
    for word in words:
        if word.startswith("--"):
            name = word.removeprefix("--")
            values[name] = True
        else:
            values[name] = {"True": True, "False": False}.get(word, json.loads(word) if word[0].isdigit() else word)
    return values


def run(name, folder, flags, in_json):
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    words = f"{COMMON} {flags}".split()
    if in_json:
        Path("arguments.json").write_text(json.dumps(as_json(words)))
        words = ["arguments.json"]
    sys.argv = [f"{name}.py", *words]
    runpy.run_path(str(HERE / f"{name}.py"), run_name="__main__")


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--own-parser", action="store_true")
    options.add_argument("folder", type=Path)
    options.add_argument("names", nargs="+")
    chosen = options.parse_args()
    if chosen.own_parser:
        import transformers

        import hftrainer

        transformers.HfArgumentParser = hftrainer.HfArgumentParser
    torch.set_num_threads(1)
    root = chosen.folder.resolve()
    for name in chosen.names:
        gc.collect()
        gc.freeze()  # accelerate collects garbage whenever it frees memory: not among all that was imported
        shape = SHAPES[name]
        try:
            run(name, root / name, shape.flags, shape.as_json)
            if shape.again is not None:
                run(name, root / name, shape.again, shape.as_json)
        except Exception:
            (root / name / "error.txt").write_text(traceback.format_exc())


if __name__ == "__main__":
    main()
