"""Measures the house: `make house` prints a line for each measure that ARCHITECTURE.md speaks of."""

import ast
import collections
import contextlib
import importlib
import inspect
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import grimp
import networkx

import hftrainer
from tests.api import test_private_names as private_names
from tests.tiny import make_plain, plain_data

ROOT = Path(__file__).parents[1]
#: Names that a release of transformers has on its Trainer.
HF_NAMES = frozenset(json.loads((ROOT / "tests" / "api" / "hf_names.json").read_text()))
#: What is read → the functions that read it, by their modules.
READERS = {
    "lightning_config": ("hftrainer.parallel.config_files:read_config",),
    "fsdp_config": ("hftrainer.parallel.fsdp.settings:read_fsdp",),
    "deepspeed": ("hftrainer.arguments.deepspeed:configure",),
    "launcher's environment": ("hftrainer.parallel.environment:find_rank_info",),
    "accelerator_config": ("hftrainer.arguments.accelerator_config:AcceleratorConfig.read",),
}


def imports_between_modules() -> networkx.DiGraph:
    """The imports between our modules: at the top, within functions, and for type hints only."""
    graph = grimp.build_graph("hftrainer", "hftrainer_lightning", exclude_type_checking_imports=False, cache_dir=None)
    found = networkx.DiGraph()
    for module in graph.modules:
        found.add_edges_from((module, imported) for imported in graph.find_modules_directly_imported_by(module))
    return found


def largest_knot(imports: networkx.DiGraph) -> list[str]:
    """The most modules that all import one another, directly or through others."""
    return sorted(max(networkx.strongly_connected_components(imports), key=len))


def methods_of_trainer() -> list[str]:
    """Functions in the body of Trainer, properties too."""
    (tree,) = ast.parse(inspect.getsource(hftrainer.Trainer)).body
    assert isinstance(tree, ast.ClassDef)
    return sorted({node.name for node in tree.body if isinstance(node, ast.FunctionDef)})


def _code(reader: str) -> CodeType:
    module, _, path = reader.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return inspect.unwrap(getattr(found, "__func__", found)).__code__


@contextlib.contextmanager
def counted() -> Iterator[collections.Counter[str]]:
    """Count how often each configuration is read."""
    of_code = {_code(reader): what for what, readers in READERS.items() for reader in readers}
    found: collections.Counter[str] = collections.Counter(dict.fromkeys(READERS, 0))

    def on_event(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (what := of_code.get(frame.f_code)) is not None:
            # One function reads the other configurations too, for their own readers.
            found[what] += frame.f_locals.get("argument", what) == what

    sys.setprofile(on_event)
    try:
        yield found
    finally:
        sys.setprofile(None)


def reads() -> tuple[collections.Counter[str], collections.Counter[str], int]:
    """Reads of each configuration by a plain Trainer, and by its 16 steps; and the attributes that it has then."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"max_steps": 16, "logging_steps": 4, "disable_tqdm": True, "use_cpu": True, "report_to": "none"}
        args = hftrainer.TrainingArguments(folder, **settings)
        with counted() as made:
            trainer = hftrainer.Trainer(make_plain(), args, train_dataset=plain_data())
        with counted() as trained:
            trainer.train()
    return made, trained, len(vars(trainer))


def private_names_outside() -> set[str]:
    """Private names of Lightning that are touched outside the room for them."""
    found = set()
    for path in private_names.SOURCES:
        found |= private_names.lightnings(importlib.import_module(private_names.name_of(path)))
    return found


def lines() -> Iterator[tuple[str, Any]]:
    """Measure → figure."""
    methods, imports = methods_of_trainer(), imports_between_modules()
    own = sorted(name for name in methods if name not in HF_NAMES and not name.startswith("__"))
    made, trained, attributes = reads()
    source = Path(inspect.getfile(hftrainer.Trainer))
    yield "trainer.py: lines", len(source.read_text().splitlines())
    yield "Trainer: methods", len(methods)
    yield "Trainer: methods that no release of transformers has", f"{len(own)} ({', '.join(own)})"
    yield "Trainer: attributes after train()", attributes
    yield "trainer.py: imports of our modules", imports.out_degree("hftrainer.trainer")
    knot = largest_knot(imports)
    yield "largest knot of imports", f"{len(knot)} of {imports.number_of_nodes()} modules"
    yield "hftrainer/: modules at the top", len(list((ROOT / "hftrainer").glob("[!_]*.py")))
    yield "adapter: modules at the top", len(list((ROOT / "adapters" / "hftrainer_lightning").glob("[!_]*.py")))
    for what in READERS:
        yield f"reads of {what}: Trainer(), then train()", f"{made[what]}, {trained[what]}"
    yield "private names of Lightning outside private_api/", len(private_names_outside())


if __name__ == "__main__":
    for measure, figure in lines():
        print(f"{measure:60s} {figure}")
