"""ZeRO-3 without gathered weights, which is DeepSpeed's default, in one process: its checkpoints hold shards.

The model is made after the arguments, so that it is partitioned before there is a Trainer.
"""

import importlib
import logging
import shutil

import pytest
from transformers import LlamaForCausalLM
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from hftrainer.checkpointing.layout import MANIFEST_NAME
from hftrainer.errors import InvalidConfig
from tests.adapters.deepspeed.training_cases import AUTO, forget
from tests.support.small_models import language_data, make_llama

pytestmark = pytest.mark.usefixtures("one_process")
#: No parameter is small enough to stay unsharded.
CONFIG = {**AUTO, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_llama().save_pretrained(folder)
    return folder


def train(name, folder, pretrained, steps, resume=None):
    library = importlib.import_module(name)
    settings = {"max_steps": steps, "lr_scheduler_type": "constant", "save_steps": 2, "logging_steps": 1}
    settings |= {"report_to": "none", "disable_tqdm": True}
    args = library.TrainingArguments(str(folder), deepspeed=CONFIG, use_cpu=True, **settings)
    model = LlamaForCausalLM.from_pretrained(pretrained)
    assert sum(each.numel() for each in model.parameters()) == 0
    trainer = library.Trainer(model, args, train_dataset=language_data())
    trainer.train(resume_from_checkpoint=resume)
    forget()
    return trainer


def losses(trainer):
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return tmp_path_factory.mktemp("written")


@pytest.fixture(params=["transformers", "hftrainer"])
def checkpoint(request, written, pretrained, tmp_path):
    if not (written / request.param).exists():
        train(request.param, written / request.param, pretrained, steps=2)
    shutil.copytree(written / request.param / "checkpoint-2", tmp_path / "checkpoint-2")
    (tmp_path / "checkpoint-2" / MANIFEST_NAME).unlink(missing_ok=True)
    return tmp_path / "checkpoint-2"


@pytest.mark.parametrize("named", [False, True])
def test_partitioned_checkpoint_resumes_exactly(checkpoint, written, pretrained, named, caplog):
    whole = train("hftrainer", written / "whole", pretrained, steps=4)
    resumed = train("hftrainer", checkpoint.parent, pretrained, 4, str(checkpoint) if named else "auto")
    assert losses(resumed) == losses(whole)
    assert "damaged" not in caplog.text  # "auto" would begin again, and end the same


@pytest.mark.parametrize("kind", ["model_states", "optim_states"])
def test_missing_shard_is_named_and_the_checkpoint_skipped(checkpoint, pretrained, kind, caplog):
    """One of two processes: the files of rank 1 say that there was a rank 0."""
    caplog.set_level(logging.WARNING)
    states = checkpoint / "global_step2"
    for path in list(states.iterdir()):
        shutil.copy(path, path.with_name(path.name.replace("rank_0_", "rank_1_")))
    missing = states / f"zero_pp_rank_0_mp_rank_00_{kind}.pt"
    missing.unlink()
    begun_again = train("hftrainer", checkpoint.parent, pretrained, 1, "auto")
    assert f"{checkpoint} is damaged and is skipped: {missing.relative_to(checkpoint)} is missing" in caplog.text
    assert begun_again.state.log_history[0]["step"] == 1


def test_flos_and_parameters_of_a_partitioned_model_are_counted(tmp_path, pretrained):
    trainer = train("hftrainer", tmp_path, pretrained, steps=1)
    model = make_llama()
    tokens = 8 * len(language_data()[0]["input_ids"])
    assert trainer.state.total_flos == 6 * tokens * model.num_parameters(exclude_embeddings=True)
    assert trainer.get_num_trainable_parameters() == model.num_parameters()


@pytest.mark.parametrize("flag", ["true", "false"])
def test_zero3_init_flag_of_the_launcher_changes_nothing(monkeypatch, tmp_path, pretrained, flag):
    """`zero3_init_flag` in accelerate's file changes nothing with transformers either."""
    launched = {"USE_DEEPSPEED": "true", "DEEPSPEED_ZERO_STAGE": "3", "DEEPSPEED_ZERO3_INIT": flag}
    for library in ("transformers", "hftrainer"):
        unset_hf_deepspeed_config()
        for name, value in launched.items():  # `forget` removes one
            monkeypatch.setenv(f"ACCELERATE_{name}", value)
        args = importlib.import_module(library).TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
        model = LlamaForCausalLM.from_pretrained(pretrained)
        assert all(hasattr(each, "ds_id") for each in model.parameters()), library
        del args
        forget()


@pytest.mark.parametrize(("layers", "marked"), [("LlamaMLP", 2), ("NoSuchLayer", None)])
def test_moe_layer_names_of_the_launcher_mark_leaf_modules(monkeypatch, tmp_path, pretrained, layers, marked):
    """`deepspeed_moe_layer_cls_names` in accelerate's file."""
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", layers)
    if marked is None:
        with pytest.raises(InvalidConfig, match="deepspeed_moe_layer_cls_names='NoSuchLayer'"):
            train("hftrainer", tmp_path, pretrained, steps=1)
        return
    model = train("hftrainer", tmp_path, pretrained, steps=1).model
    assert len([module for module in model.modules() if getattr(module, "_z3_leaf", False)]) == marked
