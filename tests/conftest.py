import logging
import os
import sys
import warnings

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_terminal_summary(terminalreporter):
    """Print the tables of what was found out, if their tests have run."""
    tables = {
        "optimizers and schedules": "tests.parity.optimizer_table",
        "Lightning callbacks": "tests.conformance.callback_table",
    }
    for title, module in tables.items():
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
