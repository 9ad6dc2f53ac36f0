"""Every argument on the command line arrives as in transformers' own class, by both parsers."""

import dataclasses
import functools
import os
import typing
from unittest import mock

import pytest
import transformers

import hftrainer

CLASSES = ("TrainingArguments", "Seq2SeqTrainingArguments")
PARSERS = ("hftrainer", "transformers")
FIELDS = {
    name: [field.name for field in dataclasses.fields(getattr(transformers, name)) if field.init] for name in CLASSES
}
#: Values of arguments that cannot take what their type suggests, and what they need besides.
WORDS = {
    "output_dir": "elsewhere",
    "activation_checkpointing_kwargs": '{"use_reentrant":false}',
    "gradient_checkpointing_kwargs": '{"use_reentrant":false}',
    "lr_scheduler_kwargs": '{"num_cycles":"2","a":"True"}',
    "accelerator_config": '{"split_batches":true}',
    "fsdp_config": '{"min_num_params":3}',
    "dataloader_prefetch_factor": "3 --dataloader_num_workers 1",
    "dataloader_persistent_workers": "true --dataloader_num_workers 1",
    "debug": "underflow_overflow",
    "fsdp": "full_shard",
    "generation_config": "a/folder",
    "fp16_backend": "cpu_amp",
    "gradient_accumulation_steps": "3",
    "half_precision_backend": "cpu_amp",
    "load_best_model_at_end": "true --eval_strategy epoch --save_strategy epoch",
    "include_num_input_tokens_seen": "true",
    "report_to": "csv",
    "save_steps": "3",
    "tf32": "false",
    "torchdynamo": "eager",
    "push_to_hub_token": "hf_token",
}
#: Arguments that transformers' own class takes from no command line -> the error of its parser.
NOT_THERE = {
    "deepspeed": "needs a package, and a file",
    "liger_kernel_config": "a dict made of a word",
    "parallelism_config": "an object made of a word",
}
#: Arguments whose words are compared before the class takes them: it needs more than one process, another device or the
#: Hub for them, or keeps them in a form of its own.
AS_PARSED = {
    *("ddp_backend", "fsdp", "fsdp_config", "local_rank", "use_mps_device", "push_to_hub_model_id"),
    *("average_tokens_across_devices", "tpu_metrics_debug", "push_to_hub_organization", "accelerator_config"),
}


@pytest.fixture(autouse=True)
def _environment():
    with mock.patch.dict(os.environ):  # transformers writes into it
        yield


def words_for(kind: str, name: str) -> list[str]:
    field = {field.name: field for field in dataclasses.fields(getattr(transformers, kind))}[name]
    hint = typing.get_type_hints(getattr(transformers, kind))[name]
    members = [member for member in typing.get_args(hint) or (hint,) if member is not type(None)]
    enumerations = [member for member in members if hasattr(member, "__members__")]
    if name in WORDS:
        return [f"--{name}", *WORDS[name].split()]
    if choices := field.metadata.get("choices") or [choice.value for kind in enumerations for choice in kind]:
        return [f"--{name}", str(next(choice for choice in choices if choice != field.default))]
    if bool in members and str not in members:
        return [f"--{name}", str(field.default is not True).lower()]
    if int in members:
        return [f"--{name}", "3"]
    if float in members:
        return [f"--{name}", "0.25"]
    return (
        [f"--{name}", "some", "words"]
        if any("list" in str(member) for member in members) and str not in members
        else [f"--{name}", "some"]
    )


@functools.cache
def make_parser(parser: str, kind: type) -> typing.Any:
    return (hftrainer if parser == "hftrainer" else transformers).HfArgumentParser(kind)


def parse(parser: str, kind: type, words: list[str], name: str) -> typing.Any:
    """What an argument becomes, in plain values."""
    words = words if "--output_dir" in words else ["--output_dir", "out", *words]
    words = words if {"--use_cpu", "--no_cuda"} & set(words) else [*words, "--use_cpu", "true"]
    made = make_parser(parser, kind)
    if name in AS_PARSED:
        return getattr(made.parse_args(words), name)
    value = getattr(made.parse_args_into_dataclasses(words)[0], name)
    value = "all" if name == "include_num_input_tokens_seen" and value is True else value  # until v4.51
    return (
        [getattr(item, "value", item) for item in value] if isinstance(value, list) else getattr(value, "value", value)
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in CLASSES for name in FIELDS[kind]])
def test_arrives_as_in_transformers(kind, name, parser, capsys):
    words = words_for(kind, name)
    if name in NOT_THERE:
        with pytest.raises((SystemExit, ImportError)):
            parse("transformers", getattr(transformers, kind), words, name)
        return
    expected = parse("transformers", getattr(transformers, kind), words, name)
    given = parse(parser, getattr(hftrainer, kind), words, name)
    assert given == expected
    assert type(given) is type(expected) or isinstance(given, (int, float))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("kind", CLASSES)
def test_flags_alone(kind, parser):
    """What takes no word in transformers takes none here: `--fp16`, `--no_dataloader_pin_memory`."""
    theirs = make_parser("transformers", getattr(transformers, kind))
    ours = make_parser(parser, getattr(hftrainer, kind))
    bare = [action for action in theirs._actions if action.nargs in ("?", 0) and action.dest != "help"]
    assert len(bare) > 30
    options = {option: action for action in ours._actions for option in action.option_strings}
    missing = [option for action in bare for option in action.option_strings if option not in options]
    assert not missing
    assert not [option for action in bare for option in action.option_strings if options[option].nargs not in ("?", 0)]


@dataclasses.dataclass
class Own(hftrainer.Seq2SeqTrainingArguments):
    folder: str | None = None
    ratio: float = 0.5


@pytest.mark.parametrize("parser", PARSERS)
def test_subclass(parser):
    words = "--output_dir out --folder here --ratio 2 --generation_max_length 4 --liger_kernel_config {}".split()
    (made,) = make_parser(parser, Own).parse_args_into_dataclasses(words)
    assert (made.folder, made.ratio, made.generation_max_length, made.liger_kernel_config) == ("here", 2.0, 4, {})
