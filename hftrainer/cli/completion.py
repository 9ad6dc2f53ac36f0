"""`python -m hftrainer completion SHELL`: what a shell needs to complete the command line, from the parsers themselves.

shtab and argcomplete complete a program by its name, and this one is `python -m hftrainer`; for every other use of
python, its own completion has to stay.
"""

from __future__ import annotations

import argparse
import functools
import json
from typing import Any

from hftrainer.cli.parser import Parser, add_json

_BASH = """\
# Completion of `python -m hftrainer`: eval "$(python -m hftrainer completion bash)"
declare -F _completion_loader >/dev/null && _completion_loader python 2>/dev/null
_hftrainer_found=$(complete -p python 2>/dev/null | sed -n 's/.* -F \\([^ ]*\\).*/\\1/p')
[ "$_hftrainer_found" = _hftrainer ] || _hftrainer_python=$_hftrainer_found
_hftrainer() {{
    local words=
    if [ "${{COMP_WORDS[*]:1:2}}" != "-m hftrainer" ] || [ "$COMP_CWORD" -lt 3 ]; then
        [ -n "$_hftrainer_python" ] && "$_hftrainer_python" "$@"
        return
    fi
    case "${{COMP_WORDS[3]}}" in
{cases}
    esac
    [ "$COMP_CWORD" -eq 3 ] && words="{commands}"
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -o bashdefault -F _hftrainer python python3"""
_ZSH = """\
# Completion of `python -m hftrainer`: eval "$(python -m hftrainer completion zsh)", after compinit
_hftrainer() {{
    if [[ "$words[2] $words[3]" != "-m hftrainer" ]] || (( CURRENT < 4 )); then
        _python "$@"
        return
    fi
    local offered=
    case "$words[4]" in
{cases}
    esac
    (( CURRENT == 4 )) && offered="{commands}"
    compadd -- ${{=offered}}
    _files
}}
compdef _hftrainer python python3"""
_FISH = """\
# Completion of `python -m hftrainer`: python -m hftrainer completion fish | source
function __hftrainer_at
    set -l words (commandline -opc)
    test "$words[2..3]" = "-m hftrainer"; and test "$words[4]" = "$argv[1]"
end
{lines}"""


def add(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "completion",
        help="print what a shell needs to complete this command line",
        description='In ~/.bashrc: eval "$(python -m hftrainer completion bash)". In ~/.zshrc, likewise with zsh. In '
        "~/.config/fish/config.fish: python -m hftrainer completion fish | source",
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    add_json(parser)
    parser.set_defaults(execute=functools.partial(_complete, commands))


def _complete(commands: Any, options: argparse.Namespace) -> None:
    script = completion(options.shell, commands)
    print(json.dumps({"shell": options.shell, "script": script}, indent=2) if options.json else script)


def completion(shell: str, commands: Any) -> str:
    """The script for a shell.

    Args:
        shell: 'bash', 'zsh' or 'fish'.
        commands: the subparsers of `python -m hftrainer`.
    """
    offered = {name: _offered(name, parser) for name, parser in commands.choices.items()}
    if shell == "fish":
        helps = {choice.dest: choice.help for choice in commands._choices_actions}
        lines = [_fish_line("", name, helps[name] or "") for name in offered]
        lines += [_fish_line(name, word, text) for name, words in offered.items() for word, text in words.items()]
        return _FISH.format(lines="\n".join(lines))
    template, variable = (_BASH, "words") if shell == "bash" else (_ZSH, "offered")
    cases = "\n".join(f'        {name}) {variable}="{" ".join(words)}" ;;' for name, words in offered.items())
    return template.format(cases=cases, commands=" ".join(offered))


def _offered(name: str, parser: Parser) -> dict[str, str]:
    """Options and choices of a subcommand, each with its help; `explain` has those of training arguments too."""
    actions = list(parser._actions)
    if name == "explain":
        from hftrainer.cli.explain import arguments_parser

        actions += arguments_parser()._actions
    found: dict[str, str] = {}
    for action in actions:
        if action.option_strings:  # in one spelling, and the long one of -h
            words = [next((word for word in action.option_strings if word.startswith("--")), action.option_strings[0])]
        else:
            words = list(map(str, action.choices or ()))
        found |= dict.fromkeys(words, action.help or "")
    return found


def _fish_line(command: str, word: str, text: str) -> str:
    where = f"__hftrainer_at '{command}'"
    kind = "-l" if word.startswith("--") else "-s" if word.startswith("-") else "-a"
    quoted = text.split(". ")[0].replace("%%", "%").replace("\\", "").replace("'", "\\'")
    return f"complete -c python -c python3 -n \"{where}\" {kind} {word.lstrip('-')} -d '{quoted}'"
