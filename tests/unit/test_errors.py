"""Bad input gets one clear error that names the argument, the reason and what to do, before any training."""

import importlib.util

import pytest
import torch
from torch import nn

from hftrainer import Trainer, TrainerCallback, TrainingArguments
from hftrainer.errors import (
    CheckpointNotFound,
    InvalidArgument,
    MetricNotFound,
    UnknownArgument,
    UnsupportedArgument,
)
from tests.support.tiny import Plain, Stream, make_plain, plain_data


@pytest.fixture
def make_args(tmp_path):
    def make(**settings):
        defaults = {"max_steps": 2, "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
        return TrainingArguments(str(tmp_path / "out"), **{**defaults, **settings})

    return make


def test_no_model():
    with pytest.raises(InvalidArgument, match="either a model or a model_init; it got neither"):
        Trainer(args=TrainingArguments("unused"))


def test_model_and_model_init(make_args):
    with pytest.raises(InvalidArgument, match="either a model or a model_init; it got both"):
        Trainer(make_plain(), make_args(), model_init=make_plain)


def test_model_init_with_optimizers(make_args):
    optimizer = torch.optim.SGD(make_plain().parameters(), lr=0.1)
    with pytest.raises(InvalidArgument, match="model_init"):
        Trainer(args=make_args(), model_init=make_plain, optimizers=(optimizer, None))


def test_two_optimizers(make_args):
    model = make_plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kwargs = {"optimizers": (optimizer, None), "optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1})}
    with pytest.raises(InvalidArgument, match="both set the optimizer"):
        Trainer(model, make_args(), **kwargs)


@pytest.mark.parametrize("result", [None, "two-arguments"])
def test_bad_model_init(make_args, result):
    model_init = (lambda: None) if result is None else (lambda trial, other: make_plain())
    with pytest.raises(InvalidArgument, match="model_init"):
        Trainer(args=make_args(), model_init=model_init)


def test_no_train_dataset(make_args):
    with pytest.raises(InvalidArgument, match="needs a train_dataset"):
        Trainer(make_plain(), make_args()).train()


def test_no_eval_dataset(make_args):
    with pytest.raises(InvalidArgument, match="needs an eval_dataset"):
        Trainer(make_plain(), make_args()).evaluate()
    with pytest.raises(InvalidArgument, match="eval_strategy='steps' needs an eval_dataset"):
        Trainer(make_plain(), make_args(eval_strategy="steps"), train_dataset=plain_data())


def test_empty_datasets(make_args):
    with pytest.raises(InvalidArgument, match="training data has no batches"):
        Trainer(make_plain(), make_args(), train_dataset=SizedEmpty()).train()
    with pytest.raises(InvalidArgument, match="Evaluation has no batches"):
        Trainer(make_plain(), make_args(), eval_dataset=[]).evaluate()


class SizedEmpty(Stream):
    def __init__(self):
        super().__init__(0)

    def __len__(self):
        return 0


def test_stream_that_ends_at_once_stops_training(make_args, caplog):
    trainer = Trainer(make_plain(), make_args(), train_dataset=Stream(0))
    assert trainer.train().global_step == 0
    assert "yielded no batch" in caplog.text


def test_unsized_without_max_steps(make_args):
    with pytest.raises(InvalidArgument, match="max_steps must be set"):
        Trainer(make_plain(), make_args(max_steps=-1), train_dataset=Stream(10))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eval_strategy": "steps", "save_strategy": "epoch"}, "'steps' and save_strategy='epoch' differ"),
        ({"eval_strategy": "no", "save_strategy": "epoch"}, "'no' and save_strategy='epoch' differ"),
        (
            {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 4, "save_steps": 6},
            "save_steps=6 is not a multiple of eval_steps=4",
        ),
        (
            {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 4, "save_steps": 0.5},
            "save_steps=0.5 is not a multiple of eval_steps=4",
        ),
        (
            {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 0.2, "save_steps": 0.5},
            "save_steps=0.5 is not a multiple of eval_steps=0.2",
        ),
    ],
)
def test_best_model_without_matching_checkpoints(make_args, settings, message):
    with pytest.raises(InvalidArgument, match=message):
        make_args(load_best_model_at_end=True, **settings)


def test_shares_that_are_multiples(make_args):
    args = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 0.1, "save_steps": 0.3}
    make_args(load_best_model_at_end=True, **args)


def test_unknown_metric(make_args):
    settings = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "acuracy"}
    trainer = Trainer(
        make_plain(),
        make_args(**settings),
        train_dataset=plain_data(),
        eval_dataset=plain_data(),
        compute_metrics=lambda prediction: {"accuracy": 1.0},
    )
    with pytest.raises(MetricNotFound, match="does not return 'eval_acuracy', only eval_accuracy, eval_loss") as caught:
        trainer.train()
    assert isinstance(caught.value, KeyError)  # as in transformers
    assert not str(caught.value).startswith("'")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("learning_rat", "learning_rate"), ("num_epochs", "num_train_epochs"), ("eval_stategy", "eval_strategy")],
)
def test_unknown_argument(name, nearest):
    with pytest.raises(UnknownArgument, match=f"has no argument '{name}'; did you mean '{nearest}'"):
        TrainingArguments("unused", **{name: 1})
    assert issubclass(UnknownArgument, TypeError)


def test_every_unknown_argument_is_named():
    with pytest.raises(UnknownArgument, match=r"'sead'.*'max_step'"):
        TrainingArguments("unused", sead=1, max_step=2)


def test_unknown_choice():
    with pytest.raises(InvalidArgument, match=r"eval_strategy: 'step' is not a valid IntervalStrategy.*mean 'steps'"):
        TrainingArguments("unused", eval_strategy="step")


def test_every_kind_of_wrong_value_is_named():
    settings = {"optim": "adamm", "lr_scheduler_type": "liner", "fsdp_config": "{1", "per_device_eval_batch_size": 0}
    with pytest.raises(InvalidArgument) as caught:
        TrainingArguments("unused", **settings)
    for words in (
        "optim: 'adamm'",
        "lr_scheduler_type: 'liner'",
        "'linear'?",
        "fsdp_config is not a valid",
        "batch_size=0",
    ):
        assert words in str(caught.value)


def test_every_wrong_value_is_named():
    with pytest.raises(InvalidArgument) as caught:
        TrainingArguments("unused", per_device_train_batch_size=0, warmup_steps=-1, dataloader_prefetch_factor=2)
    for name in ("per_device_train_batch_size=0", "warmup_steps=-1", "dataloader_prefetch_factor=2"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"logging_steps": 0},
        {"logging_steps": 1.5},
        {"eval_strategy": "steps", "eval_steps": -3},
        {"save_strategy": "best"},
        {"bf16": True, "fp16": True},
        {"lr_scheduler_kwargs": "{broken"},
        {"lr_scheduler_type": "reduce_lr_on_plateau"},
        {"debug": "overflow"},
        {"log_level": "loud"},
        {"train_sampling_strategy": "by_chance"},
        *({"torch_empty_cache_steps": steps} for steps in (0, -1, 1.0, "none")),
    ],
)
def test_wrong_values(settings):
    with pytest.raises(InvalidArgument, match=next(iter(settings))):
        TrainingArguments("unused", **settings)


def test_unsupported_arguments_are_named_together(make_args):
    with pytest.raises(UnsupportedArgument) as caught:
        Trainer(make_plain(), make_args(fsdp="full_shard", train_sampling_strategy="batch_rebalance"))
    for name in ("fsdp='full_shard' shards the model over processes", "train_sampling_strategy='batch_rebalance'"):
        assert name in str(caught.value)


def test_wrong_scheduler_keyword(make_args):
    args = make_args(lr_scheduler_type="cosine", lr_scheduler_kwargs={"cycles": 2})
    with pytest.raises(InvalidArgument, match=r"\['cycles'\] unknown, it takes \['last_epoch', 'num_cycles'\]"):
        Trainer(make_plain(), args, train_dataset=plain_data()).train()


def test_resume_without_checkpoint(make_args, tmp_path):
    trainer = Trainer(make_plain(), make_args(), train_dataset=plain_data())
    (tmp_path / "empty").mkdir()
    (tmp_path / "half" / "checkpoint-5").mkdir(parents=True)
    (tmp_path / "half" / "checkpoint-5" / "trainer_state.json").write_text("{}")
    for path, message in [
        (True, "has no whole checkpoint-xxx folder"),
        ("", "the folder does not exist"),
        (str(tmp_path / "absent"), "the folder does not exist"),
        (str(tmp_path / "empty"), "it lacks trainer_state.json"),
        (str(tmp_path / "half"), "it lacks trainer_state.json"),
        (str(tmp_path / "half" / "checkpoint-5"), "trainer_state.json does not contain a state"),
    ]:
        with pytest.raises(CheckpointNotFound, match=message):
            trainer.train(resume_from_checkpoint=path)
    assert trainer.state.global_step == 0
    assert trainer.lightning_trainer is None


class Returns(nn.Module):
    def __init__(self, make_output):
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.make_output = make_output

    def forward(self, x, labels=None):
        return self.make_output(self.layer(x))


@pytest.mark.parametrize(
    ("make_output", "message"),
    [
        (lambda logits: {"logits": logits}, "returned no loss, only logits, from the inputs x, labels"),
        (lambda logits: logits, "returned no loss, a Tensor"),
        (lambda logits: (logits,), r"one number, and is a tensor of shape \(8, 3\)"),
        (lambda logits: {"loss": None}, "is NoneType"),
        (lambda logits: logits.sum(), "returned no loss, a Tensor"),
    ],
)
def test_model_without_loss(make_args, make_output, message):
    with pytest.raises(InvalidArgument, match=message):
        Trainer(Returns(make_output), make_args(), train_dataset=plain_data()).train()


def test_no_column_is_left(make_args):
    rows = [{"pixels": [1.0] * 8, "category": 1}] * 8
    with pytest.raises(InvalidArgument, match=r"have pixels, category; the model takes label.*, x\."):
        Trainer(make_plain(), make_args(), train_dataset=rows).train()
    datasets = pytest.importorskip("datasets")
    with pytest.raises(InvalidArgument, match=r"has category, pixels; the model takes x, labels"):
        Trainer(make_plain(), make_args(), train_dataset=datasets.Dataset.from_list(rows)).train()


def test_not_a_callback(make_args):
    for wrong in (object(), 3, "callback", {}, None, dict, print):
        with pytest.raises(
            TypeError, match=rf"\({type(wrong).__name__}\) is not a callback: it handles none of the events"
        ):
            Trainer(make_plain(), make_args(), callbacks=[wrong])
    lightning = pytest.importorskip("lightning.pytorch")
    for module in (make_plain(), lightning.LightningModule()):  # the second has an on_train_end
        with pytest.raises(TypeError, match=f"{type(module).__name__} is a module"):
            Trainer(make_plain(), make_args(), callbacks=[module])
    with pytest.raises(TypeError, match=r"callbacks=.*: give a list"):
        Trainer(make_plain(), make_args(), callbacks=TrainerCallback())


def test_the_other_package_of_lightning(make_args):
    kind = type("EarlyStopping", (), {"__module__": "pytorch_lightning.callbacks", "on_train_end": lambda self: None})
    for wrong in (kind, kind()):
        with pytest.raises(TypeError, match=r"EarlyStopping comes from pytorch_lightning.*lightning\.pytorch"):
            Trainer(make_plain(), make_args(), callbacks=[wrong])
    with pytest.raises(TypeError, match="Plain is a module"):
        Trainer(make_plain(), make_args(), callbacks=[Plain])


@pytest.mark.parametrize(
    ("report_to", "words"),
    [(["none", "tensorboard"], "'none' cannot be"), (["all", "wandb"], "'all' cannot be"), (3, "report_to=3")],
)
def test_report_to(make_args, report_to, words):
    with pytest.raises(InvalidArgument, match=words):
        Trainer(make_plain(), make_args(report_to=report_to))


class NeedsPath(TrainerCallback):
    def __init__(self, path):
        self.path = path


def test_class_of_a_callback_that_needs_arguments(make_args):
    from lightning.pytorch.callbacks import EarlyStopping

    for kind, argument in ((NeedsPath, "path"), (EarlyStopping, "monitor")):
        with pytest.raises(TypeError, match=f"{kind.__name__} has a missing .*'{argument}'; give an instance"):
            Trainer(make_plain(), make_args(), callbacks=[kind])


def test_early_stopping_needs_a_metric(make_args):
    from hftrainer import EarlyStoppingCallback

    trainer = Trainer(make_plain(), make_args(), train_dataset=plain_data(), callbacks=[EarlyStoppingCallback()])
    with pytest.raises(ValueError, match="metric_for_best_model"):
        trainer.train()


def test_tokenizer_and_processing_class(make_args):
    with pytest.raises(InvalidArgument, match="old name of processing_class"):
        Trainer(make_plain(), make_args(), tokenizer=object(), processing_class=object())
    with pytest.warns(FutureWarning, match="processing_class"):
        assert Trainer(make_plain(), make_args(), tokenizer="it").processing_class == "it"


def test_error_in_user_code_passes_through(make_args):
    class Fails(Plain):
        def forward(self, x, labels=None):
            raise RuntimeError("my own bug")

    trainer = Trainer(Fails(), make_args(), train_dataset=plain_data())
    with pytest.raises(RuntimeError, match="my own bug"):
        trainer.train()
    assert not trainer.is_in_train


def test_keyboard_interrupt_passes_through(make_args):
    """Lightning alone would exit the process, and leave Ctrl-C ignored."""
    import signal

    class Interrupted(Plain):
        def forward(self, x, labels=None):
            raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    trainer = Trainer(Interrupted(), make_args(), train_dataset=plain_data(), eval_dataset=plain_data())
    for call in (trainer.train, trainer.evaluate, lambda: trainer.predict(plain_data())):
        with pytest.raises(KeyboardInterrupt):
            call()
        assert signal.getsignal(signal.SIGINT) is before
    assert not trainer.is_in_train


def test_several_processes_need_a_launcher(make_args, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UnsupportedArgument, match=r"MASTER_ADDR and MASTER_PORT and RANK are not set.*torchrun"):
        Trainer(make_plain(), make_args())


@pytest.mark.parametrize(
    ("name", "value"),
    [("ACCELERATE_MIXED_PRECISION", "fp8"), ("ACCELERATE_USE_FSDP", "true")],
)
def test_launchers_are_not_ignored(make_args, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(UnsupportedArgument, match=f"{name}={value}"):
        Trainer(make_plain(), make_args())


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="DeepSpeed is here")
def test_launcher_of_a_missing_package(make_args, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(InvalidArgument, match="ACCELERATE_USE_DEEPSPEED=true needs DeepSpeed"):
        make_args()


@pytest.mark.parametrize(
    ("name", "value"),
    [("ddp_find_unused_parameters", False), ("ddp_bucket_cap_mb", 0), ("ddp_broadcast_buffers", False)],
)
def test_false_and_zero_ask_for_something(make_args, name, value):
    from hftrainer.arguments.resolved import ResolvedArguments
    from hftrainer.arguments.table import make_plan

    assert make_plan(ResolvedArguments(make_args(**{name: value}))).ddp == {name.removeprefix("ddp_"): value}
