"""`install()` warns of modules that imported or changed transformers' Trainer before it, and of nothing else."""

import importlib.util
import json

import pytest

#: Files of a library that derives from transformers' classes.
LIBRARY = {
    "lib/__init__.py": "from lib.trainers import SFTTrainer, SFTConfig\n",
    "lib/trainers.py": """
from transformers import Trainer, TrainerCallback, TrainingArguments
class SFTConfig(TrainingArguments): pass
class SFTTrainer(Trainer): pass
class Further(SFTTrainer): pass
class Logs(TrainerCallback): pass
""",
    "derives.py": """
import transformers
class Own(transformers.Trainer): pass
class Generates(transformers.Seq2SeqTrainer): pass
""",
    "callbacks_only.py": "from transformers import TrainerCallback\nclass Logs(TrainerCallback): pass\n",
    "patches.py": """
from transformers.trainer import Trainer as T
original = T.training_step
def training_step(self, *args, **kwargs):
    return original(self, *args, **kwargs)
T.training_step = training_step
del T
""",
    "early.py": "from transformers import Trainer\n",
}
#: The environments of older releases have no peft.
PEFT = ", peft" if importlib.util.find_spec("peft") else ""
#: Runs each script in a fork of a process that has transformers loaded, as importing it takes seconds.
DRIVER = f"""
import json, os, runpy, sys, warnings
import transformers.trainer, transformers.trainer_seq2seq, hftrainer, accelerate, torch{PEFT}
for name in sorted(os.listdir(".")):
    if name.endswith("_train.py") and os.fork() == 0:
        sys.path.insert(0, os.getcwd())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            runpy.run_path(name, run_name="__main__")
        with open(name + ".json", "w") as file:
            json.dump([[os.path.basename(w.filename), w.lineno, str(w.message)] for w in caught], file)
        os._exit(0)
while True:
    try:
        if os.wait()[1]:
            sys.exit("a script has failed")
    except ChildProcessError:
        break
"""


def file_of(case: str) -> str:
    return case.replace(" ", "_").replace("'", "") + "_train.py"


@pytest.fixture(scope="module")
def warnings_of(tmp_path_factory, processes):
    """Case → the warnings of its script: file, line, and message."""
    folder = tmp_path_factory.mktemp("scripts")
    for name, text in LIBRARY.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    scripts = {case: script for case, (script, _) in CASES.items()} | SILENT
    for case, script in scripts.items():
        (folder / file_of(case)).write_text(script)
    done = processes.run("-c", DRIVER, cwd=folder, fresh=True)
    assert done.returncode == 0, done.stderr
    return {case: json.loads((folder / f"{file_of(case)}.json").read_text()) for case in scripts}


CASES = {
    "a library": (
        "import os\nfrom lib import SFTTrainer\nimport hftrainer\n\nhftrainer.install()\n",
        [
            "lib.trainers imported transformers.Trainer before hftrainer.install()",
            "(lib.trainers.Further, lib.trainers.SFTTrainer)",
            "call install() before that import, or run the script with `python -m hftrainer run`",
        ],
    ),
    "derived": ("import derives, hftrainer\nhftrainer.install()\n", ["(derives.Generates, derives.Own)"]),
    "the script itself": (
        "import torch\nfrom transformers import Seq2SeqTrainer\nimport hftrainer\nhftrainer.install()\n",
        ["__main__ imported transformers.Trainer"],
    ),
    "imported by another": (
        "import importlib, hftrainer\nimportlib.import_module('early')\nhftrainer.install()\n",
        ["early imported transformers.Trainer before hftrainer.install()"],
    ),
    "replaced methods": (
        "import patches\nimport hftrainer\nhftrainer.install()\n",
        [
            "Methods of transformers.Trainer were replaced before hftrainer.install(), which has no effect now",
            "training_step by patches",
            "To replace hftrainer's, call install() before that import.",
        ],
    ),
}
SILENT = {
    "after": "import transformers\nimport hftrainer\nhftrainer.install()\nimport lib, early, patches\n",
    "its own modules": f"import transformers.trainer, accelerate{PEFT}\nimport hftrainer\nhftrainer.install()\n",
    "callbacks and arguments": (
        "import callbacks_only, hftrainer\nfrom transformers import TrainingArguments\nhftrainer.install()\n"
    ),
    "twice": "import hftrainer\nhftrainer.install()\nhftrainer.install()\nhftrainer.uninstall()\nhftrainer.install()\n",
}


@pytest.mark.parametrize("case", CASES)
def test_import_before_install_warns(warnings_of, case):
    script, expected = CASES[case]
    ((file, line, warning),) = warnings_of[case]
    for part in expected:
        assert part in warning
    assert file == file_of(case)  # the warning is at the call
    assert "install()" in script.splitlines()[line - 1]


@pytest.mark.parametrize("case", SILENT)
def test_imports_that_are_not_too_early_do_not_warn(warnings_of, case):
    assert warnings_of[case] == []


LATE = """
import copy, pickle, sys, warnings
import transformers.trainer
from transformers import EvalPrediction, Trainer, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, PredictionOutput
import hftrainer
warnings.simplefilter("ignore")
hftrainer.install()
from tests.support.small_models import make_plain, plain_data
args = TrainingArguments("out", max_steps=2, save_steps=1, report_to="none", use_cpu=True, disable_tqdm=True)
for copied in (copy.copy(args), copy.deepcopy(args)):
    assert type(copied) is TrainingArguments and copied.max_steps == 2
assert copy.deepcopy(args).accelerator_config is not args.accelerator_config
output = PredictionOutput(1, 2, {})
assert type(copy.deepcopy(output)) is PredictionOutput
assert copy.deepcopy(IntervalStrategy.STEPS) is IntervalStrategy.STEPS
Trainer(make_plain(), args, train_dataset=plain_data()).train()
assert Trainer.__module__.startswith("transformers")
with open("output.pickle", "wb") as file:
    pickle.dump([output, IntervalStrategy.STEPS], file)
"""
READ = """
import pickle, sys
import torch
args = torch.load("out/checkpoint-2/training_args.bin", weights_only=False)
kinds = {type(args), type(args.accelerator_config)}
with open("output.pickle", "rb") as file:
    kinds |= {type(each) for each in pickle.load(file)}
assert all(kind.__module__.split(".")[0] == "transformers" for kind in kinds), [kind.__module__ for kind in kinds]
assert args.max_steps == 2
"""


def test_script_that_keeps_the_original_trainer_saves_checkpoints(tmp_path, processes):
    """The arguments pickled in them are of the original class."""
    for code in (LATE, READ):
        done = processes.run("-c", code, cwd=tmp_path, fresh=True)
        assert done.returncode == 0, done.stderr[-3000:]
