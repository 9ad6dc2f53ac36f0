"""What all subcommands of `python -m hftrainer` have in common."""

import pytest

from hftrainer.__main__ import main, make_parser


def test_all_but_the_run_of_a_script_write_json():
    commands = next(action for action in make_parser()._actions if action.dest == "command")
    without = [name for name, parser in commands.choices.items() if "--json" not in parser._option_string_actions]
    assert without == ["run"]


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_of_run_fits_a_terminal(option, capsys):
    main(["run", option])
    lines = capsys.readouterr().out.splitlines()
    assert any("--nproc N" in line for line in lines)
    assert len(lines) < 24


@pytest.mark.parametrize("words", [["plot", "--nonsense", "x"], ["dif"], ["diff", "a"]])
def test_wrong_command_lines_name_the_help(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("--help\n")
