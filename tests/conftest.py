import importlib
import logging
import os
import sys
import warnings

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Trackers report on themselves unless they are told not to; no test is to reach for a network.
os.environ["COMET_ERROR_TRACKING_ENABLE"] = os.environ["WANDB_ERROR_REPORTING"] = "false"
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"


TABLES = {
    "optimizers and schedules": "tests.parity.optimizer_table",
    "Lightning callbacks": "tests.conformance.callback_table",
}


class FoundOut:
    """The tables of what tests have found out, in the process that prints them; pytest-xdist's workers send theirs."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error):
        for module, status in getattr(node, "workeroutput", {}).get("tables", {}).items():
            importlib.import_module(module).STATUS.update(status)


def pytest_configure(config):
    config.pluginmanager.register(FoundOut())


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


@pytest.fixture(autouse=True)
def _quiet_and_deterministic():
    """One thread: two would only get in each other's way on two cores, and the reductions stay the same ones."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        # Deprecations inside lightning and torch on one another are theirs to mend.
        warnings.filterwarnings("ignore", category=FutureWarning, module="(lightning|torch)")
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="(lightning|torch)")
        yield
