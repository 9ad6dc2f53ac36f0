"""Every code block of the site runs: those of a page one after the other, in a folder of their own."""

import io
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.tiny import make_plain, plain_data

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(path for path in DOCS.rglob("*.md") if "rooms" not in path.parts), ROOT / "README.md"]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
#: Kinds of blocks that are not run: differences, pictures of files, and commands for what is not on each machine.
SHOWN = {"diff", "text"}
#: Commands that make an environment; `make test-install` and CI run them.
NOT_HERE = ("pip install", "make ")
#: Pages for what this environment may lack → the package; another lane runs them then.
NEEDS = {"docs/guides/ray.md": "ray"}


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text())


def run_python(code: str, names: dict) -> None:
    with redirect_stdout(io.StringIO()):
        exec(compile(code, "<page>", "exec"), names)


def run_shell(code: str) -> None:
    for line in code.splitlines():
        command = line.partition("#")[0].strip()
        if not command or command.startswith(NOT_HERE):
            continue
        words = shlex.split(command)
        tool = Path(sys.executable).with_name(words[0])
        words[0] = sys.executable if words[0] == "python" else str(tool)
        done = subprocess.run(words, env=warm.environment(), capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout[-1000:]}{done.stderr[-3000:]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks(page, tmp_path, monkeypatch):
    if package := NEEDS.get(str(page.relative_to(ROOT))):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text((Path(__file__).parent / "train.py").read_text())
    data = plain_data(24)
    names = {"model": make_plain(), "make_model": make_plain, "train": data, "valid": data[:8], "__name__": "__page__"}
    for kind, code in blocks(page):
        assert kind in SHOWN | {"python", "bash"}, f"a block of {kind} is neither run nor known as shown only"
        if kind == "python":
            run_python(code, names)
        elif kind == "bash":
            run_shell(code)


def test_readme_is_short():
    words = re.sub(r"```.*?```", "", (ROOT / "README.md").read_text(), flags=re.DOTALL).split()
    assert len(words) <= 600
