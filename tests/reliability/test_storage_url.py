"""An output folder at a URL: what is there after faults, and what another machine resumes from."""

import errno
import logging
import os
import shutil
import threading

import boto3
import fsspec
import pytest
import torch
from moto.server import ThreadedMotoServer

from hftrainer import TrainingArguments
from hftrainer.errors import CheckpointNotFound, CheckpointNotWritten, StorageError
from hftrainer.storage import remote
from hftrainer.storage.mirror import Mirror
from tests.support.checkpoints import BACKGROUND, BEST, AtStep, OnSave, assert_same_end, make_trainer, train_to_end
from tests.support.jobs import Job, assert_same, final_weights, names_in
from tests.support.storages import FaultyStorage, complete_checkpoints, files_at
from tests.support.tracking import scalars

KINDS = ("memory", "file", "s3")
FAULTY = "faulty://bucket/run"
#: The rates do not depend on the number of steps.
CONSTANT = {"lr_scheduler_type": "constant"}


@pytest.fixture(scope="module")
def s3():
    """A server of S3, whose address and keys are in the environment; botocore reads them."""
    server = ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    variables = {"AWS_ACCESS_KEY_ID": "an-access-key", "AWS_SECRET_ACCESS_KEY": "a-secret-key"}
    variables |= {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    with pytest.MonkeyPatch.context() as environment:
        for name, value in variables.items():
            environment.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="bucket")
        yield variables
    server.stop()


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch):
    monkeypatch.setattr(remote, "WAITS", (0.0, 0.0))
    FaultyStorage.reset()


@pytest.fixture(params=KINDS)
def url(request, tmp_path):
    if request.param == "s3":
        request.getfixturevalue("s3")
    return {"memory": f"memory://{tmp_path.name}", "file": f"file://{tmp_path}/bucket/run"}.get(
        request.param, f"s3://bucket/{tmp_path.name}"
    )


@pytest.fixture
def undisturbed(tmp_path):
    return train_to_end(make_trainer(tmp_path / "undisturbed", **CONSTANT))


def trainer_at(folder, url=FAULTY, **settings):
    return make_trainer(folder, storage_url=url, **{**CONSTANT, **settings})


@pytest.mark.parametrize("settings", [{}, BACKGROUND], ids=["at once", "in the background"])
def test_another_machine_resumes_a_run(url, tmp_path, undisturbed, settings):
    first = trainer_at(tmp_path / "a", url, max_steps=6, save_total_limit=2, **settings)
    first.train(resume_from_checkpoint="auto")
    assert complete_checkpoints(url) == ["checkpoint-3", "checkpoint-6"]
    second = trainer_at(tmp_path / "b", url, save_total_limit=2, **settings)
    second.train(resume_from_checkpoint="auto")
    assert_same_end(second, undisturbed)
    assert complete_checkpoints(url) == ["checkpoint-6", "checkpoint-9"]
    assert not any(
        "checkpoint-3" in name for name in fsspec.url_to_fs(url)[0].ls(fsspec.url_to_fs(url)[1], detail=False)
    )
    assert [name for name in names_in(tmp_path / "b") if name.startswith("checkpoint")] == ["checkpoint-9"]
    second.save_model()
    second.save_state()
    second.save_metrics("train", {"train_loss": 1.0})
    second.create_model_card()
    assert {"model.safetensors", "trainer_state.json", "train_results.json", "README.md"} <= {*files_at(url)}


def test_output_dir_may_be_a_url(tmp_path, monkeypatch, undisturbed):
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    args = TrainingArguments("s3://bucket/run/", report_to="none")
    assert (args.storage_url, args.output_dir) == ("s3://bucket/run", str(tmp_path / "home/hftrainer/s3/bucket/run"))
    trainer = train_to_end(make_trainer(FAULTY, max_steps=6, **CONSTANT))
    assert complete_checkpoints(FAULTY) == ["checkpoint-3", "checkpoint-6"]
    assert trainer.args.output_dir == str(tmp_path / "home/hftrainer/faulty/bucket/run")
    elsewhere = train_to_end(make_trainer(tmp_path / "b", **CONSTANT), f"{FAULTY}/checkpoint-6")
    assert_same_end(elsewhere, undisturbed)
    with pytest.raises(CheckpointNotFound, match="checkpoint-5: it has no hftrainer_manifest"):
        train_to_end(make_trainer(tmp_path / "b"), f"{FAULTY}/checkpoint-5")
    with pytest.raises(CheckpointNotFound, match="pass the URL of a checkpoint-xxx folder"):
        train_to_end(make_trainer(tmp_path / "b"), FAULTY)


@pytest.mark.parametrize("of_time", [1, 2, 5, 8, 9, 10, 14, 20, 26])
def test_each_request_is_repeated_when_it_fails_once(tmp_path, of_time, undisturbed):
    def fail(request, path):
        if len(FaultyStorage.requests) == of_time:
            raise ConnectionResetError("gone")

    FaultyStorage.fault = fail
    assert_same_end(train_to_end(trainer_at(tmp_path / "a")), undisturbed)
    assert complete_checkpoints(FAULTY) == ["checkpoint-3", "checkpoint-6", "checkpoint-9"]


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt", "hftrainer_manifest.json"])
def test_network_lost_during_an_upload_leaves_the_earlier_checkpoint(tmp_path, caplog, file, undisturbed):
    """Training continues, and this machine uploads the rest later."""

    def fail(request, path):
        if (request == "put" and path.endswith(f"checkpoint-6/{file}")) or "down" in state:
            state.add("down")
            raise TimeoutError("no answer")

    state = set()
    FaultyStorage.fault = fail
    assert_same_end(train_to_end(trainer_at(tmp_path / "a")), undisturbed)
    FaultyStorage.fault = None
    assert complete_checkpoints(FAULTY) == ["checkpoint-3"]
    assert "checkpoint-6 is deleted, though it was not uploaded: keep_local=1" in caplog.text
    assert "Not uploaded to faulty://bucket/run: checkpoint-9" in caplog.text
    assert [name for name in names_in(tmp_path / "a") if name.startswith("checkpoint")] == ["checkpoint-9"]
    train_to_end(trainer_at(tmp_path / "a"), resume=True)
    assert complete_checkpoints(FAULTY) == ["checkpoint-3", "checkpoint-9"]


def test_missed_uploads_are_made_with_the_next_checkpoint(tmp_path):
    def fail(request, path):
        if "checkpoint-3" in path and len(FaultyStorage.requests) < 12:
            raise TimeoutError("no answer")

    FaultyStorage.fault = fail
    train_to_end(trainer_at(tmp_path / "a", keep_local=3, save_total_limit=2))
    assert complete_checkpoints(FAULTY) == ["checkpoint-6", "checkpoint-9"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES], ids=os.strerror)
def test_refused_upload_is_reported_and_not_repeated(tmp_path, caplog, number):
    def refuse(request, path):
        if request == "put":
            raise OSError(number, os.strerror(number), path)

    FaultyStorage.fault = refuse
    assert train_to_end(trainer_at(tmp_path / "a")).state.global_step == 9
    assert "is written but not uploaded" in caplog.text and os.strerror(number) in caplog.text
    assert len(FaultyStorage.requests) < 30  # such errors are not repeated
    with pytest.raises(CheckpointNotWritten, match="checkpoint-3 is written but not uploaded"):
        train_to_end(trainer_at(tmp_path / "b", lightning_config={"on_save_error": "stop"}))


def test_storage_that_cannot_be_written_ends_the_run_at_once(tmp_path, monkeypatch, caplog):
    secret = "abcdefghijkl"
    monkeypatch.setenv("SOME_SECRET", secret)

    def refuse(self, path, *others, **keywords):
        raise PermissionError(f"not with {secret}, see https://host/key?X-Amz-Signature=0123")

    monkeypatch.setattr(FaultyStorage, "pipe_file", refuse)
    monkeypatch.setitem(remote._CREDENTIALS, "faulty", "A_VARIABLE")
    with pytest.raises(StorageError, match="faulty://bucket/run cannot be written: PermissionError") as raised:
        trainer_at(tmp_path / "a").train()
    assert str(raised.value).endswith(" The credentials are those of A_VARIABLE.")
    assert secret not in f"{raised.value}{caplog.text}" and "0123" not in f"{raised.value}{caplog.text}"
    assert raised.value.__suppress_context__


def test_incomplete_listing_hides_checkpoints_but_not_their_files(tmp_path, undisturbed):
    """The manifest names the files of a checkpoint."""
    train_to_end(trainer_at(tmp_path / "a"))
    FaultyStorage.hidden = ("checkpoint-9",)
    resumed = OnSave(lambda folder: None)
    trainer = train_to_end(trainer_at(tmp_path / "b", callbacks=[resumed]), "auto")
    assert_same_end(trainer, undisturbed)
    FaultyStorage.hidden = ("optimizer.pt", "hftrainer_manifest.json")
    assert_same_end(train_to_end(trainer_at(tmp_path / "c"), "auto"), undisturbed)
    assert ("get", "/bucket/run/checkpoint-9/optimizer.pt") in FaultyStorage.requests


@pytest.mark.parametrize("harm", ["gone", "other bytes", "half a manifest"])
def test_damaged_checkpoint_at_the_url_is_skipped(tmp_path, caplog, harm, undisturbed):
    train_to_end(trainer_at(tmp_path / "a"))
    system = fsspec.filesystem("faulty")
    file = "/bucket/run/checkpoint-9/" + ("hftrainer_manifest.json" if harm == "half a manifest" else "optimizer.pt")
    content = bytearray(system.cat_file(file))
    content[100] ^= 1
    system.rm_file(file)
    if harm != "gone":
        system.pipe_file(file, bytes(content if harm == "other bytes" else content[:100]))
    assert_same_end(train_to_end(trainer_at(tmp_path / "b"), "auto"), undisturbed)
    assert "Downloading faulty://bucket/run/checkpoint-6" in caplog.text or "checkpoint-9 is skipped" in caplog.text
    assert complete_checkpoints(FAULTY)[-1] == "checkpoint-9"  # written again


def test_keep_local_bounds_local_checkpoints(tmp_path, monkeypatch):
    """While uploads are slower than saves, training waits: only then they go on."""
    is_awaited, most, original = threading.Event(), [], Mirror.wait_for_local_space

    def wait_for_local_space(mirror):
        is_awaited.set()
        original(mirror)
        is_awaited.clear()

    def upload_when_awaited(request, path):
        if request == "put":
            most.append(len([name for name in names_in(tmp_path / "a") if "checkpoint" in name]))
            is_awaited.wait()

    monkeypatch.setattr(Mirror, "wait_for_local_space", wait_for_local_space)
    FaultyStorage.fault = upload_when_awaited
    at_end = AtStep(9, is_awaited.set, "on_train_end")
    train_to_end(trainer_at(tmp_path / "a", callbacks=[at_end], save_steps=1, keep_local=2, **BACKGROUND))
    assert max(most) <= 4  # two, one that is uploaded, one that is written
    assert complete_checkpoints(FAULTY) == [f"checkpoint-{step}" for step in range(1, 10)]


def test_best_checkpoint_is_kept_at_the_url_and_fetched(tmp_path):
    settings = {**BEST, "learning_rate": 0.5, "save_total_limit": 1}
    whole = train_to_end(trainer_at(tmp_path / "a", "memory://best", **settings))
    best = whole.state.best_model_checkpoint
    assert complete_checkpoints("memory://best") == [os.path.basename(best)]
    first = trainer_at(tmp_path / "b", callbacks=[AtStep(7, lambda: 1 / 0)], save_on_interrupt=False, **settings)
    with pytest.raises(ZeroDivisionError):
        first.train()
    second = train_to_end(trainer_at(tmp_path / "c", **settings), "auto")
    assert os.path.basename(second.state.best_model_checkpoint) == os.path.basename(best)
    assert_same_end(second, whole)


def test_tracker_run_continues_on_another_machine(tmp_path):
    """The folder of TensorBoard is fetched with the checkpoint."""
    train_to_end(trainer_at(tmp_path / "a", max_steps=6, report_to="tensorboard"))
    train_to_end(trainer_at(tmp_path / "b", report_to="tensorboard"), "auto")
    runs = {name.split("/")[1] for name in files_at(FAULTY) if name.startswith("runs/")}
    assert len(runs) == 1
    losses = scalars(tmp_path / "b" / "runs" / runs.pop())["train/loss"]
    assert [step for step, _ in losses] == [3, 6, 9]


def test_checkpoint_deleted_at_the_url_is_not_resumed(tmp_path, caplog):
    train_to_end(trainer_at(tmp_path / "a"))
    fsspec.filesystem("faulty").rm("/bucket/run", recursive=True)
    trainer = trainer_at(tmp_path / "a", max_steps=2)
    trainer.train(resume_from_checkpoint="auto")
    assert "checkpoint-9 is skipped: it was uploaded, but is no longer at faulty://bucket/run" in caplog.text
    assert trainer.state.global_step == 2
    assert "checkpoint-9" in names_in(tmp_path / "a")
    with pytest.raises(CheckpointNotFound, match=r"neither .* nor faulty://bucket/other"):
        train_to_end(trainer_at(tmp_path / "b", "faulty://bucket/other"), True)
    train_to_end(trainer_at(tmp_path / "a", "faulty://bucket/moved"), "auto")  # a bucket that was renamed
    assert complete_checkpoints("faulty://bucket/moved") == ["checkpoint-9"]


def test_checkpoint_that_is_here_is_not_downloaded(tmp_path, caplog):
    train_to_end(trainer_at(tmp_path / "a"))
    with caplog.at_level(logging.INFO, logger="hftrainer"):
        train_to_end(trainer_at(tmp_path / "a", max_steps=10), "auto")
    assert "step 9 of 10" in caplog.text and "Downloading" not in caplog.text


def test_checkpoints_of_a_run_without_a_url_are_kept_locally(tmp_path):
    train_to_end(make_trainer(tmp_path / "a", **CONSTANT))
    train_to_end(trainer_at(tmp_path / "a", max_steps=12), "auto")
    assert complete_checkpoints(FAULTY) == ["checkpoint-9", "checkpoint-12"]
    assert {"checkpoint-3", "checkpoint-6", "checkpoint-12"} <= {*names_in(tmp_path / "a")}


def test_bucket_lost_during_a_run_is_reported(tmp_path, caplog):
    def gone(request, path):
        if request == "put" and len(FaultyStorage.requests) > 30:
            raise FileNotFoundError(path)

    FaultyStorage.fault = gone
    train_to_end(trainer_at(tmp_path / "a", save_total_limit=1))
    FaultyStorage.fault = None
    assert "is written but not uploaded" in caplog.text and "Not uploaded to faulty://bucket/run" in caplog.text
    assert complete_checkpoints(FAULTY)


def test_checkpoint_deleted_during_its_upload_leaves_the_earlier_one(tmp_path, caplog):
    def delete(request, path):
        if request == "put" and path.endswith("checkpoint-9/optimizer.pt"):
            shutil.rmtree(tmp_path / "a" / "checkpoint-9")

    FaultyStorage.fault = delete
    train_to_end(trainer_at(tmp_path / "a", save_total_limit=1))
    assert "checkpoint-9 was deleted before it was uploaded" in caplog.text
    assert complete_checkpoints(FAULTY) == ["checkpoint-6"]


def test_network_lost_at_the_end_is_reported(tmp_path, caplog):
    def fail(request, path):
        if "checkpoint-9" in path or "down" in state:
            state.add("down")
            raise TimeoutError("no answer")

    state = set()
    FaultyStorage.fault = fail
    assert train_to_end(trainer_at(tmp_path / "a", **BEST, save_total_limit=1)).state.global_step == 9
    assert "were not deleted: faulty://bucket/run" in caplog.text


def test_best_checkpoint_of_another_url_is_not_deleted(tmp_path, monkeypatch):
    """A damaged one is left out when a run resumes."""
    settings = {**BEST, "learning_rate": 0.5}
    first = train_to_end(trainer_at(tmp_path / "old", "memory://old", keep_local=3, **settings))
    best = os.path.basename(first.state.best_model_checkpoint)
    last = next(name for name in ("checkpoint-9", "checkpoint-6") if name != best)
    there = complete_checkpoints("memory://old")
    train_to_end(trainer_at(tmp_path / "new", "memory://new", **settings, save_total_limit=1), tmp_path / "old" / last)
    assert complete_checkpoints("memory://old") == there
    system = fsspec.filesystem("memory")
    system.pipe_file(f"/old/{best}/model.safetensors", b"")
    train_to_end(trainer_at(tmp_path / "third", "memory://old", **settings, max_steps=12), "auto")


def test_files_of_an_older_run_do_not_overwrite_newer_ones(tmp_path):
    """The first machine resumes after another has trained further."""
    first = trainer_at(tmp_path / "a", max_steps=6)
    first.train()
    first.save_model()
    second = train_to_end(trainer_at(tmp_path / "b"), "auto")
    second.save_model()
    newest = fsspec.filesystem("faulty").cat_file("/bucket/run/model.safetensors")
    fsspec.filesystem("faulty").pipe_file("/bucket/run/data/train.parquet", b"of somebody")
    again = trainer_at(tmp_path / "a")
    again.save_metrics("eval", {"eval_loss": 1.0})
    assert fsspec.filesystem("faulty").cat_file("/bucket/run/model.safetensors") == newest
    train_to_end(again, "auto")
    assert not (tmp_path / "a" / "data").exists()


def test_retry_with_smaller_batches_removes_earlier_uploads(tmp_path):
    """Another machine must not resume the attempt that ran out of memory."""
    there = []

    def run_out():
        trainer._hftrainer.storage_sync.mirror.wait()
        there.append(complete_checkpoints(FAULTY))
        if len(there) == 2:
            raise torch.OutOfMemoryError("no memory")

    settings = {"callbacks": [AtStep(1, run_out), AtStep(4, run_out)], "auto_find_batch_size": True}
    trainer = trainer_at(tmp_path / "a", **settings)
    train_to_end(trainer)
    assert there == [[], ["checkpoint-3"], [], ["checkpoint-3"]]
    assert "checkpoint-9" in complete_checkpoints(FAULTY)


def test_checkpoint_named_by_url_wins_over_the_local_one(tmp_path):
    """The local one is of the same step, but from another run."""
    train_to_end(make_trainer(tmp_path / "a", seed=3, **CONSTANT))
    train_to_end(trainer_at(tmp_path / "b"))
    mine = fsspec.filesystem("faulty").cat_file("/bucket/run/checkpoint-3/model.safetensors")
    train_to_end(trainer_at(tmp_path / "a", max_steps=3), f"{FAULTY}/checkpoint-3")
    assert (tmp_path / "a" / "checkpoint-3" / "model.safetensors").read_bytes() == mine


def test_damaged_local_checkpoint_is_fetched_from_the_url(tmp_path, undisturbed):
    train_to_end(trainer_at(tmp_path / "a"))
    (tmp_path / "a" / "checkpoint-9" / "optimizer.pt").write_bytes(b"cut")
    assert_same_end(train_to_end(trainer_at(tmp_path / "a", max_steps=9), True), undisturbed)
    assert complete_checkpoints(FAULTY)[-1] == "checkpoint-9"


def test_run_that_does_not_resume_names_checkpoints_at_the_url(tmp_path, caplog):
    train_to_end(trainer_at(tmp_path / "a"))
    train_to_end(trainer_at(tmp_path / "b", save_total_limit=2))
    assert "faulty://bucket/run already has checkpoints, up to checkpoint-9" in caplog.text
    assert complete_checkpoints(FAULTY) == ["checkpoint-6", "checkpoint-9"]


@pytest.mark.parametrize("kind", ["file", "s3"])
def test_runs_killed_during_uploads_lose_no_complete_checkpoint(request, tmp_path, kind):
    """Each start is on a machine without local files."""
    environment = request.getfixturevalue("s3") if kind == "s3" else {}
    url = f"s3://bucket/{tmp_path.name}" if kind == "s3" else f"file://{tmp_path}/bucket"
    last = 0
    for attempt, upload in enumerate((3, 20, 8, 25, 13)):
        job = Job(tmp_path / f"killed-{attempt}", environment, kill_upload=upload, storage_url=url)
        job.process.join()
        assert job.process.exitcode == -9, job.output.read_text()
        there = complete_checkpoints(url)
        assert [int(name[11:]) for name in there] == sorted(int(name[11:]) for name in there)
        now = int(there[-1][11:]) if there else 0
        assert now >= last
        last = now
    assert last > 14
    Job(tmp_path / "end", environment, storage_url=url).finish()
    Job(tmp_path / "undisturbed").finish()
    assert_same(final_weights(tmp_path / "end"), final_weights(tmp_path / "undisturbed"))
