"""The base class of the subcommands' parsers, styles of their output, and the completion of words in a shell."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from typing import Any, NoReturn

from hftrainer.base.messages import BOLD, DIM, RED, paint, wrap_text
from hftrainer.errors import suggest

#: What completes a value, if not a list of words alone; the metavars of values that are folders.
_FILE, _FOLDER, _FILE_OR = "file", "folder", "file or "
_FOLDERS = ("OUTPUT_DIR", "CHECKPOINT", "DIR")
#: `state` is an option whose value is completed, or else the number of words before, after "option" for an option.
#: bash splits words at "=", zsh does not; a name before it is that of an option, as in `explain optim=sgd`.
_BASH = """\
_hftrainer() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" words="" state=0 i
    local valued=" {valued} " name=""
    [[ $previous != "=" ]] || previous="--${{COMP_WORDS[COMP_CWORD-2]}}"
    [[ $current != *=* ]] || {{ name="${{current%%=*}}" current="${{current#*=}}"; previous="--${{name:-$previous}}"; }}
    previous="${{previous/#----/--}}"
    for ((i = 2; i < COMP_CWORD; i++)); do
        [[ "${{COMP_WORDS[i]}}" == [-=]* || $valued == *" ${{COMP_WORDS[i-1]}} "* ]] || ((++state))
    done
    if [[ $current == -* ]]; then state="option$state"; elif [[ $valued == *" $previous "* ]]; then state=$previous; fi
    ((COMP_CWORD > 1)) || [[ $current == -* ]] || state=command
    case "${{COMP_WORDS[1]}} $state" in
        *" command") words="{commands}" ;;
        -*" option0") words="--help --version" ;;
        {cases}
    esac
    COMPREPLY=($(compgen -P "${{name:+$name=}}" -W "$words" -- "$current"))
}}
complete -o default -F _hftrainer hftrainer"""


def paint_headings(text: str) -> str:
    """Text for stdout; in a terminal its headings, which are lines above indented ones, are bold."""
    return re.sub(r"(?m)^(?:usage:|\S.*(?=\n {2}))", lambda heading: paint(heading[0], BOLD, sys.stdout), text)


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
        print(paint_headings(self.format_help()), end="", file=file, flush=True)

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 after an error in the command line."""
        message = message.removeprefix("argument ")
        if choice := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            allowed = re.findall(r"[\w-]+", choice[2])
            hint = suggest(choice[1], allowed)
            if len(allowed) > 12:
                hint = hint or f"; the nearest are {', '.join(difflib.get_close_matches(choice[1], allowed, 3, 0))}"
            names = "allowed" if len(allowed) > 12 else f"one of {', '.join(allowed)}"
            message = f"{message[: choice.start()]}{choice[1]!r} is not {names}{hint}"
        if (option := self._option_string_actions.get(message.split(": expected")[0])) and option.choices:
            *others, last = option.choices
            message = f"{option.option_strings[0]} needs a value: {', '.join(others)} or {last}"
        message = re.sub(r": invalid (?:int|float) value: (.*)", r": \1 is not a number", message)
        message = re.sub(r": ignored explicit argument .*", " takes no value", message)
        usage = self.format_usage().rstrip() if re.search("required|missing|expected one", message) else ""
        message = re.sub("^the following arguments are required.*", self.get_default("missing") or r"\g<0>", message)
        hints = (usage, (self.epilog or "") % {"prog": self.prog}, f"see {self.prog} --help")
        self.fail(message, hints="".join(f"\n{hint}" for hint in hints if hint))

    def refuse(self, word: str) -> NoReturn:
        """Exit with an error about a word that the parser does not know."""
        options = self._option_string_actions
        names = f": use {', '.join(options)}" if len(options) <= 20 else ""
        problem, otherwise = ("unknown option", names) if word.startswith("-") else ("unexpected argument", "")
        self.error(f"{problem} {word}{suggest(word, options, otherwise)}")

    def fail(self, error: BaseException | str, status: int = 2, hints: str = "") -> NoReturn:
        """Exit with an error whose message says what to do."""
        if isinstance(error, OSError) and error.filename and error.strerror:
            error = f"{error.filename}: {error.strerror.lower()}"
        if Parser.writes_json:
            print(json.dumps({"error": str(error)} | ({"hint": hints.strip()} if hints else {})))
            self.exit(status)
        text = wrap_text(f"{self.prog}: error: {error}", sys.stderr)
        text = text.replace("error:", paint("error:", RED, sys.stderr), 1)
        self.exit(status, f"{text}{paint(hints, DIM, sys.stderr)}\n")


def print_completion(_: Parser, options: argparse.Namespace) -> None:
    """Print the script with which a shell completes the commands of `hftrainer`, their options and values."""
    commands, folders = " ".join(options.parsers), "compopt -o dirnames +o default 2>/dev/null"
    completions = {name: _completions(name, parser) for name, parser in options.parsers.items()}
    completions["help"] = {"0": commands}
    rows = [(name, *row) for name, values_of_state in completions.items() for row in values_of_state.items()]
    if options.shell == "fish":
        print(f"complete -c hftrainer -f -n __fish_use_subcommand -a '{commands} --help --version'")
        print("\n".join(_fish_line(*row) for row in rows if not row[1].startswith("option")))
        return
    actions = {row: folders if row[2] == _FOLDER else f'words="{row[2]}"' for row in rows if row[2] not in ("", _FILE)}
    cases = "\n        ".join(f'"{name} "{state}) {action} ;;' for (name, state, _), action in actions.items())
    cases = cases.replace(f'words="{_FILE_OR}', 'compopt -o filenames 2>/dev/null; words="$(compgen -f -- "$current") ')
    valued = " ".join({state: None for _, state, values in rows if values and state.startswith("-")})
    print("autoload -U +X compinit bashcompinit && compinit && bashcompinit\n" * (options.shell == "zsh"), end="")
    print(_BASH.format(commands=commands, cases=cases, valued=valued))


def _fish_line(name: str, state: str, values: str) -> str:
    option = f" -{'s' if len(state) == 2 else 'l'} {state.lstrip('-')}" if state.startswith("-") else ""
    position = f"; and test (count (commandline -opc)) -eq {int(state) + 2}" if state.isdecimal() else ""
    words = {"": "", _FILE: " -r", _FOLDER: " -xa '(__fish_complete_directories)'"}.get(values, f" -xa '{values}'")
    words = words.replace(f" -xa '{_FILE_OR}", " -a '")
    return f"complete -c hftrainer -n '__fish_seen_subcommand_from {name}{position}'{option}{words}"


def _completions(name: str, parser: argparse.ArgumentParser) -> dict[str, str]:
    """State, as in `_BASH` → words, `_FILE` or `_FOLDER`; '' for an option without a value."""
    # The parsers of `run` and `explain` do not declare their options.
    described = re.findall(r"(--[a-z-]+)( [A-Z]+)?", f"--help {parser.usage} {parser.description}")
    options, names = {option: _FILE if value else "" for option, value in described}, {}
    if name == "explain":
        from hftrainer.arguments.choices import as_text
        from hftrainer.arguments.table import ARGUMENTS

        choices = {f"--{name}": map(as_text, argument.choices or ()) for name, argument in ARGUMENTS.items()}
        options |= {option: " ".join(words) or _FILE for option, words in choices.items()}
        names = {"0": f"{_FILE_OR}{' '.join(ARGUMENTS)}"}
    words: dict[str, str] = {}
    for action in parser._actions:
        values = " ".join(map(str, action.choices or ())) or (_FOLDER if action.metavar in _FOLDERS else _FILE)
        if action.option_strings:
            options[action.option_strings[-1]] = "" if action.nargs == 0 else values
        elif action.nargs != argparse.REMAINDER:
            count = action.nargs if isinstance(action.nargs, int) else 1
            positions = ["[0-9]*"] if action.nargs in ("+", "*") else map(str, range(len(words), len(words) + count))
            words |= dict.fromkeys(positions, values)
    # Options after a script are the script's.
    return {**options, **names, **words, f"option{'*' if words else 0}": " ".join(options)}
