"""Each argument, given in every way, is what it is in the TrainingArguments of the installed transformers."""

import dataclasses
import functools
import importlib
import os
import pickle
from unittest import mock

import pytest
import transformers

import hftrainer
from hftrainer.arguments.fields.argument import arguments_of
from hftrainer.arguments.old_names import FIELDS
from tests.support.arguments import CASES, words_for
from tests.support.parity import LIBRARIES, assert_agree, comparable
from tests.support.releases import TRANSFORMERS
from tests.support.small_models import make_llama, pad, varied_language_data

BEFORE_5 = TRANSFORMERS < (5,)
THEIRS = {field.name for field in dataclasses.fields(transformers.Seq2SeqTrainingArguments) if field.init}
#: Arguments of which only the words are compared: the class of transformers needs a package, more than one process,
#: another device or the Hub for them, or keeps them in a form of its own.
AS_PARSED = {
    *("ddp_backend", "deepspeed", "fsdp", "include_num_input_tokens_seen", "local_rank"),
    *("push_to_hub_model_id", "tpu_metrics_debug", "use_mps_device"),
}
#: Arguments that transformers takes from no command line.
NO_WORDS = {"parallelism_config", "liger_kernel_config"}
#: Arguments whose value in the table also holds when they are not given: by `use_cpu`, or as the default.
IMPLIED = {"dataloader_pin_memory", "disable_tqdm"}


@pytest.fixture(autouse=True)
def _environment():
    with mock.patch.dict(os.environ):  # transformers writes into it
        yield


@functools.cache
def make_parser(library, of, kind="Seq2SeqTrainingArguments"):
    return importlib.import_module(library).HfArgumentParser(getattr(importlib.import_module(of), kind))


def plain(value):
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value.to_dict() if hasattr(value, "to_dict") else getattr(value, "value", value)


def test_every_argument_has_a_case():
    assert THEIRS <= CASES.keys() == arguments_of(hftrainer.Seq2SeqTrainingArguments).keys()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_argument_is_parsed_and_stored_alike(name):
    needs = {"output_dir": "out", "use_cpu": True, **CASES[name].settings}
    settings = {**needs, name: CASES[name].value}
    words = words_for(settings)
    parsers = [make_parser(library, "hftrainer") for library in LIBRARIES]
    if name != "deepspeed":  # which would have to be installed
        args = hftrainer.Seq2SeqTrainingArguments(**settings)
        assert (args != hftrainer.Seq2SeqTrainingArguments(**needs)) is (name not in IMPLIED)
        for parser in parsers:
            assert parser.parse_args_into_dataclasses(words) == parser.parse_dict(settings) == (args,)
    if name not in THEIRS:
        return
    their_parser = make_parser("transformers", "transformers")
    if name in AS_PARSED:
        first, second, third = (getattr(parser.parse_args(words), name) for parser in (*parsers, their_parser))
        assert first == second == third
        return
    theirs = [transformers.Seq2SeqTrainingArguments(**settings)]
    theirs += [] if name in NO_WORDS else their_parser.parse_args_into_dataclasses(words)
    assert [plain(getattr(args, name))] * len(theirs) == [plain(getattr(each, name)) for each in theirs]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("kind", ["TrainingArguments", "Seq2SeqTrainingArguments"])
def test_flags_without_a_value_are_those_of_transformers(kind, library):

    def flags(parser):
        bare = [action for action in parser._actions if action.nargs in ("?", 0)]
        return {option for action in bare for option in action.option_strings}

    theirs = flags(make_parser("transformers", "transformers", kind))
    assert len(theirs) > 60
    assert theirs <= flags(make_parser(library, "hftrainer", kind))


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
        pytest.param(hftrainer, hftrainer, id="ours"),
        pytest.param(hftrainer, transformers, id="their parser"),
        pytest.param(transformers, transformers, id="theirs", marks=pytest.mark.newest_peer),
    ],
)
def test_subclass_is_built_and_parsed_alike(tmp_path, library, parser):
    kind = make_class(library)
    args = kind(str(tmp_path), mine='{"a": {"b": "1"}, "c": "true"}', use_cpu=True)
    assert (args.output_dir, args.after, args.before) == (str(tmp_path), str(tmp_path), 0.2)
    assert (args.mine, args.learning_rate, args.length_column_name) == ({"a": {"b": 1}, "c": True}, 3e-4, "size")
    assert dataclasses.fields(args)[0].name == "output_dir"
    words = words_for({"output_dir": str(tmp_path), "beta": 0.5, "mine": {"x": 2}, "use_cpu": True})
    (parsed,) = parser.HfArgumentParser(kind).parse_args_into_dataclasses(words)
    assert (parsed.beta, parsed.mine, parsed.before) == (0.5, {"x": 2}, 1.0)
    again = kind(**{name: value for name, value in args.to_dict().items() if name in ("output_dir", "mine", "beta")})
    assert (again.mine, again.beta) == (args.mine, args.beta)


def test_subclass_of_a_subclass_keeps_its_defaults(tmp_path):
    @dataclasses.dataclass
    class Further(make_class(hftrainer)):
        gamma: int = 7

    args = Further(str(tmp_path), use_cpu=True)
    assert (args.output_dir, args.gamma, args.beta) == (str(tmp_path), 7, 0.1)
    with pytest.raises(TypeError, match="did you mean 'gamma'"):
        Further(str(tmp_path), gama=1)
    assert "mine" in args._VALID_DICT_FIELDS and "mine" not in hftrainer.TrainingArguments._VALID_DICT_FIELDS
    assert hftrainer.Trainer(make_llama(), args).args.gamma == 7


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"group_by_length": True} if BEFORE_5 else {"train_sampling_strategy": "group_by_length"},
        {"warmup_ratio": 0.5} if BEFORE_5 else {"warmup_steps": 0.5},
        {"include_num_input_tokens_seen": True},
        {"gradient_checkpointing": True},
    ],
    ids=lambda settings: next(iter(settings), "plain"),
)
def test_arguments_of_transformers_train_as_ours(tmp_path, settings):
    def run(name):
        own = {"max_steps": 4, "per_device_train_batch_size": 4, "logging_steps": 1, "optim": "adamw_torch", **settings}
        quiet = {"save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True}
        args = importlib.import_module(name).TrainingArguments(str(tmp_path / name), **own, **quiet)
        trainer = hftrainer.Trainer(make_llama(), args, data_collator=pad, train_dataset=varied_language_data())
        trainer.train()
        weights = {name: tensor.tolist() for name, tensor in trainer.model.state_dict().items()}
        return comparable(trainer.state.log_history), trainer.model.is_gradient_checkpointing, weights

    logs, checkpointing, _ = assert_agree(run)
    assert (logs[-1].get("num_input_tokens_seen", 0) > 0) == ("include_num_input_tokens_seen" in settings)
    assert checkpointing == ("gradient_checkpointing" in settings)


def test_arguments_of_transformers_are_not_changed(tmp_path):
    """Arguments that an older release lacks become attributes of the object, not fields."""
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    before = args.to_dict()
    assert hftrainer.Trainer(make_llama(), args).args is args
    assert args.to_dict() == before
    names = {field.name for field in dataclasses.fields(hftrainer.TrainingArguments)}
    assert all(hasattr(args, name) for name in names - FIELDS.keys())
    assert pickle.loads(pickle.dumps(args)).to_dict() == before
