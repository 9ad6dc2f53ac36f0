"""The table of the documents' blocks is complete: each is tested, in the place that it names, or has its reason."""

import ast
import importlib
import re
from pathlib import Path

import pytest

from tests.docs.documents.blocks import BLOCKS, LANES, LEDGER, NOT_OURS, SAME, counts, table
from tests.support.differences import DIFFERENCES

ROWS = {what for rows in DIFFERENCES.values() for what in rows}
ROOT = Path(__file__).parents[3]
HERE = "tests.docs.documents.test_"
DEEPSPEED = "tests.adapters.deepspeed.test_documents"
ALL = {f"{document}:{block.line}": block for document, blocks in BLOCKS.items() for block in blocks}


def lines_of(function):
    """The lines that a test is named or parametrized by."""
    named = re.match(r"test_lines?((?:_\d+)+)", function.__name__)
    found = [int(number) for number in named[1].split("_")[1:]] if named else []
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "parametrize":
            names, values = mark.args[:2]
            names = [names] if isinstance(names, str) else list(names)
            if "line" in names:
                where = names.index("line")
                found += [value if len(names) == 1 else value[where] for value in values]
    return found


def shown_by(module, document=None):
    """The blocks that the tests of a module name."""
    functions = [value for name, value in vars(importlib.import_module(module)).items() if name.startswith("test_")]
    lines = [line for function in functions for line in lines_of(function)]
    return {line if isinstance(line, str) else f"{document}:{line}" for line in lines}


def test_no_block_is_twice():
    assert len(ALL) == sum(map(len, BLOCKS.values()))


@pytest.mark.parametrize("document", BLOCKS)
def test_each_block_has_its_test(document):
    blocks = [b for b in BLOCKS[document] if not (b.outcome.startswith(NOT_OURS) or b.lane or b.test)]
    assert shown_by(HERE + document.replace(".", "_"), document) == {f"{document}:{block.line}" for block in blocks}


def test_each_block_of_the_deepspeed_lane_has_its_test():
    assert shown_by(DEEPSPEED) == {name for name, block in ALL.items() if block.lane == "deepspeed" and not block.test}


def functions_in(path):
    return {node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)}


def test_what_is_tested_elsewhere_is():
    for name, block in ALL.items():
        path, found, function = block.test.partition("::")
        if found:
            assert function in functions_in(path), name
        elif block.test:
            other = ALL[block.test]
            assert (other.outcome, other.lane) == (block.outcome, block.lane), name
            assert "::" in other.test or not other.test, name


def test_outcomes_have_their_reasons():
    for name, block in ALL.items():
        assert block.lane in ("", *LANES), name
        if block.outcome.startswith(LEDGER):
            assert block.outcome.removeprefix(LEDGER) in ROWS, name
        elif block.outcome != SAME:
            assert block.outcome.startswith(NOT_OURS), name
            assert len(block.outcome) > len(NOT_OURS), name
            assert not block.lane, name


def test_the_counts_are_of_all_blocks():
    assert sum(counts(document).total() for document in BLOCKS) == len(ALL)
    assert len(table()) == len(BLOCKS) + 2
