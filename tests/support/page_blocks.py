"""Runs the code blocks of a page of the documentation."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"(?<!<!-- shown only -->\n)^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
#: Kinds of blocks that are not run: differences, pictures of files. Nor is code below `<!-- shown only -->`, which
#: needs what a test lacks, such as a library.
SHOWN = {"diff", "text"}
#: Commands that make an environment; `make test-install` and CI run them.
NOT_HERE = ("mkdir -p ~/try", "cd ~/try", "python3 -m venv", ". .venv", "pip install", "make ")
#: Stands above a block that needs the names of the one before it.
GOES_ON = "<!-- goes on from the block above -->\n"


def run_shell(code: str, processes: Any) -> None:
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


def run_page(page: Path, processes: Any) -> None:
    shutil.copy(ROOT / "tests" / "docs" / "train.py", ".")
    text, names = page.read_text(), {}
    for block in BLOCK.finditer(text):
        kind, code = block.groups()
        assert kind in SHOWN | {"python", "bash"}, f"a block of {kind} is neither run nor known as shown only"
        if kind == "python":
            if not text.endswith(GOES_ON, 0, block.start()):
                names = {"__name__": "__page__"}
            before = "\n" * text[: block.start(2)].count("\n")  # an error names the line of the page
            exec(compile(before + code, page, "exec"), names)
        elif kind == "bash":
            run_shell(code, processes)
