"""`python -m hftrainer explain`: how training arguments are handled, from the command line or from a script."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from hftrainer.cli.parser import Parser
from hftrainer.errors import InvalidArgument, UnknownArgument, UnsupportedArgument, suggest

if TYPE_CHECKING:
    from hftrainer.hf_argparser import HfArgumentParser
    from hftrainer.trainer import Trainer
    from hftrainer.training_args import TrainingArguments

_USAGE = "%(prog)s [--json] [any training arguments …]\n       %(prog)s [--json] [-m] SCRIPT [arguments …]"
_DESCRIPTION = (
    "Show what becomes of training arguments; with a script, of the arguments that it makes. The script runs until it "
    "makes a Trainer, which ends it, so nothing is trained; the libraries of Hugging Face are offline. If it ends "
    "before, the arguments that it made last are shown."
)


def add(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "explain", help="show how training arguments, or those of a script, are used", usage=_USAGE, add_help=False
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument("-m", dest="as_module", action="store_true", help="SCRIPT is the name of a module")
    # argparse returns unknown training arguments separately from the first value and everything after it; `main` joins
    # both.
    parser.add_argument("words", metavar="SCRIPT", nargs=argparse.REMAINDER, help="a script with its arguments")
    parser.set_defaults(execute=_explain, parser=parser)


def arguments_parser() -> HfArgumentParser:
    """The parser of training arguments."""
    from hftrainer.hf_argparser import HfArgumentParser
    from hftrainer.training_args import TrainingArguments

    return HfArgumentParser(
        TrainingArguments,
        prog="python -m hftrainer explain",
        usage=_USAGE,
        description=_DESCRIPTION,
        allow_abbrev=False,
    )


def _explain(parser: Parser, options: argparse.Namespace) -> None:
    failure: str | None = None
    if options.words and not options.words[0].startswith("-"):
        args, failure = _arguments_of_script(parser, *options.words, as_module=options.as_module)
    elif options.as_module:
        parser.error("-m needs the name of a module")
    else:
        words = [word for word in options.words if word != "--json"]
        options.json |= len(words) < len(options.words)
        args = _arguments(words)
    try:
        explanation = args.explain()
    except (ValueError, OSError) as error:  # a file named by an argument; our errors derive from ValueError
        parser.fail(error)
    print(explanation.to_json() if options.json else explanation)
    if failure is not None:
        parser.exit(1, f"{failure}. These are the arguments that it made last.\n")
    parser.exit(1 if explanation.refused or explanation.errors else 0)


def _arguments(words: list[str]) -> TrainingArguments:
    parser = arguments_parser()
    try:
        args: TrainingArguments
        args, unknown = parser.parse_args_into_dataclasses(words, True, look_for_args_file=False)
    except ValueError as error:
        parser.error(str(error))
    if unknown:
        options = [f"--{field.name}" for field in dataclasses.fields(args)]
        hint = suggest(unknown[0], options, "; a script comes first: explain train.py --fp16")
        parser.error(f"unknown argument {unknown[0]}{hint}")
    return args


class _Stop(BaseException):
    """Ends a script at its first Trainer."""

    def __init__(self, args: TrainingArguments | None) -> None:
        self.args_of_trainer = args


def _arguments_of_script(
    parser: Parser, script: str, *arguments: str, as_module: bool
) -> tuple[TrainingArguments, str | None]:
    """The arguments of the script's first Trainer, or its last arguments and the error that ended it."""
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")  # before these libraries are imported
    from hftrainer.cli.run import check_script, run_script
    from hftrainer.training_args import TrainingArguments

    check_script(parser, script, as_module=as_module)
    made, failure = _patch_trainer_to_stop(), None
    try:
        with contextlib.redirect_stdout(sys.stderr):  # the explanation alone is on stdout
            run_script(script, list(arguments), as_module=as_module)
    except _Stop as stop:
        return stop.args_of_trainer or TrainingArguments("tmp_trainer"), None
    except (Exception, SystemExit) as error:
        if not made and isinstance(error, SystemExit):  # the script itself has printed the reason
            raise
        if not made and isinstance(error, (InvalidArgument, UnknownArgument, UnsupportedArgument)):
            parser.fail(f"{script} makes arguments that are refused: {error}", status=1)
        failure = f"{script} ended before its Trainer with {type(error).__name__}: {error}".rstrip(".")
    if not made:
        parser.fail(
            f"{failure or f'{script} ended'}, and made no TrainingArguments. Give the arguments themselves, as in "
            f"{parser.prog} --fp16; python -m hftrainer run {script} shows where the script ends.",
            status=1,
        )
    return made[-1], failure


def _patch_trainer_to_stop() -> list[TrainingArguments]:
    """Make Trainer construction raise `_Stop`. Returns a list that collects all arguments made."""
    from hftrainer.trainer import Trainer
    from hftrainer.training_args import TrainingArguments

    made: list[TrainingArguments] = []
    check = TrainingArguments.__post_init__

    def keep(self: TrainingArguments) -> None:
        check(self)
        made.append(self)

    # In `__new__`, because `__init__` of subclasses may prepare data first.
    def stop(_: type[Trainer], *given: Any, **named: Any) -> NoReturn:
        raise _Stop(next((value for value in (*given, *named.values()) if isinstance(value, TrainingArguments)), None))

    setattr(TrainingArguments, "__post_init__", keep)  # noqa: B010 - mypy takes no assignment
    setattr(Trainer, "__new__", stop)  # noqa: B010
    return made
