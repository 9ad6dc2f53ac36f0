"""The command line: `python -m hftrainer`."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

from hftrainer.cli import ask, checkpoint, diff, doctor, explain, plot, run, watch
from hftrainer.cli.parser import Parser, print_completion
from hftrainer.compat.version import __version__
from hftrainer.errors import suggest

_MODULES = (run, explain, doctor, watch, diff, plot, checkpoint, ask)
#: Subcommand → its module.
COMMANDS = {module.__name__.rpartition(".")[2]: module for module in _MODULES}


def make_parser() -> Parser:
    """The parser with all subcommands; each sets `execute`, the function that runs it."""
    # Completion is for the short name.
    prog = "hftrainer" if os.path.basename(sys.argv[0]) in ("hftrainer", "hftrainer.exe") else "python -m hftrainer"
    parser = Parser(prog=prog, description="The Hugging Face Trainer API, with PyTorch Lightning as its engine.")
    parser.epilog = "example: %(prog)s run train.py"
    parser.add_argument("-V", "--version", action="store_true", help="show the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, module in COMMANDS.items():
        module.add_subcommand(commands)
        subparser = commands.choices[name]
        subparser.set_defaults(execute=module.execute, parser=subparser)
        if name != "run":
            subparser.add_argument("--json", action="store_true", help="print JSON, for programs; errors too")
    completion = commands.add_parser("completion", help="print the completion script of a shell")
    completion.description = "Print a script with which a shell completes the words after an installed hftrainer."
    completion.epilog = "example, for a line of ~/.bashrc: source <(hftrainer completion bash)"
    completion.add_argument("shell", choices=("bash", "zsh", "fish"), help="its name")
    completion.set_defaults(execute=print_completion, parser=completion, missing="name a shell: bash, zsh or fish")
    commands.add_parser("help", help="show the help of a command")
    helps = {command.dest: command.help for command in commands._choices_actions}
    parser.set_defaults(parsers=commands.choices, helps=helps)
    return parser


def main(words: Sequence[str] | None = None) -> None:
    """Parse the command line and run the subcommand, a module of `hftrainer.cli`.

    Args:
        words: the command-line arguments; default `sys.argv[1:]`.
    """
    words = list(sys.argv[1:] if words is None else words)
    parser = make_parser()
    if not words:
        parser.print_help()
        parser.exit(2)
    if words[0] == "help":
        words = [*words[1:2], "--help"]
    # The output of `run` is the script's.
    if words[0] == "run" and words[1:2] not in (["-h"], ["--help"]):
        _execute(parser, words)
        return
    if sys.stdout is None:
        parser.fail("cannot write the output: it is closed")
    # Folders and texts may have characters that the output's encoding lacks.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            _execute(parser, words)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        # Errors of files have names.
        if error.filename is not None:
            raise
        # Python flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # The process that reads the output, such as `head`, has ended.
        if isinstance(error, BrokenPipeError):
            sys.exit(141)
        Parser.writes_json = False
        parser.fail(f"cannot write the output: {str(error.strerror).lower()}")


def _execute(parser: Parser, words: list[str]) -> None:
    Parser.writes_json = "--json" in words and words[0] != "run"
    names = [*parser.get_default("parsers"), *parser._option_string_actions]
    if words[0] == "--json":
        parser.error("--json goes after the command")
    if words[0] not in names:
        is_option = words[0].startswith("-")
        problem = f"unknown option {words[0]}" if is_option else f"{words[0]!r} is not a command"
        allowed = [name for name in names if name.startswith("-") is is_option]
        cutoff = 0.7 if is_option else 0.65
        hint = suggest(words[0].lower(), [*names, "--json"], f": use {', '.join(allowed)}", cutoff=cutoff)
        scripts = [word for word in words[:2] if word.endswith(".py")]
        if scripts and words[0] in ("train", scripts[0]):
            hint = f": run a script with {parser.prog} run {scripts[0]}"
        # The example is that of the suggested command.
        parsers = parser.get_default("parsers").items()
        epilogs = ((command.epilog or "") % {"prog": command.prog} for name, command in parsers if repr(name) in hint)
        parser.epilog = next(epilogs, None)
        parser.error(f"{problem}{hint}")
    # Argparse ignores errors of the output.
    if words[0] in ("-V", "--version"):
        print(f"hftrainer {__version__}")
        return
    options, remaining = parser.parse_known_args(words)
    if options.command in ("run", "explain"):
        # This parser does not know the script's options: argparse returns those before the first value separately.
        options.script_words = remaining + options.script_words
    elif remaining:
        options.parser.refuse(remaining[0])
    options.execute(options.parser, options)


if __name__ == "__main__":
    main()
