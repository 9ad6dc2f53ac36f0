"""The package in an environment that pip has made: `make test-install`."""

import re
import sys

from tests.api.test_examples import ROOT, run


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
