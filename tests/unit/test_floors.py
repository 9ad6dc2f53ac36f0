"""`make test-versions RELEASES=floor` tries the oldest release of each package that pyproject.toml claims."""

import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.support.releases import pin

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # which pytest brings, before Python 3.11

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
#: Extras that the lane leaves out.
ELSEWHERE = {
    "deepspeed": "make test-adapters",
    "ray": "make test-adapters",
    "mlflow": "the lane takes mlflow-skinny, the same code without its server",
    "tf": "make test-adapters, beside transformers 4.57",
    "tpu": "make test-adapters ADAPTERS=xla; it needs one torch alone",
    "docs": "tools, not what the package runs with",
    "torch-tpu": "it loads on a machine with a TPU only; make test-install resolves it",
    "dev": "tools, not what the package runs with",
}


def requirements() -> list[Requirement]:
    lines = [line for extra, found in EXTRAS.items() if extra not in ELSEWHERE for line in found]
    found = [Requirement(line) for line in [*PROJECT["dependencies"], *lines]]
    return [requirement for requirement in found if requirement.name != PROJECT["name"]]


def floor(requirement: Requirement) -> Version:
    (lowest,) = [Version(each.version) for each in requirement.specifier if each.operator == ">="]
    return lowest


def pinned_versions() -> dict[str, Version]:
    lines = (ROOT / "tests" / "versions" / "floor.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {pin.name: Version(next(iter(pin.specifier)).version) for pin in pins}


@pytest.mark.parametrize("requirement", requirements(), ids=lambda requirement: requirement.name)
def test_floor_txt_pins_the_oldest_claimed_release(requirement):
    assert pinned_versions()[requirement.name] == floor(requirement)


def test_left_out_extras_exist():
    assert ELSEWHERE.keys() <= EXTRAS.keys()


def test_oldest_python_is_3_10():
    assert PROJECT["requires-python"] == ">=3.10"


def test_lightning_is_bounded_by_its_next_minor_release():
    """Private names may go with any minor release: the next one is admitted once it has been tried."""
    (lightning,) = [requirement for requirement in requirements() if requirement.name == "lightning"]
    newest = Version(pin("lightning"))
    assert newest in lightning.specifier
    assert f"{newest.major}.{newest.minor + 1}.0" not in lightning.specifier
