"""Every code block of the site runs as a reader copies it; links between files lead somewhere."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(path for path in (ROOT / "docs").rglob("*.md") if "packages" not in path.parts), ROOT / "README.md"]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
#: Kinds of blocks that are not run: differences, pictures of files.
SHOWN = {"diff", "text"}
#: Commands that make an environment; `make test-install` and CI run them.
NOT_HERE = ("pip install", "make ")
#: The first line of a block that needs the names of the one before it.
GOES_ON = "# goes on from the block above"
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([\w-]+))?\)")
#: Pages for what this environment may lack → the package; another lane runs them then.
NEEDS = {"docs/guides/ray.md": "ray"}


def run_shell(code, processes):
    for line in code.splitlines():
        command = line.partition("#")[0].strip()
        if not command or command.startswith(NOT_HERE):
            continue
        name, *words = shlex.split(command)
        if name == "python":
            done = processes.run(*words, fresh=True)
        else:
            line = [Path(sys.executable).with_name(name), *words]
            done = subprocess.run(line, env=processes.environment(), capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout[-1000:]}{done.stderr[-3000:]}"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if BLOCK.search(page.read_text())], ids=lambda page: str(page.relative_to(ROOT))
)
def test_blocks(page, processes):
    if package := NEEDS.get(str(page.relative_to(ROOT))):
        pytest.importorskip(package)
    shutil.copy(Path(__file__).with_name("train.py"), ".")
    text, names = page.read_text(), {}
    for block in BLOCK.finditer(text):
        kind, code = block.groups()
        assert kind in SHOWN | {"python", "bash"}, f"a block of {kind} is neither run nor known as shown only"
        if kind == "python":
            if not code.startswith(GOES_ON):
                names = {"__name__": "__page__"}
            before = "\n" * text[: block.start(2)].count("\n")  # an error names the line of the page
            exec(compile(before + code, page, "exec"), names)
        elif kind == "bash":
            run_shell(code, processes)


def anchors(page):
    """Of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")], ids=lambda page: page.name)
def test_links(page):
    for file, anchor in LINK.findall(BLOCK.sub("", page.read_text())):
        target = page.parent / file if file else page
        assert target.exists(), f"{file} is missing"
        assert not anchor or anchor in anchors(target), f"{file} has no heading {anchor}"
