"""The libraries of `make test-downstream`, and what it has found out about them, which COMPATIBILITY.md shows.

A test fails when they are stale. `python -m tests.adapters.downstream.libraries` runs all cases and writes
`results.json`; `make record-downstream` does so in each environment, and writes the page.
"""

import importlib.util
import json
import os
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.adapters.downstream import driver, support

RESULTS = Path(__file__).with_name("results.json")


@dataclass(frozen=True)
class Library:
    """A library, by the name it gives itself, whose Trainers run on ours; what differs from transformers' Trainer."""

    name: str
    cases: str
    trainers: str
    differs: str = ""


#: Name of the distribution → the library.
LIBRARIES = {
    "trl": Library(
        "TRL", "trl_cases", "`SFTTrainer`, `DPOTrainer`, `RewardTrainer`, `KTOTrainer`, `GRPOTrainer`, `RLOOTrainer`"
    ),
    "sentence-transformers": Library(
        "sentence-transformers",
        "sentence_transformers_cases",
        "`SentenceTransformerTrainer`, `SparseEncoderTrainer`, `CrossEncoderTrainer`",
        "Model cards list the arguments in another order.",
    ),
    "setfit": Library("setfit", "setfit_cases", "`Trainer`, `DistillationTrainer`"),
    "peft": Library("PEFT", "peft_cases", "`Trainer` with a `PeftModel`"),
    "adapters": Library("AdapterHub adapters", "adapters_cases", "`AdapterTrainer`, `Seq2SeqAdapterTrainer`"),
    "gliner": Library(
        "GLiNER",
        "gliner_cases",
        "`Trainer`",
        "Where kinds are drawn at random, a resumed run ends as an undisturbed one; with `transformers` it does not.",
    ),
    "span-marker": Library("SpanMarker", "span_marker_cases", "`Trainer`"),
    "pylate": Library("pylate", "pylate_cases", "`SentenceTransformerTrainer` with a `ColBERT`"),
    "FlagEmbedding": Library(
        "FlagEmbedding",
        "flag_embedding_cases",
        "the runners of embedders, M3 and rerankers",
        "Not resumed: `transformers` does not find the weights under the names that its checkpoints have.",
    ),
    "chronos-forecasting": Library(
        "Chronos-2",
        "chronos_cases",
        "`Chronos2Trainer`, `Chronos2Pipeline.fit`",
        "Series are drawn at random: a resumed run ends as an undisturbed one; with `transformers` it does not.",
    ),
    "colpali-engine": Library(
        "colpali-engine",
        "colpali_cases",
        "`ContrastiveTrainer`",
        "A whole model is resumed with its weights; `transformers` does not find them under the names it has saved.",
    ),
    "ms-swift": Library(
        "ms-swift",
        "swift_cases",
        "the pipelines `SwiftSft`, `SwiftPretrain` and `SwiftRLHF`",
        "`args.json` lists the arguments in another order, with those that only hftrainer has. On a CPU it asks for "
        "`fp16`, which `transformers` ignores: the cases say `--fp16 false`.",
    ),
    "llamafactory": Library(
        "LLaMA-Factory",
        "llama_factory_cases",
        "`run_exp` with the stages `sft`, `pt`, `dpo`, `kto` and `rm`",
        "Model cards are hftrainer's, with `training.png`. `rm` is not resumed: `transformers` finds no model in its "
        "checkpoints.",
    ),
}


def is_installed(module: str) -> bool:
    """Whether there is such a library. A folder of that name, as ours in the root, has no origin."""
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None


def chosen() -> list[str]:
    """The libraries that LIBRARIES in the environment names; else those that the environment of TRL has."""
    default = (
        "trl sentence-transformers setfit peft colpali-engine" if is_installed("trl") and is_installed("setfit") else ""
    )
    return os.environ.get("LIBRARIES", default).split()


def module(library: str) -> str:
    """The module with the cases of a library."""
    return f"tests.adapters.downstream.{LIBRARIES[library].cases}"


def cases(library: str) -> dict[str, Any]:
    return importlib.import_module(module(library)).CASES


def found(records: Path, library: str, cases: Any) -> dict[str, Any]:
    """What the lane says of a library in this environment: versions, and case → whether both records are the same."""
    return {
        "library": library,
        "version": version(library),
        "transformers": version("transformers"),
        "cases": {name: _is_same(records, name) for name in cases},
    }


def _is_same(records: Path, name: str) -> bool:
    try:
        support.assert_same(records, name)
    except AssertionError:
        return False
    return True


def read() -> list[dict[str, Any]]:
    """What was found when `results.json` was written."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else []


def write(result: dict[str, Any]) -> None:
    """Put a result in the place of that of the same library beside the same transformers."""
    known = {_key(one): one for one in [*read(), result]}
    order = list(LIBRARIES)
    rows = sorted(known.values(), key=lambda one: (order.index(one["library"]), one["transformers"]))
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


def _key(result: dict[str, Any]) -> tuple[str, str]:
    return result["library"], result["transformers"].rpartition(".")[0]


def rows() -> str:
    lines = []
    for result in read():
        library, cases = LIBRARIES[result["library"]], result["cases"]
        failed = [f"`{name}`" for name, same in cases.items() if not same]
        differs = " ".join([library.differs, f"Not the same: {', '.join(failed)}." if failed else ""]).strip()
        same = ", ".join(name.replace("_", " ") for name, same in cases.items() if same)
        what, release = f"{library.name} {result['version']}", result["transformers"]
        lines.append(f"| {what} | {release} | {library.trainers}: {same} | {differs} |\n")
    return "".join(lines)


if __name__ == "__main__":
    driver.declare_operators()
    for each in chosen():
        with tempfile.TemporaryDirectory() as folder:
            write(found(support.run_both(module(each), cases(each), Path(folder, "records")), each, cases(each)))
