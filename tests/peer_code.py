"""Which code of `tests/` a test reaches: a recording holds for as long as none of it has changed."""

import ast
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: How values are compared is not what they are: a recording that means something else now is one that differs. Nor is
#: how a process is started what it does.
_NOT_OF_THE_PEER = {ROOT / "tests" / "peers.py", ROOT / "tests" / "warm.py"}
#: Statements that do something when the module is imported; others count when a test reaches what they define.
_DEFINING = (ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Import, ast.ImportFrom)


class Module:
    """One file of tests: its definitions by name, and where its other names come from.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        tree = ast.parse(path.read_text())
        self.definitions: dict[str, list[ast.stmt]] = {}
        self.imported: dict[str, tuple[Path, str | None]] = {}
        self.always: list[ast.stmt] = []
        for node in tree.body:
            for name in _names_defined(node):
                self.definitions.setdefault(name, []).append(node)
            if not isinstance(node, _DEFINING) or _is_autouse(node):
                self.always.append(node)
        for node in ast.walk(tree):  # imports within functions too
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tests":
                self._note_import(node)

    def _note_import(self, node: ast.ImportFrom) -> None:
        folder = ROOT.joinpath(*str(node.module).split("."))
        for alias in node.names:
            submodule = folder / f"{alias.name}.py"
            found = (submodule, None) if submodule.exists() else (folder.with_suffix(".py"), alias.name)
            self.imported[alias.asname or alias.name] = found


def _names_defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            yield from (each.id for each in ast.walk(target) if isinstance(each, ast.Name))


def _is_autouse(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and any("autouse" in ast.dump(each) for each in node.decorator_list)


def _names_used(node: ast.stmt) -> set[str]:
    """Names read anywhere in it, and the arguments of functions, which may be fixtures."""
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return names | {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}


@functools.cache
def _module(path: Path) -> Module:
    return Module(path)


def _reached(path: Path, name: str | None) -> dict[tuple[Path, int], ast.stmt]:
    """Every statement that `name` of a file needs, by file and line; the whole file without a name."""
    found: dict[tuple[Path, int], ast.stmt] = {}
    seen: set[tuple[Path, str | None]] = set()
    waiting: list[tuple[Path, str | None]] = [(path, name)]
    while waiting:
        at = waiting.pop()
        if at in seen or at[0] in _NOT_OF_THE_PEER or not at[0].exists():
            continue
        seen.add(at)
        module = _module(at[0])
        if at[1] is None:
            waiting.extend((at[0], each) for each in module.definitions)
        nodes = [*module.always, *module.definitions.get(at[1] or "", [])]
        found.update({(at[0], node.lineno): node for node in nodes})
        if at[1] in module.imported:
            waiting.append(module.imported[at[1]])
        for used in set().union(*map(_names_used, nodes)):
            waiting.append(module.imported[used] if used in module.imported else (at[0], used))
    return found


@functools.cache
def digest(path: Path, name: str | None) -> str:
    """A digest of a test function and all of `tests/` that it reaches; comments and positions do not count.

    Args:
        path: the file.
        name: of the function; None for the whole file.
    """
    return hashlib.sha256("\n".join(sorted(map(ast.dump, _reached(path, name).values()))).encode()).hexdigest()[:16]
