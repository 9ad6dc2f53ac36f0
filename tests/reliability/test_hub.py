"""Uploads to a Hub that fails: training goes on, uploads are retried, results are logged, and no token is shown."""

import errno
import io
import logging
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hftrainer import Trainer, TrainerCallback, TrainingArguments
from hftrainer.checkpointing.writer import is_storage_error
from hftrainer.errors import CheckpointNotFound, HubError, InvalidArgument
from hftrainer.hub import background, failures, repository, snapshots, uploads
from hftrainer.hub.pending import PendingCommit
from hftrainer.search.packing import pack
from tests.support import warm
from tests.support.hub_runs import READS, STEPS, At, make_uploading
from tests.support.hub_server import Commit, HubServer, Repo
from tests.support.jobs import read_until
from tests.support.tiny import make_plain

TOKEN = "hf_aVeryPrivateTokenIndeed"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A server. After the test, everything that was uploaded to it is searched for the token."""
    monkeypatch.setattr(uploads, "_WAITS", (0.01, 0.02))
    monkeypatch.setattr(repository, "_WAITS", (0.01,))
    with HubServer({TOKEN: ("me", "write"), READS: ("me", "read")}).running() as server:
        server.serve(monkeypatch, tmp_path / "home")
        yield server
    commits = [commit for repo in server.repos.values() for branch in repo.branches.values() for commit in branch]
    assert not [name for commit in commits for name, data in commit.files.items() if TOKEN.encode() in data]


@pytest.fixture(autouse=True)
def no_token(tmp_path, caplog, capfd):
    """After the test, search every file, log line and printed line for the token."""
    root = logging.getLogger()
    everything = io.StringIO()
    handler = logging.StreamHandler(everything)
    root.addHandler(handler)
    with caplog.at_level(logging.DEBUG):
        yield
    root.removeHandler(handler)
    printed = capfd.readouterr()
    shown = {"the logs": everything.getvalue(), "what was printed": printed.out + printed.err}
    shown |= {str(path): path.read_bytes().decode("latin-1") for path in tmp_path.rglob("*") if path.is_file()}
    assert not [where for where, text in shown.items() if TOKEN in text or READS in text]


class Saved(TrainerCallback):
    """Keeps the weights of each checkpoint as they were written."""

    def __init__(self):
        self.weights = {}

    def on_save(self, args, state, control, **kwargs):
        path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / "model.safetensors"
        self.weights[state.global_step] = path.read_bytes()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights of the same run without uploads."""
    torch.set_num_threads(1)
    trainer = make_uploading(tmp_path_factory.mktemp("undisturbed"), push_to_hub=False)
    trainer.train()
    return trainer.model.state_dict()


def assert_unharmed(trainer, undisturbed):
    assert trainer.state.global_step == STEPS
    weights = trainer.model.state_dict()
    assert not [name for name, value in undisturbed.items() if not torch.equal(value, weights[name])]
    folder = Path(trainer.args.output_dir)
    assert sorted(path.name for path in folder.glob("[!_]*")) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


def last(hub, name="me/run"):
    return hub.repos[name].at("main")


def messages(hub, name="me/run"):
    return [commit.message for commit in hub.repos[name].branches["main"][1:]]


class Hangs(TrainerCallback):
    """Lets uploads hang from the first step to the end of training."""

    def __init__(self, hub):
        self.hub = hub

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.hub.delay = 60.0

    def on_train_end(self, args, state, control, **kwargs):
        self.hub.delay = 0.0


# ---- While it runs -------------------------------------------------------------------------------------------------


def fail(hub, **how):
    def act():
        for name, value in how.items():
            setattr(hub, name, value)

    return act


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"refusing": True}, id="refuses"),
        pytest.param({"failures": 3}, id="fails"),
        pytest.param({"cuts": 3}, id="cuts"),
        pytest.param({"failing": "/commit/"}, id="fails-to-commit"),
        pytest.param({"delay": 0.3}, id="slow"),
    ],
)
def test_a_hub_that_fails_for_a_while(hub, tmp_path, undisturbed, how, caplog):
    """Training yields the same weights, and at its end the repository has the last checkpoint."""
    saved, well = Saved(), {"refusing": False, "failures": 0, "cuts": 0, "failing": None, "delay": 0.0}
    trainer = make_uploading(tmp_path / "run", [saved, At(1, fail(hub, **how))], hub_strategy="checkpoint")
    finish = trainer._finish_current_push

    def repaired():
        trainer.push_in_progress.wait_until_done()
        fail(hub, **well)()
        finish()

    trainer._finish_current_push = repaired
    trainer.train()
    assert_unharmed(trainer, undisturbed)
    assert last(hub).files["model.safetensors"] == saved.weights[6]
    assert last(hub).files["last-checkpoint/model.safetensors"] == saved.weights[6]
    assert messages(hub)[-2:] == [f"Training in progress, step 6{which}" for which in ("", ", checkpoint")]
    assert "Not uploaded" not in caplog.text
    assert not list(tmp_path.rglob("_hub_uploads"))


def test_an_upload_is_tried_again_at_once(hub, tmp_path, monkeypatch, caplog):
    """The second attempt succeeds, and no warning is logged."""
    real, left = repository.HfApi.upload_folder, [1]

    def once_away(*args, **kwargs):
        if left:
            left.pop()
            raise ConnectionResetError("cut")
        return real(*args, **kwargs)

    monkeypatch.setattr(repository.HfApi, "upload_folder", once_away)
    make_uploading(tmp_path / "run").train()
    assert messages(hub)[-1] == "Training in progress, step 6"
    assert not left
    assert "is retried at the end" not in caplog.text


def test_a_commit_that_the_client_does_not_retry(hub, tmp_path, caplog):
    """The client retries the requests before the commit. Without Xet, it does not retry the commit itself."""
    trainer = make_uploading(tmp_path / "run", max_steps=2)
    hub.fails_once = "/commit/"
    trainer.train()
    assert hub.fails_once is None
    assert messages(hub) == ["Training in progress, step 2"]
    assert "is retried at the end" not in caplog.text


def test_a_hub_that_is_away_is_asked_once(hub, tmp_path, monkeypatch, caplog):
    """The first upload makes all its attempts. Every other upload and the end of the run make one."""
    attempts = []

    def away(self, *, commit_message, **kwargs):
        attempts.append(commit_message)
        time.sleep(0.05)
        raise ConnectionError("no route")

    monkeypatch.setattr(repository.HfApi, "upload_folder", away)
    trainer = make_uploading(tmp_path / "run", hub_strategy="all_checkpoints", hub_always_push=True)
    trainer.train()
    assert attempts.count("Training in progress, step 2") == 3
    assert len(attempts) <= 3 + 5 + 1
    attempts.clear()
    with pytest.raises(HubError, match="the Hub cannot be reached"):
        trainer.push_to_hub()
    assert attempts == ["End of training"]


def test_a_hub_that_stays_away(hub, tmp_path, undisturbed, caplog):
    """The log names what is uploaded and what is not, with the command; `push_to_hub` uploads the rest."""
    trainer = make_uploading(tmp_path / "run", hub_strategy="all_checkpoints")
    trainer.add_callback(
        At(3, lambda: (trainer.push_in_progress.wait_until_done(), fail(hub, failing="/preupload/")()))
    )
    trainer.train()
    assert_unharmed(trainer, undisturbed)
    report = caplog.text[caplog.text.index("Not uploaded to me/run:") :]
    folder = tmp_path / "run"
    assert f"hf upload me/run {folder}/checkpoint-6 . --include model.safetensors --include training_args.bin" in report
    assert f"hf upload me/run {folder}/checkpoint-6 checkpoint-6" in report
    assert "the Hub failed: try again later" in report
    assert "checkpoint-2: 'Training in progress, step 2, checkpoint'" in report.split("Uploaded:")[1]
    with pytest.raises(HubError, match=r"To upload it: hf upload me/run .* --exclude") as caught:
        trainer.push_to_hub()
    assert TOKEN not in "".join(traceback.format_exception(caught.value))
    trainer.save_model()  # logs the failure, and does not raise
    assert caplog.records[-1].levelname == "ERROR"
    assert isinstance(trainer.push_to_hub(blocking=False).exception(), HubError)
    assert "push_to_hub to 'me/run': the Hub failed" in caplog.records[-1].getMessage()
    hub.failing = None
    trainer.push_to_hub()
    trainer._finish_current_push()
    assert messages(hub)[2:] == [  # the current model, then the pending checkpoints, oldest first
        "End of training",
        "Training in progress, step 4, checkpoint",
        "Training in progress, step 6, checkpoint",
    ]
    assert not list(tmp_path.rglob("_hub_uploads"))
    expected = (folder / "checkpoint-6" / "model.safetensors").read_bytes()
    assert last(hub).files["model.safetensors"] == last(hub).files["checkpoint-6/model.safetensors"] == expected
    assert "checkpoint-4/model.safetensors" in last(hub).files


def test_saves_that_wait_for_their_turn(hub, tmp_path, undisturbed):
    """`hub_always_push` uploads all saves in order, even if the checkpoints have been deleted."""
    saved = Saved()
    trainer = make_uploading(
        tmp_path / "run",
        [saved, At(1, fail(hub, delay=0.1))],
        **{"hub_strategy": "all_checkpoints", "hub_always_push": True, "save_total_limit": 1, "save_steps": 1},
        lightning_config={"async_checkpoint": True},
    )
    trainer.train()
    assert [path.name for path in (tmp_path / "run").glob("*")] == ["checkpoint-6"]
    assert trainer.state.global_step == STEPS
    expected = [f"Training in progress, step {step}{part}" for step in range(1, 7) for part in ("", ", checkpoint")]
    assert messages(hub) == expected
    requests = [path.split("/")[-2] for _, path in hub.requests if "/preupload/" in path or "/commit/" in path]
    assert requests == ["preupload", "commit"] * 12  # never in parallel
    for commit in hub.repos["me/run"].branches["main"][1:]:
        step = int(commit.message.split("step ")[1].split(",")[0])
        assert commit.files["model.safetensors"] == saved.weights[step]
        assert f"checkpoint-{step}/optimizer.pt" in commit.files or not commit.message.endswith("checkpoint")


def test_skipped_saves(hub, tmp_path):
    """Without `hub_always_push`, saves during an upload are skipped, and the last one is uploaded at the end."""
    trainer = make_uploading(tmp_path / "run", [Hangs(hub)], save_steps=1)
    trainer.train()
    assert messages(hub) == ["Training in progress, step 1", "Training in progress, step 6"]


def test_the_last_save_is_made_up_for_though_it_is_deleted(hub, tmp_path):
    """`save_total_limit=1` keeps only the best checkpoint."""
    saved, begun = Saved(), []
    args = {"save_total_limit": 1, "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    trainer = make_uploading(tmp_path / "run", [saved, Hangs(hub)], metric_for_best_model="eval_x", **args)

    def evaluate(*_, **__):
        begun.append(None)
        return {"eval_x": -float(len(begun))}

    trainer.evaluate = evaluate
    trainer.train()
    assert not (tmp_path / "run" / "checkpoint-6").exists()
    assert messages(hub) == ["Training in progress, step 2", "Training in progress, step 6"]
    assert last(hub).files["model.safetensors"] == saved.weights[6]


def test_another_trainer_in_the_same_folder(hub, tmp_path):
    """It does not delete the snapshots of queued uploads."""
    another = At(5, lambda: make_uploading(tmp_path / "run", hub_model_id="me/second", hub_strategy="end"))
    trainer = make_uploading(tmp_path / "run", [Hangs(hub)], hub_always_push=True)
    trainer.callback_handler.callbacks.append(another)
    trainer.train()
    assert messages(hub) == [f"Training in progress, step {step}" for step in (2, 4, 6)]


def test_patterns_of_sagemaker_are_uploaded(hub, tmp_path):
    """The Hub's client reads `.gitignore` in a repository, and leaves out what it names."""
    trainer = make_uploading(tmp_path / "run", max_steps=2)
    trainer._add_sm_patterns_to_gitignore()
    trainer.train()
    assert b"*.sagemaker-uploading" in last(hub).files[".gitignore"]


def test_another_branch(hub, tmp_path, caplog):
    """An upload to another branch does not replace a pending upload to this one."""
    trainer = make_uploading(tmp_path / "run", max_steps=2)
    hub.repos["me/run"].branches["dev"] = list(hub.repos["me/run"].branches["main"])
    hub.failing = "/commit/main"
    trainer.train()
    trainer.push_to_hub(revision="dev")
    assert [message for message, _ in hub.repos["me/run"].commits("dev")] == ["End of training"]
    hub.failing = None
    trainer._finish_current_push()
    assert messages(hub) == ["Training in progress, step 2"]


def test_uploads_called_off(hub, tmp_path):
    """Cancelled uploads are not retried, and leave no files."""
    trainer = make_uploading(tmp_path / "run", [Hangs(hub)], hub_strategy="checkpoint", max_steps=4)

    def call_off():
        while not any(method == "PUT" for method, _ in hub.requests):  # the first of the two is running
            time.sleep(0.01)
        trainer.push_in_progress.cancel()

    trainer.add_callback(At(3, call_off))
    trainer.train()
    assert "Training in progress, step 2, checkpoint" not in messages(hub)
    assert messages(hub)[-2:] == ["Training in progress, step 4", "Training in progress, step 4, checkpoint"]
    assert not list(tmp_path.rglob("_hub_uploads"))


def test_a_search(hub, tmp_path, monkeypatch):
    """A pruned trial does not wait, uploads never run in parallel, and checkpoints of trials are not uploaded."""
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    monkeypatch.setattr(background, "_GRACE", 0.1)
    trainer = make_uploading(tmp_path / "run", [At(1, fail(hub, delay=1.0))], eval_strategy="steps", eval_steps=2)
    trainer.model_init = make_plain

    class Prunes(optuna.pruners.BasePruner):
        def prune(self, study, trial):
            return trial.number == 0 and trial.last_step >= 4

    trainer.hyperparameter_search(
        n_trials=2, hp_space=lambda trial: {"learning_rate": 1e-3 * (1 + trial.number)}, pruner=Prunes()
    )
    assert messages(hub)[0] == "Training in progress, step 2"
    assert messages(hub)[-1] == "Training in progress, step 6"
    requests = [path.split("/")[-2] for _, path in hub.requests if "/preupload/" in path or "/commit/" in path]
    assert requests == ["preupload", "commit"] * (len(requests) // 2)
    assert not [name for name in last(hub).files if "checkpoint-" in name]


class Pickler(pickle.Pickler):
    """Stands in for Ray's pickler."""

    def reducer_override(self, obj):
        return NotImplemented


def test_a_trainer_on_its_way_to_another_process(hub, tmp_path, monkeypatch):
    """The copy has no uploads of the original, and opens the repository itself."""
    cloudpickle = SimpleNamespace(CloudPickler=Pickler, loads=pickle.loads)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(cloudpickle=cloudpickle))
    trainer = make_uploading(tmp_path / "run", max_steps=2)
    packed = pack(trainer._hftrainer)
    assert trainer._hftrainer.uploads is not None
    unpacked = packed.unpack().trainer
    assert unpacked._hftrainer.uploads is not trainer._hftrainer.uploads
    unpacked.train()
    assert messages(hub) == ["Training in progress, step 2"]


def test_a_timeout_of_the_work_itself():
    """A TimeoutError of the work that others wait for is an error, and does not mean "not finished yet"."""
    from hftrainer.parallel import process_group, processes

    def times_out():
        raise TimeoutError("of the work")

    with pytest.raises(TimeoutError, match="of the work"):
        processes._has_ended(process_group.begun(times_out))
    assert processes._has_ended(process_group.begun(lambda: None))


def test_progress_bars_stay_off_until_the_last_upload_has_ended():
    quiet, hidden = repository._without_progress_bars, repository.are_progress_bars_disabled
    before = hidden()
    with quiet():
        with quiet():
            pass
        assert hidden()
    assert hidden() == before


def test_shards_and_adapters(tmp_path):
    """Only the files of the model are listed."""
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    for name in ("model-1.safetensors", "optimizer.pt", "training_args.bin", "adapter_config.json", "own.txt"):
        (tmp_path / name).touch()
    expected = ["adapter_config.json", "model.safetensors.index.json", "model-1.safetensors", "training_args.bin"]
    assert snapshots.model_files(str(tmp_path)) == expected


def refuse(*_):
    raise OSError(errno.EPERM, "not here")


def test_a_storage_that_fails(hub, tmp_path, caplog, monkeypatch):
    """If storage fails, the upload is skipped and training goes on."""
    trainer = make_uploading(tmp_path / "run", save_steps=4)
    monkeypatch.setattr(snapshots.shutil, "copyfile", refuse)
    monkeypatch.setattr(snapshots.os, "link", refuse)
    trainer.train()
    assert trainer.state.global_step == STEPS
    assert "the model, 'Training in progress, step 6': storage failed (not here). To upload it: hf" in caplog.text
    assert not messages(hub)
    assert not (tmp_path / "run" / "_hub_uploads").exists()


class Tokens:
    """A processing class that raises a plain Exception if storage fails, as the library tokenizers does."""

    def save_pretrained(self, folder, **_):
        if "_hub_uploads" in str(folder):
            raise Exception("No space left on device (os error 28)")


def test_a_processing_class_that_fails(hub, tmp_path, caplog):
    trainer = make_uploading(tmp_path / "run")
    trainer._hftrainer.uploads._snapshots.processing_class = Tokens()
    trainer.add_callback(At(3, lambda: shutil.rmtree(tmp_path / "run" / "checkpoint-2")))
    trainer.train()
    assert trainer.state.global_step == STEPS
    assert "it could not be prepared (Exception: No space left on device (os error 28))" in caplog.text
    deleted = str(tmp_path / "run" / "checkpoint-2")
    assert trainer._hftrainer.uploads.commits_for(deleted, "every_save", by_steps=True) == []
    assert is_storage_error(Exception("No space left on device (os error 28)"), str(tmp_path))
    assert not is_storage_error(Exception("something else"), str(tmp_path))


class Config:
    """A processing class that also writes a file of the model."""

    def save_pretrained(self, folder, **_):
        (Path(folder) / "config.json").write_text("of the processing class")


def test_files_of_many_kinds(tmp_path):
    """Symbolic links are followed, pipes left out, weights hard-linked, and files of the checkpoint not overwritten."""
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "run-0" / "checkpoint-2").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    for name in ("checkpoint-1/config.json", "run-0/checkpoint-2/x", "_elsewhere", "best.pt", "log.txt", ".git/HEAD"):
        (tmp_path / name).write_text("before")
    os.utime(tmp_path / "_elsewhere", (0, 0))
    (tmp_path / "link.txt").symlink_to("_elsewhere")
    (tmp_path / "to-nothing").symlink_to("nothing")
    os.mkfifo(tmp_path / "pipe")
    made = snapshots.UploadSnapshots(str(tmp_path), Config())
    snapshot = Path(made.create(PendingCommit(0, str(tmp_path / "checkpoint-1"), "", "message")))
    found = {path.relative_to(snapshot).as_posix(): path for path in snapshot.rglob("*") if path.is_file()}
    assert {name: path.read_text() for name, path in found.items()} == dict.fromkeys(
        ("config.json", "best.pt", "link.txt", "log.txt"), "before"
    )
    assert not found["link.txt"].is_symlink()
    assert found["best.pt"].samefile(tmp_path / "best.pt")
    assert not found["log.txt"].samefile(tmp_path / "log.txt")
    assert (tmp_path / "checkpoint-1" / "config.json").read_text() == "before"


@pytest.mark.parametrize("links", [True, False])
def test_snapshots(tmp_path, links, monkeypatch):
    """A snapshot does not change with the files, and takes no disk space for files that are written once."""
    if not links:
        monkeypatch.setattr(snapshots.os, "link", refuse)
    (tmp_path / "checkpoint-1").mkdir()
    for name in ("checkpoint-1/model.safetensors", "config.json", "log.txt", "old.txt", "_private"):
        (tmp_path / name).write_text("before")
    os.utime(tmp_path / "old.txt", (0, 0))
    gone = "-".join([socket.gethostname(), "999999999", "1", "0"])
    (tmp_path / "_hub_uploads" / gone / "0").mkdir(parents=True)  # of a process that was killed
    made = snapshots.UploadSnapshots(str(tmp_path))
    with open(tmp_path / "log.txt", "a") as log:
        snapshot = Path(made.create(PendingCommit(0, str(tmp_path / "checkpoint-1"), "", "message")))
        log.write("after")
    shutil.rmtree(tmp_path / "checkpoint-1")
    assert {path.name: path.read_text() for path in snapshot.iterdir()} == dict.fromkeys(
        ("config.json", "log.txt", "model.safetensors", "old.txt"), "before"
    )
    assert (snapshot / "old.txt").samefile(tmp_path / "old.txt") is links
    made.delete(str(snapshot))
    assert not (tmp_path / "_hub_uploads").exists()


HANGS = """
import sys
from hftrainer.hub import background
background._GRACE = 0.5
from tests.support.hub_runs import At, make_uploading
trainer = make_uploading(sys.argv[1], [At(3, lambda: print("third step", flush=True))], max_steps=100000, save_steps=2)
trainer.train()
"""


STOPPED_AGAIN = """
import sys
from tests.support.hub_runs import make_uploading
trainer = make_uploading(sys.argv[1], max_steps=1, hub_strategy="end")
trainer.train()
trainer.push_to_hub(blocking=False)
print("waiting", flush=True)
trainer.push_to_hub()
"""


@pytest.mark.parametrize(
    ("script", "line", "pauses"),
    [
        (HANGS.replace("_GRACE = 0.5", "_GRACE = 600"), "third step", (0.5, 1.5)),
        (STOPPED_AGAIN, "waiting", (2.0,)),  # on a busy machine, too, it is inside `push_to_hub` then
    ],
    ids=["second Ctrl-C", "inside push_to_hub"],
)
def test_stopped_at_once(hub, tmp_path, script, line, pauses):
    """A second Ctrl-C, or one inside `push_to_hub`, ends the process even if an upload hangs."""
    hub.delay = 600
    process = begin(hub, tmp_path, script)
    read_until(process, line)
    for pause in pauses:
        time.sleep(pause)
        process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode, err


def begin(hub, tmp_path, script):
    """A process that handles SIGINT as in a terminal."""
    return subprocess.Popen(
        [warm.PYTHON, "-c", script, str(tmp_path / "run")],
        env={**hub.environment(tmp_path / "home"), **warm.LIBRARIES},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_stopped_while_an_upload_hangs(hub, tmp_path):
    """The process ends, and its last checkpoint is whole."""
    hub.delay = 600
    process = begin(hub, tmp_path, HANGS)
    read_until(process, "third step")
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 20
    assert process.returncode == -signal.SIGINT, err
    assert "Not uploaded to me/run" in err
    assert "hf upload me/run" in err
    assert TOKEN not in err
    assert make_uploading(tmp_path / "run", push_to_hub=False, max_steps=1).train(resume_from_checkpoint=True)
    assert not messages(hub)
    assert not (tmp_path / "run" / "_hub_uploads").exists()  # the next run has removed it


# ---- At the start --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        pytest.param({"hub_token": "hf_wrong"}, "does not accept the token: run `hf auth login`", id="wrong token"),
        pytest.param({"hub_token": None}, "needs a token: run `hf auth login`, or give hub_token", id="no token"),
        pytest.param({"hub_token": f"{TOKEN}\n"}, "contains a space or a line break", id="token with a line break"),
        pytest.param({"hub_token": ""}, "hub_token is empty: give a token", id="empty token"),
        pytest.param({"hub_model_id": "a/b/c"}, "hub_model_id='a/b/c' is not a valid repository name", id="malformed"),
        pytest.param({"hub_model_id": "other/run"}, "the token has no write access", id="of another"),
        pytest.param({"hub_token": READS, "hub_model_id": "me/there"}, "the token has no write access", id="reads"),
        pytest.param(
            {"hub_revision": "dev", "hub_model_id": "me/there"},
            "the revision does not exist: create the branch",
            id="branch",
        ),
    ],
)
def test_refused_at_the_start(hub, tmp_path, settings, words):
    hub.repos["me/there"] = Repo()
    with pytest.raises((HubError, InvalidArgument)) as caught:
        make_uploading(tmp_path / "run", **settings)
    assert words in str(caught.value)
    shown = "".join(traceback.format_exception(caught.value))
    assert TOKEN not in shown
    assert READS not in shown


def test_no_network_at_the_start(hub, tmp_path, monkeypatch):
    hub.refusing = True
    with pytest.raises(
        HubError, match=r"push_to_hub to 'run': the Hub cannot be reached: .* You can train without push_to_hub"
    ):
        make_uploading(tmp_path / "run")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE=1 is set: unset it, or train without push_to_hub"):
        make_uploading(tmp_path / "run")


def test_a_hub_that_wakes_up(hub, tmp_path):
    hub.failures = 1
    assert make_uploading(tmp_path / "run").hub_model_id == "me/run"


def test_errors_in_words(hub, tmp_path, monkeypatch):
    """They contain the Hub's message and no token, and do not take a local failure for one of the network."""
    monkeypatch.setenv("HF_TOKEN", READS)
    shown = failures.without_tokens(f"a {TOKEN}, b {READS}, https://x.co/y?X-Sig=abc", TOKEN)
    assert shown == "a <HUB_TOKEN>, b <HUB_TOKEN>, https://x.co/y"
    trainer = make_uploading(tmp_path / "run", hub_strategy="end", max_steps=1)
    with pytest.raises(InvalidArgument, match="contains a space or a line break") as caught:
        trainer.push_to_hub(token=TOKEN + "\n")
    assert TOKEN not in "".join(traceback.format_exception(caught.value))
    local = PermissionError(errno.EACCES, "Permission denied", "secret.log")
    assert not failures.is_transient(local)
    assert "Permission denied" in failures.reason(local)
    assert "cannot be reached" not in failures.reason(local)
    wrapped = RuntimeError("Error while uploading")
    wrapped.__cause__ = TimeoutError("slow")
    assert failures.is_transient(wrapped)
    assert failures.is_transient(RuntimeError("of the client's transfers"))
    hub.tokens[TOKEN] = ("me", "read")
    with pytest.raises(HubError, match=r"has no write access.*Forbidden: you don't have the required permissions"):
        trainer.push_to_hub()


def test_tokens_are_not_saved(tmp_path, no_token):
    args = TrainingArguments(str(tmp_path / "run"), hub_token=TOKEN, use_cpu=True)
    trainer = Trainer(make_plain(), args)
    trainer.save_model()
    saved = torch.load(tmp_path / "run" / "training_args.bin", weights_only=False)
    assert saved.hub_token is None
    assert args.hub_token == TOKEN
    assert TOKEN not in repr(args) + str(args.to_dict()) + args.to_json_string() + str(args.to_sanitized_dict())
    with pytest.raises(InvalidArgument) as caught:
        TrainingArguments(hub_token=TOKEN, push_to_hub_token=READS)
    assert TOKEN not in str(caught.value)
    assert READS not in str(caught.value)


# ---- Resuming from the Hub -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["checkpoint", "all_checkpoints"])
def test_resume(hub, tmp_path, undisturbed, strategy):
    """A reference names the newest checkpoint, that of a revision, or a folder; it is downloaded once."""
    trainer = make_uploading(tmp_path / "run", hub_strategy=strategy, hub_always_push=True)
    trainer.add_callback(At(4, lambda: setattr(trainer.control, "should_training_stop", True)))
    trainer.train()
    commit = last(hub).oid
    for reference in ("hub:me/run", f"hub:me/run@{commit}", *(["hub:me/run/checkpoint-2"] * ("all" in strategy))):
        hub.requests.clear()
        resumed = make_uploading(tmp_path / "resumed", push_to_hub=False)
        resumed.train(resume_from_checkpoint=reference)
        weights = resumed.model.state_dict()
        assert not [name for name, value in undisturbed.items() if not torch.equal(value, weights[name])]
        downloaded = [path for method, path in hub.requests if method == "GET" and "/resolve/" in path]
        first = reference == "hub:me/run" or "checkpoint-2" in reference
        assert len([path for path in downloaded if path.endswith("optimizer.pt")]) == first
    hub.refusing = True
    resumed.train(resume_from_checkpoint="hub:me/run")  # from the cache
    assert resumed.state.global_step == STEPS


@pytest.mark.parametrize("strategy", ["every_save", "checkpoint", "all_checkpoints"])
def test_a_run_that_ended_before_its_last_upload(hub, tmp_path, strategy):
    """Started again it has nothing to train, and uploads what is missing, but not twice."""
    make_uploading(tmp_path / "run", push_to_hub=False).train()  # as one that was killed with its uploads still to come
    for _ in range(2):
        again = make_uploading(tmp_path / "run", hub_strategy=strategy)
        again.train(resume_from_checkpoint="auto")
        assert again._initial_global_step == STEPS
        files = last(hub).files
        prefix = {"checkpoint": "last-checkpoint/", "all_checkpoints": "checkpoint-6/"}.get(strategy)
        for path in ("model.safetensors", *([f"{prefix}optimizer.pt"] if prefix else [])):
            assert files[path] == (tmp_path / "run" / "checkpoint-6" / path.rpartition("/")[2]).read_bytes()
    assert len(messages(hub)) == (2 if prefix else 1)


def test_resume_from_the_branch_of_the_run(hub, tmp_path):
    hub.repos["me/run"] = Repo()
    hub.repos["me/run"].branches["dev"] = list(hub.repos["me/run"].branches["main"])
    there = {"hub_model_id": "me/run", "hub_revision": "dev", "hub_strategy": "checkpoint"}
    make_uploading(tmp_path / "run", **there, max_steps=2).train()
    resumed = make_uploading(tmp_path / "resumed", **there, max_steps=3, push_to_hub=False)
    resumed.train(resume_from_checkpoint="hub:me/run")
    assert resumed._initial_global_step == 2
    with pytest.raises(CheckpointNotFound, match="has no checkpoint"):
        resumed.train(resume_from_checkpoint="hub:me/run@main")


def test_nothing_to_resume_from(hub, tmp_path):
    hub.repos["me/weights"] = Repo(branches={"main": [Commit("m", {"model.safetensors": b"x"}, ())]})
    hub.repos["me/private"] = Repo(private=True)
    trainer = make_uploading(tmp_path / "run", push_to_hub=False, hub_token=None)
    for reference, words in {
        "hub:me/none": "the repository does not exist, or the token has no read access",
        "hub:me/private": "the repository does not exist, or the token has no read access",
        "hub:me/weights": "has no checkpoint, neither last-checkpoint nor checkpoint-xxx",
        "hub:me/weights@dev": "the revision does not exist",
        "hub:me/weights/checkpoint-2": "the repository has no folder 'checkpoint-2'",
        "hub:": "give 'hub:owner/name'",
    }.items():
        with pytest.raises(CheckpointNotFound, match=words):
            trainer.train(resume_from_checkpoint=reference)
    hub.refusing = True
    with pytest.raises(CheckpointNotFound, match="the Hub cannot be reached: check the network"):
        trainer.train(resume_from_checkpoint="hub:me/weights")
