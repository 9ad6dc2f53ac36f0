"""Our HfArgumentParser parses the same classes to the same objects as that of transformers."""

import dataclasses
import enum
import importlib
import json
import logging
import re
import shlex
import sys
from dataclasses import dataclass, field
from typing import Literal, Optional

import pytest

from hftrainer import HfArgumentParser, Trainer, TrainingArguments
from hftrainer.errors import InvalidArgument, UnsupportedArgument
from tests.support.small_models import make_bert, text_data

transformers = importlib.import_module("transformers")
theirs = transformers.HfArgumentParser


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Example:
    needed: int
    name: str = "x"
    rate: float = 0.5
    flag: bool = False
    on: bool = True
    maybe: bool | None = None
    count: int | None = None
    old_count: Optional[int] = None  # noqa: UP045 - scripts write it so
    color: Color = Color.RED
    size: Literal["small", "large", 3] = "small"
    items: list[int] = field(default_factory=lambda: [1, 2])
    words: list[str] | None = field(default=None, metadata={"help": "Some words.", "aliases": ["--w"]})
    path: str | None = None

    def __post_init__(self):
        self.color = Color(self.color)


@pytest.mark.parametrize(
    "line",
    [
        "--needed 3",
        "--needed 3 --name y --rate 2 --flag --count 4 --old_count 5",
        "--needed 3 --flag false --on no --maybe true",
        "--needed 3 --no_on",
        "--needed 3 --no-on --old-count 7",
        "--needed 3 --color blue --size large",
        "--needed 3 --size 3",
        "--needed 3 --items 5 6 7 --words a b",
        "--needed 3 --w a --path p",
        "--needed 3 --items 1 --flag 1 --on 0",
    ],
)
def test_parsed_objects_match_transformers(line):
    (ours,) = HfArgumentParser(Example).parse_args_into_dataclasses(line.split())
    (other,) = theirs(Example).parse_args_into_dataclasses(line.split())
    assert ours == other
    assert {name: type(value) for name, value in vars(ours).items()} == {n: type(v) for n, v in vars(other).items()}


@pytest.mark.parametrize(
    "line", ["", "--needed x", "--needed 3 --color green", "--needed 3 --flag perhaps", "--needed 3 --size 4"]
)
def test_wrong_words_are_refused_like_in_transformers(line, capsys):
    for parser in (HfArgumentParser, theirs):
        with pytest.raises(SystemExit) as caught:
            parser(Example).parse_args_into_dataclasses(line.split())
        assert caught.value.code == 2
        assert "usage" in capsys.readouterr().err


#: Command lines of transformers' documentation, v4.1 to v4.48 → the words with which a single process refuses them.
COMMANDS = {
    "--overwrite_output_dir --do_train --num_train_epochs 1 --per_device_train_batch_size 1": "",
    "--learning_rate 3e-5 --warmup_steps 500 --adam_beta1 0.8 --adam_beta2 0.999 --adam_epsilon 1e-8 --weight_decay "
    "3e-7 --lr_scheduler_type constant_with_warmup --fp16 --fp16_backend amp": "",
    "--evaluation_strategy steps --no_cuda --label_names a b --warmup_ratio 0.1": "",
    "--log_level warning --log_level_replica error --log_on_each_node 0": "",
    "--report_to none --logging_steps 0.1 --save_total_limit 3 --disable_tqdm true --max_steps 7": "",
    "--gradient_checkpointing --include_for_metrics inputs loss --dataloader_pin_memory false": "",
    "--no_dataloader_pin_memory --eval_steps 4 --metric_for_best_model f1 --greater_is_better true": "",
    "--fsdp full_shard --fsdp_config {} --accelerator_config {} --hub_strategy end": "there is only one process",
    """--lr_scheduler_type cosine --lr_scheduler_kwargs '{"num_cycles": "2"}' --gradient_accumulation_steps 2""": "",
    "--fp16 --fp16_backend apex --fp16_opt_level 01": "",
    "--debug": "",
    "--fp16 --sharded_ddp": "fsdp='shard_grad_op'",
    "--sharded_ddp simple": "fsdp='shard_grad_op'",
    "--fsdp full_shard": "fsdp='full_shard'",
    "--fsdp 'full shard'": "fsdp='full shard' shards",
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("line", COMMANDS)
def test_documented_command_line_is_parsed_and_used(line, tmp_path):
    """Both parsers read them alike, and a Trainer is made or refuses an argument by name."""
    words = ["--output_dir", str(tmp_path), "--use_cpu", *shlex.split(line)]
    args, other = (kind(TrainingArguments).parse_args_into_dataclasses(words)[0] for kind in (HfArgumentParser, theirs))
    assert args == other
    assert dataclasses.asdict(args) == dataclasses.asdict(other)
    args.max_steps, args.eval_strategy, args.report_to = 2, "no", []
    if refused := COMMANDS[line]:
        with pytest.raises(UnsupportedArgument, match=refused):
            Trainer(make_bert(), args, train_dataset=text_data())
        return
    verbosity = transformers.logging.get_verbosity()
    assert Trainer(make_bert(), args, train_dataset=text_data()).train().global_step == 2
    logging.getLogger("hftrainer").setLevel(logging.NOTSET)
    transformers.logging.set_verbosity(verbosity)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("parser", [HfArgumentParser, theirs], ids=["ours", "theirs"])
@pytest.mark.parametrize(
    ("line", "fsdp", "debug"),
    [
        ("--sharded_ddp --fp16", "shard_grad_op", []),
        ("--sharded_ddp 'zero_dp_3 offload'", "full_shard offload", []),
        ("--debug --fp16", None, ["tpu_metrics_debug"]),
        ("--debug underflow_overflow", None, ["underflow_overflow"]),
        ("--debug 'underflow_overflow tpu_metrics_debug'", None, ["underflow_overflow", "tpu_metrics_debug"]),
        ("--debug underflow_overflow tpu_metrics_debug", None, ["underflow_overflow", "tpu_metrics_debug"]),
        ("--debug ''", None, []),
        ("", None, []),
    ],
)
def test_old_flags_accept_optional_words(parser, line, fsdp, debug):
    (args,) = parser(TrainingArguments).parse_args_into_dataclasses(["--use_cpu", *shlex.split(line)])
    assert (args.fsdp, args.debug) == (fsdp, debug)


@dataclass
class Second:
    extra: str = "none"


def test_several_classes_are_parsed_and_other_words_returned():
    parser = HfArgumentParser((Example, Second))
    first, second = parser.parse_args_into_dataclasses(["--needed", "1", "--extra", "e"])
    assert (first.needed, second.extra) == (1, "e")
    *_, rest = parser.parse_args_into_dataclasses(["--needed", "1", "--other", "2"], return_remaining_strings=True)
    assert rest == ["--other", "2"]
    with pytest.raises(ValueError, match="--other"):
        parser.parse_args_into_dataclasses(["--needed", "1", "--other", "2"])
    with pytest.raises(ValueError, match="did you mean '--extra'"):
        parser.parse_args_into_dataclasses(["--needed", "1", "--extras", "e"])


def test_unknown_option_of_a_script_ends_it_like_an_invalid_value(monkeypatch, capsys):
    for word, message in (("--lerning_rate=1", "did you mean '--learning_rate'?"), ("--max_steps=a", "invalid int")):
        monkeypatch.setattr(sys, "argv", ["train.py", word])
        with pytest.raises(SystemExit) as ended:
            HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
        error = capsys.readouterr().err
        assert ended.value.code == 2 and message in error and error.count("\n") == 1


def test_arguments_are_read_from_files(tmp_path, monkeypatch):
    parser = HfArgumentParser((Example, Second))
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"needed": 4, "color": "blue", "extra": "e"}))
    first, second = parser.parse_json_file(path)
    assert (first.needed, first.color, second.extra) == (4, Color.BLUE, "e")
    (tmp_path / "settings.yaml").write_text("needed: 5\nitems: [7, 8]\n")
    assert parser.parse_yaml_file(tmp_path / "settings.yaml")[0].items == [7, 8]
    path.write_text('{"needed": 4,')
    with pytest.raises(InvalidArgument, match=r"settings.json is not valid JSON: .*line 1 column"):
        parser.parse_json_file(path)
    with pytest.raises(InvalidArgument, match="'wrong'"):
        parser.parse_dict({"needed": 1, "wrong": 2})
    assert parser.parse_dict({"needed": 1, "wrong": 2}, allow_extra_keys=True)[0].needed == 1
    words = tmp_path / "words.txt"
    words.write_text("--needed 9 --name from-file")
    assert parser.parse_args_into_dataclasses(["--name", "later"], args_filename=str(words))[0].name == "later"
    found = parser.parse_args_into_dataclasses(["--args_file", str(words)], args_file_flag="--args_file")
    assert (found[0].needed, found[0].name) == (9, "from-file")
    monkeypatch.setattr("sys.argv", [str(tmp_path / "script.py"), "--name", "y"])
    (tmp_path / "script.args").write_text("--needed 2")
    assert parser.parse_args_into_dataclasses()[0].needed == 2


def test_help_names_every_field(capsys):
    with pytest.raises(SystemExit):
        HfArgumentParser(TrainingArguments).parse_args(["--help"])
    text = capsys.readouterr().out
    for name in (each.name for each in dataclasses.fields(TrainingArguments)):
        assert f"--{name}" in text
    # By subject: our own and the old ones last.
    _, optimizer, own, old = re.split("\n(?:Optimizer, loss.*|Only in hftrainer|Removed in newer releases):\n", text)
    assert "--weight_decay" in optimizer and "--eval_minutes" in own and "--per_gpu_eval_batch_size" in old


@dataclass
class Switches:
    either: Optional[bool] = None  # noqa: UP045  as scripts write it
    other: bool | None = None


@pytest.mark.parametrize(
    ("words", "expected"),
    [("", (None, None)), ("--either --other", (True, True)), ("--either false --other no", (False, False))],
)
def test_optional_switch_without_a_value_is_true(words, expected):
    """As those that are not optional (huggingface/transformers#43469)."""
    (parsed,) = HfArgumentParser(Switches).parse_args_into_dataclasses(words.split())
    assert (parsed.either, parsed.other) == expected


def test_dict_field_is_read_as_json(capsys):
    """transformers takes none on a command line (huggingface/transformers#48030)."""
    fields = [("first", dict, field(default_factory=dict)), ("second", dict | None, None)]
    kind = dataclasses.make_dataclass("Settings", fields)
    (settings,) = HfArgumentParser(kind).parse_args_into_dataclasses(["--first", '{"a": false}', "--second", "{}"])
    assert settings == kind({"a": False}, {})
    with pytest.raises(SystemExit):
        HfArgumentParser(kind).parse_args_into_dataclasses(["--first", "[1]"])
    assert "'[1]' is not a JSON object" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--optim", "sdg"], "--optim: 'sdg' is not allowed; the nearest are sgd, "),
        (["--lr_scheduler_type", "cosin"], "'cosin' is not one of linear, cosine, "),
    ],
)
def test_wrong_choice_names_the_nearest(words, message, capsys):
    with pytest.raises(SystemExit):
        HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words, look_for_args_file=False)
    assert message in capsys.readouterr().err
