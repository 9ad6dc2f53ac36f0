import collections
import gc
import importlib
import logging
import os
import platform
import sys
import warnings

import pytest

if platform.machine() in ("x86_64", "AMD64"):
    # The same kernels on every processor, so that the bits that were recorded of a peer hold on more than one.
    os.environ.setdefault("ATEN_CPU_CAPABILITY", "avx2")
    os.environ.setdefault("DNNL_MAX_CPU_ISA", "AVX2")
    os.environ.setdefault("MKL_CBWR", "COMPATIBLE")
# Threads that share an operation of a tiny model wait for one another. It holds for the processes of tests too, and one
# that forks others (warm.py) has to have one thread.
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import torch  # it reads them when it is imported

from tests import durations, warm
from tests.releases import TRANSFORMERS, installed, pinned

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Trackers report on themselves unless they are told not to; no test is to reach for a network.
os.environ["COMET_ERROR_TRACKING_ENABLE"] = os.environ["WANDB_ERROR_REPORTING"] = "false"
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ["COMET_DISABLE_AUTO_LOGGING"] = "1"  # it would write down every run of MLflow, and wait for its threads
# Under a CI service, transformers hands its lines on to Python's root logger too: they would be seen twice.
os.environ.pop("CI", None)
# Loading processes that garbage collection ends do not hear of it: torch waits so long for each, by default 5 seconds.
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5
warm.prepare()
warm.spare_what_stays()


TABLES = {
    "optimizers and schedules": "tests.parity.optimizer_table",
    "Lightning callbacks": "tests.conformance.callback_table",
    "comparisons with transformers": "tests.peers",
    "made-up inputs": "tests.reliability.fuzz",
}


class FoundOut:
    """The tables of what tests have found out, in the process that prints them; pytest-xdist's workers send theirs."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error):
        for module, status in getattr(node, "workeroutput", {}).get("tables", {}).items():
            importlib.import_module(module).STATUS.update(status)


def pytest_configure(config):
    config.pluginmanager.register(FoundOut())


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


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        imported = {module: sys.modules[module] for module in TABLES.values() if module in sys.modules}
        session.config.workeroutput["tables"] = {module: dict(table.STATUS) for module, table in imported.items()}


def pytest_terminal_summary(terminalreporter):
    """Print the tables of what was found out, if their tests have run."""
    for title, module in TABLES.items():
        table = sys.modules.get(module)
        if table is None or not table.STATUS:
            continue
        terminalreporter.section(title)
        for line in table.lines():
            terminalreporter.write_line(line)


def shared_fixtures(item):
    """The fixtures that a test shares with others of its file: the first that asks for one is measured with it."""
    made = [each[-1] for each in item._fixtureinfo.name2fixturedefs.values()]
    return {(item.path, each.argname) for each in made if each.scope == "module" and each.baseid.endswith(".py")}


@pytest.hookimpl(tryfirst=True)  # before those that are marked are left out
def pytest_collection_modifyitems(items):
    """Mark the tests that were slow when they were last measured; the files that take longest come first.

    A worker of pytest-xdist takes whole files: the last ones are to be short.
    """
    skip_comparisons_with_the_newest(items)
    known = durations.load()
    seconds = {item: known.get(durations.function_of(item.nodeid), 0.0) for item in items}
    slow = {item for item, taken in seconds.items() if taken > durations.SLOW}
    of_slow = {fixture for item in slow for fixture in shared_fixtures(item)}
    whole = collections.Counter()
    for item, taken in seconds.items():
        if item in slow or shared_fixtures(item) & of_slow:
            item.add_marker(pytest.mark.slow)
        whole[item.path] += taken
    items.sort(key=lambda item: -whole[item.path])


@pytest.fixture(autouse=True)
def _what_is_imported_stays():
    """accelerate collects garbage whenever it frees memory: looking through all that was imported is most of a run."""
    if any(gc.get_count()[1:]):  # many objects are new
        gc.collect()
        gc.freeze()


#: Where a launcher would write, and what libraries read when they are imported.
STAYS = ("ACCELERATE_", "FSDP_", *warm.AT_IMPORT[warm.TRAINERS])


@pytest.fixture(autouse=True)
def _environment_stays():
    """Arguments write variables: their precision, where a launcher would, and how to be deterministic.

    The next test reads them; and a script that has another value than the warm processes starts cold.
    """
    before = {name: value for name, value in os.environ.items() if name.startswith(STAYS)}
    yield
    for name in [each for each in os.environ if each.startswith(STAYS)]:
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _mlflow_is_as_new():
    """It keeps the database and the experiment that it last used: those of a test that has ended."""
    yield
    if "mlflow" in sys.modules:
        importlib.import_module("tests.tracking").forget_mlflow()


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
