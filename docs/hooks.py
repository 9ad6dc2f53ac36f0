"""Pages of the site that are made from files of the repository: mkdocs calls these functions.

`COMPATIBILITY.md` becomes two pages, and `ARCHITECTURE.md` the first page of the internals.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
_ARGUMENTS = "\n## Arguments\n"  # not "### Arguments"


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made."""
    differences, _, arguments = (ROOT / "COMPATIBILITY.md").read_text(encoding="utf-8").partition(_ARGUMENTS)
    body = differences.partition("\n## ")[2]
    measure = "The measure is `transformers` 5.24, and equal means exactly equal."
    pages = {
        "differences.md": f"# Where it differs\n\n{measure}\n\n## {body}",
        "arguments.md": f"# Every argument\n{arguments}",
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Include ARCHITECTURE.md in its page, with links as they are on the site."""
    if page.file.src_uri == "internals/index.md":
        text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
        return re.sub(r"\]\(docs/", "](../", text)
    return markdown
