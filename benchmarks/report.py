"""Runs the benchmarks, and writes what they print into README.md, and their ratios to transformers into a picture.

    make bench BENCH=report     # or, for some: python benchmarks/report.py --python .venv-bench/bin/python data startup

All of them take half an hour on two idle cores. Figures of earlier runs are kept in `results.json` beside it, so that
single benchmarks can be run again.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

FOLDER = Path(__file__).parent
RESULTS, PICTURE, README = FOLDER / "results.json", FOLDER / "results.png", FOLDER / "README.md"


def _of_steps(found: dict[str, Any]) -> dict[str, float]:
    def above_raw(medians: dict[str, float], name: str) -> float:
        return medians[name] - medians["raw"]

    return {
        f"overhead of a step, {model}": above_raw(medians, "hftrainer") / above_raw(medians, "transformers")
        for model, medians in found.items()
    }


def _of_processes(found: dict[str, Any]) -> dict[str, float]:
    return {f"{name}, two processes": ratio for name, ratio in _of_steps(found).items()}


def _of_startup(found: dict[str, Any]) -> dict[str, float]:
    return {
        f"seconds to the first step, {case}": medians["hftrainer"]["seconds"] / medians["transformers"]["seconds"]
        for case, medians in found.items()
    }


def _of_checkpoints(found: dict[str, Any]) -> dict[str, float]:
    rows = found["rows"]
    return {
        f"pause for a checkpoint, {name.removeprefix('hftrainer').strip(', ') or 'at once'}": row[
            "later / transformers"
        ]
        for name, row in rows.items()
        if name != "transformers"
    }


def _of_data(found: dict[str, Any]) -> dict[str, float]:
    resuming = found["resuming"]
    return {
        f"resuming at 90 %, {kind}": resuming[f"{kind}, hftrainer"] / resuming[f"{kind}, transformers"]
        for kind in ("map-style", "stream")
    }


def _of_memory(found: dict[str, Any]) -> dict[str, float]:
    return {
        f"peak memory, {subject}, {size}": peaks["hftrainer"] / peaks["transformers"]
        for subject, sizes in found.items()
        for size, peaks in sizes.items()
        if peaks
    }


def _as_written(found: dict[str, Any]) -> dict[str, float]:
    return found["ratios"]


#: Benchmark → its command, and how its ratios to transformers are read from its JSON.
BENCHMARKS: dict[str, tuple[list[str], Callable[[dict[str, Any]], dict[str, float]]]] = {
    "step_overhead": (["step_overhead.py", "--rounds", "7"], _of_steps),
    "processes": (
        ["-m", "torch.distributed.run", "--nproc_per_node=2", "step_overhead.py", "--models=two-layers", "--rounds=5"],
        _of_processes,
    ),
    "startup": (["startup.py"], _of_startup),
    "checkpoint": (["checkpoint.py"], _of_checkpoints),
    "eval_memory": (["eval_memory.py"], _as_written),
    "data": (["data.py"], _of_data),
    "memory": (["memory.py"], _of_memory),
    "growth": (["growth.py"], lambda found: {}),
}


def run(name: str, python: str) -> dict[str, Any]:
    """Run a benchmark by this interpreter; what it has printed, and its ratios."""
    command, ratios = BENCHMARKS[name]
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        paths = [str(FOLDER / each) if each.endswith(".py") else each for each in command]
        line = [python, *paths, "--json", file.name]
        done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True)
        return {"printed": done.stdout.strip("\n"), "ratios": ratios(json.loads(Path(file.name).read_text()))}


def write_readme(results: dict[str, Any]) -> None:
    """Put what each benchmark has printed between its marks."""
    text = README.read_text(encoding="utf-8")
    for name, found in results.items():
        block = f"<!-- {name} -->\n```text\n{found['printed']}\n```\n<!-- end -->"
        text, count = re.subn(rf"<!-- {name} -->.*?<!-- end -->", lambda _, new=block: new, text, flags=re.DOTALL)
        if count != 1:
            raise SystemExit(f"{README} has {count} places for {name}: mark one by <!-- {name} --> and <!-- end -->")
    README.write_text(text, encoding="utf-8")


def draw(ratios: dict[str, float]) -> None:
    """A bar for each ratio; transformers is the line at 1."""
    figure = Figure(figsize=(9, 0.32 * len(ratios) + 1.2), layout="constrained")
    axes = figure.add_subplot()
    names, values = list(reversed(ratios)), list(reversed(ratios.values()))
    bars = axes.barh(names, values, color=["#2a7f62" if round(value, 2) <= 1 else "#b5532a" for value in values])
    axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("hftrainer / transformers.Trainer, in one run (less is better)")
    axes.set_xlim(0, max(1.15, *(value * 1.12 for value in values)))
    axes.tick_params(axis="y", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("benchmarks", nargs="*", help=f"of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--python", default=sys.executable, help="runs all but `data`, which needs datasets")
    options = parser.parse_args()
    chosen = options.benchmarks or list(BENCHMARKS)
    if unknown := set(chosen) - set(BENCHMARKS):
        parser.error(f"there is no {', '.join(sorted(unknown))}: choose from {', '.join(BENCHMARKS)}")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in chosen:
        print(f"{name} ...", flush=True)
        results[name] = run(name, sys.executable if name == "data" else options.python)
        RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    write_readme(results)
    draw({name: ratio for found in results.values() for name, ratio in found["ratios"].items()})


if __name__ == "__main__":
    main()
