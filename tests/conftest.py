import contextlib
import gc
import importlib
import json
import logging
import os
import signal
import sys
import warnings

import pytest

# One thread: tiny models run slower with several. Processes that tests start inherit this.
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import torch  # it reads them when it is imported

# A comparison that fails in these shows the two values.
pytest.register_assert_rewrite("tests.support.parity", "tests.support.jobs", "tests.support.searches")

from tests.support import processes as started_processes
from tests.support.releases import TRANSFORMERS, installed, pinned

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Disable the telemetry of trackers: tests must not use the network.
os.environ["COMET_ERROR_TRACKING_ENABLE"] = os.environ["WANDB_ERROR_REPORTING"] = "false"
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ["COMET_DISABLE_AUTO_LOGGING"] = "1"  # it would write down every run of MLflow, and wait for its threads
# Under CI, transformers also propagates to the root logger, which would duplicate lines.
os.environ.pop("CI", None)
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it, and tables in a pipe would have that width
# Workers of a collected DataLoader are not told to stop; torch waits 5 s for each.
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5
# A shell's background jobs ignore Ctrl-C, and so would what they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def processes():
    """Starts processes (tests/support/processes.py). Tests that use it are slow."""
    return started_processes


def skip_comparisons_with_the_newest(items):
    """Beside an older transformers."""
    if pinned("transformers") <= TRANSFORMERS:
        return
    reason = "compares with the transformers of constraints.txt, and an older one is installed"
    for item in items:
        if item.get_closest_marker("newest_peer"):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_report_header():
    return f"with {installed()}"


def pytest_make_parametrize_id(val, argname):
    """`workers=2` in place of `2`; and a short container of plain values as it is written, in place of `settings3`."""
    if isinstance(val, (bool, int, float, type(None))):
        return f"{argname}={val}"
    if isinstance(val, (dict, list, tuple, torch.dtype, Exception)) and len(text := repr(val)) < 100:
        with contextlib.suppress(TypeError):  # of sets and other objects, whose text may differ between processes
            return text if isinstance(val, (torch.dtype, Exception)) else json.dumps(val) and text
    return None


@pytest.hookimpl(tryfirst=True)  # before those that are marked are left out
def pytest_collection_modifyitems(items):
    skip_comparisons_with_the_newest(items)
    for item in items:
        if "processes" in item.fixturenames:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _freeze_imported_objects():
    """accelerate collects garbage whenever it frees memory: looking through all that was imported is most of a run."""
    if any(gc.get_count()[1:]):  # many objects are new
        gc.collect()
        gc.freeze()


#: How the variables begin that arguments write, or that libraries read when they are imported.
STAYS = """
    ACCELERATE_ BITSANDBYTES_ CUDA_ DNNL_ FSDP_ HF_ MKL_ MPL PYTHON TORCH_ TRANSFORMERS_ USE_
""".split()


@pytest.fixture(autouse=True)
def _restore_environment():
    """Arguments write variables: their precision, where a launcher would, and how to be deterministic."""
    before = {name: value for name, value in os.environ.items() if name.startswith(tuple(STAYS))}
    yield
    for name in [each for each in os.environ if each.startswith(tuple(STAYS))]:
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _reset_logging():
    """Messages that are logged once in a process come again in each test, and no level that a Trainer has set stays."""
    if (ours := logging.getLogger("hftrainer")).level:
        ours.setLevel(logging.NOTSET)
    if "hftrainer.base.messages" in sys.modules:
        sys.modules["hftrainer.base.messages"].log_once.cache_clear()


@pytest.fixture(autouse=True)
def _reset_mlflow():
    """MLflow keeps the database and the experiment that it last used: those of a test that has ended."""
    yield
    if "mlflow" in sys.modules:
        importlib.import_module("tests.support.tracking").forget_mlflow()


@pytest.fixture(autouse=True)
def _quiet_and_deterministic():
    """One thread: two would only get in each other's way on two cores, and the reductions stay the same ones."""
    torch.set_num_threads(1)
    lightnings = logging.getLogger("lightning.pytorch")
    if lightnings.level != logging.ERROR:  # setting it empties the caches of all loggers
        lightnings.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        # Deprecations inside lightning and torch on one another are theirs to mend.
        warnings.filterwarnings("ignore", category=FutureWarning, module="(lightning|torch)")
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="(lightning|torch)")
        yield
