"""The base class of the subcommands' parsers, styles of their output, and the completion of words in a shell."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from typing import Any, NoReturn

from hftrainer.base.messages import BOLD, DIM, RED, paint, wrap_text
from hftrainer.errors import explain_choice, suggest

#: State, as in `_BASH` → words, or one of the following; '' for an option without a value; and its description.
_Completions = dict[str, tuple[str, str]]
#: What completes a value, if not a list of words alone.
_FILE, _FOLDER, _FREE, _FILE_OR = "file", "folder", "free", "file or "
#: The metavars of values that are not files.
_KINDS = dict.fromkeys(("OUTPUT_DIR", "CHECKPOINT"), _FOLDER) | dict.fromkeys(("N", "SECONDS", "NAME", "HOST"), _FREE)
_COUNTS = "1 2 4 8 auto cpu gpu xpu"
#: `state` is an option whose value is completed, or else the number of words before, after "option" for an option.
#: bash splits words at "="; a name before it is that of an option, as in `explain optim=sgd`.
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
#: `words` and `CURRENT` are zsh's: the line without the command's name, and the position in it.
_ZSH = """\
(( $+functions[compdef] )) || {{ autoload -U +X compinit && compinit; }}
_hftrainer_argument() {{
    local -A values=({values})
    if [[ $PREFIX == *=* ]]; then compset -P '*='; compadd -- ${{=values[--${{IPREFIX%=}}]}}
    else _files; compadd -- {names}; fi
}}
_hftrainer() {{
    local -a commands=({commands})
    if ((CURRENT == 2)) && [[ $PREFIX != -* ]]; then _describe command commands; return; fi
    ((CURRENT == 2)) || {{ shift words; ((CURRENT--)); }}
    case $words[1] in
        {cases}
        *) _arguments --help --version ;;
    esac
}}
compdef _hftrainer hftrainer"""


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
        message = explain_choice(message).removeprefix("argument ")
        if (option := self._option_string_actions.get(message.split(": expected")[0])) and option.choices:
            *others, last = option.choices
            message = f"{option.option_strings[0]} needs a value: {', '.join(others)} or {last}"
        message = re.sub(r": invalid (?:int|float) value: (.*)", r": \1 is not a number", message)
        message = re.sub(r": ignored explicit argument .*", " takes no value", message)
        usage = self.format_usage().rstrip() if re.search("required|missing|expected one|unexpected", message) else ""
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
    completions = {name: _completions(name, parser) for name, parser in options.parsers.items()}
    completions["help"] = {"0": (" ".join(options.parsers), "")}
    {"bash": _print_bash, "zsh": _print_zsh, "fish": _print_fish}[options.shell](options.helps, completions)


def _print_bash(helps: dict[str, str], completions: dict[str, _Completions]) -> None:
    commands, no_default = " ".join(helps), "compopt {}+o default 2>/dev/null"
    special = {_FOLDER: no_default.format("-o dirnames "), _FREE: no_default.format("")}
    rows = [(name, state, values) for name, words in completions.items() for state, (values, _) in words.items()]
    for name, parts in completions.items():
        # Options after a script are the script's.
        state = "option0" if name == "run" else "option*"
        rows.append((name, state, " ".join(option for option in parts if option.startswith("-"))))
    actions = {row: special.get(row[2], f'words="{row[2]}"') for row in rows if row[2] not in ("", _FILE)}
    cases = "\n        ".join(f'"{name} "{state}) {action} ;;' for (name, state, _), action in actions.items())
    cases = cases.replace(f'words="{_FILE_OR}', 'compopt -o filenames 2>/dev/null; words="$(compgen -f -- "$current") ')
    valued = " ".join({state: None for _, state, values in rows if values and state.startswith("-")})
    print(_BASH.format(commands=commands, cases=cases, valued=valued))


def _print_zsh(helps: dict[str, str], completions: dict[str, _Completions]) -> None:
    actions = {_FILE: "_files", _FOLDER: "_files -/", _FREE: " "}
    cases = []
    for name, parts in completions.items():
        specs = []
        for state, (values, text) in parts.items():
            action = "_hftrainer_argument" if values.startswith(_FILE_OR) else actions.get(values, f"({values})")
            position = "*" if state == "[0-9]*" else str(int(state) + 1) if state.isdecimal() else ""
            option = state + ("[" + re.sub(r"([][:])", r"\\\1", text) + "]") * bool(text)
            specs.append(shlex.quote((position or option) + f": :{action}" * bool(position or values)))
        # Words after a script are the script's.
        script = "'1: :_files' '*:: :_files'" if name == "run" else ""
        cases.append(f"{name}) _arguments {' '.join(specs)} {script} ;;")
    explained = {state: values for state, (values, _) in completions["explain"].items() if " " in values}
    names = explained.pop("0").removeprefix(_FILE_OR)
    choices = " ".join(f"{state} {shlex.quote(values)}" for state, values in explained.items())
    commands = " ".join(shlex.quote(f"{name}:{text}") for name, text in helps.items())
    print(_ZSH.format(commands=commands, values=choices, names=names, cases="\n        ".join(cases)))


def _print_fish(helps: dict[str, str], completions: dict[str, _Completions]) -> None:
    for name, text in helps.items():
        print(f"complete -c hftrainer -f -n __fish_use_subcommand -a {name} -d {shlex.quote(text)}")
    print("complete -c hftrainer -f -n __fish_use_subcommand -a '--help --version'")
    special = {"": "", _FILE: " -r", _FREE: " -x", _FOLDER: " -xa '(__fish_complete_directories)'"}
    for name, parts in completions.items():
        for state, (values, text) in parts.items():
            option = f" -{'s' if len(state) == 2 else 'l'} {state.lstrip('-')}" if state.startswith("-") else ""
            position = f"; and test (count (commandline -opc)) -eq {int(state) + 2}" if state.isdecimal() else ""
            words = special.get(values, f" -xa '{values}'").replace(f" -xa '{_FILE_OR}", " -a '")
            words += f" -d {shlex.quote(text)}" if option and text else ""
            print(f"complete -c hftrainer -n '__fish_seen_subcommand_from {name}{position}'{option}{words}")


def _completions(name: str, parser: argparse.ArgumentParser) -> _Completions:
    # The parsers of `run` and `explain` do not declare their options.
    text = f"--help  show this help message\n{parser.description}\n{parser.usage}"
    options: _Completions = {}
    for option, metavar, help in re.findall(r"(--[a-z-]+)(?: ([A-Z]+))?(?: {2,}(.*))?", text):
        values = _COUNTS if option == "--nproc" else _KINDS.get(metavar, _FILE if metavar else "")
        options.setdefault(option, (values, _shorten(help)))
    words: _Completions = {}
    if name == "explain":
        from hftrainer.arguments.choices import as_text
        from hftrainer.arguments.fields.table import ARGUMENTS

        for argument_name, argument in ARGUMENTS.items():
            values = " ".join(map(as_text, argument.choices or ())) or _FILE
            options[f"--{argument_name}"] = values, _shorten(argument.help)
        options["--help-all"] = "", "show the help of all arguments"
        words["0"] = f"{_FILE_OR}{' '.join(ARGUMENTS)}", ""
    for action in parser._actions:
        values = " ".join(map(str, action.choices or ())) or _KINDS.get(str(action.metavar), _FILE)
        if action.option_strings:
            long = [option for option in action.option_strings if option.startswith("--")] or action.option_strings
            options |= dict.fromkeys(long, ("" if action.nargs == 0 else values, _shorten(action.help or "")))
        elif action.nargs != argparse.REMAINDER:
            count = action.nargs if isinstance(action.nargs, int) else 1
            positions = ["[0-9]*"] if action.nargs in ("+", "*") else map(str, range(len(words), len(words) + count))
            words |= dict.fromkeys(positions, (values, ""))
    return options | words


def _shorten(help: str) -> str:
    """The first sentence of a help text."""
    return re.split(r"[.;]\s|\.$", help)[0]
