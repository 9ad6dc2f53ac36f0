"""Print how long the ways through the code are: functions on the stack, calls of a Trainer, functions that forward.

Run it from the root of the repository: `.venv/bin/python scripts/shape.py`. A small run on the CPU is traced.
"""

import ast
import contextlib
import importlib.util
import io
import os
import re
import sys
import tempfile
import tokenize
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (ROOT / "hftrainer", ROOT / "adapters")
sys.path[:0] = [str(ROOT), str(ROOT / "adapters")]


def is_ours(filename: str) -> bool:
    """Whether a source file belongs to the product."""
    return filename.startswith(tuple(f"{folder}{os.sep}" for folder in FOLDERS))


def stack(start: str, *, innermost: bool = False) -> list[str]:
    """The functions of ours on the stack, inwards from the outermost (or innermost) with the name `start`."""
    frame, found = sys._getframe(2), []
    while frame is not None:
        name = frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name
        # A comprehension or a lambda is part of the function around it.
        if is_ours(frame.f_code.co_filename) and not name.endswith(">"):
            found.append(f"{Path(frame.f_code.co_filename).stem}.{name}")
        frame = frame.f_back
    depths = [depth for depth, name in enumerate(found) if name.endswith(f".{start}")]  # 0 is the innermost
    return found[(depths[0] if innermost else depths[-1]) :: -1] if depths else []


def names_of_others() -> set[str]:
    """The functions that transformers, accelerate and Lightning define: scripts or they call ours of that name."""
    found: set[str] = set()
    for package, pattern in (
        ("transformers", "t*.py"),
        ("transformers", "opt*.py"),
        ("accelerate", "*.py"),
        ("lightning", "**/*.py"),
    ):
        for folder in importlib.util.find_spec(package).submodule_search_locations:
            for path in Path(folder).glob(pattern):
                found |= set(re.findall(r"def (\w+)", path.read_text(encoding="utf-8")))
    return found


def small_functions() -> dict[str, list[str]]:
    """Functions that the product mentions once: those of at most two lines, and those whose body is one call."""
    mentions: Counter[str] = Counter(dict.fromkeys(names_of_others(), 1))
    functions = []
    for path in (path for folder in FOLDERS for path in sorted(folder.rglob("*.py"))):
        source = path.read_bytes()
        tokens = tokenize.tokenize(io.BytesIO(source).readline)
        mentions.update(token.string for token in tokens if token.type == tokenize.NAME)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("__"):
                body = node.body[ast.get_docstring(node) is not None :]
                if body and body[-1].end_lineno - body[0].lineno < 2:
                    is_call = len(body) == 1 and isinstance(getattr(body[0], "value", None), ast.Call)
                    functions.append((node.name, is_call, f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"))
    once = [(is_call, where) for name, is_call, where in functions if mentions[name] == 2]
    return {
        "functions of at most two lines with one user": [where for _, where in once],
        "functions whose body is one call, with one user": [where for is_call, where in once if is_call],
    }


def traced_run() -> dict[str, Any]:
    """Train, evaluate and save a small model once, and note what is on the stack at each place."""
    import torch

    found: dict[str, Any] = {}
    calls = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and is_ours(frame.f_code.co_filename)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 2)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            for what, start, innermost in (
                ("train() to forward", "train", False),
                ("Lightning's batch to forward", "advance", True),
                ("evaluate() to forward", "evaluate", False),
            ):
                if path := stack(start, innermost=innermost):
                    found.setdefault(what, path)
            logits = self.linear(x)
            return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

    import safetensors.torch

    from hftrainer import Trainer, TrainingArguments

    def noted(what: str, start: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if path := stack(start, innermost=True):
                found.setdefault(what, path)
            return function(*args, **kwargs)

        return call

    clip, save = torch.nn.utils.clip_grad_norm_, safetensors.torch.save_file
    torch.nn.utils.clip_grad_norm_ = noted("optimizer step to clipping", "run_micro_batch", clip)
    safetensors.torch.save_file = noted("end of a step to a checkpoint's file", "_end_step", save)
    rows = [{"x": torch.randn(4), "labels": index % 2} for index in range(8)]
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            max_steps=2,
            per_device_train_batch_size=2,
            save_steps=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        sys.setprofile(count)
        trainer = Trainer(Model(), args, train_dataset=rows, eval_dataset=rows)
        sys.setprofile(None)
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train()
            trainer.evaluate()
    return {**found, "calls in Trainer(...)": calls}


def main() -> None:
    for what, value in {**small_functions(), **traced_run()}.items():
        print(f"{what:50}{value if isinstance(value, int) else len(value):7,}")
        if "-v" in sys.argv and not isinstance(value, int):
            print("".join(f"    {line}\n" for line in value), end="")


if __name__ == "__main__":
    main()
