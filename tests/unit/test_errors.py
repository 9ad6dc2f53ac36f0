"""Bad input gets one clear error that names the argument, the reason and what to do, before any training."""

import signal

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from hftrainer import EarlyStoppingCallback, Seq2SeqTrainer, Trainer, TrainerCallback, TrainingArguments
from hftrainer.arguments.resolved import ResolvedArguments
from hftrainer.arguments.support import check_supported
from hftrainer.errors import (
    CheckpointNotFound,
    InvalidArgument,
    MetricNotFound,
    UnknownArgument,
    UnknownKey,
    UnsupportedArgument,
    WrongObject,
)
from tests.support.tiny import Plain, SizedStream, Stream, make_plain, plain_data

STEPS = {"eval_strategy": "steps", "save_strategy": "steps"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rat": 1}, "has no argument 'learning_rat'; did you mean 'learning_rate'"),
        ({"num_epochs": 1}, "has no argument 'num_epochs'; did you mean 'num_train_epochs'"),
        ({"max_epochs": 1}, "did you mean 'num_train_epochs'"),  # as in Lightning, and nearer to max_steps
        ({"eval_stategy": 1}, "has no argument 'eval_stategy'; did you mean 'eval_strategy'"),
        ({"sead": 1, "max_step": 2}, "'sead'.*'max_step'"),
    ],
)
def test_unknown_arguments(settings, message):
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
            ["eval_strategy: 'step' is not valid: choose one of no, steps, epoch", "mean 'steps'"],
        ),
        ({"save_strategy": "best"}, ["save_strategy"]),
        ({"bf16": True, "fp16": True}, ["bf16"]),
        ({"lr_scheduler_kwargs": "{broken"}, ["lr_scheduler_kwargs"]),
        ({"lightning_config": "{broken"}, ["lightning_config is not a valid JSON object"]),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, ["lr_scheduler_type"]),
        ({"debug": "overflow"}, ["debug: unknown ['overflow']: use underflow_overflow and tpu_metrics_debug"]),
        ({"debug": 3}, ["debug: unknown ['3']: use underflow_overflow and tpu_metrics_debug"]),
        ({"optim": "adam"}, ["'adamw_torch'"]),
        (
            {"adam_beta1": 2.0, "adam_beta2": -1},
            ["adam_beta1=2.0: use a number of at least 0 and below 1", "beta2=-1"],
        ),
        ({"label_smoothing_factor": 1.5}, ["label_smoothing_factor=1.5: use a number"]),
        ({"seed": None}, ["seed=None: use a number of at least 0"]),
        ({"num_train_epochs": None}, ["num_train_epochs=None: use a number"]),
        ({"optim": ["adam"]}, ["optim: ['adam'] is not valid: choose one of adamw_hf"]),
        ({"log_level": "loud"}, ["log_level"]),
        ({"elastic": True, "auto_find_batch_size": True}, ["elastic=True keeps the samples of a step"]),
        ({"train_sampling_strategy": "by_chance"}, ["train_sampling_strategy"]),
        *(
            ({"torch_empty_cache_steps": steps}, [f"torch_empty_cache_steps={steps!r}", "at least 1, or None"])
            for steps in (0, -1, 1.0, "none")
        ),
        (
            {"optim": "adamm", "lr_scheduler_type": "liner", "fsdp_config": "{1", "per_device_eval_batch_size": 0},
            ["optim: 'adamm'", "lr_scheduler_type: 'liner'", "'linear'?", "fsdp_config is not a valid", "batch_size=0"],
        ),
        (
            {"per_device_train_batch_size": 0, "warmup_steps": -1, "dataloader_prefetch_factor": 2},
            ["per_device_train_batch_size=0", "warmup_steps=-1", "dataloader_prefetch_factor=2"],
        ),
        *(
            ({"load_best_model_at_end": True, **settings}, [message])
            for settings, message in [
                ({"eval_strategy": "steps", "save_strategy": "epoch"}, "'steps' and save_strategy='epoch' differ"),
                ({"eval_strategy": "no", "save_strategy": "epoch"}, "'no' and save_strategy='epoch' differ"),
                ({**STEPS, "eval_steps": 4, "save_steps": 6}, "save_steps=6 is not a multiple of eval_steps=4"),
                ({**STEPS, "eval_steps": 4, "save_steps": 0.5}, "save_steps=0.5 is not a multiple of eval_steps=4"),
                ({**STEPS, "eval_steps": 0.2, "save_steps": 0.5}, "save_steps=0.5 is not a multiple of eval_steps=0.2"),
            ]
        ),
    ],
    ids=str,
)
def test_wrong_values(settings, messages):
    with pytest.raises(InvalidArgument) as caught:
        Trainer(make_plain(), TrainingArguments("unused", **settings))
    assert all(message in str(caught.value) for message in messages)


def test_shares_that_are_multiples(make_args):
    make_args(load_best_model_at_end=True, **STEPS, eval_steps=0.1, save_steps=0.3)


def test_unsupported_arguments_are_named_together(make_args):
    words = "mp_parameters='a=b' is not supported.*\nfsdp='full_shard' shards the model over processes"
    with pytest.raises(UnsupportedArgument, match=words):
        Trainer(make_plain(), make_args(fsdp="full_shard", mp_parameters="a=b"))


class NeedsPath(TrainerCallback):
    def __init__(self, path):
        self.path = path


OtherLightning = type("EarlyStopping", (), {"__module__": "pytorch_lightning.callbacks", "on_train_end": id})
MODEL = make_plain()
OfLightning = type("OfLightning", (LightningModule,), {"training_step": id, "on_train_start": id, "log": id})
LightningTrainer = pl.Trainer(logger=False, accelerator="cpu", enable_checkpointing=False)
OPTIMIZERS, SGD = (torch.optim.SGD(MODEL.parameters(), lr=0.1), None), (torch.optim.SGD, {"lr": 0.1})


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (InvalidArgument, {"model": None}, "either a model or a model_init, but got neither"),
        (InvalidArgument, {"model_init": make_plain}, "either a model or a model_init, but got both"),
        (InvalidArgument, {"model": None, "model_init": lambda: None}, "model_init"),
        (InvalidArgument, {"model": None, "model_init": lambda trial, other: make_plain()}, "model_init"),
        (InvalidArgument, {"model": None, "model_init": make_plain, "optimizers": OPTIMIZERS}, "model_init"),
        (InvalidArgument, {"optimizers": OPTIMIZERS, "optimizer_cls_and_kwargs": SGD}, "both set the optimizer"),
        (
            InvalidArgument,
            {"tokenizer": object(), "processing_class": object()},
            "tokenizer is the old name of processing_class",
        ),
        (TypeError, {"callbacks": TrainerCallback()}, "callbacks=.*: pass a list"),
        *(
            (TypeError, {"callbacks": [wrong]}, rf"\({type(wrong).__name__}\) handles no event, such as on_ste")
            for wrong in (object(), 3, "callback", {}, None, dict, print)
        ),
        (TypeError, {"callbacks": [MODEL]}, "Plain is a module"),
        (TypeError, {"callbacks": [Plain]}, "Plain is a module"),
        (TypeError, {"callbacks": [LightningModule()]}, "LightningModule is a module"),  # it has an on_train_end
        *(
            (TypeError, {"callbacks": [wrong]}, r"EarlyStopping comes from pytorch_lightning.*lightning\.pytorch")
            for wrong in (OtherLightning, OtherLightning())
        ),
        (UnknownArgument, {"train_data": []}, "Trainer has no argument 'train_data'; did you mean 'train_dataset'"),
        (InvalidArgument, {"data_collator": [1]}, "data_collator must be callable, got list.*as train_dataset="),
        (WrongObject, {"args": {"max_steps": 2}}, r"args is a dict: pass TrainingArguments\(\*\*args\)"),
        (WrongObject, {"args": "out"}, r"args is a str: pass TrainingArguments\('out'\)"),
        (WrongObject, {"args": TrainingArguments}, "args is the class TrainingArguments: pass an instance"),
        (WrongObject, {"args": MODEL}, r"args is a model, Plain: pass the model first, as Trainer\(model, args\)"),
        (WrongObject, {"args": LightningTrainer}, r"args is a lightning\.\S+\.Trainer: pass TrainingArguments\('fold"),
        (WrongObject, {"model": LightningTrainer}, r"model is a lightning\.\S+\.Trainer: pass a torch\.nn\.Module"),
        (WrongObject, {"model": Plain}, "model is the class Plain: pass a model"),
        (WrongObject, {"model": "a-model"}, r"load it first, for example with AutoModel\.from_pretrained\('a-model'\)"),
        (
            WrongObject,
            {"processing_class": "a-model"},
            r"load it first, for example with AutoTokenizer\.from_pretrained\('a-mod",
        ),
        (
            InvalidArgument,
            {"model": OfLightning()},
            r"(?s)OfLightning is a LightningModule, .* pass the module inside it.*\n- training_step: a forward .*"
            r"\n- on_train_start: a Lightning callback in",
        ),
        (TypeError, {"callbacks": [NeedsPath]}, "NeedsPath\\(\\) fails .*missing .*'path'.*: pass an instance"),
        (
            TypeError,
            {"callbacks": [EarlyStopping]},
            "EarlyStopping\\(\\) fails .*missing .*'monitor'.*: pass an instance",
        ),
    ],
)
def test_what_a_trainer_is_given(make_args, kind, given, message):
    with pytest.raises(kind, match=message):
        Trainer(**{"model": MODEL, "args": make_args(), **given})


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            [1],
            r"'valud': Trainer has no evaluation dataset of that name, its eval_dataset is a list\. Pass a dataset",
        ),
        (None, "its eval_dataset is a NoneType"),
        ({"valid": [1], "other": [1]}, "it has 'valid', 'other'; did you mean 'valid'"),
    ],
)
def test_unknown_evaluation_set(make_args, own, message):
    with pytest.raises(KeyError, match=message) as caught:
        Trainer(make_plain(), make_args(), eval_dataset=own).evaluate("valud")
    assert isinstance(caught.value, TypeError)  # as in transformers for a list


def test_negative_number_of_epochs(make_args, caplog):
    Trainer(make_plain(), make_args(num_train_epochs=-1, max_steps=-1), train_dataset=plain_data()).train()
    assert "num_train_epochs=-1 trains no step" in caplog.text
    caplog.clear()
    Trainer(make_plain(), make_args(num_train_epochs=-1, max_steps=1), train_dataset=plain_data()).train()
    assert "num_train_epochs=-1" not in caplog.text


def test_the_old_name_of_processing_class(make_args):
    with pytest.warns(FutureWarning, match="processing_class"):
        assert Trainer(make_plain(), make_args(), tokenizer="it").processing_class == "it"


class Returns(nn.Module):
    def __init__(self, make_output):
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.make_output = make_output

    def forward(self, x, labels=None):
        return self.make_output(self.layer(x))


ROWS = [{"pixels": [1.0] * 8, "category": 1}] * 8
METRICS = {
    "kind": MetricNotFound,
    "eval_dataset": plain_data(),
    "compute_metrics": lambda prediction: {"accuracy": 1.0},
    "settings": {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "acuracy"},
}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"train_dataset": None}, "needs a train_dataset"),
        ({"settings": {"eval_strategy": "steps"}}, "eval_strategy='steps' needs an eval_dataset"),
        ({"train_dataset": SizedStream(0)}, "training data has no batches"),
        ({"train_dataset": Stream(10), "settings": {"max_steps": -1}}, "max_steps must be set"),
        ({"callbacks": [EarlyStoppingCallback()], "kind": ValueError}, "metric_for_best_model"),
        (METRICS, "does not return 'eval_acuracy', only eval_accuracy, eval_loss"),
        ({**METRICS, "compute_metrics": None}, "metric_for_best_model='acuracy': without compute_metrics"),
        (
            {"settings": {"torch_compile_backend": "inductr"}},
            "'inductr' is not a backend of torch; did you mean 'inductor'",
        ),
        ({"train_dataset": TensorDataset(torch.zeros(8, 8))}, "A sample is a tuple, .* data_collator=lambda samples"),
        ({"train_dataset": DataLoader(plain_data())}, "is a DataLoader: pass its dataset, with its collate_fn"),
        (
            {"train_dataset": LightningDataModule(), "settings": {"max_steps": -1}},
            "for a LightningDataModule, pass its datasets",
        ),
        (
            {"train_dataset": LightningDataModule()},
            "is a LightningDataModule: .*; for a LightningDataModule, pass its data",
        ),
        (
            {"train_dataset": [{"text": "a", "labels": 0}]},
            "has no 'x', which Plain.forward needs; the samples have tex",
        ),
        ({"train_dataset": type("DataFrame", (), {"__len__": lambda _: 8})()}, r"a list of its rows, frame\.to_dict"),
        (
            {"eval_dataset": {"a": plain_data(), "b": None}, "settings": {"eval_strategy": "steps", "eval_steps": 1}},
            "The 'b' evaluation dataset is a NoneType",
        ),
        ({"train_dataset": ROWS}, r"have pixels, category; the model accepts label.*, x\."),
        *(
            ({"model": Returns(make_output)}, message)
            for make_output, message in [
                (lambda logits: {"logits": logits}, "returned no loss, only logits, from the inputs x, labels"),
                (lambda logits: logits, "returned no loss, a Tensor"),
                (lambda logits: (logits,), r"one number, but is a tensor of shape \(8, 3\): return loss\.mean"),
                (lambda logits: {"loss": None}, "is a NoneType"),
                (lambda logits: 3, "returned no loss, an int,"),
                (lambda logits: logits.sum(), "returned no loss, a Tensor"),
            ]
        ),
    ],
)
def test_training(make_args, given, message):
    given = {"model": make_plain(), "train_dataset": plain_data(), **given}
    settings, kind = given.pop("settings", {}), given.pop("kind", InvalidArgument)
    with pytest.raises(kind, match=message) as caught:
        Trainer(args=make_args(**settings), **given).train()
    assert not str(caught.value).startswith("'")  # as a KeyError's message does


def test_no_column_of_a_dataset_is_left(make_args):
    dataset = pytest.importorskip("datasets").Dataset.from_list(ROWS)
    with pytest.raises(InvalidArgument, match="has category, pixels; the model accepts x, labels"):
        Trainer(make_plain(), make_args(), train_dataset=dataset).train()


def test_evaluation_without_data(make_args):
    with pytest.raises(InvalidArgument, match="needs an eval_dataset"):
        Trainer(make_plain(), make_args()).evaluate()
    with pytest.raises(InvalidArgument, match="Evaluation has no batches"):
        Trainer(make_plain(), make_args(), eval_dataset=[]).evaluate()


def test_a_loss_without_its_outputs(make_args):
    class Alone(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            return model(**inputs)["loss"]

    with pytest.raises(
        InvalidArgument, match=r"Alone.compute_loss returned a Tensor .*: return \(loss, outputs\) in that case"
    ):
        Alone(make_plain(), make_args(), eval_dataset=plain_data(8)).evaluate()


def test_whole_numbers_with_a_point(make_args):
    """transformers accepts some floats for integers; for others, its DataLoader or `range` fails."""
    args = make_args(save_strategy="steps", save_steps=1.0, save_total_limit=1.0, dataloader_num_workers=0.0)
    assert Trainer(make_plain(), args, train_dataset=plain_data()).train().global_step == 2
    refused = dict.fromkeys(("per_device_train_batch_size", "max_steps", "seed", "dataloader_num_workers"), 4.0)
    with pytest.raises(WrongObject) as caught:
        Trainer(make_plain(), make_args(**refused))
    assert all(f"{name}=4.0 is a float: use a whole number, 4." in str(caught.value) for name in refused)


def test_columns_of_an_evaluation_do_not_explain_training(make_args):
    others = [{**sample, "extra": 1} for sample in plain_data(8)]
    samples = [{"x": sample["x"]} for sample in others]
    trainer = Trainer(make_plain(), make_args(), train_dataset=samples, eval_dataset=others)
    with pytest.raises(InvalidArgument, match="returned no loss") as caught:
        trainer.train()
    assert not any("extra" in note for note in caught.value.__notes__)


def test_predictions_that_do_not_fit(make_args):
    def fail(_):
        raise MemoryError("too large")

    with pytest.raises(MemoryError) as caught:
        Trainer(make_plain(), make_args(), eval_dataset=plain_data(8), compute_metrics=fail).evaluate()
    assert any("eval_memmap_dir keeps predictions on disk" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("checkpoint-2/model.safetensors", r"Did you mean '.*checkpoint-2'\?"),
        ("checkpoint-5", "There are checkpoint-2."),
        (2, "resume_from_checkpoint=2: pass a checkpoint-xxx folder"),
    ],
)
def test_what_to_resume_from(make_args, given, message):
    args = make_args(save_strategy="steps", save_steps=2)
    Trainer(make_plain(), args, train_dataset=plain_data()).train()
    path = given if isinstance(given, int) else f"{args.output_dir}/{given}"
    with pytest.raises(CheckpointNotFound, match=message):
        Trainer(make_plain(), args, train_dataset=plain_data()).train(resume_from_checkpoint=path)


def test_labels_that_are_texts(make_args, caplog):
    samples = [{**sample, "labels": "cat"} for sample in plain_data(8)]
    with pytest.raises(InvalidArgument, match="returned no loss"):
        Trainer(make_plain(), make_args(), train_dataset=samples).train()
    assert "'labels' is dropped: its values are texts, such as 'cat'" in caplog.text


def test_a_metric_that_does_not_fit(make_args):
    metrics = {"accuracy": MulticlassAccuracy(4)}
    with pytest.raises(ValueError, match="preds") as caught:
        Trainer(make_plain(), make_args(), eval_dataset=plain_data(8), compute_metrics=metrics).evaluate()
    note = "got (float32 (8, 3), int64 (8,)). Select other tensors with TorchMetrics(metrics, adapter=...)."
    assert note in caught.value.__notes__[0]


def test_labels_that_a_model_does_not_take(make_args):
    class Unlabelled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 3)

        def forward(self, x):
            return self.linear(x)

    args = make_args(remove_unused_columns=False)
    with pytest.raises(UnknownKey, match="add a parameter labels=None to forward, and return the loss"):
        Trainer(Unlabelled(), args, train_dataset=plain_data()).train()


def test_stream_that_ends_at_once_stops_training(make_args, caplog):
    assert Trainer(make_plain(), make_args(), train_dataset=Stream(0)).train().global_step == 0
    assert "yielded no batch" in caplog.text


def test_resume_without_checkpoint(make_args, tmp_path):
    trainer = Trainer(make_plain(), make_args(), train_dataset=plain_data())
    (tmp_path / "empty").mkdir()
    (tmp_path / "half" / "checkpoint-5").mkdir(parents=True)
    (tmp_path / "half" / "checkpoint-5" / "trainer_state.json").write_text("{}")
    for path, message in [
        (True, "no intact checkpoint-xxx folder"),
        ("", "the folder does not exist"),
        ("True", "the folder does not exist.*auto on a command line"),
        (str(tmp_path / "absent"), "the folder does not exist"),
        (str(tmp_path / "empty"), "it lacks trainer_state.json"),
        (str(tmp_path / "half"), "it lacks trainer_state.json"),
        (str(tmp_path / "half" / "checkpoint-5"), "trainer_state.json does not contain a state"),
    ]:
        with pytest.raises(CheckpointNotFound, match=message):
            trainer.train(resume_from_checkpoint=path)
    assert trainer.state.global_step == 0
    assert trainer.lightning_trainer is None


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_errors_of_a_model_pass_through(make_args, kind):
    """After KeyboardInterrupt, Lightning alone would exit the process, and leave Ctrl-C ignored."""

    class Fails(Plain):
        def forward(self, x, labels=None):
            raise kind("my own bug")

    before = signal.getsignal(signal.SIGINT)
    trainer = Trainer(Fails(), make_args(), train_dataset=plain_data(), eval_dataset=plain_data())
    for call in (trainer.train, trainer.evaluate, lambda: trainer.predict(plain_data())):
        with pytest.raises(kind, match="my own bug"):
            call()
        assert signal.getsignal(signal.SIGINT) is before
    assert not trainer.is_in_train


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
def test_what_a_run_needs_may_be_filled_in_later(make_args, settings, then):
    """As in transformers, whose scripts and libraries complete arguments that they have made."""
    args = make_args(**settings)
    for name, value in then.items():
        setattr(args, name, value)
    Trainer(make_plain(), args, eval_dataset=[])


def test_numbers_that_are_text_are_named(make_args):
    with pytest.raises(WrongObject, match=r"learning_rate='1e-8' is text: .*1\.0e-5 as a number"):
        Trainer(make_plain(), make_args(learning_rate="1e-8"))
    with pytest.raises(WrongObject, match=r"num_train_epochs='three' is text: use a number\.\nmax_steps='10' is text"):
        Trainer(make_plain(), make_args(num_train_epochs="three", max_steps="10"))


@pytest.mark.parametrize("value", [torch.ones(3), torch.ones(3).numpy(), [1.0, 2.0], "high", None])
def test_a_best_metric_that_is_no_number(make_args, value):
    args = make_args(**STEPS, eval_steps=1, save_steps=1, metric_for_best_model="score")
    data = {"train_dataset": plain_data(), "eval_dataset": plain_data(8)}
    with pytest.raises(WrongObject, match=r"metric_for_best_model='score': 'eval_score' is .* must return one number"):
        Trainer(make_plain(), args, compute_metrics=lambda _: {"score": value}, **data).train()


@pytest.mark.parametrize("value", [torch.ones(1), torch.ones(1).numpy(), torch.tensor(1.0), 1])
def test_a_best_metric_of_one_element(make_args, value):
    class Own(Trainer):
        def evaluate(self, *_, **__):
            return {"eval_score": value}

    args = make_args(**STEPS, eval_steps=1, save_steps=1, metric_for_best_model="score")
    trainer = Own(make_plain(), args, train_dataset=plain_data(), eval_dataset=plain_data(8))
    trainer.train()
    assert trainer.state.best_metric == 1.0


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_an_output_dir_that_is_a_file(tmp_path, name):
    (tmp_path / "file").touch()
    args = TrainingArguments(str(tmp_path / name), use_cpu=True)
    with pytest.raises(FileExistsError, match=r"output_dir=.*: this path, or one of its parents, is a file"):
        Trainer(make_plain(), args)


def test_seq2seq_with_arguments_of_another_trainer(make_args):
    with pytest.raises(WrongObject, match=r"args is a TrainingArguments, .* pass Seq2SeqTrainingArguments"):
        Seq2SeqTrainer(make_plain(), make_args())


def test_a_timeout_that_no_operation_meets(make_args, monkeypatch):
    Trainer(make_plain(), make_args(ddp_timeout=-1))  # one process waits for no other
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    found = check_supported(ResolvedArguments(make_args(ddp_timeout=-1)))
    assert any("ddp_timeout=-1 would end every operation" in each for each in found)


@pytest.mark.parametrize(("given", "is_told"), [((), True), ((False,), False), ((None,), True)])
def test_resume_from_checkpoint_is_for_the_script(make_args, caplog, given, is_told):
    args = make_args(resume_from_checkpoint=f"checkpoint-{len(given)}-{is_told}")
    Trainer(make_plain(), args, train_dataset=plain_data()).train(*given)
    told = "To resume, call train(resume_from_checkpoint=args.resume_from_checkpoint)" in caplog.text
    assert told is is_told


def test_stale_samples_are_not_named(make_args):
    class Fails(torch.utils.data.Sampler):
        def __iter__(self):
            yield from range(8)
            raise LookupError

    class OwnSampler(Trainer):
        def _get_train_sampler(self, *_):
            return Fails()

    with pytest.raises(LookupError) as caught:
        OwnSampler(make_plain(), make_args(max_steps=9), train_dataset=plain_data()).train()
    assert not any("samples" in note for note in caught.value.__notes__)
