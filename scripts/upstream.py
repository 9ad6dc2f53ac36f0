"""Print what the newest releases of the libraries beneath us changed since the pinned ones.

Wheels are downloaded and read, not imported, so that a release can be looked at that does not work yet: fields,
defaults, signatures and members of the public API, and the code of each function that one of our modules follows, which
`followed.toml` records by its hash. Comments, docstrings and texts of help do not count.

Usage: python scripts/upstream.py [--since VERSION] [--check | --record]

    --since   compare with this release of transformers, not with the pinned one
    --check   say which of the installed functions are not as recorded; exit with 1 if there is any
    --record  write the hashes of the installed ones, after our modules were compared with what has changed
"""

import argparse
import ast
import difflib
import functools
import hashlib
import importlib.util
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import tomllib

ROOT = Path(__file__).resolve().parents[1]
FOLLOWED = ROOT / "scripts" / "followed.toml"
WHEELS = ROOT / "build" / "upstream"
PINS = ("constraints.txt", "tests/adapters/downstream/requirements.txt")
#: What the registry is asked for. torch is not downloaded: its newest release brings gigabytes of CUDA.
PACKAGES = ("transformers", "accelerate", "lightning", "trl", "peft", "torch")

Code = dict[str, ast.AST]


# ---- Releases --------------------------------------------------------------------------------------------------------


def pip(*words: str) -> str:
    """What pip prints.

    Raises:
        SystemExit: when it fails, with what it said.
    """
    run = subprocess.run([sys.executable, "-m", "pip", *words, "--no-input"], capture_output=True, text=True)
    if run.returncode:
        sys.exit(f"pip {' '.join(words)} failed:\n{run.stderr}")
    return run.stdout


def newest(package: str) -> str:
    return re.search(r"\((.+?)\)", pip("index", "versions", package))[1]


def pinned(package: str) -> str | None:
    pins = "".join((ROOT / file).read_text() for file in PINS)
    found = re.search(rf"^{package}==(\S+)", pins, re.MULTILINE)
    return found and found[1]


def unpacked(package: str, version: str) -> Path:
    """The folder above the package of a release."""
    folder = WHEELS / f"{package}-{version}"
    if not folder.is_dir():
        pip(
            "download", "--no-deps", "--quiet", "--only-binary", ":all:", "--dest", str(WHEELS), f"{package}=={version}"
        )
        with zipfile.ZipFile(next(WHEELS.glob(f"{package}-{version}-*.whl"))) as wheel:
            wheel.extractall(folder)
    return folder


def installed(package: str) -> Path:
    return Path(importlib.util.find_spec(package).origin).parents[1]


# ---- Code ------------------------------------------------------------------------------------------------------------


def without_texts(node: ast.AST) -> ast.AST:
    """The code without docstrings and the help of fields."""
    for each in ast.walk(node):
        if isinstance(each, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(each, clean=False) is not None:
            each.body = each.body[1:] or [ast.Pass()]
        if isinstance(each, ast.Call):
            each.keywords = [keyword for keyword in each.keywords if keyword.arg != "metadata"]
    return node


def code_of(file: Path) -> Code:
    """The functions, classes, methods and fields in a file, by their dotted names; nothing without the file."""
    found: Code = {}
    if not file.is_file():
        return found
    for node in without_texts(ast.parse(file.read_text())).body:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            continue
        found[node.name] = node
        for part in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(part, ast.FunctionDef):
                found[f"{node.name}.{part.name}"] = part
            elif isinstance(part, (ast.AnnAssign, ast.Assign)):
                target = part.target if isinstance(part, ast.AnnAssign) else part.targets[0]
                found[f"{node.name}.{ast.unparse(target)}"] = part
    return found


def declared(node: ast.AST) -> str:
    """What users see of a function, class or field: its signature, bases, or type and default."""
    if isinstance(node, ast.FunctionDef):
        return f"({ast.unparse(node.args)})"
    if isinstance(node, ast.ClassDef):
        return f"class({', '.join(map(ast.unparse, node.bases))})"
    return ast.unparse(node)


def digest(node: ast.AST | None) -> str:
    return hashlib.sha256(ast.unparse(node).encode()).hexdigest()[:8] if node else "none"


# ---- The report ------------------------------------------------------------------------------------------------------


def is_public(name: str) -> bool:
    return not any(part.startswith("_") and part != "__init__" for part in name.split("."))


def api_changes(old: Code, new: Code) -> list[str]:
    """A line for each public name that is new, gone, or declared otherwise."""
    lines = []
    for name in sorted(filter(is_public, old | new)):
        before, after = (declared(code[name]) if name in code else None for code in (old, new))
        if before is None:
            lines.append(f"+ {name} {after}")
        elif after is None:
            lines.append(f"- {name} {before}")
        elif before != after:
            lines += [f"! {name}", f"      {before}", f"    → {after}"]
    return lines


class Entry(NamedTuple):
    """A module of ours, the function that it follows with the file that has it, and the recorded hash."""

    ours: str
    file: str
    name: str
    recorded: str

    @property
    def place(self) -> str:
        return f"{self.file}:{self.name}"


@functools.cache
def entries() -> list[Entry]:
    table = tomllib.loads(FOLLOWED.read_text())
    places = [(ours, *place) for ours, followed in table.items() for place in followed.items()]
    return [Entry(ours, *place.split(":"), recorded) for ours, place, recorded in places]


def files_of(package: str) -> list[str]:
    return sorted({each.file for each in entries() if each.file.startswith(f"{package}/")})


def differences(old: ast.AST | None, new: ast.AST | None) -> Iterator[str]:
    before, after = (ast.unparse(node).splitlines() if node else [] for node in (old, new))
    return difflib.unified_diff(before, after, lineterm="")


def report(package: str, since: str, until: str) -> str:
    """Print what changed, and return the differences of the code."""
    folders = unpacked(package, since), unpacked(package, until)
    both = {file: [code_of(folder / file) for folder in folders] for file in files_of(package)}
    for file, (old, new) in both.items():
        if lines := api_changes(old, new):
            print(f"\n{file}: the API", *lines, sep="\n  ")
    patch, followed = [], [each for each in entries() if each.file in both]
    for each in followed:
        old, new = (code.get(each.name) for code in both[each.file])
        if {digest(old), digest(new)} != {each.recorded}:
            patch += [f"\n# {each.ours} follows {each.place}\n", *differences(old, new)]
            compared = "" if digest(new) == each.recorded else "; ours was not compared with it yet"
            print(f"{each.ours} follows {each.place}: {'changed' if new else 'gone'}{compared}")
    named = {each.place for each in followed}
    for file, (old, new) in both.items():
        for name in new.keys() - old.keys():
            if (
                isinstance(new[name], ast.FunctionDef)
                and not {f"{file}:{name}", f"{file}:{name.split('.')[0]}"} & named
            ):
                print(f"no module of ours follows {file}:{name}: new")
    return "\n".join(patch)


def installed_digests() -> dict[str, str]:
    """The hash of each followed function in the installed packages; "none" for one that is not there."""
    files = {file: code_of(installed(file.partition("/")[0]) / file) for file in {each.file for each in entries()}}
    return {each.place: digest(files[each.file].get(each.name)) for each in entries()}


def check() -> None:
    """Exit with 1 when a module of ours is gone, or an installed function is not as recorded."""
    found = installed_digests()
    wrong = [f"{ours} is not there" for ours in {each.ours for each in entries()} if not (ROOT / ours).is_file()]
    changed = [each for each in entries() if found[each.place] != each.recorded]
    wrong += [f"{each.ours} follows {each.place}, which has changed" for each in changed]
    if wrong:
        sys.exit("\n".join([*wrong, "Compare, then record: python scripts/upstream.py --record"]))


def record() -> None:
    """Write the hashes of the installed functions."""
    found, lines = installed_digests(), ["# What our modules follow, with the hash of its code: scripts/upstream.py."]
    for ours in sorted({each.ours for each in entries()}):
        followed = sorted(each.place for each in entries() if each.ours == ours)
        lines += ["", f'["{ours}"]', *(f'"{place}" = "{found[place]}"' for place in followed)]
    FOLLOWED.write_text("\n".join(lines) + "\n")


def compare(transformers: str) -> None:
    """Print what the newest releases changed; the changed code goes into a file.

    Args:
        transformers: the release to start from, for the others it is the pinned one.
    """
    patches = []
    for package in PACKAGES:
        since = transformers if package == "transformers" else pinned(package)
        until = newest(package)
        print(f"\n## {package}: {since or 'not pinned'}{' → ' + until if until != since else ', the newest'}")
        if since and since != until and files_of(package):
            patches.append(report(package, since, until))
    changes = WHEELS / "changes.diff"
    changes.parent.mkdir(parents=True, exist_ok=True)
    changes.write_text("\n".join(patches))
    print(f"\nThe code that changed: {changes.relative_to(ROOT)}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--since", default=pinned("transformers"))
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args()
    if given.check:
        check()
    elif given.record:
        record()
    else:
        compare(given.since)


if __name__ == "__main__":
    main()
