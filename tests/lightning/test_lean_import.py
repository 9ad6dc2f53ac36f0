"""A first run imports little, and torchmetrics is complete for whoever imports it afterwards."""

import pytest

TRAIN = """
import gc, sys
from hftrainer import Trainer, TrainingArguments
from tests.support.small_models import make_plain, plain_data

quiet = dict(report_to="none", disable_tqdm=True, save_strategy="no", use_cpu=True)
Trainer(make_plain(), TrainingArguments("unused", max_steps=1, **quiet), train_dataset=plain_data(2)).train()
assert gc.isenabled()
"""
LEAN = """
import sys
from hftrainer.plugins import lightning_engine_module
lightning_engine_module()
from lightning.pytorch.core.module import Metric as of_lightning
assert "torchmetrics.functional" not in sys.modules
"""


@pytest.fixture(scope="module")
def run(processes, tmp_path_factory):
    def run_code(code, folder=None):
        done = processes.run("-c", code, cwd=folder or tmp_path_factory.mktemp("run"), fresh=True)
        assert done.returncode == 0, done.stderr

    return run_code


#: Name → code that runs in a new process.
FRESH = {
    # neither metrics, nor transformers and its models, which torchmetrics would import
    "a run needs no metrics": f"""{TRAIN}
assert not {{"torchmetrics.functional", "transformers"}} & {{*sys.modules}}
""",
    "the classes need neither Lightning nor a tracker": """
import sys
from hftrainer import Trainer, TrainingArguments
assert not {"lightning", "wandb", "mlflow", "tensorboard", "comet_ml"} & {*sys.modules}
""",
    "torchmetrics is left alone once it is there": """
import sys
import torchmetrics
from hftrainer.plugins import lightning_engine_module
lightning_engine_module()
assert sys.modules["torchmetrics"] is torchmetrics and "__getattr__" not in vars(torchmetrics)
""",
    # a release of Lightning may ask for more while it is imported
    "any other name completes torchmetrics": """
import sys
import hftrainer_lightning
hftrainer_lightning._defer_torchmetrics()
from torchmetrics import Metric
assert "torchmetrics.functional" not in sys.modules
from torchmetrics import SumMetric
assert "torchmetrics.functional" in sys.modules and issubclass(SumMetric, Metric)
import torchmetrics
assert torchmetrics.SumMetric is SumMetric and "__getattr__" not in vars(torchmetrics)
""",
    "garbage collection stays on": f"import gc; gc.enable()\n{LEAN}\nassert gc.isenabled()",
    "garbage collection stays off": f"import gc; gc.disable()\n{LEAN}\nassert not gc.isenabled()",
}


@pytest.mark.parametrize("name", FRESH)
def test_import_leaves_out_what_is_not_needed(run, name):
    run(FRESH[name])


#: Runs after LEAN, each in a fork of the same process.
WHOLE = """
import torchmetrics
from torchmetrics.classification import BinaryAccuracy
assert sys.modules["torchmetrics"] is torchmetrics
assert torchmetrics.classification.BinaryAccuracy is BinaryAccuracy and issubclass(BinaryAccuracy, of_lightning)
assert torchmetrics.Metric is torchmetrics.metric.Metric is of_lightning
assert torchmetrics.SumMetric()(2.0) == 2
assert "__getattr__" not in vars(torchmetrics) and torchmetrics.__version__
assert torchmetrics._logger.handlers and not hasattr(torchmetrics, "nothing")
for name in [name for name in sys.modules if name.startswith("torchmetrics.")]:
    parent, _, child = name.rpartition(".")
    assert hasattr(sys.modules[parent], child), name
"""
FORKED = {
    "the package": "import torchmetrics" + WHOLE,
    "all names": "from torchmetrics import *; SumMetric" + WHOLE,
    "a search through all modules": """
for module in list(sys.modules.values()):
    hasattr(module, "__warningregistry__")
assert "torchmetrics.functional" not in sys.modules
"""
    + WHOLE,
    "a submodule": "import torchmetrics.metric" + WHOLE,
    "a metric": "from torchmetrics.classification import BinaryAccuracy" + WHOLE,
    "pickled before": "import pickle; pickle.dumps(of_lightning); import torchmetrics" + WHOLE,
    "two threads": """
import threading
thread = threading.Thread(target=__import__, args=("torchmetrics",))
thread.start()
import torchmetrics
thread.join()
"""
    + WHOLE,
    "a metric is known without the package": """
from torchmetrics.metric import Metric
from hftrainer.compat.libraries import is_torchmetric

class Own(Metric):
    def update(self): ...
    def compute(self): ...

sys.modules.pop("torchmetrics", None)
assert is_torchmetric(Own()) and not is_torchmetric(Own)
""",
}


@pytest.fixture(scope="module")
def failures(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("forked")
    code = f"""{LEAN}
import os, traceback
for number, code in enumerate({list(FORKED.values())!r}):
    if (child := os.fork()) == 0:
        status = 0
        try:
            exec(code, globals())
        except BaseException:
            status = 1
            with open(f"{{number}}", "w") as file:
                traceback.print_exc(file=file)
        os._exit(status)
    if os.waitpid(child, 0)[1]:
        open(f"{{number}}", "a").close()
"""
    run(code, folder)
    files = {name: folder / str(number) for number, name in enumerate(FORKED)}
    return {name: file.read_text() or "it was ended" for name, file in files.items() if file.exists()}


@pytest.mark.parametrize("name", FORKED)
def test_torchmetrics_is_complete_when_imported_later(failures, name):
    assert name not in failures, failures[name]
