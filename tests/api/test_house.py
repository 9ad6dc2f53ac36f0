"""The house of ARCHITECTURE.md: what import-linter cannot say of it."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

import hftrainer
from hftrainer.training.trainer_api import TrainerApi
from tests import walks

ROOT = Path(__file__).parents[2]
#: Modules that transformers has, under these names.
OF_TRANSFORMERS = set(
    """
    debug_utils hf_argparser hyperparameter_search integrations modelcard optimization trainer trainer_callback
    trainer_optimizer trainer_pt_utils trainer_seq2seq trainer_utils training_args training_args_seq2seq
    optimization_tf trainer_tf training_args_tf
    """.split()
)
#: The one attribute behind which everything else is, for modules of transformers' names whose functions take a Trainer.
OWN = {"_hftrainer"}


def test_the_top_level_has_the_names_of_transformers_and_rooms():
    found = {path.stem for path in (ROOT / "hftrainer").glob("[!_]*.py")}
    assert found == OF_TRANSFORMERS | {"errors"}


@pytest.fixture(scope="module")
def house():
    """The measures, with the libraries of import-linter, which not each lane installs."""
    pytest.importorskip("grimp")
    return importlib.import_module("tests.house")


def test_no_knot_of_imports(house):
    """Lazy imports and those for type hints count."""
    knot = house.largest_knot(house.imports_between_modules())
    assert len(knot) <= 7, knot


def test_rooms_see_names_of_transformers(house):
    """What a room calls on a Trainer, a subclass may override: so it must be a name that transformers has."""
    body = ast.parse(inspect.getsource(TrainerApi)).body[0].body
    names = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    names |= {node.target.id for node in body if isinstance(node, ast.AnnAssign)}
    assert names - OWN <= house.HF_NAMES
    methods = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    assert {name for name in methods if not callable(getattr(hftrainer.Trainer, name, None))} == set()


def looks_behind(path: Path) -> bool:
    nodes = ast.walk(ast.parse(path.read_text()))
    return any(isinstance(node, ast.Attribute) and node.attr in OWN for node in nodes)


def test_only_modules_of_transformers_names_look_behind_the_trainer():
    folder = ROOT / "hftrainer"
    found = {str(path.relative_to(folder)) for path in folder.rglob("*.py") if looks_behind(path)}
    assert found == {
        *("trainer.py", "trainer_seq2seq.py", "modelcard.py", "training/run.py"),
        "assembly/earlier_methods.py",  # methods of Trainer
    }


PAGES = ["ARCHITECTURE.md", *(f"docs/rooms/{path.name}" for path in sorted((ROOT / "docs/rooms").glob("*.md")))]


@pytest.mark.parametrize("page", PAGES)
def test_files_that_the_pages_name_are_there(page):
    text = (ROOT / page).read_text()
    folders = ("hftrainer", "adapters", "tests", "benchmarks", "examples")
    everywhere = {str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.py")}
    named = set(re.findall(r"`([\w/]+\.py)`", text))
    missing = {name for name in named if not any(path == name or path.endswith("/" + name) for path in everywhere)}
    assert not missing


@pytest.fixture(scope="module")
def traces():
    return walks.walks()


@pytest.mark.parametrize("walk", ["One batch", "One save", "One resume"])
def test_walks_are_those_that_are_traced(walk, traces):
    """The page names files in the order of their first call, each once."""
    paragraph = (ROOT / "ARCHITECTURE.md").read_text().partition(f"**{walk}**")[2].partition("\n\n")[0]
    named = [
        name for name in re.findall(r"`([\w/]+\.py)`", paragraph) if "/" in name or name in ("trainer.py", "module.py")
    ]
    assert len(named) > 8
    trace = iter(traces[walk])
    assert [name for name in named if name not in trace] == []
