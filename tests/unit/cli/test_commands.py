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


@pytest.mark.parametrize("words", [["plot", "--nonsense", "x"], ["dif"], ["diff", "a"], ["run", "-n", "x.py"]])
def test_wrong_command_lines_name_the_help(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("--help\n")


def test_unknown_options_of_run_name_the_nearest(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--nprocs", "2", "x.py"])
    assert "unrecognized arguments: --nprocs; did you mean '--nproc'?" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["watch {}", "plot {}", "diff {} {}", "ask {} save", "checkpoint {}"])
@pytest.mark.parametrize(
    ("name", "reason"),
    [("none", "the folder does not exist"), ("file.txt", "is not a folder"), ("", "trainer_state.json")],
)
def test_paths_that_hold_no_run(tmp_path, capsys, words, name, reason):
    (tmp_path / "file.txt").touch()
    path = str(tmp_path / name)
    with pytest.raises(SystemExit) as ended:
        main([*words.format(path, path).split(), *(["--timeout", "0"] if words.startswith("ask") else [])])
    error = capsys.readouterr().err
    if name or not words.startswith("ask"):  # a run may have written nothing yet
        assert ended.value.code == 2 and reason in error and "checkpoint-xxx" in error
    else:
        assert ended.value.code == 1 and "no run writes here now" in error
    assert path in error


def test_checkpoint_names_the_newest_in_a_folder(tmp_path, capsys):
    for step in (5, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").touch()
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", str(tmp_path)])
    assert ended.value.code == 2
    assert f"the newest checkpoint in it is {tmp_path / 'checkpoint-10'}" in capsys.readouterr().err
