"""The gallery's examples that use TRL and sentence-transformers: by `python -m hftrainer run`, and without it."""

import subprocess
import sys

import pytest

from tests.support.gallery import EXAMPLES, SHORT, assert_same
from tests.support.processes import environment


@pytest.mark.parametrize("name", ["dpo", "embeddings"])
def test_example_gives_the_numbers_of_transformers(name, tmp_path):
    text = (EXAMPLES / f"{name}.py").read_text()
    assert "import hftrainer" not in text and "from hftrainer" not in text
    script = [str(EXAMPLES / f"{name}.py"), *SHORT]
    ways = {"ours": ["-m", "hftrainer", "run", *script], "theirs": script}
    for way, words in ways.items():
        (tmp_path / way).mkdir()
        line, env = [sys.executable, *words], {**environment(), "PYTHONHASHSEED": "0"}
        done = subprocess.run(line, cwd=tmp_path / way, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert_same(*(tmp_path / way for way in ways))
