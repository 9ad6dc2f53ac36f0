"""`TrainingArguments` as a base class, and `accelerator_config` as the object that libraries change."""

import copy
import dataclasses
import itertools
import json
import pickle

import pytest
import torch
import transformers

import hftrainer
from hftrainer.errors import InvalidArgument, UnknownKey, UnsupportedArgument
from hftrainer.trainer_pt_utils import AcceleratorConfig
from tests.support.tiny import make_plain, plain_data

LIBRARIES = pytest.mark.parametrize("library", [hftrainer, transformers], ids=lambda library: library.__name__)


def make_class(library):
    @dataclasses.dataclass
    class Config(library.TrainingArguments):
        _VALID_DICT_FIELDS = [*library.TrainingArguments._VALID_DICT_FIELDS, "mine"]

        mine: dict | str | None = dataclasses.field(default=None, metadata={"help": "Something as JSON."})
        beta: float = dataclasses.field(default=0.1, metadata={"help": "Of the loss."})
        learning_rate: float = dataclasses.field(default=3e-4, metadata={"help": "Another default."})
        length_column_name: str = "size"

        def __post_init__(self):
            self.before = self.beta * 2
            super().__post_init__()
            self.after = self.output_dir

    return Config


@pytest.mark.parametrize(
    ("library", "parser"),
    [
        (hftrainer, hftrainer.HfArgumentParser),
        (hftrainer, transformers.HfArgumentParser),
        (transformers, transformers.HfArgumentParser),
    ],
    ids=["ours", "their parser", "theirs"],
)
def test_a_subclass(tmp_path, library, parser):
    kind = make_class(library)
    args = kind(str(tmp_path), mine='{"a": {"b": "1"}, "c": "true"}', use_cpu=True)
    assert (args.output_dir, args.after, args.before) == (str(tmp_path), str(tmp_path), 0.2)
    assert (args.mine, args.learning_rate, args.length_column_name) == ({"a": {"b": 1}, "c": True}, 3e-4, "size")
    assert dataclasses.fields(args)[0].name == "output_dir"
    words = ["--output_dir", str(tmp_path), "--beta", "0.5", "--mine", '{"x": 2}', "--use_cpu"]
    (parsed,) = parser(kind).parse_args_into_dataclasses(words)
    assert (parsed.beta, parsed.mine, parsed.before) == (0.5, {"x": 2}, 1.0)
    again = kind(**{name: value for name, value in args.to_dict().items() if name in ("output_dir", "mine", "beta")})
    assert (again.mine, again.beta) == (args.mine, args.beta)


def test_a_subclass_of_a_subclass(tmp_path):
    @dataclasses.dataclass
    class Further(make_class(hftrainer)):
        gamma: int = 7

    args = Further(str(tmp_path), use_cpu=True)
    assert (args.output_dir, args.gamma, args.beta) == (str(tmp_path), 7, 0.1)
    with pytest.raises(TypeError, match="did you mean 'gamma'"):
        Further(str(tmp_path), gama=1)
    assert "mine" in args._VALID_DICT_FIELDS and "mine" not in hftrainer.TrainingArguments._VALID_DICT_FIELDS
    trainer = hftrainer.Trainer(make_plain(), args, train_dataset=plain_data())
    assert trainer.args.gamma == 7


@LIBRARIES
def test_the_config_is_an_object(tmp_path, library):
    args = library.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    config = args.accelerator_config
    assert config.dispatch_batches is None and config.even_batches is True and config.split_batches is False
    config.dispatch_batches = config.even_batches = False
    config.non_blocking = True
    trainer = library.Trainer(make_plain(), args, train_dataset=plain_data())
    now = trainer.accelerator.dataloader_config
    assert (now.dispatch_batches, now.even_batches, now.non_blocking) == (False, False, True)
    assert args.to_dict()["accelerator_config"] == config.to_dict()
    assert json.loads(args.to_json_string())["accelerator_config"]["dispatch_batches"] is False


@pytest.mark.parametrize("given", [None, {"split_batches": True}, {"gradient_accumulation_kwargs": {"num_steps": 3}}])
def test_it_is_written_as_theirs(tmp_path, given):
    settings = {"use_cpu": True, "report_to": "none", "accelerator_config": given}
    ours, theirs = (
        library.TrainingArguments(str(tmp_path), **copy.deepcopy(settings)) for library in (hftrainer, transformers)
    )
    assert ours.to_dict()["accelerator_config"] == theirs.to_dict()["accelerator_config"]
    assert ours.to_sanitized_dict()["accelerator_config"] == theirs.to_sanitized_dict()["accelerator_config"]


@LIBRARIES
def test_it_survives_copies(tmp_path, library):
    args = library.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    args.accelerator_config.use_seedable_sampler = False
    torch.save(args, tmp_path / "training_args.bin")
    copies = [
        copy.deepcopy(args),
        dataclasses.replace(args, seed=7),
        torch.load(tmp_path / "training_args.bin", weights_only=False),
        pickle.loads(pickle.dumps(args)),
    ]
    assert all(each.accelerator_config.use_seedable_sampler is False for each in copies)
    assert copies[0].accelerator_config == args.accelerator_config
    assert copies[0].accelerator_config is not args.accelerator_config


def test_equal_arguments(tmp_path):
    first, second = (hftrainer.TrainingArguments(str(tmp_path), use_cpu=True) for _ in range(2))
    assert first == second
    second.accelerator_config.even_batches = False
    assert first != second


def test_it_may_be_given_late(tmp_path):
    args = hftrainer.TrainingArguments(str(tmp_path), use_cpu=True)
    args.accelerator_config = {"split_batches": True}
    assert args.accelerator_config == AcceleratorConfig(split_batches=True) and args.split_batches
    args.accelerator_config = None
    assert args.accelerator_config == AcceleratorConfig()
    with pytest.raises(UnknownKey, match="did you mean 'split_batches'"):
        args.accelerator_config = {"split_batch": True}
    args.accelerator_config.split_batch = True
    with pytest.raises(InvalidArgument, match="has no key 'split_batch': did you mean 'split_batches'"):
        hftrainer.Trainer(make_plain(), args, train_dataset=plain_data())


@LIBRARIES
def test_accumulation_that_is_set_on_it(tmp_path, library):
    args = library.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", max_steps=2)
    args.accelerator_config.gradient_accumulation_kwargs = {"num_steps": 4}
    trainer = library.Trainer(make_plain(), args, train_dataset=plain_data())
    assert args.gradient_accumulation_steps == 4
    trainer.train()
    assert trainer.state.epoch > 0


def test_an_object_stays_the_one_it_is(tmp_path):
    """Of either class: who holds it may change it."""
    for config in (AcceleratorConfig(), transformers.trainer_pt_utils.AcceleratorConfig()):
        args = hftrainer.TrainingArguments(str(tmp_path), use_cpu=True, accelerator_config=config)
        assert args.accelerator_config is config
        config.non_blocking = True
        trainer = hftrainer.Trainer(make_plain(), args, train_dataset=plain_data())
        assert trainer.accelerator.non_blocking
        assert "use_configured_state" not in args.to_dict()["accelerator_config"]


def test_a_configured_state_is_in_the_dict():
    config = AcceleratorConfig(use_configured_state=True)
    assert config.to_dict() == transformers.trainer_pt_utils.AcceleratorConfig(use_configured_state=True).to_dict()


def test_the_deepspeed_plugin_is_not_set(tmp_path):
    args = hftrainer.TrainingArguments(tmp_path, use_cpu=True)
    args.deepspeed_plugin = None
    with pytest.raises(UnsupportedArgument, match="give the configuration as `deepspeed`"):
        args.deepspeed_plugin = object()


def test_the_default_optimizer():
    assert hftrainer.TrainingArguments.default_optim == transformers.TrainingArguments.default_optim


def test_what_is_set_on_the_accelerator(tmp_path):
    """Loaders that are prepared from then on go by it."""
    orders = [set_on_the_accelerator(library, tmp_path) for library in (hftrainer, transformers)]
    assert orders[0] == orders[1]
    assert all(first != second for first, second in itertools.combinations(orders[0], 2))


def set_on_the_accelerator(library, folder):
    args = library.TrainingArguments(str(folder), use_cpu=True, report_to="none")
    trainer = library.Trainer(make_plain(), args, train_dataset=plain_data())
    accelerator, orders = trainer.accelerator, []
    orders.append([batch["x"].tolist() for batch in trainer.get_train_dataloader()])
    accelerator.even_batches = False
    assert accelerator.dataloader_config.even_batches is accelerator.even_batches is False
    accelerator.dataloader_config.data_seed = 1234
    orders.append([batch["x"].tolist() for batch in trainer.get_train_dataloader()])
    accelerator.dataloader_config.use_seedable_sampler = False
    torch.manual_seed(0)
    orders.append([batch["x"].tolist() for batch in trainer.get_train_dataloader()])
    return orders


def test_a_loader_cannot_be_stateful(tmp_path):
    trainer = hftrainer.Trainer(
        make_plain(), hftrainer.TrainingArguments(str(tmp_path), use_cpu=True), train_dataset=plain_data()
    )
    trainer.accelerator.dataloader_config.use_stateful_dataloader = True
    with pytest.raises(UnsupportedArgument, match="use_stateful_dataloader"):
        trainer.get_train_dataloader()
