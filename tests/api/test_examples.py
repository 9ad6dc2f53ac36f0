"""The examples, as a new user runs them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(command: list, cwd: Path, **environment: str) -> str:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'adapters'}", **environment}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_demo(tmp_path):
    """What `make demo` runs, for two epochs, then resumed."""
    script = ROOT / "examples" / "digits_vit.py"
    out = run([sys.executable, script, "--epochs", "1", "--output-dir", "here"], tmp_path)
    assert re.search(r"Test accuracy: +0\.\d+ on 270 images", out)
    assert "checkpoint-40/" in out
    assert "'epoch': '1'" in out
    out = run([sys.executable, script, "--epochs", "2", "--output-dir", "here", "--resume"], tmp_path)
    assert "checkpoint-80/" in out
    out = run([sys.executable, script, "--help"], tmp_path)
    assert "--resume" in out


@pytest.mark.slow
def test_an_environment_with_only_the_declared_dependencies(tmp_path):
    """Without transformers, accelerate, datasets: importing works, and the plain example trains."""
    python = tmp_path / "venv" / "bin" / "python"
    run([sys.executable, "-m", "venv", tmp_path / "venv"], tmp_path)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", ROOT / "constraints.txt"]
    run([*pip, "torch"], tmp_path)
    run([*pip, ROOT], tmp_path)
    installed = run([python, "-m", "pip", "list", "--disable-pip-version-check"], tmp_path).lower()
    assert "hftrainer" in installed
    for absent in ("transformers", "accelerate", "datasets", "peft", "scikit-learn"):
        assert absent not in installed
    run([python, "-c", "import hftrainer; hftrainer.Trainer, hftrainer.TrainingArguments"], tmp_path, PYTHONPATH="")
    out = run([python, ROOT / "examples" / "plain_torch.py", "--epochs", "2"], tmp_path, PYTHONPATH="")
    accuracy = float(re.search(r"Test accuracy: (0\.\d+|1\.0+)", out).group(1))
    assert accuracy > 0.9
    assert (tmp_path / "plain_torch_output" / "checkpoint-80" / "model.safetensors").is_file()
