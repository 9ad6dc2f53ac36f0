"""Which progress bar a Trainer has, and what it writes to a terminal and to a file."""

import fcntl
import functools
import importlib
import io
import os
import pty
import re
import signal
import struct
import sys
import termios
import textwrap

import pytest
import torch
import transformers
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

import hftrainer
from hftrainer import ProgressCallback, Trainer, TrainerControl, TrainerState, TrainingArguments
from hftrainer.base.messages import wrap_text
from hftrainer.base.tracebacks import add_note
from hftrainer.callbacks.log_lines import format_log_line
from hftrainer.callbacks.notebook import _find_callback
from hftrainer.callbacks.progress_bar import ERASE, _make_bar
from hftrainer.training.stopping import SignalListener
from tests.support.parity import comparable
from tests.support.processes import read_to_end
from tests.support.small_models import plain_data

SCRIPT = """
    import logging, os, sys, tqdm
    if sys.argv[1:]:
        terminal = os.open(sys.argv[1], os.O_RDWR | os.O_NOCTTY)
        os.dup2(terminal, 1)
        os.dup2(terminal, 2)
        os.close(terminal)
        print("begins", flush=True)
    from hftrainer import Trainer, TrainerCallback, TrainingArguments
    from tests.support.small_models import make_plain, plain_data

    class Warns(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            logging.getLogger("hftrainer.script").warning("After a step.")
            print("printed")
            print("to stderr", file=sys.stderr)
            logging.getLogger("script").warning("logged")
            for _ in tqdm.tqdm(range(2), disable=None, leave=False):
                print("within a bar", file=sys.stderr)

    logging.getLogger("script").addHandler(logging.StreamHandler())
    args = TrainingArguments({folder!r}, max_steps=4, gradient_accumulation_steps=2, logging_steps=2, use_cpu=True,
        eval_strategy="steps", eval_steps=2, save_strategy="no", report_to="none")
    trainer = Trainer(make_plain(), args, train_dataset=plain_data(), eval_dataset=plain_data(), callbacks=[Warns])
    trainer.train()
    trainer.evaluate()
"""


def write_script(folder):
    text = textwrap.dedent(SCRIPT).format(folder=str(folder))
    path = folder / "script.py"
    path.write_text(text)
    return path


#: A log line of losses that are NaN, as `logging_nan_inf_filter` makes it.
FILTERED = {"loss": 0.0, "grad_norm": float("nan")}


@pytest.mark.parametrize(
    ("logs", "line"),
    [
        (
            {"loss": 0.12345, "learning_rate": 5e-5, "tokens_per_second": 12345.6, "step_seconds": 0.07}
            | {"peak_memory_mb": 1234.0, "epoch": 0.5},
            "   20/1,000  loss 0.1235   lr 5.00e-05  ep 0.50     12,346 tokens/s  mem 1.23 GB    70.0 ms/step",
        ),
        (
            {"loss": 1.0, "data_wait": 0.25, "eval_share": 0.05, "save_share": 0.001, "mfu": 0.417, "total_flos": 1e9},
            "   20/1,000  loss 1.000    41.7% MFU  data  25% of time",
        ),
        (
            {"eval_loss": 2.5, "eval_text": "a b", "eval_runtime": 0.5, "eval_samples_per_second": 64.0},
            "   20/1,000  eval_loss 2.500    eval_text a b  time  0.500 s     64.0 samples/s",
        ),
        ({"my_mfu": 2.5, "teacher_grad_norm": 1.0}, "   20/1,000  my_mfu 2.500    teacher_grad_norm 1.000"),
        ({"loss": float("nan")}, "   20/1,000  loss nan"),
        (FILTERED, "   20/1,000  loss nan      grad nan"),
        ({"train_loss": 0.5}, "   20/1,000  train_loss nan"),
        ({"train_x": 1, "train_runtime": 2.0, "train_samples_per_second": 4}, "   20/1,000  train_x 1"),
    ],
)
def test_log_line_shows_measurements(logs, line):
    assert format_log_line(logs, TrainerState(global_step=20, max_steps=1000, log_history=[FILTERED]), 120) == line


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (10, "20/40  loss 1.000"),
        (60, "20/40  loss 1.000    grad 0.500    12,346 tokens/s"),
        (73, "20/40  loss 1.000    grad 0.500   ep 6.67     12,346 tokens/s"),
        (74, "20/40  loss 1.000    grad 0.500   lr 5.00e-05  ep 6.67     12,346 tokens/s"),
        (85, "20/40  loss 1.000    grad 0.500   lr 5.00e-05  ep 6.67     12,346 tokens/s  data   3%"),
        (120, "20/40  loss 1.000    grad 0.500   lr 5.00e-05  ep 6.67     12,346 tokens/s  data   3% of time"),
    ],
)
def test_narrow_terminal_keeps_the_most_useful_parts(width, shown):
    logs = {"loss": 1.0, "grad_norm": 0.5, "learning_rate": 5e-5, "epoch": 6.67}
    logs |= {"tokens_per_second": 12345.6, "data_wait": 0.03}
    state = TrainerState(global_step=20, max_steps=40)
    assert format_log_line(logs, state, width) == shown
    assert format_log_line(logs | {"eval_share": 0.4, "save_share": 0.12}, state, width) == shown
    wide = format_log_line(logs | {"data_wait": 1.0, "epoch": 123.45}, state, width)
    assert wide == shown.replace("  3%", "100%").replace("6.67  ", "123.45")
    state.non_finite_step = 12
    assert format_log_line(logs, state, 80).endswith("ep 6.67     12,346 tokens/s\n       NaN at step 12")
    assert format_log_line(logs, state, 90).endswith("ep 6.67     12,346 tokens/s  NaN at step 12")


def test_metrics_continue_below_each_other():
    """Each evaluation breaks at the same names, which say once what they share, and its values are aligned."""
    names = [f"eval_{name}" for name in "loss accuracy f1_macro precision_macro recall_macro".split()]
    state = TrainerState(global_step=20, max_steps=40)
    logs = [dict.fromkeys(names, value) | {"epoch": 2.0, "eval_runtime": 0.25} for value in (0.5, 0.4375)]
    lines = [format_log_line(line, state, 80).splitlines() for line in logs]
    assert lines[1] == [line.replace("0.5000", "0.4375") for line in lines[0]]
    assert format_log_line({f"eval_{'x' * 90}": 1.0}, state, 80).splitlines()[1].startswith("       xxx")
    assert lines[0] == [
        "20/40  eval:  loss 0.5000              accuracy 0.5000       f1_macro 0.5000",
        "              precision_macro 0.5000   recall_macro 0.5000   ep 2.00",
        "              time  0.250 s",
    ]
    more = {
        f"eval_second_{name.removeprefix('eval_')}": 0.5 for name in [*names, "eval_runtime", "eval_steps_per_second"]
    }
    assert format_log_line(more, state, 80).splitlines() == [
        "20/40  eval_second:",
        "       loss 0.5000              accuracy 0.5000       f1_macro 0.5000",
        "       precision_macro 0.5000   recall_macro 0.5000   time  0.500 s",
    ]


def test_columns_keep_their_places():
    names = "loss grad_norm learning_rate epoch runtime tokens_per_second data_wait peak_memory_mb step_seconds".split()
    small = (1.234e-05, 1.234e-05, 1e-7, 0.01, 1e-4, 12.34, 0.0, 1.0, 1.234e-05)
    large = (123_456.0, 98_765.4, 0.1, 123.45, 9_876.5, 7_654_321.0, 1.0, 99_999.0, 1_234.5)
    lines = [format_log_line(dict(zip(names, row, strict=True)), TrainerState(), 200) for row in (small, large)]
    first, second = ([part.start() for part in re.finditer("  [a-z]", line)] for line in lines)
    assert first == second


@pytest.fixture
def make_trainer(make_trainer):
    return functools.partial(make_trainer, logging_steps=1, disable_tqdm=False)


def callback_names(trainer):
    return [type(callback).__name__ for callback in trainer.callback_handler.callbacks]


def test_output_to_a_file_has_no_bar(tmp_path, processes):
    """No bar and no control characters: each log line is a line."""
    done = processes.run(write_script(tmp_path), cwd=tmp_path, merge=True)
    assert done.returncode == 0, done.stderr
    text = done.stderr
    assert not re.search(r"[\r\x1b\x08]", text)
    assert "it/s" not in text
    lines = [line for line in text.splitlines() if line.startswith("{")]
    names = [re.search(r"'(loss|eval_loss|train_loss)'", line).group(1) for line in lines]
    assert names == ["loss", "eval_loss", "loss", "eval_loss", "train_loss"]
    assert all(line.endswith("}") for line in lines)


def test_terminal_bar_counts_optimizer_steps(tmp_path, processes):
    """The bar counts optimizer steps, that of the evaluation its batches; warnings and printed lines are above them."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    process = processes.start(write_script(tmp_path), os.ttyname(theirs), cwd=tmp_path, merge=True)
    os.read(ours, 1)  # it has the terminal; without a process that has it, reading ends
    os.close(theirs)
    text = read_to_end(ours)
    os.close(ours)
    assert process.wait() == 0
    assert b"4/4" in text
    assert b"5/5" in text
    assert b"8/8" not in text
    assert re.findall(rb"([^\r\n]*)\[hftrainer\] After a step\.\x1b\[0m\r\n", text) == [b"\x1b[33m"] * 4
    for line, count in {b"printed": 4, b"to stderr": 4, b"logged": 4, b"within a bar": 8}.items():
        # Below a script's bar, tqdm has moved up to the line.
        assert re.findall(rb"([^\r\n]*?)(?:\x1b\[[AK])*" + line + rb"\r\n", text) == [b""] * count


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_ctrl_c_erases_the_bar(monkeypatch):
    """The bar leaves room for the "^C" of the terminal, so that both are in one line."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        bar = _make_bar(total=4)
        bar.refresh()
        bar.refresh()  # the first pads the line that it replaces
        with SignalListener(should_save=True).handle_signals():
            signal.raise_signal(signal.SIGINT)
        bar.close()
    drawn, erased, _ = read_to_end(ours).decode().partition("\r\x1b[K")
    os.close(ours)
    assert erased and "0/4" in drawn and len(drawn.split("\r")[-1].removesuffix(ERASE)) <= 37


def test_output_is_given_back_with_an_unfinished_line(monkeypatch, tmp_path):
    output = Terminal()
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "stderr", Terminal())
    callback, state = ProgressCallback(), TrainerState(max_steps=4)
    callback.on_train_begin(TrainingArguments(str(tmp_path)), state, TrainerControl())
    callback.on_prediction_step(None, state, None, eval_dataloader=range(2))
    print("a line\nand more", end="")
    sys.stdout.flush()  # as tqdm does for each bar
    assert output.getvalue() == f"\r{ERASE}a line\n"
    callback.close()  # as after an error in an evaluation
    assert sys.stdout is output and callback.prediction_bar is None
    assert output.getvalue() == f"\r{ERASE}a line\n\r{ERASE}and more"
    callback.on_prediction_step(None, state, None, eval_dataloader=range(2))
    assert sys.stdout is not output  # outside of a run too
    print(".", end="")
    sys.stdout.end_line()  # as before a log line
    callback.on_evaluate(None, state, None)
    assert sys.stdout is output and output.getvalue().endswith(f"{ERASE}.\n")


def test_rank_without_a_bar_erases_that_of_another_rank(monkeypatch, tmp_path):
    output = Terminal()
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "stderr", Terminal())
    callback, state = ProgressCallback(), TrainerState(max_steps=4, is_world_process_zero=False)
    callback.on_train_begin(TrainingArguments(str(tmp_path)), state, TrainerControl())
    print("a line")
    callback.on_train_end(None, state, None)
    assert (callback.training_bar, output.getvalue(), sys.stdout) == (None, f"\r{ERASE}a line\n", output)


@pytest.mark.parametrize(("columns", "losses"), [(80, "loss 0.5"), (120, "loss 0.5, eval_loss 0.9937"), (50, "")])
def test_narrow_bar_leaves_out_losses(monkeypatch, columns, losses):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    bar = _make_bar(total=600_000, dynamic_ncols=False, ncols=columns)
    bar.set_postfix_str("loss 0.5, eval_loss 0.9937")
    bar.close()
    drawn = terminal.getvalue().split("\r")[-1].rstrip().removesuffix(ERASE)
    assert drawn.endswith(f"{', ' * bool(losses)}{losses}]") and len(drawn) == columns - 3
    assert len(drawn.split("|")[1]) >= 15


def test_message_keeps_a_number_with_its_unit(monkeypatch):
    monkeypatch.setenv("COLUMNS", "18")
    text = wrap_text("Peak memory is 16 MB, with 10% saving.", Terminal())
    assert text.splitlines() == ["Peak memory is", "    16 MB, with", "    10% saving."]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(sys, "stderr", Terminal())
    add_note(error := ValueError(), "Peak memory is 16 MB")
    assert error.__notes__ == ["Peak\n    memory\n    is\n    16 MB"]  # behind "[rank0]: "


@pytest.mark.parametrize("steps", [4, 9])
def test_bar_of_a_resumed_run_starts_at_its_step(monkeypatch, tmp_path, steps):
    """A run without steps left shows none."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    callback, state = ProgressCallback(), TrainerState(global_step=4, max_steps=steps)
    callback.on_train_begin(TrainingArguments(str(tmp_path)), state, TrainerControl())
    assert (callback.training_bar.n, callback.training_bar.total) == (4, steps)
    state.global_step += 1
    callback.on_step_end(None, state, None)
    assert callback.training_bar.n == (4 if steps == 4 else 5)
    monkeypatch.setattr(sys, "stdout", Terminal())
    callback.on_log(TrainingArguments(str(tmp_path)), state, None, logs={"loss": 0.5, "epoch": 1})
    assert f"5/{steps}  loss 0.5000   ep 1.00\n" in sys.stdout.getvalue()
    assert callback.training_bar.postfix == "loss 0.5"
    callback.close()


@pytest.mark.parametrize(
    ("value", "text"), [(1234567, "1234567"), (12345678.0, "1.235e7"), (1.2e12, "1.20e12"), (999.96, "1,000")]
)
def test_large_numbers_keep_their_digits(value, text):
    assert format_log_line({"tokens_seen": value}, TrainerState(), 120) == f"tokens_seen {text}"


def test_plain_line_in_a_terminal_shows_losses_that_are_nan(monkeypatch, tmp_path):
    for terminal, lines in (
        (
            Terminal(),
            "15/30  loss nan      grad nan     NaN at step 13\n15/30  loss nan      grad nan\n15/30  train_loss nan\n",
        ),
        (
            io.StringIO(),
            "{'loss': '0.5', 'grad_norm': 'nan'}\n{'loss': '0', 'grad_norm': 'nan'}\n{'train_loss': '0.5'}\n",
        ),
    ):
        monkeypatch.setattr(sys, "stdout", terminal)
        state = TrainerState(global_step=15, max_steps=30)
        state.non_finite_step = 13
        for logs in ({"loss": 0.5, "grad_norm": float("nan")}, FILTERED, {"train_loss": 0.5}):
            hftrainer.PrinterCallback().on_log(TrainingArguments(str(tmp_path)), state, None, logs=logs)
        assert terminal.getvalue() == lines


def test_plain_evaluation_takes_a_row_of_a_terminal(monkeypatch, tmp_path):
    """Outside of a run there is no step, and what has the name of a measurement may be text."""
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "80")
    logs = {"eval_loss": 0.9937, "eval_accuracy": 0.5, "eval_runtime": 0.0286, "eval_samples_per_second": 280.0}
    logs |= {"eval_steps_per_second": 35.0, "epoch": 1.0}
    for state, values in ((TrainerState(global_step=3, max_steps=60), logs), (TrainerState(), {"learning_rate": "-"})):
        hftrainer.PrinterCallback().on_log(TrainingArguments(str(tmp_path)), state, None, logs=values)
    row, outside, end = sys.stdout.getvalue().split("\n")
    assert row.startswith(" 3/60  eval_loss 0.9937   eval_accuracy 0.5000   ep 1.00") and len(row) <= 80 and not end
    assert outside == "learning_rate -"


@pytest.mark.parametrize("name", "ProgressCallback PrinterCallback DefaultFlowCallback EarlyStoppingCallback".split())
def test_transformers_class_removes_our_callback(make_trainer, name):
    theirs = getattr(transformers.trainer_callback, name)
    ours = getattr(hftrainer, name)
    for remove in (Trainer.remove_callback, Trainer.pop_callback):
        trainer = make_trainer(callbacks=[hftrainer.EarlyStoppingCallback()], disable_tqdm=name == "PrinterCallback")
        assert name in callback_names(trainer)
        removed = remove(trainer, theirs)
        assert name not in callback_names(trainer)
        assert remove is Trainer.remove_callback or type(removed) is ours
        assert trainer.pop_callback(theirs) is None


def test_notebook_callback_of_transformers_replaces_the_bar(make_trainer, monkeypatch):
    """Where it cannot be imported, our bar is used."""
    pytest.importorskip("IPython")
    theirs = pytest.importorskip("transformers.utils.notebook").NotebookProgressCallback
    assert hftrainer.NotebookProgressCallback is theirs
    assert "ProgressCallback" not in callback_names(make_trainer(callbacks=[theirs]))
    monkeypatch.setitem(sys.modules, "transformers.utils.notebook", None)
    assert _find_callback() is hftrainer.ProgressCallback


def test_user_class_of_the_same_name_is_kept_apart(make_trainer):
    class ProgressCallback(hftrainer.TrainerCallback):
        pass

    trainer = make_trainer(callbacks=[ProgressCallback])
    assert callback_names(trainer).count("ProgressCallback") == 2
    trainer.remove_callback(ProgressCallback)
    assert callback_names(trainer).count("ProgressCallback") == 1
    assert trainer.pop_callback(ProgressCallback) is None


@pytest.mark.parametrize("library", ["hftrainer", "transformers"])
@pytest.mark.parametrize("later", [False, True])
def test_given_progress_callback_replaces_the_default(make_trainer, library, later, capfd):
    callback = importlib.import_module(f"{library}.trainer_callback").ProgressCallback(max_str_len=7)
    trainer = make_trainer(callbacks=[] if later else [callback])
    if later:
        trainer.add_callback(callback)
    assert [it for it in trainer.callback_handler.callbacks if type(it).__name__ == "ProgressCallback"] == [callback]
    trainer.train()
    assert capfd.readouterr().out.count("train_loss") == 1


def test_default_flow_callback_of_transformers_acts_once(make_trainer, tmp_path):
    trainer = make_trainer(callbacks=[transformers.DefaultFlowCallback], save_strategy="steps", save_steps=1)
    trainer.train()
    assert [line["step"] for line in trainer.state.log_history] == [1, 2, 2]
    assert sorted(path.name for path in tmp_path.glob("out/checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    trainer.remove_callback(hftrainer.DefaultFlowCallback)
    assert trainer.train().global_step == 2  # theirs does it alone


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
@pytest.mark.parametrize("later", [False, True])
def test_lightning_bar_replaces_ours(make_trainer, bar, later, caplog, capfd):
    trainer = make_trainer(callbacks=[] if later else [bar])
    if later:
        assert "ProgressCallback" in callback_names(trainer)
        trainer.add_callback(bar())
    trainer.add_callback(hftrainer.EarlyStoppingCallback)
    trainer.pop_callback(hftrainer.EarlyStoppingCallback)
    assert callback_names(trainer) == ["DefaultFlowCallback"]
    assert caplog.text.count("replaces the Trainer's") == 1
    trainer.train()
    assert trainer.lightning_trainer.progress_bar_callback is not None
    assert "Epoch 0" in capfd.readouterr().out


def test_lightning_bar_stays_with_disable_tqdm(make_trainer, caplog, capfd):
    trainer = make_trainer(callbacks=[TQDMProgressBar()], disable_tqdm=True)
    assert callback_names(trainer) == ["DefaultFlowCallback", "PrinterCallback"]
    assert "replaces the Trainer's" not in caplog.text
    trainer.train()
    out = capfd.readouterr()
    assert "'train_loss'" in out.out
    assert "Epoch 0" in out.out + out.err


def test_trainer_callback_module_has_the_names_of_transformers():
    module = importlib.import_module("hftrainer.trainer_callback")
    assert module.ProgressCallback is hftrainer.ProgressCallback
    assert module.PrinterCallback is hftrainer.PrinterCallback
    with pytest.raises(AttributeError, match=r"'hftrainer\.trainer_callback' has no attribute 'Absent'"):
        module.Absent  # noqa: B018


def test_only_the_main_process_prints(make_trainer, capfd):
    trainer = make_trainer()
    trainer.state.is_world_process_zero = False
    events, event_args = trainer.callback_handler, (trainer.args, trainer.state, trainer.control)
    events.eval_dataloader = [1, 2]
    for name in ("train_begin", "step_end", "prediction_step", "log", "evaluate", "train_end"):
        values = [{"loss": 1.0}] if name in ("log", "evaluate") else []
        getattr(events, f"on_{name}")(*event_args, *values)
    assert capfd.readouterr() == ("", "")


def test_callback_classes_of_transformers_change_nothing(make_trainer):
    """A run with all of them, and a user's, given as classes is the run without them."""
    counted = []

    class Counting(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            counted.append(state.global_step)

    names = ("DefaultFlowCallback", "ProgressCallback", "PrinterCallback", "EarlyStoppingCallback")
    classes = [*(getattr(transformers.trainer_callback, name) for name in names), Counting]
    settings = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps"}
    settings |= {"max_steps": 3, "save_steps": 1, "per_device_train_batch_size": 8, "eval_dataset": plain_data()}
    histories = []
    for callbacks in (classes, []):
        trainer = make_trainer(callbacks=list(callbacks), **settings)
        trainer.train()
        histories.append(comparable(trainer.state.log_history))
    assert histories[0] == histories[1]
    assert counted == [1, 2, 3]
