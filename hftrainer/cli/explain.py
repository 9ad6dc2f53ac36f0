"""`python -m hftrainer explain`: prints the `Explanation` of arguments from the command line or from a script."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import sys
import textwrap
import traceback
import warnings
from typing import TYPE_CHECKING, Any, NoReturn

from hftrainer.cli.parser import Parser, paint_headings
from hftrainer.errors import InvalidArgument, UnknownArgument, UnsupportedArgument, suggest

if TYPE_CHECKING:
    from hftrainer.trainer import Trainer
    from hftrainer.training_args import TrainingArguments

_USAGE = "%(prog)s [--json] [--help-all] [any training arguments …]\n       %(prog)s [--json] [-m] SCRIPT [arguments …]"
_DESCRIPTION = (
    "Show how training arguments are handled, or those that a script creates. The script runs until it creates a "
    "Trainer, so nothing is trained, and the libraries of Hugging Face are offline. If it ends earlier, the arguments "
    "that it created last are shown. The name of an argument shows its help; --help-all shows that of all arguments. "
    "Exits with 1 if a Trainer would refuse the arguments together, or if a script fails, 2 for a wrong name or value."
)


def add_subcommand(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "explain", help="show how training arguments, or a script's, are used", usage=_USAGE, description=_DESCRIPTION
    )
    parser.epilog = "example: %(prog)s train.py --fp16"
    parser.add_argument("-m", dest="as_module", action="store_true", help="SCRIPT is the name of a module")
    # argparse returns unknown options apart from the words after the first value. `main` joins both.
    parser.add_argument("script_words", metavar="SCRIPT", nargs=argparse.REMAINDER, help="a script with its arguments")


def execute(parser: Parser, options: argparse.Namespace) -> None:
    """Run the subcommand."""
    failure: str | None = None
    name = (options.script_words or [""])[0].partition("=")[0]
    # An argument without its dashes, such as optim=sgd. The path of a script has a dot.
    if is_name := name.isidentifier() and not options.as_module and not os.path.exists(name):
        options.script_words[0] = f"--{options.script_words[0]}"
    if options.script_words and not options.script_words[0].startswith("-"):
        args, failure = _arguments_of_script(parser, *options.script_words, as_module=options.as_module)
    elif options.as_module:
        parser.error("-m needs the name of a module")
    else:
        words = [word for word in options.script_words if word != "--json"]
        options.json |= len(words) < len(options.script_words)
        args = _parse_arguments(parser, words, is_name=is_name)
    try:
        explanation = args.explain()
        _check_like_trainer(args)
    # OSError for a file that an argument names, RuntimeError of torch.compile. Our errors derive from ValueError.
    except (ValueError, OSError, RuntimeError) as error:
        parser.fail(error, status=1)
    print(explanation.to_json() if options.json else paint_headings(str(explanation)))
    if failure is not None:
        parser.exit(1, f"{failure}. These are the arguments that it created last.\n")
    parser.exit(1 if explanation.refused or explanation.errors else 0)


def _parse_arguments(parser: Parser, words: list[str], *, is_name: bool) -> TrainingArguments:
    from hftrainer.hf_argparser import HfArgumentParser
    from hftrainer.training_args import TrainingArguments

    class ArgumentsParser(HfArgumentParser):
        print_help = Parser.print_help

    texts = {"prog": parser.prog, "usage": _USAGE, "description": _DESCRIPTION}
    arguments_parser = ArgumentsParser(TrainingArguments, **texts, allow_abbrev=False, exit_on_error=False)
    arguments_parser.add_argument("--help-all", action="help", help="show this help message and exit")
    dashes = "" if is_name else "--"
    parser.epilog = "example: %(prog)s --learning_rate 3e-5 --optim sgd"
    action = arguments_parser._option_string_actions.get(words[0]) if len(words) == 1 else None
    # A name alone asks for its help, and so does an option without its value.
    if action is not None and (is_name or (isinstance(action, argparse._StoreAction) and action.nargs != "?")):
        _show_help(arguments_parser, action)
        parser.exit()
    try:
        args: TrainingArguments
        with warnings.catch_warnings(record=True) as notes:
            args, unknown = arguments_parser.parse_args_into_dataclasses(words, True, look_for_args_file=False)
    except ValueError as error:
        parser.fail(error, status=1)
    except argparse.ArgumentError as error:
        # argparse names all spellings.
        parser.error(re.sub(r"^argument --(\w+)\S*:", rf"argument {dashes}\1:", str(error)))
    print(*(f"note: {note.message}\n" for note in notes), sep="", end="", file=sys.stderr)
    if unknown:
        names = [*(field.name for field in dataclasses.fields(args)), *([] if is_name else ["json"])]
        hint = suggest(unknown[0].strip("-").partition("=")[0], names).replace("mean '", f"mean '{dashes}")
        hint = hint or "; a script must come first: explain train.py --fp16"
        parser.error(f"unknown {'argument' if is_name else 'option'} {unknown[0].removeprefix('--' * is_name)}{hint}")
    return args


def _show_help(parser: argparse.ArgumentParser, action: argparse.Action) -> None:
    """Print the help of an argument and how it is handled."""
    from hftrainer.arguments.explain import TITLES, WIDTH
    from hftrainer.arguments.fields.table import ARGUMENTS

    argument = ARGUMENTS.get(action.dest)
    handling = ": ".join(filter(None, (TITLES[argument.kind], argument.detail))) if argument else ""
    if Parser.writes_json:
        default = None if action.default == argparse.SUPPRESS else action.default
        texts = {"argument": action.dest, "help": action.help, "handling": handling}
        print(json.dumps({**texts, "default": default, "choices": action.choices}, indent=2, default=str))
        return
    formatter = parser._get_formatter()
    formatter.add_argument(action)
    print(formatter.format_help() + textwrap.fill(handling, WIDTH))


def _check_like_trainer(args: TrainingArguments) -> None:
    """Raise for values that only a Trainer checks, such as the names of trackers."""
    from torch import nn, optim

    from hftrainer.assembly import object_checks
    from hftrainer.model import apply_arguments
    from hftrainer.optimizers import factory, schedules
    from hftrainer.trackers.registry import select_trackers

    select_trackers(args.report_to)
    object_checks.check_memmap(args)
    apply_arguments.compile_model(model := nn.Linear(1, 1), args)
    if args.optim_args:
        factory.optimizer_cls_and_kwargs(args, model)
    schedule: Any = args.lr_scheduler_type, optim.SGD(model.parameters(), 1.0), 0, 1, args.lr_scheduler_kwargs
    schedules.get_scheduler(*schedule)


class _Stop(BaseException):
    """Ends a script at its first Trainer; its argument is that Trainer's TrainingArguments, or None."""


def _arguments_of_script(
    parser: Parser, script: str, *arguments: str, as_module: bool
) -> tuple[TrainingArguments, str | None]:
    """The arguments of the script's first Trainer, or its last arguments and the error that ended it."""
    # These libraries read the variables during their import.
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    from hftrainer.cli.run import check_script, run_script

    check_script(parser, script, as_module=as_module)
    # Only now, since it imports torch.
    from hftrainer.training_args import TrainingArguments

    all_args = _patch_trainer_to_stop()
    failure = None
    try:
        # Only the explanation goes to stdout.
        with contextlib.redirect_stdout(sys.stderr):
            run_script(script, list(arguments), parser.prog, as_module=as_module)
    except _Stop as stop:
        return stop.args[0] or TrainingArguments("tmp_trainer"), None
    except (Exception, SystemExit) as error:
        # The script has already printed the reason.
        if not all_args and isinstance(error, SystemExit):
            raise
        if not all_args and isinstance(error, (InvalidArgument, UnknownArgument, UnsupportedArgument)):
            parser.fail(f"{script} creates arguments that are refused: {error}", status=1)
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == script]
        place = f"{script}:{lines[-1]}" if lines else script
        failure = f"{place} ended before its Trainer with {type(error).__name__}: {error}".rstrip(".")
    if not all_args:
        parser.fail(
            f"{failure or f'{script} ended'}, and created no TrainingArguments. Pass the arguments directly, as in "
            f"{parser.prog} --fp16; {parser.prog.rpartition(' ')[0]} run {script} shows where the script ends.",
            status=1,
        )
    return all_args[-1], failure


def _patch_trainer_to_stop() -> list[TrainingArguments]:
    """Make `Trainer()` raise `_Stop`; returns a list that collects all TrainingArguments."""
    from hftrainer.trainer import Trainer
    from hftrainer.training_args import TrainingArguments

    all_args: list[TrainingArguments] = []
    post_init = TrainingArguments.__post_init__

    def collect(self: TrainingArguments) -> None:
        post_init(self)
        all_args.append(self)

    # Patch `__new__`, because `__init__` of subclasses may prepare data first.
    def stop(_: type[Trainer], *args: Any, **kwargs: Any) -> NoReturn:
        raise _Stop(next((value for value in (*args, *kwargs.values()) if isinstance(value, TrainingArguments)), None))

    setattr(TrainingArguments, "__post_init__", collect)  # noqa: B010 - mypy rejects an assignment
    setattr(Trainer, "__new__", stop)  # noqa: B010
    return all_args
