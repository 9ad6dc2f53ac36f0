"""The package works in an environment that pip has made: `make test-install`."""

import json
import os
import re
import subprocess
import sys
import zipfile

import pytest
from packaging.version import Version

from tests.support.processes import ROOT, environment


def run(command, cwd, **variables):
    env = {**environment(), **variables}
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_declared_dependencies_suffice_to_import_and_train(tmp_path):
    """Without transformers, accelerate, datasets: importing works, and the plain example trains."""
    python = tmp_path / "venv" / "bin" / "python"
    run([sys.executable, "-m", "venv", tmp_path / "venv"], tmp_path)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", ROOT / "constraints.txt"]
    run([sys.executable, "-m", "build", "--outdir", tmp_path / "dist", ROOT], tmp_path)  # the wheel from the sdist
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        assert "hftrainer/py.typed" in file.namelist()
    run([*pip, "torch"], tmp_path)
    run([*pip, wheel], tmp_path)
    installed = run([python, "-m", "pip", "list", "--disable-pip-version-check"], tmp_path).lower()
    assert "hftrainer" in installed
    for absent in ("transformers", "accelerate", "datasets", "peft", "scikit-learn"):
        assert absent not in installed
    code = "import hftrainer; hftrainer.Trainer, hftrainer.TrainingArguments; print(hftrainer.__version__)"
    assert wheel.name.startswith(f"hftrainer-{run([python, '-c', code], tmp_path, PYTHONPATH='').strip()}-")
    out = run([python, ROOT / "examples" / "plain_torch.py", "--epochs", "2"], tmp_path, PYTHONPATH="")
    accuracy = float(re.search(r"Test accuracy: (0\.\d+|1\.0+)", out).group(1))
    assert accuracy > 0.9
    assert (tmp_path / "plain_torch_output" / "checkpoint-80" / "model.safetensors").is_file()


@pytest.fixture(scope="module")
def resolve(tmp_path_factory):
    """Resolves an extra by the metadata in wheels, which a new pip reads by requests for ranges of bytes.

    76 MB instead of the wheels' 8 GB, where the registry serves no metadata beside them.
    """
    folder = tmp_path_factory.mktemp("resolver")
    run([sys.executable, "-m", "venv", folder / "venv"], folder)
    pip = [folder / "venv" / "bin" / "python", "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    run([*pip, "--upgrade", "pip"], folder)

    def resolve(extra: str) -> dict[str, str]:
        run([*pip, "--use-feature=fast-deps", "--dry-run", "--report", folder / extra, f"{ROOT}[{extra}]"], folder)
        found = [each["metadata"] for each in json.loads((folder / extra).read_text())["install"]]
        return {each["name"].lower().replace("_", "-"): each["version"] for each in found}

    return resolve


@pytest.mark.skipif(sys.platform != "linux", reason="libraries for TPUs are for Linux")
def test_tpu_extra_resolves_to_the_torch_of_torch_xla(resolve):
    versions = resolve("tpu")
    assert versions["torch"].startswith("2.9.") and versions["torch-xla"].startswith("2.9.")
    assert "libtpu" in versions


@pytest.mark.skipif(sys.platform != "linux" or sys.version_info < (3, 11), reason="torch_tpu: Linux, Python 3.11")
def test_torch_tpu_extra_brings_what_it_imports(resolve):
    imported = {"absl-py", "frozendict", "immutabledict", "libtpu", "portpicker", "pyzmq", "torch"}
    assert imported <= resolve("torch-tpu").keys()


def newest(package, folder, *options):
    """The version that pip would install, found without installing it."""
    line = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--dry-run"]
    line += ["--ignore-installed", "--no-deps", "--report", "-", *options, package]
    (found,) = json.loads(run(line, folder))["install"]
    return Version(found["metadata"]["version"])


def test_newest_pre_release_of_lightning_is_reported(tmp_path):
    """pyproject.toml does not admit pre-releases, so what fails with one is reported by a skip, not as a failure."""
    candidate = newest("lightning", tmp_path, "--pre")
    if candidate <= newest("lightning", tmp_path):
        pytest.skip("no pre-release of lightning is newer than its newest release")
    target = tmp_path / "lightning"
    run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", target, f"lightning=={candidate}"], ROOT
    )
    paths = os.pathsep.join([str(target), environment()["PYTHONPATH"]])
    line = [sys.executable, "-m", "pytest", "-q", "tests/lightning", "tests/parity/test_matrix.py"]
    done = subprocess.run(line, cwd=ROOT, env={**environment(), "PYTHONPATH": paths}, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"lightning {candidate}: {done.stdout[-3000:]}")
