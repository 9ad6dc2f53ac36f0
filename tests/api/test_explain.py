"""`python -m hftrainer explain`: what becomes of each argument."""

import inspect
import json
import subprocess

import lightning.pytorch as pl
import pytest

from hftrainer import TrainingArguments
from tests import warm


def explain(*words: str) -> subprocess.CompletedProcess:
    env = {**warm.environment(), **warm.LIBRARIES}
    return subprocess.run([warm.PYTHON, "-m", "hftrainer", "explain", *words], env=env, capture_output=True, text=True)


def test_command_line(tmp_path):
    done = explain(
        *("--gradient_accumulation_steps", "4", "--do_train", "--learning_rate", "3e-4", "--no_cuda"),
        *("--train_sampling_strategy", "batch_rebalance"),
    )
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert "  gradient_accumulation_steps=4: accumulate_grad_batches" in text
    assert "  do_train=True: a switch for your script" in text
    assert "  train_sampling_strategy='batch_rebalance': leave it at 'random'" in text
    assert "accumulate_grad_batches=4" in text.split("The same by hand")[1]
    assert max(map(len, text.splitlines())) <= 80
    assert not list(tmp_path.iterdir())


def test_json():
    done = explain("--json", "--max_steps", "3")
    assert json.loads(done.stdout)["arguments"] == [
        {"argument": "max_steps", "value": 3, "kind": "handled", "detail": "data.schedule"}
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--learning_rat", "3"], "--learning_rat; did you mean --learning_rate"),
        (["--logging_steps", "0"], "logging_steps=0"),
        (["--eval_strategy", "sometimes"], "invalid choice"),
    ],
)
def test_wrong_arguments(words, message):
    done = explain(*words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("settings", "kind", "argument"),
    [
        ({"fsdp": "full_shard auto_wrap"}, "mapped", "fsdp"),
        ({"sharded_ddp": "zero_dp_3"}, "mapped", "fsdp"),
        ({"deepspeed": {"zero_optimization": {"stage": 2}}}, "mapped", "deepspeed"),
        ({"tpu_num_cores": 8}, "handled", "tpu_num_cores"),
        ({"use_mps_device": True}, "handled", "use_mps_device"),
        ({"bf16": True}, "mapped", "bf16"),
        ({"train_sampling_strategy": "batch_rebalance"}, "planned", "train_sampling_strategy"),
        ({"train_sampling_strategy": "sequential"}, "handled", "train_sampling_strategy"),
        ({"use_ipex": True}, "refused", "use_ipex"),
    ],
)
@pytest.mark.usefixtures("deepspeed_installed")
def test_kinds(settings, kind, argument):
    lines = {line.argument: line for line in TrainingArguments(**settings).explain().lines}
    assert lines[argument].kind == kind
    assert lines.keys() == {argument}


def test_defaults_and_tokens():
    assert "All arguments have their defaults." in str(TrainingArguments().explain())
    assert "secret" not in str(TrainingArguments(hub_token="secret").explain())


def test_the_call_is_one_that_lightning_takes():
    from hftrainer.arguments.resolved import ResolvedArguments
    from hftrainer.arguments.table import make_plan

    keywords = make_plan(ResolvedArguments(TrainingArguments("x", bf16=True, use_cpu=True))).trainer_keywords()
    assert keywords.keys() <= inspect.signature(pl.Trainer.__init__).parameters.keys()
    trainer = pl.Trainer(**keywords, logger=False, enable_progress_bar=False, enable_model_summary=False)
    assert trainer.precision == "bf16-mixed"


def test_nothing_is_imported_for_it():
    code = (
        "import sys; from hftrainer import TrainingArguments; str(TrainingArguments(max_steps=1).explain());"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'lightning', 'transformers'}))"
    )
    env = {**warm.environment(), **warm.LIBRARIES}
    done = subprocess.run([warm.PYTHON, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
