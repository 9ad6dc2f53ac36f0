"""What the parity tests leave out of their comparisons, and the ledger of differences (compatibility.toml)."""

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # which pytest brings, before Python 3.11

#: Keys of log lines that are measured times: equal in name, never in value.
MEASURED = ("_runtime", "_per_second", "_model_preparation_time")
#: Files in a checkpoint that are ours alone.
OWN_FILES = {*("hftrainer_manifest.json", "lightning_callbacks.pt"), *("progress.pt", "progress_0.pt", "progress_1.pt")}


def files_in(folder: Path) -> list[str]:
    """The files below a folder, without those that are ours alone."""
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and path.name not in OWN_FILES]
    return sorted(file.as_posix() for file in files)


_LEDGER = tomllib.loads((Path(__file__).parents[2] / "compatibility.toml").read_text(encoding="utf-8"))
#: What must differ and why: 'numbers', 'checkpoints', 'runs' or 'messages' → subject → what → why.
DIFFERENCES: dict[str, dict[str, dict[str, str]]] = {}
for _row in _LEDGER["difference"]:
    DIFFERENCES.setdefault(_row["changes"], {}).setdefault(_row["subject"], {})[_row["what"]] = _row["why"]
#: Every callback of `lightning.pytorch.callbacks` → what to know of it here; "" when there is nothing.
LIGHTNING_CALLBACKS: dict[str, str] = _LEDGER["lightning_callbacks"]
#: Attributes of fresh arguments that differ under `install()`: names, releases, ours and theirs.
ATTRIBUTES: list[dict[str, str]] = _LEDGER["attribute"]
#: Methods that a run does not call as often as transformers does → why.
NOT_CALLED_ALIKE: dict[str, str] = _LEDGER["not_called_alike"]
