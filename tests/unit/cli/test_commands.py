"""What all subcommands of `python -m hftrainer` have in common."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from hftrainer.__main__ import main, make_parser
from hftrainer.base.messages import command_name
from hftrainer.cli.run import run_script
from hftrainer.monitoring.journal import Journal


def test_every_command_but_run_and_completion_has_json():
    commands = next(action for action in make_parser()._actions if action.dest == "command")
    without = [name for name, parser in commands.choices.items() if "--json" not in parser._option_string_actions]
    assert without == ["run", "completion", "help"]


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_of_run_fits_a_terminal(option, capsys):
    main(["run", option])
    lines = capsys.readouterr().out.splitlines()
    assert any("--nproc N" in line for line in lines)
    assert len(lines) < 24


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("rnu", "'rnu' is not a command; did you mean 'run'?"),
        ("check", "'check' is not a command; did you mean 'checkpoint'?"),
        ("nonsense", "'nonsense' is not a command: use run, explain, doctor"),
        ("--verison", "unknown option --verison; did you mean '--version'?"),
        ("-v", "unknown option -v; did you mean '--version'?"),
        ("PLOT", "'PLOT' is not a command; did you mean 'plot'?"),
        ("train --lr 3", "'train' is not a command; did you mean 'run'?"),
        ("train my.py --lr 3", "'train' is not a command: run a script with python -m hftrainer run my.py"),
        ("my.py --lr 3", "'my.py' is not a command: run a script with python -m hftrainer run my.py"),
        ("plot --html=5 out", "--html takes no value"),
        ("ask out stop --timeout -3", "--timeout -3: use a number of seconds from 0 to 86400"),
        ("doctor --jsn", "--jsn; did you mean '--json'?"),
        ("--verbose", "unknown option --verbose: use -h, --help, -V, --version"),
        ("--foo", "unknown option --foo: use -h, --help, -V, --version"),
        ("--josn doctor", "unknown option --josn; did you mean '--json'?"),
        ("hlep", "'hlep' is not a command; did you mean 'help'?"),
        ("doctor out", "unexpected argument out\nusage: python -m hftrainer doctor [-h]"),
        ("plot -o x out", "unknown option -o; did you mean '--out'?"),
        ("ask out save --timeout abc", "--timeout: 'abc' is not a number"),
        ("diff absent missing", "absent and missing do not exist: pass the output_dir of two runs"),
        ("ask out sav", "request: 'sav' is not one of save, evaluate, stop, profile; did you mean 'save'?"),
        ("plot out --x", "--x needs a value: step, epoch or time"),
        ("plot --x tim out", "--x: 'tim' is not one of step, epoch, time; did you mean 'time'?"),
        ("plot out --study-name x", "--study-name is for --study"),
        ("plot out --tag", "unknown option --tag: use -h, --help, --x, --html,"),
        ("ask save", "OUTPUT_DIR: the output folder comes before the request: ask OUTPUT_DIR save\nexample: "),
        ("ask stop out", "the output folder comes before the request: ask OUTPUT_DIR stop\nexample: "),
        ("ask out", "then what to ask: save, evaluate, stop or profile\nusage: python -m hftrainer ask [-h]"),
        ("diff a", "two runs\nusage: python -m hftrainer diff [-h] [--json] OUTPUT_DIR OUTPUT_DIR\nexample: "),
        ("checkpoint", "pass a checkpoint folder\n"),
        ("watch", "pass the output folders of runs\n"),
        ("completion", "name a shell: bash, zsh or fish\n"),
        ("plt out", "did you mean 'plot'?\nexample: python -m hftrainer plot out\nsee python -m hftrainer --help"),
        ("plot", "pass the output folders of runs, or --study for a search\nexample: python -m hftrainer plot out\n"),
        ("watch --every 0 out", "--every 0: use a number of seconds above 0, and at most 86400\nexample: python"),
        ("watch --every nan out", "--every nan: use a number of seconds above 0"),
        ("completion ksh", "shell: 'ksh' is not one of bash, zsh, fish"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_wrong_command_line_says_what_to_type(words, message, as_json, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*words.split(), *(["--json"] if as_json else [])])
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert message in ("\n".join([*json.loads(printed.out).values(), ""]) if as_json else printed.err)
    assert not as_json or "\n" not in json.loads(printed.out)["error"]
    assert not (printed.err if as_json else printed.out)


@pytest.mark.parametrize(
    ("terminal", "no_color", "force_color"), [(True, "", ""), (True, "1", "1"), (False, "", ""), (False, "", "1")]
)
def test_colours_only_on_a_terminal(terminal, no_color, force_color, capsys, monkeypatch):
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("FORCE_COLOR", force_color)
    monkeypatch.setenv("TERM", "xterm")
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(getattr(sys, name), "isatty", lambda: terminal, raising=False)
    shown = ""
    for words in (["ask", "--help"], ["ask", "out"], ["ask", "out", "--json"]):
        with pytest.raises(SystemExit):
            main(words)
        shown += "".join(capsys.readouterr())
    is_painted = (terminal or bool(force_color)) and not no_color
    assert [text in shown for text in ("\033[1moptions:", "\033[1;31merror:", "\033[2m\nusage")] == [is_painted] * 3
    assert json.loads(shown.splitlines()[-1])["hint"].startswith("usage")


def test_run_says_in_a_terminal_what_takes_seconds(tmp_path, monkeypatch, capsys):
    script = tmp_path / "script.py"
    script.write_text("import sys; print('begins', file=sys.stderr)")
    for name, value in {"argv": sys.argv, "path": [*sys.path], "excepthook": sys.excepthook}.items():
        monkeypatch.setattr(sys, name, value)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("hftrainer.cli.install.install", lambda: print("imports", file=sys.stderr))
    for is_terminal, expected in ((True, [f"[hftrainer] Loading torch and transformers for {script}"]), (False, [])):
        monkeypatch.setattr(sys.stderr, "isatty", lambda shown=is_terminal: shown, raising=False)
        run_script(str(script), [], "hftrainer run")
        assert capsys.readouterr().err.splitlines() == [*expected, "imports", "begins"]


def test_errors_are_json_with_the_json_option(tmp_path, capsys):
    for words, status in ((["plot", "absent"], 2), (["checkpoint", str(tmp_path)], 2), (["explain", "absent.py"], 2)):
        with pytest.raises(SystemExit) as ended:
            main([words[0], "--json", *words[1:]])
        printed = capsys.readouterr()
        assert ended.value.code == status and not printed.err
        assert words[1] in json.loads(printed.out)["error"]
    with pytest.raises(SystemExit):
        main(["--json", "plot", "out"])
    assert json.loads(capsys.readouterr().out)["error"].startswith("--json goes after the command")


@pytest.mark.parametrize(
    ("words", "shown"),
    [([], "  doctor  "), (["help"], "  doctor  "), (["help", "ask"], "example: python -m hftrainer ask out save")],
)
def test_help_is_a_command(words, shown, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code in ((0, None) if words else (2,))
    assert shown in capsys.readouterr().out


def test_bash_completes_commands_options_and_values(capsys):
    main(["completion", "bash"])
    words = 'compopt() { echo "$@"; }; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _hftrainer; echo "${COMPREPLY[*]}"'
    script = f"{capsys.readouterr().out}\n{words}"

    def complete(*typed):
        done = subprocess.run(["bash", "-c", script, "bash", "hftrainer", *typed], capture_output=True, text=True)
        assert not done.stderr
        return done.stdout.split()

    assert complete("") == [*make_parser()._subparsers._group_actions[0].choices]
    assert complete("wa") == ["watch"] and complete("--") == ["--help", "--version"]
    assert complete("watch", "--e") == ["--every"]
    assert complete("run", "--np") == ["--nproc"]
    assert complete("plot", "--x", "") == complete("plot", "out", "--x", "=", "") == ["step", "epoch", "time"]
    assert complete("explain", "--max_steps", "3", "--learn") == ["--learning_rate"]
    assert complete("explain", "--optim", "adamw_b") == complete("explain", "optim", "=", "adamw_b")
    assert complete("run", "--nproc", "") == "1 2 4 8 auto cpu gpu xpu".split()
    assert complete("watch", "--every", "") == complete("run", "--nnodes", "") == ["+o", "default"]  # no files
    assert complete("explain", "learning_") == ["-o", "filenames", "learning_rate"]
    folders = ["-o", "dirnames", "+o", "default"]
    for words in (["watch", "a", "b", ""], ["ask", "--json", ""]):
        assert complete(*words) == folders
    assert complete("ask", "--timeout", "5", "out", "s") == ["save", "stop"]
    assert complete("ask", "out", "save", "") == complete("run", "") == complete("run", "a.py", "--n") == []  # files
    assert complete("help", "wa") == ["watch"] and complete("completion", "z") == ["zsh"]


@pytest.mark.parametrize("words", ["completion bash", "explain --help", "ask {} save", "watch --once --json {}"])
def test_command_without_tensors_imports_no_torch(words, tmp_path, processes):
    journal = Journal(str(tmp_path))
    journal.write(
        "begin", 0, max_steps=2, logging_steps=1, world_size=1, device="cpu", pid=1, host="", resumed_from=None
    )
    journal.write("log", 1, logs={"loss": 0.5})
    journal.write("end", 2, reason="complete")
    code = "import sys, hftrainer.__main__ as m\ntry: m.main()\nfinally: print('torch' in sys.modules, file=sys.stderr)"
    command = [sys.executable, "-c", code, *words.format(tmp_path).split()]
    done = subprocess.run(command, env=processes.environment(), capture_output=True, text=True)
    assert done.stdout or "the run completed at step 2" in done.stderr
    assert done.stderr.endswith("False\n")


def test_zsh_script_has_descriptions(capsys):
    main(["completion", "zsh"])
    script = capsys.readouterr().out
    assert "'watch:show live or finished runs in the terminal: " in script
    assert "'--x[the horizontal axis]: :(step epoch time)' '--output[the .png, " in script
    assert "'--help-all[show the help of all arguments]'" in script and "[]" not in script
    assert "'--num-cores[with --tpu\\: 1 core, " in script and "'--every[time between updates]: : '" in script
    if shutil.which("zsh"):
        subprocess.run(["zsh", "-n", "-c", script], check=True)


@pytest.mark.skipif(not shutil.which("fish"), reason="needs fish")
def test_fish_describes_commands_and_options(capsys):
    main(["completion", "fish"])
    script = capsys.readouterr().out

    def complete(line):
        command = ["fish", "--no-config", "-c", f"{script}\ncomplete -C 'hftrainer {line}'"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()

    assert complete("hel") == ["help\tshow the help of a command"]
    assert complete("explain --learning_r") == ["--learning_rate\tPeak, after warm-up"]
    assert [line.split("\t")[0] for line in complete("run --nproc ")] == "1 2 4 8 auto cpu gpu xpu".split()
    assert complete("ask out s") == ["save", "stop"] and not complete("watch --every ")


def test_folder_of_runs_suggests_one_of_them(tmp_path, capsys):
    (tmp_path / "run" / "checkpoint-5").mkdir(parents=True)
    with pytest.raises(SystemExit):
        main(["plot", str(tmp_path)])
    assert f"no run has written in {tmp_path}; did you mean {tmp_path / 'run'}?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plot", str(tmp_path / "runs")])
    assert f"{tmp_path / 'runs'} does not exist; did you mean 'run'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--bogus"], "unknown option --bogus"),
        (["-n", "0", "x.py"], "unknown option -n; did you mean '--nproc'?"),
        (
            ["--nprocs", "2", "x.py"],
            "unknown option --nprocs; did you mean '--nproc'?\nexample: python -m hftrainer run --nproc 2 train.py",
        ),
        (["--zzz", "2", "x.py"], "unknown option --zzz\nexample: "),
        (["--nproc"], "expected one argument\nusage: "),
        (["--nproc", "2"], "error: a script is missing\nusage: python -m hftrainer run [--nproc N ...]"),
        (["train.p"], "the script 'train.p' does not exist; did you mean 'train.py'?"),
        (["--nproc", "2", "train.p"], "the script 'train.p' does not exist; did you mean 'train.py'?"),
    ],
)
def test_wrong_run_command_says_what_to_type(tmp_path, capsys, monkeypatch, words, message):
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["run", *words])
    assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "error"),
    [
        ("nomod", "python -m hftrainer run: error: no module named 'nomod'"),
        ("json", "python -m hftrainer run: error: No module named json.__main__; 'json' is a package"),
        ("imports", "ModuleNotFoundError: No module named 'nomod'"),
    ],
)
def test_missing_module_is_named_without_a_traceback(tmp_path, processes, module, error):
    """A failing import inside an existing module keeps its traceback."""
    (tmp_path / "imports.py").write_text("import nomod")
    words = [sys.executable, "-m", "hftrainer", "run", "-m", module]
    done = subprocess.run(words, cwd=tmp_path, env=processes.environment(), capture_output=True, text=True)
    assert done.returncode == (1 if module == "imports" else 2) and error in done.stderr
    assert ("Traceback" in done.stderr) is (module == "imports")


@pytest.mark.parametrize("words", [["completion", "bash"], ["plot", "--help"]])
def test_closed_output_pipe_ends_the_command_quietly(words, processes):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "hftrainer", *words]
    done = subprocess.run(command, env=processes.environment(), stdout=writer, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux")
@pytest.mark.parametrize("words", ["completion bash", "run --help", "nosuch --json", "--version"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(("output", "reason"), [("/dev/full", "no space left on device"), ("&-", "it is closed")])
def test_output_that_cannot_be_written_is_an_error(words, unbuffered, output, reason, processes):
    command = ["sh", "-c", f'"{sys.executable}" -m hftrainer {words} >{output}']
    environment = processes.environment() | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
    error = f"python -m hftrainer: error: cannot write the output: {reason}\n"
    assert (done.returncode, done.stderr) == (2, error)


def test_characters_that_the_output_lacks_are_replaced(processes):
    command = [sys.executable, "-m", "hftrainer", "run", "--help"]
    environment = processes.environment() | {"PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, env=environment, capture_output=True, check=True)
    assert b"SCRIPT [arguments ?]" in done.stdout


@pytest.mark.parametrize(("typed", "prog"), [("/bin/hftrainer", "hftrainer"), ("x/__main__.py", "python -m hftrainer")])
def test_usage_shows_the_program_name_that_was_typed(monkeypatch, typed, prog):
    monkeypatch.setattr(sys, "argv", [typed])
    assert make_parser().prog == prog


def test_messages_name_hftrainer_if_it_is_on_the_path(monkeypatch, tmp_path):
    (tmp_path / "hftrainer").touch(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    for path, name in (("", "python -m hftrainer"), (str(tmp_path), "hftrainer")):
        monkeypatch.setenv("PATH", path)
        assert command_name() == name


@pytest.mark.parametrize("words", ["watch {}", "plot {}", "diff {} {}", "ask {} save", "checkpoint {}"])
@pytest.mark.parametrize(
    ("name", "reason"),
    [("none", "not exist"), ("file.txt", "is not a folder"), ("", r"no logs of a run|trainer_state\.json")],
)
def test_path_without_a_run_is_named(tmp_path, capsys, words, name, reason):
    (tmp_path / "file.txt").touch()
    path = str(tmp_path / name)
    with pytest.raises(SystemExit) as ended:
        main([*words.format(path, path).split(), *(["--timeout", "0"] if words.startswith("ask") else [])])
    error = capsys.readouterr().err
    if name or not words.startswith("ask"):  # a run may have written nothing yet
        assert ended.value.code == 2 and re.search(reason, error)
    else:
        assert ended.value.code == 1 and "no run writes here now" in error
        assert "no run has saved anything here yet; waiting for 0 s" in error
    assert path in error


def test_accept_lists_the_checkpoints_in_the_folder(tmp_path, capsys):
    for step in (5, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").touch()
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", "--accept", str(tmp_path)])
    assert ended.value.code == 2
    assert f"newest first: {tmp_path / 'checkpoint-10'}, {tmp_path / 'checkpoint-5'}." in capsys.readouterr().err
