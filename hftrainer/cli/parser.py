"""The base class of the subcommands' parsers, and the completion of their options in a shell."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any, NoReturn

from hftrainer.errors import suggest

_BASH = """\
_hftrainer() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" words="{commands}"
    ((COMP_CWORD == 1)) || case "${{COMP_WORDS[1]}} $current" in {cases} *) words="" ;; esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _hftrainer hftrainer"""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are followed by the usage, if words are missing, by an example, and by `--help`.

    Attributes:
        writes_json: whether errors are JSON on stdout, for programs.
    """

    writes_json = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **kwargs})

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
        self.fail("\n".join([message, *filter(None, hints)]))

    def fail(self, error: BaseException | str, status: int = 2) -> NoReturn:
        """Exit with an error whose message says what to do."""
        if Parser.writes_json:
            print(json.dumps({"error": str(error)}))
            self.exit(status)
        self.exit(status, f"{self.prog}: error: {error}\n")


def print_completion(_: Parser, options: argparse.Namespace) -> None:
    """Print the script with which a shell completes the commands of `hftrainer` and their options."""
    commands = " ".join(options.parsers)
    # Not all options are arguments of their parser; the usage has all.
    usages = {name: f"{each.format_usage()} --help" for name, each in options.parsers.items()}
    words = {name: " ".join(dict.fromkeys(re.findall("--[a-z-]+", usage))) for name, usage in usages.items()}
    if options.shell == "fish":
        print(f"complete -c hftrainer -f -n __fish_use_subcommand -a '{commands}'")
        for name, options_of_command in words.items():
            print(f"complete -c hftrainer -n '__fish_seen_subcommand_from {name}' -a '{options_of_command}'")
        return
    cases = " ".join(f'"{name} "-*) words="{words[name]}" ;;' for name in words)
    print("autoload -U +X compinit bashcompinit && compinit && bashcompinit\n" * (options.shell == "zsh"), end="")
    print(_BASH.format(commands=commands, cases=cases))
