"""`python -m hftrainer completion`: what shells complete; and what all subcommands have in common."""

import json
import shutil
import subprocess

import pytest

from hftrainer.__main__ import main
from hftrainer.cli.commands import make_parser

COMMANDS = ["run", "explain", "doctor", "diff", "plot", "checkpoint", "completion"]


def script(shell, capsys):
    main(["completion", shell])
    return capsys.readouterr().out


def completed(path, before, *words):
    """What bash offers for the last of the words."""
    call = f"""
    {before}
    . {path}
    COMP_WORDS=({" ".join(f"'{word}'" for word in words)}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
    _hftrainer; echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "--norc", "-c", call], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_bash(capsys, tmp_path):
    path = tmp_path / "completion"
    path.write_text(script("bash", capsys))
    assert completed(path, "", "python", "-m", "hftrainer", "") == COMMANDS
    assert completed(path, "", "python", "-m", "hftrainer", "do") == ["doctor"]
    assert completed(path, "", "python3", "-m", "hftrainer", "explain", "--learning") == ["--learning_rate"]
    assert completed(path, "", "python", "-m", "hftrainer", "run", "--np") == ["--nproc"]
    assert completed(path, "", "python", "-m", "hftrainer", "completion", "z") == ["zsh"]
    assert completed(path, "", "python", "train.py", "--") == []


def test_bash_keeps_the_completion_of_python(capsys, tmp_path):
    path = tmp_path / "completion"
    path.write_text(script("bash", capsys))
    other = "_other() { COMPREPLY=(of-python); }; complete -F _other python"
    assert completed(path, other, "python", "-") == ["of-python"]
    assert completed(path, f"{other}; . {path}", "python", "-m", "hf") == ["of-python"]  # also when it is read twice
    assert completed(path, other, "python", "-m", "hftrainer", "pl") == ["plot"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_everything_and_can_read_it(shell, capsys, tmp_path):
    text = script(shell, capsys)
    assert all(name in text for name in [*COMMANDS, "max_steps", "study-name"])
    main(["completion", shell, "--json"])
    assert json.loads(capsys.readouterr().out) == {"shell": shell, "script": text.removesuffix("\n")}
    if shutil.which(shell):
        (tmp_path / "completion").write_text(text)
        subprocess.run([shell, "-n", str(tmp_path / "completion")], check=True)


def test_all_but_the_run_of_a_script_write_json():
    commands = next(action for action in make_parser()._actions if action.dest == "command")
    without = [name for name, parser in commands.choices.items() if "--json" not in parser._option_string_actions]
    assert list(commands.choices) == COMMANDS and without == ["run"]


@pytest.mark.parametrize("words", [["plot", "--nonsense", "x"], ["dif"], ["diff", "a"], ["completion", "csh"]])
def test_wrong_command_lines_name_the_help(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("--help shows what it takes\n")
