"""Data, models, metrics and checkpoints with which training cannot begin or go on: the error names what to do."""

import signal
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hftrainer import EarlyStoppingCallback, Trainer
from hftrainer.errors import (
    CheckpointNotFound,
    InvalidArgument,
    InvalidSetup,
    MetricNotFound,
    UnknownKey,
    WrongObject,
)
from tests.support.checkpoints import AtStep
from tests.support.small_models import Plain, SizedStream, Stream, make_plain, plain_data

STEPS = {"eval_strategy": "steps", "save_strategy": "steps"}


def frozen_adapter():
    model = make_plain().requires_grad_(False)
    model.peft_config = {}
    return model


class Returns(nn.Module):
    def __init__(self, make_output):
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.make_output = make_output

    def forward(self, x, labels=None):
        return self.make_output(self.layer(x))


class Unsized:
    def __getitem__(self, index):
        return plain_data()[index]


ROWS = [{"pixels": [1.0] * 8, "category": 1}] * 8
METRICS = {
    "kind": MetricNotFound,
    "eval_dataset": plain_data(),
    "compute_metrics": lambda prediction: {"accuracy": 1.0},
    "settings": {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "acuracy"},
}


@pytest.mark.parametrize(
    ("trainer_kwargs", "message"),
    [
        ({"train_dataset": None}, "needs a train_dataset"),
        ({"settings": {"eval_strategy": "steps"}}, "eval_strategy='steps' needs an eval_dataset"),
        ({"train_dataset": SizedStream(0)}, "training data has no batches"),
        ({"train_dataset": Stream(10), "settings": {"max_steps": -1}}, "max_steps must be set"),
        ({"train_dataset": Unsized()}, "training dataset is an Unsized without a length: give it a __len__, or pass"),
        (
            {"eval_dataset": Unsized(), "settings": {"eval_strategy": "steps", "eval_steps": 1}},
            "evaluation dataset is an Unsized without a length",
        ),
        ({"callbacks": [EarlyStoppingCallback()], "kind": ValueError}, "metric_for_best_model"),
        ({"settings": {"optim": "sgd", "optim_args": {"momentum": 0.9}}}, "is not name=value"),
        (METRICS, "does not return 'eval_acuracy', only eval_accuracy, eval_loss"),
        ({**METRICS, "compute_metrics": None}, "metric_for_best_model='acuracy': compute_metrics is not given"),
        (
            {"settings": {"torch_compile_backend": "inductr"}},
            "'inductr' is not a backend of torch; did you mean 'inductor'",
        ),
        (
            {"train_dataset": {"x": torch.zeros(8, 8), "labels": torch.zeros(8)}},
            "the column 'labels': pass .*from_dict",
        ),
        ({"train_dataset": TensorDataset(torch.zeros(8, 8))}, "A sample is a tuple, .* data_collator=lambda samples"),
        ({"data_collator": lambda a, b: a}, r"one argument, the list of samples, but yours takes \(a, b\)\."),
        (
            {"train_dataset": DataLoader(plain_data())},
            "pass its dataset, .*collator and per_device_train_batch_size; or",
        ),
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
        ({"train_dataset": [{"f": [1.0], "labels": 0}] * 8}, "samples have f, labels. Rename 'f' to 'x', or let"),
        ({"train_dataset": type("DataFrame", (), {"__len__": lambda _: 8})()}, r"a list of its rows, frame\.to_dict"),
        (
            {"eval_dataset": {"a": plain_data(), "b": None}, "settings": {"eval_strategy": "steps", "eval_steps": 1}},
            "The 'b' evaluation dataset is None",
        ),
        ({"model": make_plain().requires_grad_(False)}, "All parameters of Plain are frozen: call requires_grad_"),
        ({"model": make_plain().to("meta")}, "layers.0.weight is on the meta device, without values: load the weights"),
        ({"model": frozen_adapter()}, "frozen: call requires_grad_.*, or load the adapters with is_trainable=True"),
        ({"compute_loss_func": lambda outputs, labels: None}, "compute_loss_func returned None. The model gets no la"),
        ({"train_dataset": ROWS}, r"have pixels, category; the model accepts label.*, x\."),
        *(
            ({"model": Returns(make_output)}, message)
            for make_output, message in [
                (lambda logits: {"logits": logits}, "loss, only logits, from the inputs x, labels: let the model"),
                (lambda logits: {}, "returned no loss, only an empty dict, from the inputs x, labels"),
                (lambda logits: logits, "returned no loss, a Tensor"),
                (lambda logits: (logits,), r"one number, but is a tensor of shape \(8, 3\): return loss\.mean"),
                (lambda logits: {"loss": None}, "is None"),
                (lambda logits: 3, "returned no loss, an int,"),
                (lambda logits: logits.sum(), "returned no loss, a Tensor"),
            ]
        ),
    ],
)
def test_wrong_data_model_or_metric_is_named(make_args, caplog, trainer_kwargs, message):
    trainer_kwargs = {"model": make_plain(), "train_dataset": plain_data(), **trainer_kwargs}
    settings, kind = trainer_kwargs.pop("settings", {}), trainer_kwargs.pop("kind", InvalidArgument)
    with pytest.raises(kind, match=message) as caught:
        Trainer(args=make_args(**settings), **trainer_kwargs).train()
    assert not str(caught.value).startswith("'")  # as a KeyError's message does
    assert "Training 0 parameters" not in caplog.text


class Own(Trainer):
    def get_eval_dataloader(self, eval_dataset=None):
        return super().get_eval_dataloader(plain_data())


def test_names_in_place_of_datasets_are_refused_when_the_trainer_is_made(make_args):
    others = [{"eval_dataset": "val"}, {"eval_dataset": {"a": Path("val")}}, {"train_dataset": "train"}]
    for trainer_kwargs in others:
        with pytest.raises(InvalidArgument, match=r"dataset is a .*; '(val|train)' is only its name: load it first"):
            Trainer(make_plain(), make_args(), **trainer_kwargs)
    with pytest.raises(InvalidArgument, match="The evaluation dataset is an int: pass a list"):
        Trainer(make_plain(), make_args(eval_strategy="epoch"), eval_dataset=5)
    assert "eval_loss" in Own(make_plain(), make_args(), eval_dataset="val").evaluate()


def test_callback_may_unfreeze_a_model_before_the_first_step(make_args):
    model = make_plain().requires_grad_(False)
    unfreeze = AtStep(0, lambda: model.requires_grad_(True), "on_step_begin")
    optimizers = (torch.optim.SGD(model.parameters(), 0.1), None)
    trainer = Trainer(model, make_args(), None, plain_data(), optimizers=optimizers, callbacks=[unfreeze])
    assert trainer.train().global_step == 2


def test_dataset_without_usable_columns_is_named(make_args):
    dataset = pytest.importorskip("datasets").Dataset.from_list(ROWS)
    with pytest.raises(InvalidArgument, match="has category, pixels; the model accepts x, labels"):
        Trainer(make_plain(), make_args(), train_dataset=dataset).train()


def test_training_error_does_not_name_evaluation_columns(make_args):
    others = [{**sample, "extra": 1} for sample in plain_data(8)]
    samples = [{"x": sample["x"]} for sample in others]
    trainer = Trainer(make_plain(), make_args(), train_dataset=samples, eval_dataset=others)
    with pytest.raises(InvalidArgument, match="returned no loss") as caught:
        trainer.train()
    assert not any("extra" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        ("checkpoint-2/model.safetensors", r"it is not a folder .*Did you mean '.*checkpoint-2'\?"),
        ("checkpoint-1", r"The nearest in \S+: checkpoint-2, checkpoint-4, .*, checkpoint-10\.$"),
        (2, r"resume_from_checkpoint=2: pass a checkpoint-xxx folder.* Did you mean '.*/out/checkpoint-2'\?"),
        ([], r"Data goes to Trainer\(train_dataset"),
    ],
)
def test_wrong_checkpoint_path_suggests_the_right_one(make_args, checkpoint, message):
    args = make_args(save_strategy="steps", save_steps=2, max_steps=12)
    Trainer(make_plain(), args, train_dataset=plain_data()).train()
    path = f"{args.output_dir}/{checkpoint}" if isinstance(checkpoint, str) else checkpoint
    with pytest.raises(CheckpointNotFound, match=message):
        Trainer(make_plain(), args, train_dataset=plain_data()).train(resume_from_checkpoint=path)


def test_subclass_that_does_not_call_the_constructor_is_named():
    class Without(Trainer):
        def __init__(self):
            pass

    with pytest.raises(InvalidSetup, match=r"Without.__init__ must call super\(\).__init__"):
        Without().train()


def test_dict_without_evaluation_datasets_warns(make_args, caplog):
    Trainer(make_plain(), make_args(**STEPS, max_steps=1), train_dataset=plain_data(), eval_dataset={}).train()
    assert "eval_dataset={} names no dataset" in caplog.text


@pytest.mark.parametrize("method", ["create_optimizer", "training_step"])
def test_override_that_returns_nothing_is_named(make_args, method):
    kind = type("Own", (Trainer,), {method: lambda *_, **__: None})
    with pytest.raises(ValueError, match=rf"Own\.{method} must "):
        kind(make_plain(), make_args(), train_dataset=plain_data()).train()


def test_labels_that_are_texts_are_named(make_args, caplog):
    samples = [{**sample, "labels": "cat"} for sample in plain_data(8)]
    with pytest.raises(InvalidArgument, match="returned no loss"):
        Trainer(make_plain(), make_args(), train_dataset=samples).train()
    assert "'labels' is dropped: its values are texts, such as 'cat'" in caplog.text


def test_model_without_a_labels_parameter_is_named(make_args):
    class Unlabelled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 3)

        def forward(self, x):
            return self.linear(x)

    args = make_args(remove_unused_columns=False)
    with pytest.raises(UnknownKey, match="add a parameter labels=None to forward, and return the loss"):
        Trainer(Unlabelled(), args, train_dataset=plain_data()).train()


def test_empty_stream_is_refused_where_transformers_fails_too(make_args, caplog):
    with pytest.raises(InvalidArgument, match="yielded no batch: check its filters"):
        Trainer(make_plain(), make_args(), train_dataset=Stream(0)).train()
    args = make_args(accelerator_config={"dispatch_batches": False})
    assert Trainer(make_plain(), args, train_dataset=Stream(0)).train().global_step == 0
    assert "yielded no batch" in caplog.text


def test_resume_without_a_valid_checkpoint_is_refused(make_args, tmp_path):
    trainer = Trainer(make_plain(), make_args(), train_dataset=plain_data())
    (tmp_path / "empty").mkdir()
    for step in range(2, 6):
        (tmp_path / "half" / f"checkpoint-{step}").mkdir(parents=True)
        (tmp_path / "half" / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    for path, message in [
        (True, r"No valid checkpoint found in output directory \(\S+/out\)\. Train without this"),
        ("", "the folder does not exist"),
        ("True", "No valid checkpoint found"),
        ("last", "the folder does not exist.*On a command line, true or auto"),
        (str(tmp_path / "absent"), "the folder does not exist"),
        (str(tmp_path / "empty"), "it lacks trainer_state.json"),
        (str(tmp_path / "half"), "it lacks trainer_state.json"),
    ]:
        with pytest.raises(CheckpointNotFound, match=message):
            trainer.train(resume_from_checkpoint=path)
    trainer.args.output_dir = str(tmp_path / "half")
    with pytest.raises(CheckpointNotFound, match=r"\); checkpoint-5 is damaged: trainer_state.json .*; \.\.\.\. Train"):
        trainer.train(resume_from_checkpoint=True)
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


@pytest.mark.parametrize("value", [torch.ones(3), torch.ones(3).numpy(), [1.0, 2.0], "high", None], ids=repr)
def test_best_metric_that_is_no_number_is_refused(make_args, value):
    args = make_args(**STEPS, eval_steps=1, save_steps=1, metric_for_best_model="score")
    data = {"train_dataset": plain_data(), "eval_dataset": plain_data(8)}
    with pytest.raises(WrongObject, match=r"metric_for_best_model='score': 'eval_score' is .* must return one number"):
        Trainer(make_plain(), args, compute_metrics=lambda _: {"score": value}, **data).train()


@pytest.mark.parametrize("value", [torch.ones(1), torch.ones(1).numpy(), torch.tensor(1.0), 1], ids=repr)
def test_best_metric_may_be_an_array_of_one_element(make_args, value):
    class Own(Trainer):
        def evaluate(self, *_, **__):
            return {"eval_score": value}

    args = make_args(**STEPS, eval_steps=1, save_steps=1, metric_for_best_model="score")
    trainer = Own(make_plain(), args, train_dataset=plain_data(), eval_dataset=plain_data(8))
    trainer.train()
    assert trainer.state.best_metric == 1.0


@pytest.mark.parametrize(("train_args", "is_told"), [((), True), ((False,), False), ((None,), True)])
def test_unused_resume_from_checkpoint_argument_warns(make_args, caplog, train_args, is_told):
    args = make_args(resume_from_checkpoint=f"checkpoint-{len(train_args)}-{is_told}")
    Trainer(make_plain(), args, train_dataset=plain_data()).train(*train_args)
    told = "To resume, call train(resume_from_checkpoint=args.resume_from_checkpoint)" in caplog.text
    assert told is is_told


def test_sampler_error_does_not_name_earlier_samples(make_args):
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
