"""Paths and symbols of this repository exist if its pages name them."""

import ast
import re

import pytest

from tests.support.page_blocks import BLOCK, ROOT

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
CODE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"[\w.\-]+(/[\w.\-*]+)*(/|\.(py|toml|md|txt|yml|json))")
SYMBOL = re.compile(r"([A-Z]\w+)\.(\w+)(\(.*\))?")
FOLDERS = ("hftrainer", "adapters", "tests", "docs", "examples", "scripts", "benchmarks", ".github")
OURS = {
    f"/{path.relative_to(ROOT).as_posix()}"
    for folder in FOLDERS
    for path in [ROOT / folder, *(ROOT / folder).rglob("*")]
}
OURS |= {f"/{path.name}" for path in ROOT.iterdir()}
#: Files that runs and other libraries write, and those of readers.
WRITTEN = re.compile(
    r"(trainer_state|hftrainer_manifest|config|\w+_results|adapter_config|model\.safetensors\.index)\.json|"
    r"(args|epoch_loss|spmd)\.json|README\.md|(train|script|quickstart|stopped|zero_to_fp32)\.py|.*\*.*|.*\.pt|"
    r"(build|output_dir|out|checkpoint-.*|(pytorch_model_fsdp|optimizer)_0|mlruns|global_stepN)/.*"
)


def _members():
    """Class of ours → what is defined in it, and the names of its bases."""
    found = {}
    for folder in ("hftrainer", "adapters"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    names = {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.ClassDef)}
                    targets = [t for each in ast.walk(node) if isinstance(each, ast.Assign) for t in each.targets]
                    targets += [each.target for each in ast.walk(node) if isinstance(each, ast.AnnAssign)]
                    names |= {getattr(each, "id", getattr(each, "attr", None)) for each in targets}
                    bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                    found.setdefault(node.name, (set(), set()))
                    found[node.name][0].update(names)
                    found[node.name][1].update(bases)
    return found


MEMBERS = _members()


def _has(kind, name):
    """Whether a class has an attribute; True if one of its bases is not ours, and so unknown."""
    names, bases = MEMBERS[kind]
    return name in names or any(base not in MEMBERS or _has(base, name) for base in bases)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_and_symbols_in_page_exist(page):
    if page.name == "CHANGELOG.md":
        pytest.skip("names what there was")
    for code in CODE.findall(BLOCK.sub("", page.read_text())):
        if PATH.fullmatch(code) and not WRITTEN.fullmatch(code):
            assert any(path.endswith(f"/{code.rstrip('/')}") for path in OURS), f"{code} does not exist"
        symbol = SYMBOL.fullmatch(code)
        if symbol and symbol[1] in MEMBERS:
            assert _has(symbol[1], symbol[2]), f"{symbol[1]} has no {symbol[2]}"
