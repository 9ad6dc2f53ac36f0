"""Wrong arguments get one clear error that names them, the reason and what to do, before any training."""

import errno
import math

import numpy as np
import pytest
import transformers

import hftrainer
from hftrainer import Trainer, TrainingArguments
from hftrainer.arguments.checks.unsupported import check_supported
from hftrainer.arguments.resolved import ResolvedArguments
from hftrainer.errors import InvalidArgument, MetricNotFound, UnknownArgument, UnsupportedArgument, WrongObject
from tests.support.small_models import make_plain, plain_data

BEST = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rat": 1}, "has no argument 'learning_rat'; did you mean 'learning_rate'"),
        ({"max_epochs": 1}, "did you mean 'num_train_epochs'"),  # as in Lightning, and nearer to max_steps
        ({"sead": 1, "max_step": 2}, "'sead'.*'max_step'"),
        ({"Epoch": 1}, "did you mean 'num_train_epochs'"),  # nearly the name of another library
    ],
)
def test_unknown_argument_suggests_the_nearest_name(settings, message):
    with pytest.raises(UnknownArgument, match=message):
        TrainingArguments("unused", **settings)
    assert issubclass(UnknownArgument, TypeError) and issubclass(MetricNotFound, KeyError)  # as in transformers


@pytest.mark.parametrize(
    ("settings", "messages"),
    [
        ({"logging_steps": 0}, ["logging_steps"]),
        ({"logging_steps": 1.5}, ["logging_steps"]),
        ({"eval_strategy": "steps", "eval_steps": -3}, ["eval_steps"]),
        (
            {"eval_strategy": "step"},
            ["eval_strategy: 'step' is not valid; did you mean 'steps'? Choose one of no, steps, epoch."],
        ),
        ({"on_divergence": "roll"}, ["on_divergence: 'roll' is not valid; did you mean 'rollback'? Choose one of"]),
        ({"lr_scheduler_type": "warmup_"}, ["lr_scheduler_type: 'warmup_' is not valid; did you mean 'warmup_stable"]),
        ({"lr_scheduler_type": "co"}, ["lr_scheduler_type: 'co' is not valid. Choose one of"]),
        ({"save_strategy": "best"}, ["save_strategy"]),
        ({"bf16": True, "fp16": True}, ["bf16"]),
        ({"lr_scheduler_kwargs": "{broken"}, ["lr_scheduler_kwargs"]),
        ({"lightning_config": "{broken"}, ["lightning_config is not a valid JSON object"]),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, ["lr_scheduler_type"]),
        ({"debug": "overflow"}, ["debug: unknown ['overflow']: use underflow_overflow and tpu_metrics_debug"]),
        ({"fsdp": "full_shrd", "seed": -1}, ["did you mean 'full_shard'?"]),
        ({"optim": "adam"}, ["'adamw_torch'? python -m hftrainer explain optim lists all 43."]),
        *(({"optim": name}, ["'adamw_torch'? "]) for name in ("adamww", "adam_w", "AdamW")),
        ({"output_dir": "s3//bucket/run"}, ["use 's3://bucket/run', or './s3//bucket/run' for a folder"]),
        ({"storage_url": "s3//bucket/run"}, ["has no scheme (did you mean 's3://bucket/run'?)"]),
        ({"optim": "adam", "logging_steps": 0, "eval_strategy": "steps"}, ["optim: 'adam'", "logging_steps=0: "]),
        ({"adam_beta1": 2.0, "adam_beta2": -1}, ["adam_beta1=2.0: use a number of at least 0 and below 1", "beta2=-1"]),
        *(
            ({name: value}, [f"{name}={value}: use a "])
            for value in (math.nan, math.inf)
            for name in ("learning_rate", "weight_decay", "warmup_steps", "adam_epsilon", "neftune_noise_alpha")
        ),
        *(({name: math.nan}, [f"{name}=nan: use a number"]) for name in ("max_grad_norm", "num_train_epochs")),
        ({"num_train_epochs": math.inf}, ["num_train_epochs=inf needs max_steps"]),
        *(({"bf16": value}, [f"bf16={value!r}", "True or False"]) for value in ("no", 2, [True])),
        ({"label_smoothing_factor": 1.5}, ["label_smoothing_factor=1.5: use a number"]),
        ({"seed": None}, ["seed=None: use a number of at least 0"]),
        ({"num_train_epochs": None}, ["num_train_epochs=None: use a number"]),
        ({"optim": ["adam"]}, ["optim: ['adam'] is not valid. Choose one of adamw_hf"]),
        ({"log_level": "loud"}, ["log_level"]),
        ({"train_sampling_strategy": "by_chance"}, ["train_sampling_strategy"]),
        ({"elastic": True, "auto_find_batch_size": True}, ["elastic=True keeps the samples of a step"]),
        ({"torch_empty_cache_steps": 0}, ["torch_empty_cache_steps=0: ", "at least 1, or None"]),
        ({"torch_empty_cache_steps": -1}, ["torch_empty_cache_steps=-1: ", "at least 1, or None"]),
        ({"torch_empty_cache_steps": 1.0}, ["torch_empty_cache_steps=1.0: ", "at least 1, or None"]),
        (
            {"optim": "adamm", "lr_scheduler_type": "liner", "fsdp_config": "{1", "per_device_eval_batch_size": 0},
            ["optim: 'adamm'", "lr_scheduler_type: 'liner'", "'linear'?", "fsdp_config is not a valid", "batch_size=0"],
        ),
        (
            {"per_device_train_batch_size": 0, "warmup_steps": -1, "dataloader_prefetch_factor": 2},
            ["per_device_train_batch_size=0", "warmup_steps=-1", "dataloader_prefetch_factor=2"],
        ),
        ({**BEST, "save_strategy": "epoch"}, ["'steps' and save_strategy='epoch' differ"]),
        ({**BEST, "eval_strategy": "no", "save_strategy": "epoch"}, ["'no' and save_strategy='epoch' differ"]),
        ({**BEST, "eval_steps": 4, "save_steps": 6}, ["save_steps=6 is not a multiple of eval_steps=4"]),
        ({**BEST, "eval_steps": 4, "save_steps": 0.5}, ["of eval_steps=4: use two whole numbers or two fractions"]),
        ({**BEST, "eval_steps": 0.2, "save_steps": 0.5}, ["save_steps=0.5 is not a multiple of eval_steps=0.2"]),
    ],
    ids=str,
)
def test_invalid_value_is_named_with_the_reason(settings, messages):
    with pytest.raises(InvalidArgument) as caught:
        Trainer(make_plain(), TrainingArguments(**{"output_dir": "unused", **settings}))
    assert all(message in str(caught.value) for message in messages)


def test_save_steps_share_that_is_a_multiple_is_accepted(make_args):
    make_args(**BEST, eval_steps=0.1, save_steps=0.3)


def test_unsupported_arguments_are_named_together(make_args):
    words = "mp_parameters='a=b' is not supported.*\nfsdp='full_shard' shards the model over processes"
    with pytest.raises(UnsupportedArgument, match=words):
        Trainer(make_plain(), make_args(fsdp="full_shard", mp_parameters="a=b"))


def test_negative_num_train_epochs_warns_without_max_steps(make_args, caplog):
    Trainer(make_plain(), make_args(num_train_epochs=-1, max_steps=-1), train_dataset=plain_data()).train()
    assert "num_train_epochs=-1 trains no step: use more than 0." in caplog.text
    caplog.clear()
    Trainer(make_plain(), make_args(num_train_epochs=-1, max_steps=1), train_dataset=plain_data()).train()
    assert "num_train_epochs=-1" not in caplog.text


def test_floats_for_integers_are_accepted_or_named(make_args):
    """transformers accepts some floats for integers; for others, its DataLoader or `range` fails."""
    args = make_args(save_strategy="steps", save_steps=1.0, save_total_limit=1.0, dataloader_num_workers=0.0)
    assert Trainer(make_plain(), args, train_dataset=plain_data()).train().global_step == 2
    names = "per_device_train_batch_size per_device_eval_batch_size max_steps seed dataloader_num_workers".split()
    refused = dict.fromkeys(names, 4.0)
    with pytest.raises(WrongObject) as caught:
        Trainer(make_plain(), make_args(eval_strategy="steps", **refused))
    assert all(f"{name}=4.0 is a float: use a whole number, 4." in str(caught.value) for name in refused)


@pytest.mark.parametrize("package", [hftrainer, transformers])
def test_float_eval_batch_size_fails_in_evaluation_only(tmp_path, package):
    args = package.TrainingArguments(str(tmp_path), per_device_eval_batch_size=4.0, max_steps=2, use_cpu=True)
    data = {"train_dataset": plain_data(), "eval_dataset": plain_data()}
    trainer = package.Trainer(make_plain(), args, **data)
    assert trainer.train().global_step == 2
    with pytest.raises(ValueError, match="batch_size"):
        trainer.evaluate()


@pytest.mark.parametrize(
    ("settings", "then"),
    [
        ({"save_strategy": "best", "eval_strategy": "epoch"}, {"metric_for_best_model": "loss"}),
        ({"learning_rate": "2e-5"}, {"learning_rate": 2e-5}),
        ({"per_device_train_batch_size": None}, {"per_device_train_batch_size": 2}),
        ({"gradient_accumulation_steps": 0}, {"gradient_accumulation_steps": 1}),
        ({"num_train_epochs": None, "max_steps": None}, {"num_train_epochs": 1.0, "max_steps": -1}),
    ],
)
def test_arguments_may_be_completed_before_the_trainer_is_made(make_args, settings, then):
    """As in transformers, whose scripts and libraries complete arguments that they have made."""
    args = make_args(**settings)
    for name, value in then.items():
        setattr(args, name, value)
    Trainer(make_plain(), args, eval_dataset=[])


def test_values_of_another_type_are_named(make_args):
    with pytest.raises(WrongObject, match=r"learning_rate='1e-8' is text: .*1\.0e-5 as a number"):
        Trainer(make_plain(), make_args(learning_rate="1e-8"))
    with pytest.raises(WrongObject, match=r"dataloader_num_workers='2' is text"):
        Trainer(make_plain(), make_args(dataloader_num_workers="2"))
    with pytest.raises(WrongObject, match=r"num_train_epochs='3' is text: .*\nmax_steps='10' is text"):
        Trainer(make_plain(), make_args(num_train_epochs="3", max_steps="10"))
    with pytest.raises(WrongObject, match=r"lr_scheduler_kwargs='num_cycles=3': use a dict"):
        Trainer(make_plain(), make_args(lr_scheduler_kwargs="num_cycles=3"))
    with pytest.raises(WrongObject, match=r"metric_for_best_model=3: use its name"):
        make_args(metric_for_best_model=3)


@pytest.mark.parametrize("name", ["learning_rate", "tokens_per_batch", "weight_decay", "seed", "save_steps"])
def test_words_in_place_of_numbers_are_named(make_args, name):
    with pytest.raises(InvalidArgument, match=rf"^{name}='fast' is text: use a number\.$"):
        make_args(**{name: "fast", "max_steps": "1e1"})


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_output_dir_that_is_a_file_is_refused(tmp_path, name):
    (tmp_path / "file").touch()
    args = TrainingArguments(str(tmp_path / name), use_cpu=True)
    with pytest.raises(FileExistsError, match=r"output_dir=.*: this path, or one of its parents, is a file"):
        Trainer(make_plain(), args)


@pytest.mark.parametrize(
    ("code", "remedy"), [(errno.EACCES, "folder, or change its permissions"), (errno.ENOENT, "folder")]
)
def test_output_dir_that_cannot_be_created_is_named(tmp_path, monkeypatch, code, remedy):
    def fail(*_, **__):
        raise OSError(code, "reason", "/there")

    args = TrainingArguments("/there/run", use_cpu=True)
    monkeypatch.setattr("os.makedirs", fail)
    with pytest.raises(
        PermissionError, match=rf"output_dir='/there/run' cannot be created: reason\. Pass another {remedy}\.$"
    ) as caught:
        Trainer(make_plain(), args)
    assert caught.value.errno == code and isinstance(caught.value, InvalidArgument)


def test_output_dir_that_cannot_be_written_is_named_before_training(make_args, monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)
    args = make_args(save_strategy="steps")
    with pytest.raises(PermissionError, match=r"^output_dir=.* cannot be written to: .*Pass another folder"):
        Trainer(make_plain(), args, train_dataset=plain_data()).train()
    args.save_strategy = "no"
    assert Trainer(make_plain(), args, train_dataset=plain_data()).train().global_step


def test_numbers_of_numpy_are_accepted(make_args):
    args = make_args(save_steps=np.int64(4), learning_rate=np.float32(0.5), bf16=np.bool_(False))
    args.logging_steps = np.int64(2)
    values = [args.save_steps, args.learning_rate, args.bf16, args.logging_steps]
    assert [*map(repr, values)] == ["4", "0.5", "False", "2"]


def test_negative_ddp_timeout_is_refused_for_several_processes(make_args, monkeypatch):
    Trainer(make_plain(), make_args(ddp_timeout=-1))  # one process waits for no other
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    found = check_supported(ResolvedArguments(make_args(ddp_timeout=-1)))
    assert any("ddp_timeout=-1 would end every operation" in each for each in found)
