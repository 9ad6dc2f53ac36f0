"""The base class of the subcommands' parsers, styles of their output, and the completion of words in a shell."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from typing import Any, NoReturn, TextIO

from hftrainer.errors import suggest

BOLD, DIM, RED = "1", "2", "1;31"
#: What completes a value, if not a list of words; the metavars of values that are folders.
_FILE, _FOLDER = "file", "folder"
_FOLDERS = ("OUTPUT_DIR", "FOLDER", "RUN", "DIR")
#: `state` is an option whose value is completed, or else the number of words before this one, after "option" for an
#: option. bash splits words at "=".
_BASH = """\
_hftrainer() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" words="" state=0 i
    local valued=" {valued} "
    [[ $previous != "=" ]] || previous="${{COMP_WORDS[COMP_CWORD-2]}}"
    [[ $current != "=" ]] || current=""
    for ((i = 2; i < COMP_CWORD; i++)); do
        [[ "${{COMP_WORDS[i]}}" == [-=]* || $valued == *" ${{COMP_WORDS[i-1]}} "* ]] || ((++state))
    done
    if [[ $current == -* ]]; then state="option $state"; elif [[ $valued == *" $previous "* ]]; then state=$previous; fi
    ((COMP_CWORD > 1)) || state=command
    case "${{COMP_WORDS[1]}} $state" in
        *" command") words="{commands}" ;;
        {cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _hftrainer hftrainer"""


def paint(text: str, style: str, stream: TextIO) -> str:
    """The text in a style if the stream is a terminal, unless NO_COLOR is set."""
    is_painted = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"\033[{style}m{text}\033[0m" if text and is_painted else text


def paint_headings(text: str, stream: TextIO) -> str:
    """The text, in a terminal with bold headings: lines above indented ones."""
    return re.sub(r"(?m)^\S.*(?=\n {2})", lambda heading: paint(heading[0], BOLD, stream), text)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are followed by the usage, if words are missing, by an example, and by `--help`.

    Attributes:
        writes_json: whether errors are JSON on stdout, for programs.
    """

    writes_json = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **kwargs})

    def print_help(self, file: Any = None) -> None:
        """Print the help."""
        print(paint_headings(self.format_help(), sys.stdout), end="", file=file)

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 after an error in the command line."""
        if choice := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            allowed = re.findall(r"[\w-]+", choice[2])
            # Of up to three values all are named.
            hint = suggest(choice[1], allowed if len(allowed) > 3 else (), f": use one of {', '.join(allowed)}")
            message = f"{message[: choice.start()]}{choice[1]!r} is not allowed{hint}"
        message = re.sub(r"^argument (\S+): ignored explicit argument .*", r"\1 takes no value", message)
        usage = self.format_usage().rstrip() if "required" in message or "missing" in message else ""
        hints = (usage, (self.epilog or "") % {"prog": self.prog}, f"see {self.prog} --help")
        self.fail(message, hints="".join(f"\n{hint}" for hint in hints if hint))

    def fail(self, error: BaseException | str, status: int = 2, hints: str = "") -> NoReturn:
        """Exit with an error whose message says what to do."""
        if Parser.writes_json:
            print(json.dumps({"error": f"{error}{hints}"}))
            self.exit(status)
        label, hints = paint("error:", RED, sys.stderr), paint(hints, DIM, sys.stderr)
        self.exit(status, f"{self.prog}: {label} {error}{hints}\n")


def print_completion(_: Parser, options: argparse.Namespace) -> None:
    """Print the script with which a shell completes the commands of `hftrainer`, their options and values."""
    commands = " ".join(options.parsers)
    completions = {name: _completions(name, parser) for name, parser in options.parsers.items()}
    completions["help"] = {"0": commands}
    if options.shell == "fish":
        print(f"complete -c hftrainer -f -n __fish_use_subcommand -a '{commands}'")
        for name, values_of_state in completions.items():
            for state, values in values_of_state.items():
                print(_fish_line(name, state, values))
        return
    cases, valued = [], {"="}
    for name, values_of_state in completions.items():
        options_of_command = [state for state in values_of_state if state.startswith("-")]
        valued |= {option for option in options_of_command if values_of_state[option]}
        # The options after a script are the script's.
        position = "*" if len(options_of_command) < len(values_of_state) else "0"
        cases.append(f'"{name} option "{position}) words="{" ".join(options_of_command)}" ;;')
        for state, values in values_of_state.items():
            action = "compopt -o dirnames +o default 2>/dev/null" if values == _FOLDER else f'words="{values}"'
            if values not in ("", _FILE):
                cases.append(f'"{name} "{state}) {action} ;;')
    print("autoload -U +X compinit bashcompinit && compinit && bashcompinit\n" * (options.shell == "zsh"), end="")
    print(_BASH.format(commands=commands, cases="\n        ".join(cases), valued=" ".join(sorted(valued))))


def _fish_line(name: str, state: str, values: str) -> str:
    """The completion of one state by fish."""
    words = {"": "", _FILE: " -r", _FOLDER: " -xa '(__fish_complete_directories)'"}.get(values, f" -xa '{values}'")
    condition = f"__fish_seen_subcommand_from {name}"
    if state.isdecimal():
        condition += f"; and test (count (commandline -opc)) -eq {int(state) + 2}"
    return f"complete -c hftrainer -n '{condition}'{f' -l {state[2:]}' * state.startswith('-')}{words}"


def _completions(name: str, parser: argparse.ArgumentParser) -> dict[str, str]:
    """What completes each option and word: words, `_FILE` or `_FOLDER`; '' for an option without a value.

    The key of a word is the number of words before it, or a pattern for any number.
    """
    # The parsers of `run` and `explain` do not declare their options.
    described = re.findall(r"(--[a-z-]+)( [A-Z]+)?", f"{parser.usage} {parser.description}")
    completions = {"--help": "", **{option: _FILE if value else "" for option, value in described}}
    if name == "explain":
        from hftrainer.arguments.choices import as_text
        from hftrainer.arguments.old_fields import ARGUMENTS

        choices = {name: " ".join(map(as_text, argument.choices or ())) for name, argument in ARGUMENTS.items()}
        completions |= {f"--{argument}": words or _FILE for argument, words in choices.items()}
    words = 0
    for action in parser._actions:
        values = " ".join(map(str, action.choices or ())) or (_FOLDER if action.metavar in _FOLDERS else _FILE)
        if action.option_strings:
            long_names = [option for option in action.option_strings if option.startswith("--")]
            completions |= dict.fromkeys(long_names, "" if action.nargs == 0 else values)
        elif action.nargs != argparse.REMAINDER:
            first, words = words, words + (action.nargs if isinstance(action.nargs, int) else 1)
            positions = ["[0-9]*"] if action.nargs in ("+", "*") else map(str, range(first, words))
            completions |= dict.fromkeys(positions, values)
    return completions
