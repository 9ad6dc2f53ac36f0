"""`UploadQueue`: uploads in order, of which the newest that fail are tried again and reported with the command."""

import errno
import itertools
import re
import shutil
import signal
import threading
import traceback
from concurrent import futures
from types import SimpleNamespace

import pytest

from hftrainer.errors import HubError
from hftrainer.search.workers import pickle_trainer
from tests.support.checkpoints import AtStep, OnSave
from tests.support.hub_runs import STEPS, environment, head, make_uploading, messages, step_messages
from tests.support.hub_server import cut, fail
from tests.support.parity import assert_same_weights
from tests.support.small_models import make_plain


def assert_one_at_a_time(hub):
    made = [request.split("/")[-2] for request in hub.requests if "/preupload/" in request or "/commit/" in request]
    assert made == ["preupload", "commit"] * (len(made) // 2)


def train_disturbed(hub, folder, act, part="", times=None, callbacks=(), **settings):
    """Train with a Hub that fails from the first step until the last upload was tried, or hangs until training ends.

    The Trainer, and the weights of each checkpoint as they were written.
    """
    saved, act = {}, hub.hold if act == "hold" else act
    keep = OnSave(lambda folder: saved.update({folder.name: (folder / "model.safetensors").read_bytes()}))
    disturb = AtStep(1, lambda: hub.disturb(act, part, times))
    trainer = make_uploading(folder, [keep, disturb, *callbacks], **settings)
    finish = trainer._finish_current_push

    def repair_and_finish():
        if act != hub.hold:
            trainer.push_in_progress.wait_until_done()
        hub.repair()
        finish()

    trainer._finish_current_push = repair_and_finish
    trainer.train()
    assert trainer.state.global_step == STEPS
    assert head(hub).files["model.safetensors"] == saved[f"checkpoint-{STEPS}"]
    return trainer, saved


ONCE, QUEUED = {"hub_strategy": "checkpoint"}, {"hub_always_push": True}
EACH = {"hub_strategy": "all_checkpoints", "save_steps": 1, "save_total_limit": 1, "hub_always_push": True}
#: How the Hub fails, the arguments, whether the log promises a retry at the end, the commits.
DISTURBED = {
    "refuses": ((cut,), ONCE, True, step_messages(6, checkpoint=True)),
    "fails": ((fail, "", 3), ONCE | QUEUED, False, step_messages(2, 4, 6, checkpoint=True)),
    "cuts uploads": ((cut, "PUT", 3), ONCE | QUEUED, False, step_messages(2, 4, 6, checkpoint=True)),
    "fails to commit": ((fail, "/commit/"), {}, True, step_messages(6)),
    # Without Xet, the client retries all requests but this one.
    "fails to commit once": ((fail, "/commit/", 1), QUEUED, True, step_messages(4, 6)),
    "cuts a commit": ((cut, "/commit/", 1), QUEUED, True, step_messages(4, 6)),
    # Skipped saves: the newest for each path is uploaded at the end.
    "hangs": (("hold", "PUT"), {"save_steps": 1}, False, step_messages(1, 6)),
    "hangs, checkpoint": (("hold", "PUT"), ONCE, False, step_messages(2, 6, checkpoint=True)),
    # All saves are uploaded in order, even if the checkpoints have been deleted.
    "hangs, all queued": (
        ("hold", "PUT"),
        EACH | {"lightning_config": {"async_checkpoint": True}},
        False,
        step_messages(1, 2, 3, 4, 5, 6, checkpoint=True),
    ),
}


@pytest.mark.parametrize(("disturbance", "settings", "is_retried", "expected"), DISTURBED.values(), ids=DISTURBED)
def test_failed_uploads_are_retried(hub, tmp_path, undisturbed, caplog, disturbance, settings, is_retried, expected):
    """Training yields the same weights, each commit has those of its step, and at the end the last save is uploaded."""
    trainer, saved = train_disturbed(hub, tmp_path / "run", *disturbance, **settings)
    assert_same_weights(trainer.model.state_dict(), undisturbed)
    kept = list(saved)[-settings.get("save_total_limit", STEPS) :]
    assert sorted(path.name for path in (tmp_path / "run").glob("*")) == kept
    assert messages(hub) == expected
    for commit in hub.repos["me/run"].branches["main"][1:]:
        made = "checkpoint-" + re.search(r"step (\d+)", commit.message)[1]
        folder = "last-checkpoint" if settings.get("hub_strategy") == "checkpoint" else made
        assert commit.files["model.safetensors"] == saved[made]
        if commit.message.endswith("checkpoint"):
            assert commit.files[f"{folder}/model.safetensors"] == saved[made]
            assert f"{folder}/optimizer.pt" in commit.files
    if disturbance[0] == "hold":
        assert_one_at_a_time(hub)
    assert ("will be retried at the end" in caplog.text) is is_retried
    assert "Not uploaded" not in caplog.text


def test_last_save_is_uploaded_though_its_checkpoint_is_deleted(hub, tmp_path):
    """`save_total_limit=1` keeps only the best checkpoint."""
    falling = itertools.count(0, -1)
    best = {"save_total_limit": 1, "load_best_model_at_end": True, "metric_for_best_model": "x", "eval_steps": 2}
    measured = {"eval_strategy": "steps", "trainer": {"compute_metrics": lambda _: {"x": float(next(falling))}}}
    train_disturbed(hub, tmp_path / "run", "hold", "PUT", **best, **measured)
    assert not (tmp_path / "run" / "checkpoint-6").exists()
    assert messages(hub) == step_messages(2, 6)


def test_second_trainer_in_the_folder_leaves_pending_uploads(hub, tmp_path):
    other = AtStep(5, lambda: make_uploading(tmp_path / "run", hub_model_id="me/second", hub_strategy="end"))
    train_disturbed(hub, tmp_path / "run", "hold", "PUT", callbacks=[other], hub_always_push=True)
    assert messages(hub) == step_messages(2, 4, 6)


def test_cancelled_uploads_are_followed_by_the_next_save(hub, tmp_path):
    arrived = threading.Event()

    def call_off():
        arrived.wait()  # the first of the two is running
        trainer.push_in_progress.cancel()
        hub.repair()

    trainer = make_uploading(tmp_path / "run", [AtStep(3, call_off)], hub_strategy="checkpoint", max_steps=4)
    hub.disturb(lambda _: arrived.set(), "PUT")
    hub.disturb(hub.hold, "PUT")
    trainer.train()
    assert messages(hub) == [*step_messages(2), *step_messages(4, checkpoint=True)]
    assert not list(tmp_path.rglob("_tmp_*"))


def test_uploads_that_keep_failing_are_reported_with_the_command(hub, tmp_path, undisturbed, caplog):
    """The log names what is uploaded and what is not, with the command; `push_to_hub` uploads the rest."""
    trainer = make_uploading(tmp_path / "run", hub_strategy="all_checkpoints")
    trainer.add_callback(
        AtStep(3, lambda: (trainer.push_in_progress.wait_until_done(), hub.disturb(fail, "/preupload/")))
    )
    trainer.train()
    assert_same_weights(trainer.model.state_dict(), undisturbed)
    report = caplog.text[caplog.text.index("Not uploaded to me/run:") :]
    folder = tmp_path / "run"
    assert f"hf upload me/run {folder}/checkpoint-6 . --include model.safetensors --include training_args.bin" in report
    assert f"hf upload me/run {folder}/checkpoint-6 checkpoint-6" in report
    assert "the Hub failed: try again later" in report
    assert "checkpoint-2: 'Training in progress, step 2, checkpoint'" in report.split("Uploaded:")[1]
    with pytest.raises(HubError, match=r"To upload it: hf upload me/run .* --exclude") as caught:
        trainer.push_to_hub()
    traceback.print_exception(caught.value)
    trainer.save_model()  # logs the failure, and does not raise
    assert caplog.records[-1].levelname == "ERROR"
    assert isinstance(trainer.push_to_hub(blocking=False).exception(), HubError)
    assert "push_to_hub to 'me/run': the Hub failed" in caplog.records[-1].getMessage()
    hub.repair()
    trainer.push_to_hub()
    trainer._finish_current_push()
    # The current model, then the pending checkpoints, oldest first.
    assert messages(hub)[2:] == ["End of training", *(f"{message}, checkpoint" for message in step_messages(4, 6))]
    assert not list(tmp_path.rglob("_tmp_*"))
    expected = (folder / "checkpoint-6" / "model.safetensors").read_bytes()
    assert head(hub).files["model.safetensors"] == head(hub).files["checkpoint-6/model.safetensors"] == expected
    assert "checkpoint-4/model.safetensors" in head(hub).files


def test_push_to_another_branch_leaves_the_pending_upload(hub, tmp_path):
    trainer = make_uploading(tmp_path / "run", max_steps=2)
    hub.repos["me/run"].branches["dev"] = list(hub.repos["me/run"].branches["main"])
    hub.disturb(fail, "/commit/main")
    trainer.train()
    trainer.push_to_hub(revision="dev")
    assert hub.repos["me/run"].messages("dev") == ["End of training"]
    hub.repair()
    trainer._finish_current_push()
    assert messages(hub) == step_messages(2)


def test_search_uploads_one_at_a_time_and_no_checkpoints_of_trials(hub, tmp_path):
    """A pruned trial does not wait for its uploads."""
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    in_trial = iter([lambda: hub.disturb(hub.hold, "PUT"), hub.repair])
    evaluated = {"eval_strategy": "steps", "eval_steps": 2}
    trainer = make_uploading(tmp_path / "run", [AtStep(1, lambda: next(in_trial)())], **evaluated)
    trainer.model_init = make_plain
    pruner = SimpleNamespace(prune=lambda study, trial: trial.number == 0 and trial.last_step >= 4)
    trainer.hyperparameter_search(n_trials=2, hp_space=lambda trial: {"seed": trial.number}, pruner=pruner)
    assert [messages(hub)[0], messages(hub)[-1]] == step_messages(2, 6)
    assert_one_at_a_time(hub)
    assert not [name for name in head(hub).files if "checkpoint-" in name]


def test_pickled_trainer_has_uploads_of_its_own(hub, tmp_path):
    """The copy opens the repository itself."""
    trainer = make_uploading(tmp_path / "run", max_steps=2)
    unpacked = pickle_trainer(trainer._hftrainer).unpack().trainer
    assert None is not trainer._hftrainer.upload_queue is not unpacked._hftrainer.upload_queue
    unpacked.train()
    assert messages(hub) == step_messages(2)


def refuse(*_, **__):
    raise OSError(errno.EPERM, "not here")


def find_no_space(*_, **__):
    """As the library tokenizers does."""
    raise Exception("No space left on device (os error 28)")


@pytest.mark.parametrize(
    ("save_pretrained", "words"),
    [(refuse, "storage failed (not here)"), (find_no_space, "it could not be prepared (Exception: No space left on")],
)
def test_upload_that_cannot_be_prepared_is_skipped(hub, tmp_path, caplog, save_pretrained, words):
    """Training continues, also if a checkpoint has been deleted."""
    trainer, deleted = make_uploading(tmp_path / "run"), str(tmp_path / "run" / "checkpoint-2")
    uploads = trainer._hftrainer.upload_queue
    uploads._snapshots.processing_class = SimpleNamespace(save_pretrained=save_pretrained)
    trainer.add_callback(AtStep(3, lambda: shutil.rmtree(deleted)))
    trainer.train()
    assert trainer.state.global_step == STEPS
    assert f"the model, 'Training in progress, step 6': {words}" in caplog.text
    assert f"To upload it: hf upload me/run {tmp_path}/run/checkpoint-6" in caplog.text
    assert not messages(hub)
    assert not list((tmp_path / "run").glob("_tmp_*"))
    assert uploads.make_commits(deleted, "every_save", names_step=True) == []


TRAINS = """
import os, signal
from hftrainer.hub import upload_queue
from tests.support.hub_runs import make_uploading
{}
make_uploading("run", max_steps=100000).train()
"""
GIVES_UP = TRAINS.format("upload_queue._GRACE = 0.5")
#: Sends itself Ctrl-C again when it logs that it waits for the uploads.
AGAIN = TRAINS.format(
    "from hftrainer.training import stopping\n"
    "stopping._DUPLICATE_WINDOW[False] = 0.0\n"
    "upload_queue._GRACE, upload_queue.logger.info = 1e9, lambda *_: os.kill(os.getpid(), signal.SIGINT)"
)
PUSHES = """
from tests.support.hub_runs import make_uploading
trainer = make_uploading("run", max_steps=1, hub_strategy="end")
trainer.train()
trainer.push_to_hub()
"""


def interrupt_upload(hub, processes, script, cwd):
    """Run a script whose upload hangs, and send SIGINT when its request arrives; the ended process."""
    started = futures.Future()

    def hold(request):
        started.result().send_signal(signal.SIGINT)
        hub.hold(request)

    hub.disturb(hold, "/preupload/")
    process = processes.start("-c", script, cwd=cwd, env=environment(hub, cwd / "home"), fresh=True)
    started.set_result(process)
    process.communicate()
    assert process.returncode == -signal.SIGINT, process.stderr
    return process


@pytest.mark.parametrize("script", [AGAIN, PUSHES], ids=["second Ctrl-C", "push_to_hub"])
def test_ctrl_c_ends_the_process_though_an_upload_hangs(hub, tmp_path, processes, script):
    """A second Ctrl-C, or one inside `push_to_hub`, ends the process even if an upload hangs."""
    interrupt_upload(hub, processes, script, tmp_path)


def test_interrupted_run_saves_and_reports_the_hanging_upload(hub, tmp_path, processes):
    process = interrupt_upload(hub, processes, GIVES_UP, tmp_path)
    assert "Not uploaded to me/run" in process.stderr
    assert "hf upload me/run" in process.stderr
    print(process.stderr)
    assert make_uploading(tmp_path / "run", push_to_hub=False, max_steps=1).train(resume_from_checkpoint=True)
    assert not messages(hub)
    assert not list((tmp_path / "run").glob("_tmp_*"))  # the next run has removed it
