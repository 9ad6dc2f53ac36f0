"""Runs the cases of one library in this process, one after the other, and writes what each has left.

python -m tests.adapters.downstream.driver MODULE FOLDER NAME [NAME ...]            with transformers' Trainer
python -m tests.adapters.downstream.driver --swap MODULE FOLDER NAME [NAME ...]     with ours, by `hftrainer.install()`

MODULE has a table `CASES`: name → function(output folder) that returns a record (of `records.py`). Each case runs in
a working folder of its own, FOLDER/NAME, and is given a relative path, so that no file says who wrote it.
FOLDER/NAME.json is its record. An error ends its case only: FOLDER/NAME.error.txt then has the traceback.
"""

import argparse
import importlib
import importlib.util
import json
import os
import random
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def declare_operators() -> None:
    """Find torchvision, and declare two operators that nothing here calls: a CPU lacks them, and so it is kept apart.

    The registry has torchvision for CUDA. In the environment it would end all imports that look for it.
    """
    import torch

    sys.path.append(os.path.join(sys.prefix, "torchvision"))
    if importlib.util.find_spec("torchvision") is not None and torch.version.cuda is None:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def run(case: Callable[[Path], dict], folder: Path) -> dict[str, Any]:
    import numpy
    import torch

    folder.mkdir(parents=True)
    os.chdir(folder)
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    return case(Path("output"))


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--swap", action="store_true")
    options.add_argument("module")
    options.add_argument("folder", type=Path)
    options.add_argument("names", nargs="+")
    chosen = options.parse_args()
    declare_operators()
    if chosen.swap:
        import hftrainer

        hftrainer.install()
    cases = importlib.import_module(chosen.module).CASES
    folder = chosen.folder.resolve()
    for name in chosen.names:
        try:
            text = json.dumps(run(cases[name], folder / name))
            (folder / f"{name}.json").write_text(text)
        except Exception:
            (folder / f"{name}.error.txt").write_text(traceback.format_exc())
        sys.stdout.flush()


if __name__ == "__main__":
    main()
