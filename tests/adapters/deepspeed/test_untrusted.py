"""A checkpoint of DeepSpeed from an untrusted source: its code is not run, and no other file is read."""

import shutil

import pytest
import torch

from hftrainer import Trainer, TrainingArguments
from hftrainer.checkpointing.layout import MANIFEST_NAME
from hftrainer.errors import DamagedCheckpoint, UnsafeCheckpoint
from tests.support import random_files
from tests.support.small_models import make_plain, plain_data

pytestmark = pytest.mark.usefixtures("one_process")
CONFIG = {
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
}
FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt")


def make_trainer(folder, steps):
    args = TrainingArguments(
        str(folder), deepspeed=CONFIG, max_steps=steps, save_steps=2, use_cpu=True, report_to="none", disable_tqdm=True
    )
    return Trainer(make_plain(), args, train_dataset=plain_data(24))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return tmp_path_factory.mktemp("written") / "run"


@pytest.fixture
def checkpoint(written, tmp_path):
    if not written.exists():
        make_trainer(written, steps=2).train()
    folder = tmp_path / "run" / "checkpoint-2"
    shutil.copytree(written / "checkpoint-2", folder)
    (folder / MANIFEST_NAME).unlink()
    return folder


def resume(checkpoint, steps=3):
    trainer = make_trainer(checkpoint.parent, steps)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    return trainer.state.global_step


def test_unchanged_checkpoint_resumes(checkpoint):
    assert resume(checkpoint) == 3


@pytest.mark.parametrize("name", FILES)
def test_pickled_code_is_not_run(checkpoint, tmp_path, name):
    path = checkpoint / "global_step2" / name
    torch.save({**torch.load(path, weights_only=False), "more": random_files.MaliciousPickle(tmp_path / "trace")}, path)
    with pytest.raises(UnsafeCheckpoint, match=r"checkpoint-2 holds a pickled posix\.mkdir"):
        resume(checkpoint)
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("tag", ["../../elsewhere", "/tmp", "..", ""])
def test_tag_that_leads_out_of_the_folder_is_refused(checkpoint, tag):
    shutil.copytree(checkpoint / "global_step2", checkpoint.parent / "elsewhere")
    (checkpoint / "latest").write_text(tag)
    with pytest.raises(
        DamagedCheckpoint,
        match=r"is damaged: latest does not hold what .* \(ValueError: [^:]*\)\. Use another one \(True",
    ):
        resume(checkpoint)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("way", ["values", "bytes"])
@random_files.with_examples
def test_random_contents_are_used_or_refused(checkpoint, written, tmp_path, name, way, data):
    """No step is taken: DeepSpeed checks little, and a later step may fail."""
    path, intact = checkpoint / "global_step2" / name, written / "checkpoint-2" / "global_step2" / name
    if way == "values":
        held = torch.load(intact, weights_only=False)
        torch.save(data.draw(random_files.pickled(held, tmp_path / "trace")), path)
    else:
        path.write_bytes(data.draw(random_files.scrambled(intact.read_bytes())))
    with random_files.accepted_or_refused():
        resume(checkpoint, steps=2)
    assert not (tmp_path / "trace").exists()
