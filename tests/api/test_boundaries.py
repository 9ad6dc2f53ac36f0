"""Who may import whom. The rules are in ARCHITECTURE.md."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PEERS = {"transformers", "accelerate", "datasets", "peft", "deepspeed", "sklearn"}


def imports(path: Path) -> list[tuple[str, bool, bool]]:
    """Top-level package of every import in a file, whether type checkers alone see it, and whether a function does."""
    found = []

    def walk(node: ast.AST, checking: bool, inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            names = []
            if isinstance(child, ast.Import):
                names = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom) and child.level == 0:
                names = [child.module or ""]
            found.extend((name.split(".")[0], checking, inside) for name in names)
            only_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            walk(child, checking or only_types, inside or function)

    walk(ast.parse(path.read_text()), False, False)
    return found


def sources(folder: str) -> list[Path]:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    return files


@pytest.mark.parametrize("path", sources("hftrainer"), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_library_never_imports_lightning(path):
    assert not {"lightning", "pytorch_lightning"} & {name for name, _, _ in imports(path)}


@pytest.mark.parametrize("path", sources("hftrainer"), ids=lambda path: str(path.relative_to(ROOT)))
def test_other_libraries_are_optional(path):
    at_import = {name for name, checking, inside in imports(path) if not checking and not inside}
    assert not at_import & (PEERS | {"hftrainer_lightning"})


@pytest.mark.parametrize("path", sources("adapters"), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_adapter_knows_its_host_by_protocol(path):
    """DeepSpeed is behind one of Lightning's strategies, and imported when that is asked for."""
    at_run_time = {
        name for name, checking, inside in imports(path) if not (checking or (inside and name == "deepspeed"))
    }
    assert not at_run_time & (PEERS | {"hftrainer"})


def test_the_walk_sees_what_it_should(tmp_path):
    path = tmp_path / "example.py"
    path.write_text(
        "import lightning.pytorch as pl\nif TYPE_CHECKING:\n    import a\ndef f():\n    from b.c import d\n"
    )
    assert imports(path) == [("lightning", False, False), ("a", True, False), ("b", False, True)]


def test_adapters_is_a_folder_and_no_package():
    """`import adapters` belongs to another library of the same users."""
    assert not (ROOT / "adapters" / "__init__.py").exists()


def test_private_lightning_names_are_touched_in_seams_alone():
    for path in sources("adapters"):
        if path.name == "seams.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning"):
                private = [alias.name for alias in node.names if alias.name.startswith("_")]
                assert not private, f"{path.name}: {private}"


def test_importing_is_cheap():
    """`from hftrainer import Trainer` must not pay for lightning or transformers."""
    code = (
        "import sys; from hftrainer import Trainer, TrainingArguments; TrainingArguments('unused');"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'lightning', 'transformers', 'optuna'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
