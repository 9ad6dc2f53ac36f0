"""`python -m hftrainer run` and `install()`: unmodified scripts on Lightning."""

import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.known_differences import files_in

SCRIPT = Path(__file__).parent / "ordinary_script.py"
FLAGS = """
    --output_dir out --num_train_epochs 2 --per_device_train_batch_size 4 --gradient_accumulation_steps 2
    --learning_rate 0.01 --eval_strategy steps --eval_steps 3 --save_strategy steps --save_steps 3 --logging_steps 2
    --load_best_model_at_end True --report_to none --disable_tqdm True --use_cpu True --warmup_steps 2
""".split()


@pytest.fixture
def run(processes):
    def run_in(folder: Path, *words):
        folder.mkdir(parents=True, exist_ok=True)
        return processes.run(*words, cwd=folder, fresh=True)

    return run_in


def report(done: subprocess.CompletedProcess) -> dict:
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    return json.loads(line.removeprefix("REPORT "))


def test_ordinary_script_gives_the_same_numbers(tmp_path, run):
    theirs = report(run(tmp_path / "theirs", SCRIPT, *FLAGS))
    ours = report(run(tmp_path / "ours", "-m", "hftrainer", "run", SCRIPT, *FLAGS))
    assert (ours.pop("trainer"), theirs.pop("trainer")) == ("hftrainer", "transformers")
    assert ours == theirs
    assert files_in(tmp_path / "ours") == files_in(tmp_path / "theirs")


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    return path


def test_exceptions_and_exit_codes_pass_through(tmp_path, run, processes):
    text = "import sys\nfrom transformers import Trainer\ndef f():\n    raise ValueError('mine')\nf()\n"
    path = script(tmp_path, text)
    line = [sys.executable, "-m", "hftrainer", "run", str(path)]  # no frames of ours come first
    done = subprocess.run(line, env=processes.environment(), capture_output=True, text=True)
    assert done.returncode == 1
    lines = done.stderr.strip().splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].strip() == f'File "{path}", line 5, in <module>'
    assert lines[-1] == "ValueError: mine"
    path = script(tmp_path, "import sys\nprint(sys.argv[1:], __name__)\nsys.exit(7)\n")
    done = run(tmp_path, "-m", "hftrainer", "run", path, "--epochs", "3", "-m")
    assert done.returncode == 7
    assert done.stdout.strip() == "['--epochs', '3', '-m'] __main__"
    assert run(tmp_path, "-m", "hftrainer", "run", "absent.py").returncode == 2
    script(tmp_path, "if 1:\nx")
    done = subprocess.run(line, env=processes.environment(), capture_output=True, text=True)
    assert done.returncode == 1 and "IndentationError" in done.stderr and "runpy" not in done.stderr


def test_module_is_run_by_name_with_its_arguments(tmp_path, run):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    text = "import sys\nfrom transformers import Trainer\nprint(Trainer.__module__, sys.argv[1:], __package__)\n"
    (tmp_path / "package" / "train.py").write_text(text)
    done = run(tmp_path, "-m", "hftrainer", "run", "-m", "package.train", "--a", "b")
    assert done.stdout.strip() == "hftrainer.trainer ['--a', 'b'] package", done.stderr


def test_ctrl_c_reaches_the_script(tmp_path, processes):
    path = script(
        tmp_path,
        """
        import signal
        try:
            print("ready", flush=True), signal.pause()  # one line: the signal may come before print has returned
        except KeyboardInterrupt:
            print("cleaned up", flush=True)
            raise
        """,
    )
    process = processes.start("-m", "hftrainer", "run", path, fresh=True)
    assert process.stdout.readline().strip() == "ready"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert "cleaned up" in out
    assert err.strip().endswith(f"Interrupted in line 4 of {path}.")
    assert process.returncode in (-signal.SIGINT, 130)


def test_ctrl_c_in_training_ends_with_what_is_saved(tmp_path, processes):
    """Without a traceback, unlike a Ctrl-C elsewhere in the script."""
    path = script(
        tmp_path,
        f"""
        import signal
        from hftrainer.demo import model, train
        from transformers import Trainer, TrainerCallback, TrainingArguments

        class Stops(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                if state.global_step == 3:
                    signal.raise_signal(signal.SIGINT)

        args = TrainingArguments({str(tmp_path / "out")!r}, max_steps=9, use_cpu=True, report_to=[])
        Trainer(model, args, train_dataset=train, callbacks=[Stops()]).train()
        """,
    )
    line = [sys.executable, "-m", "hftrainer", "run", str(path)]  # `fresh` would print a traceback of its own
    done = subprocess.run(line, env=processes.environment(), capture_output=True, text=True)
    assert done.returncode in (-signal.SIGINT, 130)
    assert "Traceback" not in done.stderr
    last = f"[hftrainer] Last checkpoint: {tmp_path}/out/checkpoint-3; trainer.train(resume_from_checkpoint=True)"
    assert done.stderr.splitlines()[-1].startswith(last)


ORDERS = {
    "install-first": "import hftrainer; hftrainer.install()\nimport transformers",
    "transformers-first": "import transformers\nimport hftrainer; hftrainer.install()",
    "trainer-loaded-first": "import transformers.trainer\nimport hftrainer; hftrainer.install()",
    "name-fetched-first": "import transformers; transformers.Trainer\nimport hftrainer; hftrainer.install()",
}


@pytest.mark.parametrize("order", sorted(ORDERS))
def test_names_are_swapped_in_any_order_of_imports(tmp_path, run, order):
    text = f"""
{ORDERS[order]}
from transformers import Trainer, TrainingArguments, EarlyStoppingCallback
from transformers import Seq2SeqTrainer as S1, Seq2SeqTrainingArguments as S2
from transformers.trainer_seq2seq import Seq2SeqTrainer as S3
from transformers.trainer import Trainer as T1, TrainingArguments as T2
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import EvalPrediction
kinds = (Trainer, TrainingArguments, EarlyStoppingCallback, T1, T2, S1, S2, S3, TrainerState, EvalPrediction)
ours = {{kind.__module__.split('.')[0] for kind in kinds}}
hftrainer.uninstall()
import transformers.training_args
kinds = (transformers.Trainer, transformers.trainer.Trainer, transformers.TrainingArguments)
back = {{kind.__module__.split('.')[0] for kind in kinds}}
print(sorted(ours), sorted(back))
"""
    done = run(tmp_path, script(tmp_path, text))
    assert done.stdout.strip() == "['hftrainer'] ['transformers']", done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nproc", "0"], "--nproc 0 is neither a number >= 1"),
        (["--nnodes", "3:2"], "--nnodes 3:2 is neither a number >= 1 nor MIN:MAX"),
        (["--node-rank", "-1"], "--node-rank -1 must be at least 0"),
        (["--nproc", "2", "--node_rank", "1"], "--node-rank 1 must be at least 0, and below --nnodes 1"),
        (["--nnodes", "2"], "--nnodes 2 needs --rdzv-endpoint HOST:PORT, or --master-addr HOST"),
        (["--nnodes", "2", "--standalone"], "--standalone is for one machine"),
        (["--nproc", "2"], "the script 'absent.py' does not exist"),
        (["--num-cores", "8"], "--num-cores is for TPUs: add --tpu"),
        (["--tpu", "--nproc", "2"], "remove one or the other"),
        (["--tpu", "--num-cores", "0"], "--num-cores 0 is not a number >= 1"),
    ],
)
def test_wrong_launch_options_are_refused(words, message, monkeypatch, capsys):
    from hftrainer.__main__ import main

    monkeypatch.setattr(sys, "argv", ["hftrainer", "run", *words, "absent.py"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--nproc", "2"], ["--nproc-per-node=2", "--standalone"]),
        (
            ["--nproc_per_node", "4", "--nnodes", "1:2", "--rdzv-endpoint", "a:1", "--rdzv-id", "x"],
            ["--nproc-per-node=4", "--nnodes=1:2", "--rdzv-id=x", "--rdzv-endpoint=a:1", "--rdzv-backend=c10d"],
        ),
        (
            ["--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", "5"],
            ["--nproc-per-node=1", "--nnodes=2", "--node-rank=0", "--master-addr=127.0.0.1", "--master-port=5"],
        ),
    ],
)
def test_launch_options_are_passed_to_torchrun(words, expected, monkeypatch):
    from torch.distributed import run as torchrun

    from hftrainer.__main__ import main

    told = []
    monkeypatch.setattr(torchrun, "run", told.append)
    monkeypatch.setattr(sys, "argv", ["hftrainer", "run", *words, "-m", "a.module", "--flag"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    (options,) = told
    assert options == torchrun.parse_args([*expected, "-m", "hftrainer", "run", "-m", "a.module", "--flag"])
