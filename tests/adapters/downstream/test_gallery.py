"""The gallery's examples that use TRL and sentence-transformers: by `python -m hftrainer run`, and without it."""

import sys

import pytest

from tests.docs.examples.support import EXAMPLES, SHORT, assert_same, finish, start


@pytest.mark.parametrize("name", ["dpo", "embeddings"])
def test_the_numbers_of_transformers(name, tmp_path):
    text = (EXAMPLES / f"{name}.py").read_text()
    assert "import hftrainer" not in text and "from hftrainer" not in text
    script = [str(EXAMPLES / f"{name}.py"), *SHORT]
    ways = {"ours": ["-m", "hftrainer", "run", *script], "theirs": script}
    folders = [tmp_path / way for way in ways]
    processes = [start([sys.executable, *words], tmp_path / way, PYTHONHASHSEED="0") for way, words in ways.items()]
    for process, folder in zip(processes, folders, strict=True):
        finish(process, folder)
    assert_same(*folders)
