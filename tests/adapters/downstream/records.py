"""What a case leaves behind, as JSON: log lines, weights and arrays by their digests, files by their content."""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from tests.support.known_differences import OWN_FILES

#: Lines of model cards that say how long something has taken.
_TIMED = re.compile(r"^- \*\*(Training|Evaluation|Total)\*\*: |(seconds|minutes|hours)$")


def digest(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous()
        kind, shape = str(value.dtype), tuple(value.shape)
        content = value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    else:
        value = np.ascontiguousarray(value)
        kind, shape, content = str(value.dtype), value.shape, value.tobytes()
    return f"{kind} {list(shape)} {hashlib.sha256(content).hexdigest()[:16]}"


def weights(model: torch.nn.Module) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in model.state_dict().items()}


def plain(value: Any) -> Any:
    """`value` as JSON can say it; arrays and tensors of more than one number as digests."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return value.item() if value.ndim == 0 else digest(value)
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)


def files(folder: Path) -> dict[str, Any]:
    """Path → content of each file below `folder`: tensors by their digests, JSON as it is, others by name."""
    return {
        str(path.relative_to(folder)): _content(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in OWN_FILES
    }


def _content(path: Path) -> Any:
    if path.suffix == ".safetensors":
        return {name: digest(tensor) for name, tensor in load_file(path).items()}
    if path.name.startswith("pytorch_model"):
        return {name: digest(tensor) for name, tensor in torch.load(path).items()}
    if path.suffix == ".json":
        return json.loads(path.read_text())
    if path.suffix in (".txt", ".jinja", ".csv", ".jsonl"):
        return path.read_text()
    return "by name"


def cards(folder: Path) -> dict[str, list[str]]:
    """Path → lines of each model card below `folder`, without measured times.

    In alphabetical order: arguments are listed in the order of their fields, which ours has by subject.
    """
    found = {str(path.relative_to(folder)): path.read_text().splitlines() for path in folder.rglob("README.md")}
    return {name: sorted(line for line in lines if not _TIMED.search(line)) for name, lines in sorted(found.items())}


def of(trainer: Any, folder: Path, **more: Any) -> dict[str, Any]:
    """The record of a Trainer that is done with `folder`, with `more` beside: metrics, predictions, ..."""
    return {
        "log_history": plain(trainer.state.log_history),
        "global_step": trainer.state.global_step,
        "weights": weights(trainer.model),
        "files": files(folder),
        **plain(more),
    }
