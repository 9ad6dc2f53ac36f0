"""Every code block of the site runs as a reader copies it; links between files lead somewhere."""

import re

import pytest

from tests.support.page_blocks import BLOCK, ROOT, run_page

PAGES = [*sorted(path for path in (ROOT / "docs").rglob("*.md") if "packages" not in path.parts), ROOT / "README.md"]
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([\w-]+))?\)")
#: Pages for what this environment may lack → the package; another lane runs them then.
NEEDS = {"docs/guides/ray.md": "ray"}


@pytest.mark.parametrize(
    "page", [page for page in PAGES if BLOCK.search(page.read_text())], ids=lambda page: str(page.relative_to(ROOT))
)
def test_code_blocks_run(page, processes):
    if package := NEEDS.get(str(page.relative_to(ROOT))):
        pytest.importorskip(package)
    run_page(page, processes)


def anchors(page):
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")], ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    for file, anchor in LINK.findall(BLOCK.sub("", page.read_text())):
        target = page.parent / file if file else page
        assert target.exists(), f"{file} is missing"
        assert not anchor or anchor in anchors(target), f"{file} has no heading {anchor}"
