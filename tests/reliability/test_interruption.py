"""Signals, Ctrl-C and errors leave one checkpoint and the documented exit status, and the run resumes exactly."""

import os
import re
import signal

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging

from hftrainer import Trainer
from hftrainer.checkpointing.run_progress import load_progress
from hftrainer.checkpointing.writing import folder
from tests.reliability import job
from tests.support.checkpoints import BACKGROUND, BEST, AtStep, assert_same_end, make_trainer, train_to_end
from tests.support.faults import FailsOnce
from tests.support.jobs import Job, assert_same, final_weights, names_in
from tests.support.small_models import Plain

NAMES = {signal.SIGINT: "Ctrl-C"}
STATUS = {signal.SIGTERM: 143, signal.SIGUSR1: 138, signal.SIGINT: -signal.SIGINT}


def finish(folder, **settings):
    job.main(str(folder), settings)
    return final_weights(folder)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return finish(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def start_waiting(processes, tmp_path):
    def start(**settings):
        os.mkfifo(tmp_path / "run.go")
        started = Job(tmp_path / "run", waits_at=9, **settings)
        started.wait_for("waiting")
        return started

    return start


@pytest.mark.parametrize(
    ("number", "settings"),
    [
        *((number, {}) for number in STATUS),
        (signal.SIGTERM, {"gradient_accumulation_steps": 2}),
        (signal.SIGTERM, BACKGROUND),
    ],
    ids=repr,
)
def test_signal_saves_and_exits_with_its_status(tmp_path, undisturbed, start_waiting, capsys, number, settings):
    folder, started = tmp_path / "run", start_waiting(**settings)
    os.kill(started.process.pid, number)
    open(tmp_path / "run.go", "w").close()
    started.process.join()
    printed = started.output.read_text()
    assert started.process.exitcode == STATUS[number], printed
    assert f"{NAMES.get(number, number.name)}: saving after this step" in printed
    assert [line for line in printed.splitlines() if line.startswith("step")][-1] == "step 10"
    assert [line for line in printed.splitlines() if line.startswith("saved")] == ["saved 7", "saved 10"]
    assert names_in(folder) == ["checkpoint-10", "checkpoint-7"]
    end = finish(folder, **settings)
    assert capsys.readouterr().out.startswith(f"resuming from {folder}/checkpoint-10\n")
    if "gradient_accumulation_steps" not in settings:
        assert_same(end, undisturbed)


def test_signal_without_save_on_interrupt_stops_at_once(tmp_path, start_waiting):
    started = start_waiting(save_on_interrupt=False)
    os.kill(started.process.pid, signal.SIGTERM)
    started.process.join()
    assert started.process.exitcode == -signal.SIGTERM
    assert names_in(tmp_path / "run") == ["checkpoint-7"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=repr)
@pytest.mark.parametrize(("every", "left"), [(7, ["checkpoint-7"]), (100, [])])
def test_second_signal_stops_at_once_and_says_what_is_saved(tmp_path, start_waiting, number, every, left):
    started = start_waiting(save_steps=every, copies_within=0)
    os.kill(started.process.pid, number)
    started.wait_for(f".*{NAMES.get(number, number.name)}: saving after this step")
    os.kill(started.process.pid, number)
    started.process.join()
    assert started.process.exitcode == -number
    assert names_in(tmp_path / "run") == left
    last = started.output.read_text().rstrip().splitlines()[-1]
    assert "second signal stopped the run at step 9, before its save was complete" in last
    resumes = f"Last checkpoint: {tmp_path}/run/checkpoint-7; trainer.train(resume_from_checkpoint=True) resumes"
    assert (resumes if left else "No checkpoint was saved.") in last


def test_duplicate_of_a_signal_is_ignored(tmp_path, start_waiting):
    """`timeout --foreground` forwards the Ctrl-C of a terminal, which the process has already received."""
    started = start_waiting(copies_within=1e9)
    os.kill(started.process.pid, signal.SIGINT)
    started.wait_for(".*Ctrl-C: saving after this step")
    os.kill(started.process.pid, signal.SIGINT)
    open(tmp_path / "run.go", "w").close()
    started.process.join()
    assert names_in(tmp_path / "run") == ["checkpoint-10", "checkpoint-7"]


def fail():
    raise RuntimeError("my own bug")


def at_step(step, number=None, event="on_step_end"):
    return AtStep(step, lambda: signal.raise_signal(number) if number else fail(), event)


def test_jit_checkpoint_saves_once(tmp_path):
    """`train()` returns, as in transformers."""
    callbacks = [at_step(3, signal.SIGTERM)]
    trainer = make_trainer(tmp_path, callbacks=callbacks, enable_jit_checkpoint=True, save_strategy="no")
    assert trainer.train().global_step == 3
    assert names_in(tmp_path) == ["checkpoint-3"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


THIRD, EVALUATED = ["checkpoint-3"], {"eval_strategy": "steps", "eval_steps": 3}


@pytest.mark.parametrize(
    ("event", "settings", "left"),
    [
        *((event, EVALUATED, THIRD) for event in ("on_step_end", "on_step_begin", "on_evaluate", "on_log")),
        ("on_step_begin", {"save_steps": 3}, THIRD),  # nothing is saved twice
        ("on_optimizer_step", {}, []),  # the weights are between two steps
        ("on_step_end", {"save_on_interrupt": False}, []),
        ("on_step_end", {"save_strategy": "no"}, []),
    ],
)
def test_error_in_a_callback_saves_the_last_complete_step(tmp_path, event, settings, left):
    with pytest.raises(RuntimeError, match="my own bug") as caught:
        make_trainer(tmp_path, callbacks=[at_step(3, event=event)], **{"save_steps": 4, **settings}).train()
    assert names_in(tmp_path) == left
    label = "Last checkpoint" if settings == {"save_steps": 3} else "Saved at the error"
    resumes = f"{label}: {tmp_path}/checkpoint-3; trainer.train(resume_from_checkpoint=True) resumes from it"
    assert any(note.startswith(resumes) for note in caught.value.__notes__) == bool(left)
    assert not left or train_to_end(make_trainer(tmp_path), True).state.global_step == 9


def test_ctrl_c_says_what_was_done(tmp_path):
    with pytest.raises(KeyboardInterrupt) as caught:
        make_trainer(tmp_path, callbacks=[at_step(3, signal.SIGINT)], logging_steps=1).train()
    done, saved = caught.value.__notes__
    assert re.search(r"Stopped at step 3 of 9, after [\d.]+ m?s( \(.*%.*\))?; last loss [\d.]+\.$", done)
    assert f"Last checkpoint: {tmp_path}/checkpoint-3" in saved


def test_averaged_weights_are_put_back_when_an_evaluation_fails(tmp_path):
    """Otherwise a resumed run would begin with the averaged weights."""
    settings = {"eval_strategy": "steps", "eval_steps": 4}

    def trainer(name, *more):
        return make_trainer(tmp_path / name, callbacks=[EMAWeightAveraging(decay=0.7), *more], **settings)

    with pytest.raises(RuntimeError, match="my own bug"):
        trainer("b", at_step(4, event="on_prediction_step")).train()
    assert_same_end(train_to_end(trainer("b"), True), train_to_end(trainer("a")))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=repr)
def test_signal_handlers_of_the_script_stay_under_slurm(tmp_path, number, monkeypatch):
    """Lightning would end training, and requeue the job under SLURM."""
    for name, value in {"NTASKS": "1", "JOB_NAME": "train", "JOB_ID": "7", "PROCID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    caught = []
    before = signal.signal(number, lambda *args: caught.append(args[0]))
    try:
        assert train_to_end(make_trainer(tmp_path, callbacks=[at_step(2, number)])).state.global_step == 9
    finally:
        signal.signal(number, before)
    assert caught == [number]
    assert not list(tmp_path.glob("*.ckpt"))


def test_signal_after_the_last_step_exits_with_its_status(tmp_path):
    with pytest.raises(SystemExit) as left:
        make_trainer(tmp_path, callbacks=[at_step(9, signal.SIGTERM, "on_train_end")]).train()
    assert left.value.code == 143


def test_signal_in_a_step_whose_save_failed_saves_again(tmp_path, monkeypatch):
    FailsOnce(monkeypatch, folder, "write_manifest", OSError(28, "No space left on device"))
    with pytest.raises(SystemExit):
        make_trainer(tmp_path, callbacks=[at_step(3, signal.SIGTERM)]).train()
    assert names_in(tmp_path) == ["checkpoint-3"]


def test_out_of_memory_after_resuming_retries_from_the_checkpoint(tmp_path):
    class Hungry(Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            if self.state.global_step >= 5 and len(inputs["labels"]) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().compute_loss(model, inputs, *args, **kwargs)

    make_trainer(tmp_path, max_steps=3).train()
    settings = {"auto_find_batch_size": True, "save_total_limit": 1, "save_steps": 4}
    assert train_to_end(make_trainer(tmp_path, trainer_class=Hungry, **settings), True).state.global_step == 9
    assert names_in(tmp_path) == ["checkpoint-3", "checkpoint-9"]


class Fails(Plain):
    def __init__(self, call=None):
        torch.manual_seed(1)
        super().__init__()
        self.layers[3].p = 0.0  # the dropout
        self.left = call

    def forward(self, x, labels=None):
        if self.left and self.training:
            self.left -= 1
            if not self.left:
                fail()
        return super().forward(x, labels)


@pytest.mark.parametrize(("accumulation", "calls"), [(1, [4, 5]), (3, [4, 5, 6, 7])])
def test_error_in_any_micro_batch_resumes_exactly(tmp_path, accumulation, calls):
    def make(name, call=None):
        settings = {"gradient_accumulation_steps": accumulation, "max_steps": -1, "num_train_epochs": 2}
        return make_trainer(tmp_path / name, trainer={"model": Fails(call)}, **settings)

    whole = train_to_end(make("whole"))
    for call in calls:
        with pytest.raises(RuntimeError, match="my own bug"):
            make(f"{call}", call).train()
        assert_same_end(train_to_end(make(f"{call}"), True), whole)


def test_error_before_an_epoch_reads_data_resumes_exactly(tmp_path):
    settings = {"max_steps": 14, "save_steps": 20}
    with pytest.raises(RuntimeError, match="my own bug"):
        make_trainer(tmp_path / "left", callbacks=[at_step(10, event="on_epoch_begin")], **settings).train()
    progress = load_progress(str(tmp_path / "left" / "checkpoint-10"), 0, 1)
    assert progress is not None and (progress.epoch, progress.data) == (None, None)
    whole = train_to_end(make_trainer(tmp_path / "whole", **settings))
    assert_same_end(train_to_end(make_trainer(tmp_path / "left", **settings), True), whole)


@pytest.mark.parametrize("max_steps", [8, 14])
def test_complete_run_trains_more_steps_from_mid_epoch(tmp_path, max_steps):
    settings = {"save_strategy": "epoch"}
    make_trainer(tmp_path, max_steps=6, **settings).train()
    further = train_to_end(make_trainer(tmp_path, max_steps=max_steps, **settings), True)
    assert further.state.global_step == max_steps
    assert further.state.epoch == pytest.approx(max_steps / 10)


def test_aborted_evaluation_is_repeated_after_resuming(tmp_path, caplog):
    """Otherwise the log and the best metric would lack it."""
    settings = {**BEST, "eval_steps": 1, "save_steps": 1, "max_steps": 11}
    whole = train_to_end(make_trainer(tmp_path / "whole", **settings))
    for error, step, number in ((SystemExit, 3, signal.SIGTERM), (RuntimeError, 10, None), (SystemExit, 10, 15)):
        folder = tmp_path / f"{step}-{number}"
        with pytest.raises(error):
            make_trainer(folder, callbacks=[at_step(step, number, "on_prediction_step")], **settings).train()
        assert ("The evaluation was aborted" in caplog.text) == (error is SystemExit)
        assert f"checkpoint-{step}" in names_in(folder)
        caplog.clear()
        resumed = train_to_end(make_trainer(folder, **settings), True)
        assert_same_end(resumed, whole)
        assert evaluations(resumed.state) == evaluations(whole.state)


def evaluations(state):
    losses = [(line["step"], line["eval_loss"]) for line in state.log_history if "eval_loss" in line]
    return losses, state.best_global_step, state.best_metric
