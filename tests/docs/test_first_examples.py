"""The examples, as a new user runs them."""

import re
import subprocess
from pathlib import Path

from tests.support import warm

ROOT = Path(__file__).parents[2]


def run(command: list, cwd: Path, **environment: str) -> str:
    env = {**warm.environment(), **warm.LIBRARIES, **environment}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_demo(tmp_path):
    """What `make demo` runs, for two epochs, then resumed."""
    script = ROOT / "examples" / "digits_vit.py"
    out = run([warm.PYTHON, script, "--epochs", "1", "--output-dir", "here"], tmp_path)
    assert re.search(r"Test accuracy: +0\.\d+ on 270 images", out)
    assert "checkpoint-40/" in out
    assert "'epoch': '1'" in out
    out = run([warm.PYTHON, script, "--epochs", "2", "--output-dir", "here", "--resume"], tmp_path)
    assert "checkpoint-80/" in out
    out = run([warm.PYTHON, script, "--help"], tmp_path)
    assert "--resume" in out
