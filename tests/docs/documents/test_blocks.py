"""blocks.toml lists the blocks of transformers' documents, each with its test or the reason why it has none.

With `DOCUMENTS=FOLDER make test-docs`, the table is also compared with the documents in that folder. They are not ours,
so they are not in the repository, and no lane of CI does this.
"""

import ast
import functools
import os
import re
import sys
from pathlib import Path

import pytest

from tests.support.known_differences import DIFFERENCES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # which pytest brings, before Python 3.11

HERE = Path(__file__).parent
TESTS = HERE.parents[1]
TABLE = tomllib.loads((HERE / "blocks.toml").read_text(encoding="utf-8"))
ROWS = [(document, lines, row) for document, rows in TABLE.items() for lines, row in rows.items()]
FILES = ("test_code.py", "test_launching.py")


@functools.cache
def names_of_tests(path):
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize(
    ("document", "lines", "row"), ROWS, ids=lambda value: value["has"] if isinstance(value, dict) else value
)
def test_each_block_has_a_test_or_a_reason(document, lines, row):
    assert row.keys() <= {"has", "differs", "not_ours", "test"}
    assert ("test" in row) == (not row.get("not_ours"))
    if "differs" in row:
        assert any(row["differs"] in rows for subjects in DIFFERENCES.values() for rows in subjects.values())
    if "test" in row:
        path, _, name = row["test"].rpartition("::")
        assert any(name in names_of_tests(file) for file in ([TESTS / path] if path else [HERE / one for one in FILES]))


def test_every_test_is_named_in_the_table():
    named = {row["test"] for _, _, row in ROWS if "::" not in row.get("test", "::")}
    assert named == set().union(*(names_of_tests(HERE / each) for each in FILES))


def text_by_number(document, text):
    """Number → text, of each line; of each block in the document that is a single line."""
    if document != "trainer_api_v4.48":
        return dict(enumerate(text.splitlines(), 1))
    fenced = re.findall(r"```\w+ (.*?)```", text)
    options = [words for words in re.findall(r"`([^`]*)`", re.sub(r"```.*?```", "", text)) if words.startswith("-")]
    return dict(enumerate([*fenced, *options], 1))


@pytest.mark.skipif("DOCUMENTS" not in os.environ, reason="DOCUMENTS names no folder with the documents")
@pytest.mark.parametrize("document", TABLE)
def test_table_lists_exactly_the_blocks_of_the_document(document):
    """Each is at its line; where the document marks its blocks, there are no others."""
    text = Path(os.environ["DOCUMENTS"], f"{document}.txt").read_text(encoding="utf-8")
    found = text_by_number(document, text)
    listed = [int(line) for lines in TABLE[document] for line in lines.split()]
    assert len(set(listed)) == len(listed)
    for lines, row in TABLE[document].items():
        for line in map(int, lines.split()):
            assert any(word in found[line] for word in row["has"].split("|")), (line, found[line])
    marked = {line + 2 for line, words in found.items() if words.strip().startswith(".. code-block::")}
    assert (set(found) if document == "trainer_api_v4.48" else marked) <= set(listed)
