"""Two processes train with DeepSpeed as those of transformers do, and as replicas do, and go on from checkpoints."""

from pathlib import Path

import pytest
import torch

from tests.adapters.deepspeed.training_cases import CASES, RESUMED, TOLERANCE
from tests.support.jobs import assert_same
from tests.support.launchers import run_with_both

pytestmark = pytest.mark.timeout(3600)  # the first test waits for the runs of all
RANKS = ("0", "1")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_with_both(Path(__file__).with_name("training_cases.py"), tmp_path_factory.mktemp("training_cases"))


NAMES = [*CASES, *(f"{name}, resumed at {step}" for name, step in RESUMED)]


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("case", NAMES)
def test_training_is_that_of_transformers(found, case, rank):
    ours, theirs = dict(found[f"hftrainer-{rank}"][case]), dict(found[f"transformers-{rank}"][case])
    assert torch.equal(ours.pop("random"), theirs.pop("random"))
    assert_same(ours.pop("weights"), theirs.pop("weights"))
    assert ours == theirs


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize(("name", "step"), RESUMED)
@pytest.mark.parametrize("written", ["", " from theirs"])
def test_resumed_run_ends_the_same(found, name, step, written, rank):
    undisturbed = found[f"hftrainer-{rank}"][name]
    resumed = found[f"hftrainer-{rank}"][f"{name}, resumed at {step}{written}"]
    assert_same(resumed["weights"], undisturbed["weights"])
    assert resumed["logs"][:-1] == undisturbed["logs"][:-1]
    assert torch.equal(resumed["random"], undisturbed["random"])


STAGES = ("stage 0", "stage 1", "stage 2", "stage 3", "offload", "offload, stage 3")


@pytest.mark.parametrize(("name", "replicas"), [*((stage, "stage 0") for stage in STAGES), ("llama", "llama")])
def test_losses_are_those_of_replicas(found, name, replicas):
    """`llama` accumulates."""
    assert_close(found["hftrainer-0"][name]["logs"], found["hftrainer-0"][f"{replicas}, replicas"]["logs"])


def assert_close(logs, others):
    assert len(logs) == len(others)
    for line, other in zip(logs[:-1], others[:-1], strict=True):
        for name in line.keys() & {"loss", "grad_norm", "learning_rate"}:  # without ZeRO there is no norm
            assert line[name] == pytest.approx(other[name], rel=TOLERANCE), name
