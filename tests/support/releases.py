"""Which releases of the libraries around us are installed, for conditions of tests and for the head of a test run."""

import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

#: Packages whose releases matter; pytest's header names those installed.
SHOWN = """
    torch lightning torchmetrics transformers accelerate huggingface_hub safetensors tokenizers numpy optuna tqdm
    datasets peft deepspeed ray torch_xla trl sentence-transformers setfit adapters
""".split()


def release_of(package: str) -> tuple[int, ...]:
    """Major and minor, as in (2, 6); nothing when the package is not installed."""
    try:
        return tuple(int(part) for part in version(package).split(".")[:2])
    except PackageNotFoundError:
        return ()


def installed() -> str:
    """Python and the packages of `SHOWN`, each with its exact version."""
    return ", ".join([f"python {platform.python_version()}", *(f"{p} {version(p)}" for p in SHOWN if release_of(p))])


def pin(package: str) -> str:
    constraints = (Path(__file__).parents[2] / "constraints.txt").read_text()
    return re.search(rf"^{package}==(\S+)", constraints, re.MULTILINE).group(1)


def pinned(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in pin(package).split(".")[:2])


TORCH = release_of("torch")
TRANSFORMERS = release_of("transformers")
