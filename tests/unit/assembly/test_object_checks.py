"""A Trainer refuses wrong arguments when it is made, and says what to pass instead."""

from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from hftrainer import Seq2SeqTrainer, Trainer, TrainerCallback, TrainingArguments
from hftrainer.assembly.object_checks import check_consistency
from hftrainer.errors import InvalidArgument, UnknownArgument, WrongObject
from tests.support.small_models import Plain, make_plain, plain_data


class NeedsPath(TrainerCallback):
    def __init__(self, path):
        self.path = path


OtherLightning = type("EarlyStopping", (), {"__module__": "pytorch_lightning.callbacks", "on_train_end": id})
MODEL = make_plain()
OfLightning = type("OfLightning", (LightningModule,), {"training_step": id, "on_train_start": id, "log": id})
LightningTrainer = pl.Trainer(logger=False, accelerator="cpu", enable_checkpointing=False)
OPTIMIZERS, SGD = (torch.optim.SGD(MODEL.parameters(), lr=0.1), None), (torch.optim.SGD, {"lr": 0.1})


@pytest.mark.parametrize(
    ("kind", "trainer_kwargs", "message"),
    [
        (InvalidArgument, {"model": None}, "either a model or a model_init, but got neither"),
        (InvalidArgument, {"model_init": make_plain}, "either a model or a model_init, but got both"),
        (InvalidArgument, {"model": None, "model_init": lambda: None}, "model_init"),
        (InvalidArgument, {"model": None, "model_init": lambda trial, other: make_plain()}, "model_init"),
        (InvalidArgument, {"model": None, "model_init": make_plain, "optimizers": OPTIMIZERS}, "model_init"),
        (InvalidArgument, {"optimizers": OPTIMIZERS, "optimizer_cls_and_kwargs": SGD}, "both set the optimizer"),
        (InvalidArgument, {"tokenizer": object(), "processing_class": object()}, "the old name of processing_class"),
        (TypeError, {"callbacks": TrainerCallback()}, r"callbacks=\[TrainerCallback\(\)\]\."),
        (TypeError, {"callbacks": [lambda: None]}, r"callbacks: <lambda> \(function\) handles no event"),
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
        (UnknownArgument, {"metrics": {}}, "no argument 'metrics'; did you mean 'compute_metrics'"),
        (InvalidArgument, {"optimizers": (None,)}, "optimizers is a tuple of 1, but must be a pair"),
        (InvalidArgument, {"optimizers": OPTIMIZERS[::-1]}, r"is \(NoneType, SGD\): pass \(optimizer, scheduler\)"),
        (
            InvalidArgument,
            {"optimizers": torch.optim.SGD([torch.zeros(1)])},
            "optimizers is an SGD, but must be a pair",
        ),
        (InvalidArgument, {"optimizers": 3}, "optimizers is an int, but must be a pair"),
        (InvalidArgument, {"optimizers": ("sgd", None)}, "not 'sgd': .* set optim and lr_scheduler_type"),
        (WrongObject, {"args": 3}, r"args is of type int: pass TrainingArguments\('folder'"),
        (InvalidArgument, {"data_collator": [1]}, "data_collator must be callable, got list.*as train_dataset="),
        (WrongObject, {"args": {"max_steps": 2}}, r"args is a dict: pass TrainingArguments\(\*\*args\)"),
        (WrongObject, {"args": "out"}, r"args is a str: pass TrainingArguments\('out'\)"),
        (WrongObject, {"args": TrainingArguments}, "args is the class TrainingArguments: pass an instance"),
        (WrongObject, {"args": MODEL}, r"args is a model, Plain: pass the model first, as Trainer\(model, args\)"),
        (
            WrongObject,
            {"args": LightningTrainer},
            r"args is of type lightning\.\S+\.Trainer: pass TrainingArguments\('fold",
        ),
        (
            WrongObject,
            {"model": LightningTrainer},
            r"model is of type lightning\.\S+\.Trainer: pass a torch\.nn\.Module",
        ),
        (WrongObject, {"model": Plain}, "model is the class Plain: pass a model"),
        (WrongObject, {"tokenizer": "a-model"}, r"load it first, for example with AutoTokenizer"),
        (WrongObject, {"model": None, "model_init": "bert"}, "model_init is a str: pass a function"),
        (WrongObject, {"compute_loss_func": "mse"}, "compute_loss_func is a str: pass a function"),
        (WrongObject, {"preprocess_logits_for_metrics": 1}, "preprocess_logits_for_metrics is an int: pass a function"),
        (WrongObject, {"model": "a-model"}, r"load it first, for example with AutoModel\.from_pretrained\('a-model'\)"),
        (
            WrongObject,
            {"processing_class": "a-model"},
            r"load it first, for example with AutoTokenizer\.from_pretrained\('a-mod",
        ),
        (
            InvalidArgument,
            {"model": OfLightning()},
            r"(?s)OfLightning is a LightningModule, .* or pass its inner model, .*\n- training_step: a forward .*"
            r"\n- on_train_start: a Lightning callback in",
        ),
        (TypeError, {"callbacks": [NeedsPath]}, "NeedsPath\\(\\) fails .*missing .*'path'.*: pass an instance"),
    ],
)
def test_wrong_argument_of_the_trainer_is_refused(make_args, kind, trainer_kwargs, message):
    with pytest.raises(kind, match=message):
        Trainer(**{"model": MODEL, "args": make_args(), **trainer_kwargs})


def test_tokenizer_sets_processing_class(make_args):
    it = object()
    with pytest.warns(FutureWarning, match="processing_class"):
        assert Trainer(make_plain(), make_args(), tokenizer=it).processing_class is it


def test_seq2seq_trainer_refuses_plain_training_arguments(make_args):
    with pytest.raises(WrongObject, match=r"args is a TrainingArguments, .* pass Seq2SeqTrainingArguments"):
        Seq2SeqTrainer(make_plain(), make_args())


def test_import_of_a_name_of_transformers_says_where_it_is():
    with pytest.raises(ImportError, match="Write: from transformers import AutoTokenizer"):
        from hftrainer import AutoTokenizer  # noqa: F401


def test_arguments_must_be_the_same_on_all_ranks(make_args):
    """But for those that concern one process."""

    def gather(own):
        assert not {"output_dir", "dataloader_num_workers", "report_to", "hub_token"} & own[0].keys()
        return [own[0], {**own[0], "seed": "7"}, own[0]]

    ranks = SimpleNamespace(is_distributed=True, gather_objects=gather)
    with pytest.raises(InvalidArgument, match=r"\nseed is 1 in rank 0, 2; 7 in rank 1\.$"):
        check_consistency(make_args(seed=1), ranks)


def test_iterable_of_an_evaluation_is_left_to_methods_that_come_later(make_args):
    """Ray's `prepare_trainer` gives a Trainer the class that reads its iterables."""

    class Reads(Trainer):
        def get_eval_dataloader(self, eval_dataset=None):
            return DataLoader(list(self.eval_dataset))

    rows = type("Rows", (), {"__iter__": lambda self: iter(plain_data(4))})()
    trainer = Trainer(make_plain(), make_args(eval_strategy="steps", eval_steps=2), eval_dataset=rows)
    with pytest.raises(InvalidArgument, match="The evaluation dataset is a Rows: pass a list"):
        trainer.evaluate()
    trainer.__class__ = Reads
    assert "eval_loss" in trainer.evaluate()
