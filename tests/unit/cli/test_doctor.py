"""`python -m hftrainer doctor` shows what is installed, what is missing, and no secret."""

import importlib.metadata
import json
import os
import re
import shutil
from collections import namedtuple

import pytest
import torch

from hftrainer.__main__ import main
from hftrainer.cli import doctor
from hftrainer.cli.doctor import PRINTABLE, environment
from hftrainer.parallel import devices
from hftrainer.releases.policy import NEWEST
from hftrainer.trackers.registry import TRACKERS
from tests.support.processes import ROOT

REQUIRES = [
    "torch>=2.6",
    "lightning<2.7,>=2.6.0",
    "matplotlib>=3.8; extra == 'plot'",
    "torch-xla[tpu]>=2.6; (platform_system == 'Plan9') and extra == 'tpu'",
    "pytest>=8.0; extra == 'test'",
]
VERSIONS = {"torch": "2.13.0", "lightning": "2.6.6", "matplotlib": "3.11", "s3fs": "1", "gcsfs": "1", "adlfs": "1"}


@pytest.fixture
def installed_versions(monkeypatch):
    versions = dict(VERSIONS)

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "requires", lambda name: REQUIRES)
    monkeypatch.setattr(importlib.metadata, "version", version)
    return versions


def run_doctor(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *words])
    return ended.value.code, capsys.readouterr().out


def test_ready_machine_has_no_problems(installed_versions, capsys):
    trackers = {tracker.install.split()[0] for tracker in TRACKERS.values() if tracker.install}
    installed_versions.update(dict.fromkeys(trackers, "1.0"))
    status, text = run_doctor(capsys, "--json")
    found = json.loads(text)
    assert status == 0 and found["ready"] and found["missing"] == {}
    assert found["versions"]["torch"] == "2.13.0" and found["versions"]["transformers"] is None
    assert trackers - found["versions"].keys() == {"comet-ml", "mlflow", "tensorboard", "wandb"}  # extras of ours
    assert found["devices"]["used"] == devices.detect_device_type()
    assert found["launchers"].keys() == set(doctor.LAUNCHERS)
    assert found["disks"]["folder"]["path"] == os.getcwd()
    status, text = run_doctor(capsys)
    assert status == 0 and "  transformers not installed" in text and "Not installed, and needed" not in text


def test_missing_packages_are_named_with_the_pip_command(installed_versions, capsys, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: [*REQUIRES, "mlflow>=2.14; extra == 'mlflow'"])
    del installed_versions["matplotlib"], installed_versions["gcsfs"]
    assert "needs mlflow" in run_doctor(capsys)[1]
    installed_versions["mlflow-skinny"] = "3.1"
    status, text = run_doctor(capsys)
    assert status == 0 and "needs mlflow" not in text
    assert "output_dir='gs://...' (needs gcsfs): pip install gcsfs" in text and "s3fs 1" in text
    assert "plots in model cards (needs matplotlib): pip install 'hftrainer[plot]'" in text
    installed_versions["lightning"] = "2.7.1"
    status, text = run_doctor(capsys)
    assert status == 1
    assert "hftrainer needs lightning<2.7,>=2.6.0, not 2.7.1: pip install 'lightning<2.7,>=2.6.0'" in text


def test_newer_transformers_than_known_is_reported(installed_versions, capsys):
    installed_versions["transformers"] = f"{NEWEST}.1"
    assert "newer" not in run_doctor(capsys)[1]
    installed_versions["transformers"] = "6.1.0"
    assert f"transformers 6.1.0 is newer than {NEWEST}, the newest release that this hftrainer" in run_doctor(capsys)[1]


def test_package_not_installed_with_pip_is_reported(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", absent)
    problem = f"hftrainer runs from {ROOT}, not installed with pip, so its requirements are not checked: pip install "
    assert f"{problem}{ROOT}" in doctor.make_report()["problems"]


def test_every_extra_has_a_description():
    section = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    assert set(re.findall(r"^([\w-]+) = \[", section, re.M)) - {"test", "docs", "dev"} == doctor.EXTRAS.keys()


SECRETS = {"HF_TOKEN": "hf_topsecret1", "WANDB_API_KEY": "topsecret2", "COMET_API_KEY": "topsecret3"}
SECRETS |= {"MLFLOW_TRACKING_PASSWORD": "topsecret4", "MLFLOW_TRACKING_URI": "https://me:topsecret5@example.org"}
SECRETS |= {"AWS_SECRET_ACCESS_KEY": "topsecret6", "SOME_SERVICE_TOKEN": "topsecret7"}


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_secrets_are_never_printed(installed_versions, capsys, monkeypatch, words):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_PROJECT", "visible")
    text = run_doctor(capsys, *words)[1]
    assert "topsecret" not in text
    assert re.search("WANDB_PROJECT\\W+visible", text)
    assert {name: value for name, value in environment().items() if name in SECRETS} == dict.fromkeys(SECRETS, "set")


def test_variables_with_printed_values_are_no_secrets():
    assert not [name for name in PRINTABLE if re.search("TOKEN$|KEY|SECRET|PASSWORD|CREDENTIAL|URI|URL", name)]


def test_every_variable_that_the_sources_read_is_shown(monkeypatch):
    """Variables of MPI, SLURM and TPUs are read from tables, and shown by their effect."""
    files = [*(ROOT / "hftrainer").rglob("*.py"), *(ROOT / "adapters").rglob("*.py")]
    read = {name for path in files for name in re.findall(r'environ(?:\.get\(|\[)"([A-Z_]+)"', path.read_text())}
    assert {"COMET_MODE", "OMP_NUM_THREADS", "MASTER_PORT"} <= read
    for name in read:
        monkeypatch.setenv(name, "x")
    assert read - {"SSH_CONNECTION", "NO_COLOR", "FORCE_COLOR", "TERM"} <= environment().keys()


def test_gpus_hidden_from_torch_are_reported(monkeypatch):
    monkeypatch.setattr("torch.utils.collect_env.get_gpu_info", lambda run: "NVIDIA H100, 81559 MiB")
    monkeypatch.setattr(devices, "detect_device_type", lambda: "cpu")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert any("is built without CUDA: install another" in problem for problem in doctor.make_report()["problems"])
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert any("CUDA_VISIBLE_DEVICES hides them: unset it" in problem for problem in doctor.make_report()["problems"])


def test_small_disk_and_wrong_launcher_variable_are_reported(monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(64 << 20, 0, 64 << 20))
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "many")
    monkeypatch.setenv("SLURM_PROCID", "0")
    problems = " ".join(doctor.make_report()["problems"])
    assert "folder has 67.1 MB free" in problems and "save_total_limit" in problems
    assert "SLURM_STEP_NUM_TASKS='many'" in problems
