"""Methods and side effects of a Trainer that other tests of runs do not show."""

import importlib
import multiprocessing
import os
import time

import pytest
import torch

import hftrainer
from hftrainer import Trainer, TrainingArguments
from hftrainer.errors import CheckpointNotFound
from tests.support.checkpoints import make_tied
from tests.support.parity import assert_same_weights
from tests.support.small_models import (
    language_data,
    make_bert,
    make_llama,
    make_peft,
    make_plain,
    plain_data,
    text_data,
)

transformers = importlib.import_module("transformers")


def test_loading_processes_end_with_the_run(make_trainer):
    """Also persistent ones: left to garbage collection, each would take 5 seconds to end."""
    others = multiprocessing.active_children()
    trainer = make_trainer(max_steps=12, dataloader_num_workers=2, dataloader_persistent_workers=True)
    trainer.train()
    assert set(multiprocessing.active_children()) <= set(others)
    trainer.train()  # with new ones
    assert trainer.state.global_step == 12


@pytest.mark.newest_peer  # it was a method before
def test_metrics_format_matches_transformers(make_trainer):
    metrics = {"train_runtime": 3725.6789, "total_flos": 5 << 33, "init_mem_cpu_alloc_delta": 5 << 20}
    metrics |= {"train_loss": 0.123456, "epoch": 3, "note": "text"}
    assert make_trainer().metrics_format(metrics) == transformers.trainer_pt_utils.metrics_format(metrics)


@pytest.mark.parametrize("make_model", [make_plain, make_bert, make_llama])
def test_decay_parameter_names_match_transformers(make_trainer, tmp_path, make_model):
    model = make_model()
    ours = make_trainer(model).get_decay_parameter_names(model)
    theirs = transformers.Trainer(model, transformers.TrainingArguments(str(tmp_path), use_cpu=True))
    assert ours == theirs.get_decay_parameter_names(model)
    assert 0 < len(ours) < len(dict(model.named_parameters()))


def test_optimizer_getters_give_rates_and_groups(make_trainer):
    trainer = make_trainer(learning_rate=0.25, weight_decay=0.5)
    with pytest.raises(ValueError, match="no optimizer yet"):
        trainer.get_learning_rates()
    trainer.create_optimizer_and_scheduler(10)
    assert trainer.get_learning_rates() == [0.25, 0.25]
    weight = trainer.model.layers[0].weight
    assert trainer.get_optimizer_group(weight)["weight_decay"] == 0.5
    assert trainer.get_optimizer_group(trainer.model.layers[0].bias)["weight_decay"] == 0.0
    assert len(trainer.get_optimizer_group()) == 2
    assert trainer.get_num_trainable_parameters() == sum(p.numel() for p in trainer.model.parameters())


def test_examples_tokens_and_flops_are_counted(make_trainer):
    trainer = make_trainer(make_bert(), text_data(), remove_unused_columns=True)
    loader = trainer.get_train_dataloader()
    assert trainer.num_examples(loader) == 38
    assert Trainer.num_tokens(loader) == 38 * 12  # tokens in each sample
    assert Trainer.num_tokens(loader, max_steps=5) == 4 * 12 * 5  # a batch in each step
    batch = next(iter(loader))
    flos = trainer.floating_point_ops(batch)
    assert flos == 6 * 48 * trainer.model.num_parameters(exclude_embeddings=True)  # 48 tokens in a batch
    assert make_trainer().floating_point_ops(plain_data()[0]) == 0


def make_vit():
    torch.manual_seed(1)
    sizes = {"image_size": 4, "patch_size": 2, "num_channels": 1, "hidden_size": 8, "intermediate_size": 16}
    config = transformers.ViTConfig(**sizes, num_hidden_layers=2, num_attention_heads=2, num_labels=3)
    return transformers.ViTForImageClassification(config)


@pytest.mark.parametrize("make_model", [make_tied, make_vit])
def test_resume_restores_tied_and_renamed_weights(make_trainer, tmp_path, caplog, make_model):
    """A plain module's shared tensor is written once; transformers v5 saves a ViT in the names of older releases."""
    images = [{"pixel_values": torch.randn(1, 4, 4), "labels": i % 3} for i in range(20)]
    data = images if make_model is make_vit else plain_data()
    whole, resumed = (
        make_trainer(make_model(), data, save_strategy="steps", save_steps=2, max_steps=4) for _ in range(2)
    )
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert_same_weights(resumed.model.state_dict(), whole.model.state_dict())
    assert len(list(resumed.model.parameters())) == len(list(make_model().parameters()))  # shared ones stay shared
    assert "lacks" not in caplog.text


def test_resume_of_adapters_needs_a_peft_model(make_trainer, tmp_path):
    make_trainer(make_peft(), language_data(), save_strategy="steps").train()
    with pytest.raises(CheckpointNotFound, match="get_peft_model"):
        make_trainer(make_llama(), language_data()).train(resume_from_checkpoint=True)


def test_rotation_spares_a_fresh_run_in_a_used_folder(make_trainer, tmp_path):
    make_trainer(max_steps=9, save_strategy="steps", save_steps=9).train()
    old = tmp_path / "out" / "checkpoint-9"
    os.utime(old / "trainer_state.json", (1, 1))
    make_trainer(max_steps=3, save_strategy="steps", save_steps=1, save_total_limit=2).train()
    assert sorted(os.listdir(tmp_path / "out")) == ["checkpoint-2", "checkpoint-3"]


def test_training_leaves_no_hook_or_wrapper_on_the_model(make_trainer):
    """No hook, wrapper or moved weight is left on the user's model, with autocast either."""
    model = make_plain()
    trainer = make_trainer(model, bf16=True)
    trainer.train()
    assert "forward" not in vars(model)
    assert model(plain_data()[0]["x"][None])["logits"].dtype == torch.float32
    assert trainer.model is model


def test_accelerator_methods_work_in_one_process(make_trainer):
    accelerator, model, tensor = make_trainer().accelerator, make_plain(), torch.ones(3)
    assert accelerator.prepare(model) is accelerator.unwrap_model(model) is model
    assert accelerator.num_processes == accelerator.state.num_processes == 1
    assert accelerator.is_main_process and accelerator.gradient_state.sync_gradients is True
    for name in ("gather", "gather_for_metrics", "reduce", "pad_across_processes"):
        assert torch.equal(getattr(accelerator, name)(tensor), tensor)
    with accelerator.autocast(), accelerator.no_sync(model), accelerator.main_process_first():
        accelerator.wait_for_everyone()
    loss, weight = model(plain_data()[0]["x"][None], torch.tensor([1]))["loss"], model.layers[0].weight
    (gradient,) = torch.autograd.grad(loss, weight, retain_graph=True)
    accelerator.gradient_accumulation_steps = 4
    accelerator.backward(loss)
    assert torch.equal(weight.grad, gradient / 4)


def test_first_trainer_of_a_process_is_seeded(processes):
    """Libraries that the engine imports draw random numbers; the first Trainer of a process is seeded all the same."""
    code = """
import random, tempfile
from hftrainer import Trainer, TrainingArguments
from tests.support.small_models import make_plain
Trainer(make_plain(), TrainingArguments(tempfile.mkdtemp(), save_strategy="no", report_to="none", use_cpu=True))
drawn = random.getstate()
random.seed(42)
assert drawn == random.getstate()
"""
    done = processes.run("-c", code, fresh=True)
    assert done.returncode == 0, done.stderr


def test_methods_may_be_called_before_init(tmp_path):
    """SpanMarker and sentence-transformers call them on a Trainer that is not made yet."""

    class Own(Trainer):
        def __init__(self, args):
            self.args, self.model_init = args, make_plain
            self.model = self.call_model_init()
            assert self.is_world_process_zero()
            assert self.get_num_trainable_parameters() > 0
            super().__init__(model_init=self.model_init, args=args, train_dataset=plain_data(8))

    trainer = Own(TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, report_to="none"))
    assert trainer.train().global_step == 1


def test_token_rate_of_a_resumed_run_is_that_of_its_own_tokens(make_trainer):
    trainer = make_trainer(include_num_input_tokens_seen=True)
    trainer.state.num_input_tokens_seen, trainer._initial_num_input_tokens_seen = 500, 200
    trainer.log({"loss": 1.0}, start_time=time.time() - 100)
    line = trainer.state.log_history[-1]  # whose rate has three decimals
    assert line["train_tokens_per_second"] * line["train_runtime"] == pytest.approx(300, rel=1e-3)


@pytest.mark.parametrize(("devices", "expected"), [([0], False), ([0, "cpu"], False), ([0, 1], True)])
def test_model_on_several_devices_is_parallel(make_trainer, devices, expected):
    model = make_plain()
    model.hf_device_map = {f"layer{index}": device for index, device in enumerate(devices)}
    assert make_trainer(model).is_model_parallel is expected


@pytest.mark.parametrize("name", ["OPTIMIZER_NAME", "TRAINER_STATE_NAME", "TRAINING_ARGS_NAME"])
def test_file_names_are_those_of_transformers(name):
    assert getattr(hftrainer.trainer, name) == getattr(transformers.trainer, name)
