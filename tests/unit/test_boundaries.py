"""Import rules that import-linter cannot express; its contracts are in pyproject.toml, for `make lint`."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
OPTIONAL = {"transformers", "accelerate", "datasets", "peft", "deepspeed", "sklearn"}
ADAPTERS = {"hftrainer_lightning", "hftrainer_deepspeed", "hftrainer_xla", "hftrainer_tensorflow", "hftrainer_ray"}


def imported_at_once(node: ast.AST) -> Iterator[str]:
    """The libraries that a file asks for while it is imported: outside functions, and not for type checkers alone."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return
    if isinstance(node, ast.Import):
        yield from (alias.name.split(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
        yield node.module.split(".")[0]
    only_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    for child in node.orelse if only_types else ast.iter_child_nodes(node):
        yield from imported_at_once(child)


def imports_by_file(folder: str, libraries: set[str]) -> dict[str, set[str]]:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    asked = {str(path.relative_to(ROOT)): {*imported_at_once(ast.parse(path.read_text()))} for path in files}
    return {path: names & libraries for path, names in asked.items() if names & libraries}


def test_optional_libraries_are_imported_in_functions_only():
    """They are imported inside functions only; to import-linter an import is an import, wherever it stands."""
    assert not imports_by_file("hftrainer", OPTIONAL | ADAPTERS)


def test_adapters_import_deepspeed_in_functions_only():
    """import-linter checks the other imports of the adapters."""
    assert not imports_by_file("adapters", {"deepspeed"})


def test_no_test_module_imports_another():
    imports = re.compile(r"^ *(from|import) tests\b.*\btest_", re.MULTILINE)
    assert not [str(path) for path in ROOT.glob("tests/**/*.py") if imports.search(path.read_text())]


def test_adapters_folder_is_no_package():
    """`import adapters` belongs to another library of the same users."""
    assert not (ROOT / "adapters" / "__init__.py").exists()


def names_used_of_adapters() -> Iterator[tuple[str, str, str]]:
    """File, module of an adapter, and name that the file uses of it; mypy does not know the type of such a module."""
    for path in sorted([*ROOT.glob("hftrainer/**/*.py"), *ROOT.glob("adapters/**/*.py")]):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        modules = {ast.unparse(node): node for node in nodes if isinstance(node, ast.Call)}
        # loggers = import_adapter("lightning", "loggers")
        assigned = {
            ast.unparse(node.targets[0]): ast.unparse(node.value) for node in nodes if isinstance(node, ast.Assign)
        }
        for node in nodes:
            if isinstance(node, ast.Attribute):
                owner = ast.unparse(node.value)
                match modules.get(assigned.get(owner, owner)):
                    case ast.Call(func=ast.Name("lightning_engine_module")):
                        yield path.name, "hftrainer_lightning/engine.py", node.attr
                    case ast.Call(func=ast.Name("import_adapter"), args=[ast.Constant(name), *rest]):
                        module = rest[0].value if rest else "__init__"
                        yield path.name, f"hftrainer_{name}/{module}.py", node.attr


def test_adapters_define_every_name_used_of_them():
    """`run --tpu` and `observe` on a GPU once called functions that did not exist, where no test runs."""
    asked = set(names_used_of_adapters())
    assert len(asked) > 25
    for path, module, name in asked:
        defined = set()
        for node in ast.parse((ROOT / "adapters" / module).read_text()).body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                defined |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, ast.Assign):
                defined |= {ast.unparse(target) for target in node.targets}
            else:
                defined.add(getattr(node, "name", None))
        assert name in defined, f"{path} asks {module} for {name}"


def test_import_loads_no_large_library(processes, tmp_path):
    """Neither `from hftrainer import Trainer` nor arguments must pay for what a run may need."""
    code = (
        "import sys; from hftrainer import Trainer, TrainingArguments; args = TrainingArguments(max_steps=1);"
        "args.device; str(args.explain()); not_asked_for = {'lightning', 'transformers', 'optuna', 'torch_xla'};"
        "print(sorted({name.split('.')[0] for name in sys.modules} & not_asked_for))"
    )
    done = processes.run("-c", code, cwd=tmp_path, fresh=True)
    assert done.stdout.strip() == "[]", done.stderr
