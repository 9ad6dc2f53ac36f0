"""Under `install()`, what scripts import to compare with is what the arguments and the Trainer have."""

import json

import pytest

SCRIPT = """
import json, sys, warnings
warnings.simplefilter("ignore")
order = sys.argv[1]
if order == "install first":
    import hftrainer; hftrainer.install()
import transformers.trainer, transformers.training_args
if order == "transformers first":
    import hftrainer; hftrainer.install()
from transformers import Adafactor, SchedulerType, Trainer, TrainerCallback, TrainingArguments
from transformers.debug_utils import DebugOption
from transformers.trainer_utils import HPSearchBackend, HubStrategy, IntervalStrategy, SaveStrategy
from transformers.training_args import OptimizerNames, ParallelMode
from tests.support.small_models import make_plain, plain_data
import torch
import transformers.optimization

class Own(TrainerCallback):
    pass

class Bar(TrainerCallback):
    pass

KINDS = {
    "eval_strategy": IntervalStrategy, "logging_strategy": IntervalStrategy, "save_strategy": SaveStrategy,
    "hub_strategy": HubStrategy, "lr_scheduler_type": SchedulerType, "optim": OptimizerNames,
}
settings = {"use_cpu": True, "report_to": [], "optim": "adafactor", "eval_strategy": "steps", "max_steps": 1}
args = TrainingArguments("out", debug="underflow_overflow", **settings)
found = {
    "isinstance": {name: isinstance(getattr(args, name), kind) for name, kind in KINDS.items()},
    "str": {name: str(getattr(args, name)) for name in [*KINDS, "parallel_mode"]},
    "format": [f"{args.lr_scheduler_type} {args.eval_strategy:>30}", "%s" % args.optim, repr(args.save_strategy)],
    "mode": [args.parallel_mode is ParallelMode.NOT_PARALLEL, args.parallel_mode == ParallelMode.DISTRIBUTED],
    "sagemaker": args.parallel_mode == ParallelMode.SAGEMAKER_MODEL_PARALLEL,
    "debug": [DebugOption.UNDERFLOW_OVERFLOW in args.debug, isinstance(args.debug[0], DebugOption)],
    "strings": [args.eval_strategy == "steps", args.optim in ("adafactor",), {"linear": 1}[args.lr_scheduler_type]],
    "backend": str(HPSearchBackend.OPTUNA),
    "one class": [
        getattr(module, name, kind) is kind
        for module in (transformers.trainer, transformers.training_args)
        for name, kind in {"IntervalStrategy": IntervalStrategy, "ParallelMode": ParallelMode,
                           "OptimizerNames": OptimizerNames, "DebugOption": DebugOption}.items()
    ],
    "members": {kind.__name__: sorted(kind.__members__) for kind in (OptimizerNames, ParallelMode, SchedulerType)},
}
schedule = transformers.get_scheduler(SchedulerType.COSINE, torch.optim.SGD([torch.ones(1)], lr=1.0), 1, 4)
found["schedule"] = type(schedule).__name__
transformers.trainer.DEFAULT_CALLBACKS.append(Own)

data = plain_data(8)
args.debug = []
trainer = Trainer(make_plain(), args, train_dataset=data, eval_dataset=data)
found["callbacks"] = trainer.callback_handler.callback_list.split()
trainer.train()
found["optimizer"] = isinstance(getattr(trainer.optimizer, "optimizer", trainer.optimizer), Adafactor)
found["class"] = Trainer.get_optimizer_cls_and_kwargs(args)[0] is Adafactor
transformers.trainer.DEFAULT_CALLBACKS = transformers.trainer.DEFAULT_CALLBACKS[:1]
transformers.trainer.DEFAULT_PROGRESS_CALLBACK = Bar
found["rebound"] = Trainer(make_plain(), args, eval_dataset=data).callback_handler.callback_list.split()
args.optim = OptimizerNames.ADAMW_HF if hasattr(transformers.optimization, "AdamW") else "adamw_torch"
expected = getattr(transformers.optimization, "AdamW", torch.optim.AdamW)
found["adamw"] = Trainer.get_optimizer_cls_and_kwargs(args)[0] is expected
print("FOUND", Trainer.__module__.split(".")[0], json.dumps(found))
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory, processes):
    """Order of the imports → the library of the Trainer, and what the script found."""
    orders = ("install first", "transformers first", "transformers alone")
    return {order: run(processes, tmp_path_factory.mktemp("out"), order) for order in orders}


def run(processes, folder, order):
    done = processes.run("-c", SCRIPT, order, cwd=folder, fresh=True)
    assert done.returncode == 0, done.stderr
    results = next(line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    _, library, values = results.split(" ", 2)
    return library, json.loads(values)


@pytest.mark.parametrize("order", ["install first", "transformers first"])
def test_names_and_values_are_those_of_transformers(results, order):
    (library, ours), (stock, theirs) = results[order], results["transformers alone"]
    assert (library, stock) == ("hftrainer", "transformers")
    ours, theirs = dict(ours), dict(theirs)
    of_ours, of_theirs = ours.pop("members"), theirs.pop("members")
    assert ours == theirs
    for kind, members in of_theirs.items():  # ours has those of all releases
        assert set(members) <= set(of_ours[kind])
