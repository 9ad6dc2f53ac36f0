"""Names of files, trackers and process types that libraries rely on are those of transformers."""

import os

import pytest

from hftrainer.trainer import OPTIMIZER_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from tests.support.parity import build


def test_checkpoint_has_the_file_names_of_transformers(tmp_path):
    trainer, _ = build("hftrainer", "plain", tmp_path, save_strategy="steps", save_steps=2, max_steps=2)
    trainer.train()
    assert {OPTIMIZER_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_NAME} <= set(os.listdir(tmp_path / "checkpoint-2"))


@pytest.mark.parametrize("given", ["none", ["csv"]])
def test_kubeflow_job_reports_to_kubeflow(tmp_path, monkeypatch, given):
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "http://127.0.0.1")
    trainer, _ = build("hftrainer", "plain", tmp_path, report_to=given)
    assert trainer.args.report_to == [*([] if given == "none" else given), "kubeflow"]
    monkeypatch.setenv("DISABLE_KUBEFLOW_INTEGRATION", "TRUE")
    trainer, _ = build("hftrainer", "plain", tmp_path, report_to=given)
    assert "kubeflow" not in trainer.args.report_to


def test_distributed_type_equals_that_of_accelerate(tmp_path):
    from accelerate import DistributedType

    trainer, _ = build("hftrainer", "plain", tmp_path)
    kind = trainer.accelerator.distributed_type
    assert (str(kind), kind, kind.value) == (str(DistributedType.NO), DistributedType.NO, "NO")
    assert kind in (DistributedType.NO, DistributedType.FSDP) and kind != DistributedType.MULTI_GPU
