"""Print lines of code, without blank lines, comments and docstrings, and other sizes; exit with 1 above a limit."""

import ast
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {"lines of code": 30_606, "modules": 218, "packages": 34, "lines of tests": 45_142}
#: Lines of a file, and the limits of those that may have more.
LONGEST = 500
LONGER = {"hftrainer/trainer.py": 1_200}
LAYOUT = {getattr(tokenize, name) for name in ("ENCODING", "COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")}


def lines_of_code(source: bytes) -> int:
    """Lines with more than comments and strings that are statements."""
    tokens = tokenize.tokenize(iter(source.splitlines(keepends=True)).__next__)
    code = {line for token in tokens if token.type not in LAYOUT for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            code -= set(range(node.lineno, node.end_lineno + 1))
    return len(code)


def read(*folders: str) -> dict[str, bytes]:
    """The modules in folders, without the one that a build writes."""
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if path.name != "_version.py"]
    return {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in found}


product = read("hftrainer", "adapters")
# A module that holds no code, such as most __init__.py, is not counted.
code = [count for source in product.values() if (count := lines_of_code(source))]
packages = sum(path.endswith("__init__.py") for path in product)
tests = sum(source.count(b"\n") for source in read("tests").values())
sizes = list(zip(LIMITS, (sum(code), len(code), packages, tests), LIMITS.values(), strict=True))
files = [(path, source.count(b"\n"), LONGER.get(path, LONGEST)) for path, source in product.items()]
for what, size, limit in [*sizes, *(file for file in files if file[1] > file[2])]:
    print(f"{what:16}{size:7,} of at most {limit:,}")
sys.exit(any(size > limit for _, size, limit in sizes + files))
