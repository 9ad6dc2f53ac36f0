"""Keras 3 models on torch, trained by TFTrainer and by Keras itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import processes

OPTIMIZERS = "adam,amsgrad,adamw,sgd,schedule,clipnorm,global clipnorm,clipvalue,weight decay".split(",")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    environment = {**processes.environment(), "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    line = [sys.executable, str(Path(__file__).with_name("keras_cases.py")), str(tmp_path_factory.mktemp("keras"))]
    done = subprocess.run(line, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("FOUND "))[6:])
    assert list(results["far"]) == OPTIMIZERS
    return results


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_are_those_of_keras(found, name):
    assert found["far"][name] < 2e-6  # float32, in another order


def test_saved_model_is_loaded_by_keras(found):
    assert found["saved"]


def test_model_that_is_not_compiled_is_refused(found):
    assert "Functional has no loss. Call model.compile(loss=...)" in found["refused"]
