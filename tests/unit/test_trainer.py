"""The methods of Trainer that a run does not show."""

import importlib
import json
import multiprocessing
import os

import pytest
import torch
from torch import nn

import hftrainer
from hftrainer import Trainer, TrainerCallback, TrainingArguments
from hftrainer.errors import CheckpointNotWritten
from tests.support.tiny import Plain, make_bert, make_llama, make_peft, make_plain, plain_data, text_data

transformers = importlib.import_module("transformers")


@pytest.fixture
def make_trainer(tmp_path):
    def make(model=None, data=None, folder="out", trainer=None, **settings):
        defaults = {"max_steps": 3, "per_device_train_batch_size": 4, "disable_tqdm": True, "use_cpu": True}
        args = TrainingArguments(str(tmp_path / folder), **{**defaults, **settings})
        data = data if data is not None else plain_data()
        return Trainer(
            model if model is not None else make_plain(),
            args,
            train_dataset=data,
            eval_dataset=data[:9],
            **(trainer or {}),
        )

    return make


def test_loading_processes_end_with_the_run(make_trainer):
    """Also those that stay between epochs: collected as garbage, each would be waited for 5 seconds in vain."""
    trainer = make_trainer(max_steps=12, dataloader_num_workers=2, dataloader_persistent_workers=True)
    trainer.train()
    assert multiprocessing.active_children() == []
    trainer.train()  # with new ones
    assert trainer.state.global_step == 12


# ---- Metrics and state -------------------------------------------------------------------------------------------

METRICS = {
    "train_runtime": 3725.6789,
    "total_flos": 5 << 33,
    "init_mem_cpu_alloc_delta": 5 << 20,
    "train_loss": 0.123456,
    "epoch": 3,
    "note": "text",
}


def test_log_metrics_prints_as_transformers_does(make_trainer, capsys):
    make_trainer().log_metrics("train", METRICS)
    ours = capsys.readouterr().out
    theirs = transformers.Trainer(make_plain(), transformers.TrainingArguments("unused", use_cpu=True))
    theirs.log_metrics("train", METRICS)
    assert ours == capsys.readouterr().out
    os.rmdir("unused")


@pytest.mark.newest_peer  # it was a method before
def test_metrics_format_is_that_of_transformers(make_trainer):
    assert make_trainer().metrics_format(METRICS) == transformers.trainer_pt_utils.metrics_format(METRICS)


def test_save_metrics_and_state(make_trainer, tmp_path):
    trainer = make_trainer()
    trainer.train()
    trainer.save_metrics("train", {"loss": 1.0})
    trainer.save_metrics("eval", {"other": 2.0})
    trainer.save_metrics("test", {"third": 3.0}, combined=False)
    trainer.save_state()
    out = tmp_path / "out"
    assert json.loads((out / "train_results.json").read_text()) == {"loss": 1.0}
    assert json.loads((out / "all_results.json").read_text()) == {"loss": 1.0, "other": 2.0}
    assert json.loads((out / "trainer_state.json").read_text())["global_step"] == 3


# ---- Optimizer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make_model", [make_plain, make_bert, make_llama])
def test_decay_parameter_names(make_trainer, make_model):
    model = make_model()
    ours = make_trainer(model).get_decay_parameter_names(model)
    args = transformers.TrainingArguments("unused", use_cpu=True)
    theirs = transformers.Trainer(model, args).get_decay_parameter_names(model)
    assert ours == theirs
    assert 0 < len(ours) < len(dict(model.named_parameters()))
    os.rmdir("unused")


def test_optimizer_questions(make_trainer):
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


def test_frozen_parameters_stay(make_trainer):
    trainer = make_trainer()
    frozen = trainer.model.layers[0]
    frozen.requires_grad_(False)
    before = frozen.weight.clone()
    trainer.train()
    assert torch.equal(frozen.weight, before)
    assert all(frozen.weight is not p for group in trainer.optimizer.param_groups for p in group["params"])


# ---- Data --------------------------------------------------------------------------------------------------------


def test_counting(make_trainer):
    trainer = make_trainer(make_bert(), text_data(), remove_unused_columns=True)
    loader = trainer.get_train_dataloader()
    assert trainer.num_examples(loader) == 38
    assert Trainer.num_tokens(loader) == 38 * 12
    assert Trainer.num_tokens(loader, max_steps=5) == 4 * 12 * 5
    batch = next(iter(loader))
    flos = trainer.floating_point_ops(batch)
    assert flos == 6 * 48 * trainer.model.num_parameters(exclude_embeddings=True)
    assert make_trainer().floating_point_ops(plain_data()[0]) == 0


of_numpy = pytest.param("array", marks=pytest.mark.newest_peer)  # integers became floats before


@pytest.mark.parametrize(
    "style", ["number", "list", "tensor", of_numpy, "float", "label_ids", "tensor-number", "multi-hot"]
)
def test_default_collator_as_transformers(style):
    numpy = importlib.import_module("numpy")
    labels = {
        "number": [{"label": 1}, {"label": 2}],
        "float": [{"label": 1.5}, {"label": 2.5}],
        "list": [{"label_ids": [1, 2]}, {"label_ids": [3, 4]}],
        "label_ids": [{"label_ids": [1.0, 2.0]}, {"label_ids": [3.0, 4.0]}],
        "tensor": [{"label_ids": torch.tensor([1, 2])}, {"label_ids": torch.tensor([3, 4])}],
        "tensor-number": [{"label": torch.tensor(1)}, {"label": torch.tensor(2)}],
        "multi-hot": [{"label": [0, 1, 1]}, {"label": [1, 0, 0]}],
        "array": [{"label": numpy.int64(3)}, {"label": numpy.int64(4)}],
    }[style]
    values = {"x": torch.ones(2), "y": numpy.arange(3), "z": [1, 2], "text": "no", "nothing": None}
    features = [{**values, **label} for label in labels]
    ours = hftrainer.default_data_collator(features)
    theirs = transformers.default_data_collator(features)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(tensor, theirs[name])


def test_old_sampler_signature(make_trainer):
    class Own(Trainer):
        def _get_train_sampler(self):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    trainer = make_trainer()
    trainer.__class__ = Own
    first = next(iter(trainer.get_train_dataloader()))
    assert torch.equal(first["x"], torch.stack([sample["x"] for sample in plain_data()[:4]]))


def test_label_names(make_trainer):
    class TwoLabels(Plain):
        def forward(self, x, first_label=None, second_label=None):
            return super().forward(x, first_label)

    data = [{"x": s["x"], "first_label": s["labels"], "second_label": s["labels"] + 1} for s in plain_data()]
    trainer = make_trainer(TwoLabels(), data)
    assert trainer.label_names == ["first_label", "second_label"]
    output = trainer.predict(data[:5])
    assert [labels.shape for labels in output.label_ids] == [(5,), (5,)]
    assert (output.label_ids[0] + 1 == output.label_ids[1]).all()


# ---- Overrides of older releases ---------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [1, 3])
def test_compute_loss_of_every_release_trains_alike(make_trainer, accumulation):
    class V41(Trainer):
        def compute_loss(self, model, inputs):
            return model(**inputs)["loss"]

    class V42(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False):
            outputs = model(**inputs)
            return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    class V446(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    results = []
    for kind in (Trainer, V41, V42, V446):
        trainer = make_trainer(gradient_accumulation_steps=accumulation, eval_strategy="steps", eval_steps=1)
        trainer.__class__ = kind
        trainer.compute_metrics = lambda p: {"mean": float(p.predictions.mean())}
        trainer.train()
        logs = [line for line in trainer.state.log_history if "eval_loss" in line]
        results.append([(line["eval_loss"], line["eval_mean"]) for line in logs])
    assert all(result == results[0] for result in results)
    assert len(results[0]) == 3


def test_old_override_of_a_model_that_takes_num_items(make_trainer):
    """Such an override cannot pass the items on, so the model's mean is divided by the micro-batches."""

    class Old(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False):
            outputs = model(**inputs)
            return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    from tests.support.tiny import language_data

    trainer = make_trainer(make_llama(), language_data(), gradient_accumulation_steps=3)
    trainer.__class__ = Old
    trainer.current_gradient_accumulation_steps = 3
    batch = next(iter(trainer.get_train_dataloader()))
    model = trainer.model.eval()
    whole = model(**batch)["loss"]
    model.train = lambda mode=True: model
    assert torch.equal(trainer._hftrainer.steps.loss(model, dict(batch), torch.tensor(99)), whole / 3)


def test_training_step_of_v4(make_trainer):
    class Own(Trainer):
        def training_step(self, model, inputs):
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
            self.accelerator.backward(loss)
            return loss.detach()

    trainer = make_trainer()
    trainer.__class__ = Own
    trainer.train()
    assert trainer.lightning_trainer.global_step == 3
    assert not trainer.lightning_module.automatic_optimization


# ---- Saving ------------------------------------------------------------------------------------------------------


def test_saved_models_load_with_from_pretrained(make_trainer, tmp_path):
    trainer = make_trainer(make_bert(), text_data())
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    for folder in (tmp_path / "saved", tmp_path / "out" / "checkpoint-3"):
        loaded = transformers.BertForSequenceClassification.from_pretrained(folder)
        for name, tensor in trainer.model.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor)
    args = torch.load(tmp_path / "saved" / "training_args.bin", weights_only=False)
    assert args == trainer.args


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x, labels=None):
        logits = self.second(self.first(x))
        return nn.functional.cross_entropy(logits, labels), logits


def test_tied_weights_of_a_plain_module(make_trainer, tmp_path, caplog):
    """transformers cannot save such a module; here the shared tensor is written once."""
    trainer = make_trainer(Tied(), save_steps=2, max_steps=4)
    trainer.train()
    resumed = make_trainer(Tied(), save_steps=2, max_steps=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert torch.equal(resumed.model.first.weight, trainer.model.first.weight)
    assert resumed.model.second.weight is resumed.model.first.weight
    assert "lacks" not in caplog.text


def make_vit():
    torch.manual_seed(1)
    config = transformers.ViTConfig(
        image_size=4,
        patch_size=2,
        num_channels=1,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=3,
    )
    return transformers.ViTForImageClassification(config)


def test_architectures_saved_under_other_names(make_trainer, tmp_path, caplog):
    """transformers v5 saves a ViT in the names of older releases; loading those by name would load nothing."""
    images = [{"pixel_values": torch.randn(1, 4, 4), "labels": i % 3} for i in range(20)]
    whole = make_trainer(make_vit(), images, save_steps=2, max_steps=4)
    whole.train()
    resumed = make_trainer(make_vit(), images, save_steps=2, max_steps=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], tensor)
    assert "lacks" not in caplog.text


@pytest.mark.parametrize("layout", ["sharded", "bin"])
def test_other_layouts(make_trainer, tmp_path, layout):
    trainer = make_trainer(make_bert(), text_data(), save_steps=2, max_steps=4)
    trainer.train()
    folder = tmp_path / "out" / "checkpoint-2"
    saved = transformers.BertForSequenceClassification.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    (folder / "hftrainer_manifest.json").unlink()  # as the message about the missing file says
    if layout == "sharded":
        saved.save_pretrained(folder, max_shard_size="4KB")
        assert len(list(folder.glob("model-*.safetensors"))) > 2
    else:
        torch.save(saved.state_dict(), folder / "pytorch_model.bin")
    resumed = make_trainer(make_bert(), text_data(), save_steps=2, max_steps=4)
    resumed.train(resume_from_checkpoint=str(folder))
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], tensor)


def test_adapters_into_a_model_without(make_trainer, tmp_path):
    from hftrainer.errors import CheckpointNotFound
    from tests.support.tiny import language_data

    make_trainer(make_peft(), language_data()).train()
    with pytest.raises(CheckpointNotFound, match="get_peft_model"):
        make_trainer(make_llama(), language_data()).train(resume_from_checkpoint=True)


def test_a_failed_save_leaves_no_half_folder(make_trainer, tmp_path):
    class Fails(Trainer):
        def _save_rng_state(self, output_dir):
            assert os.listdir(output_dir)
            raise OSError(28, "No space left on device")

    trainer = make_trainer(save_steps=2, lightning_config={"on_save_error": "stop"})
    trainer.__class__ = Fails
    with pytest.raises(CheckpointNotWritten, match=r"checkpoint-2 could not be written \(No space left on device\)"):
        trainer.train()
    assert os.listdir(tmp_path / "out") == []


def test_a_failed_save_costs_the_checkpoint_only(make_trainer, tmp_path, caplog):
    announced = []

    class Announces(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            announced.append(state.global_step)

    class FailsOnce(Trainer):
        def _save_rng_state(self, output_dir):
            if self.state.global_step == 2:
                raise OSError(28, "No space left on device")
            super()._save_rng_state(output_dir)

    trainer = make_trainer(save_steps=2, max_steps=6, trainer={"callbacks": [Announces]})
    trainer.__class__ = FailsOnce
    trainer.train()
    assert announced == [4, 6]
    assert sorted(os.listdir(tmp_path / "out")) == ["checkpoint-4", "checkpoint-6"]
    assert "checkpoint-2 could not be written (No space left on device)" in caplog.text
    assert "Training continues" in caplog.text


def test_a_save_replaces_an_older_run(make_trainer, tmp_path):
    make_trainer(save_steps=2).train()
    (tmp_path / "out" / "checkpoint-2" / "left-over").touch()
    make_trainer(save_steps=2).train()
    assert not (tmp_path / "out" / "checkpoint-2" / "left-over").exists()
    assert sorted(os.listdir(tmp_path / "out")) == ["checkpoint-2", "checkpoint-3"]


def test_rotation_spares_a_fresh_run_in_a_used_folder(make_trainer, tmp_path):
    make_trainer(max_steps=9, save_steps=9).train()
    old = tmp_path / "out" / "checkpoint-9"
    os.utime(old, (1, 1))
    make_trainer(max_steps=3, save_steps=1, save_total_limit=2).train()
    assert sorted(os.listdir(tmp_path / "out")) == ["checkpoint-2", "checkpoint-3"]


def test_rotation_that_a_kill_has_cut_off_is_completed(make_trainer, tmp_path):
    """The run was complete, so that no save of it would rotate any more; other folders are left alone."""
    settings = {"max_steps": 3, "save_steps": 1}
    make_trainer(**settings).train()
    last = str(tmp_path / "out" / "checkpoint-3")
    make_trainer(**settings, folder="other", save_total_limit=2).train(resume_from_checkpoint=last)
    assert sorted(os.listdir(tmp_path / "out")) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    make_trainer(**settings, save_total_limit=2).train(resume_from_checkpoint=True)
    assert sorted(os.listdir(tmp_path / "out")) == ["checkpoint-2", "checkpoint-3"]


# ---- Around a run ------------------------------------------------------------------------------------------------


def test_model_stays_in_use_after_training(make_trainer):
    """No hook, wrapper or moved weight is left on the user's model, with autocast either."""
    model = make_plain()
    trainer = make_trainer(model, bf16=True)
    trainer.train()
    assert "forward" not in vars(model)
    assert model(plain_data()[0]["x"][None])["logits"].dtype == torch.float32
    assert trainer.model is model


def test_no_output_of_lightning(make_trainer, capfd, recwarn):
    trainer = make_trainer()
    trainer.train()
    trainer.evaluate()
    trainer.predict(plain_data()[:3])
    out, err = capfd.readouterr()
    for word in ("Tip", "litlogger", "GPU available", "Trainer.fit"):
        assert word not in out + err
    assert not [str(warning.message) for warning in recwarn if "lightning" in warning.filename]


def test_accelerator_names(make_trainer):
    accelerator = make_trainer().accelerator
    model = make_plain()
    assert accelerator.prepare(model) is model
    assert accelerator.unwrap_model(model) is model
    assert accelerator.num_processes == accelerator.state.num_processes == 1
    assert accelerator.is_main_process
    assert accelerator.gradient_state.sync_gradients is True
    tensor = torch.ones(3)
    for method in (
        accelerator.gather,
        accelerator.gather_for_metrics,
        accelerator.reduce,
        accelerator.pad_across_processes,
    ):
        assert torch.equal(method(tensor), tensor)
    with accelerator.autocast(), accelerator.no_sync(model), accelerator.main_process_first():
        accelerator.wait_for_everyone()
    loss = model(plain_data()[0]["x"][None], torch.tensor([1]))["loss"]
    accelerator.backward(loss)
    assert model.layers[0].weight.grad is not None


def test_the_seed_holds_in_a_fresh_process(processes):
    """Libraries that the engine imports draw random numbers; the first Trainer of a process is seeded all the same."""
    code = """
import random, tempfile
from hftrainer import Trainer, TrainingArguments
from tests.support.tiny import make_plain
Trainer(make_plain(), TrainingArguments(tempfile.mkdtemp(), save_strategy="no", report_to="none", use_cpu=True))
drawn = random.getstate()
random.seed(42)
assert drawn == random.getstate()
"""
    done = processes.run("-c", code, fresh=True)
    assert done.returncode == 0, done.stderr


def test_methods_before_init(tmp_path):
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
