"""Trainer runs on an XLA device: the same as on the CPU, and the same again when they are resumed."""

import math

import pytest
import torch
import torch_xla
from safetensors.torch import load_file
from torch_xla._internal import tpu as their_tpu
from torch_xla.debug import metrics

from hftrainer import Trainer, TrainerCallback
from hftrainer.errors import InvalidArgument, UnsupportedArgument
from hftrainer.parallel import devices
from hftrainer.training_args import ParallelMode
from tests.adapters.xla.support import MODELS, assert_close, make_trainer, numbers, weights, without_dropout


def train(output_dir, name="plain", resume=None, **settings):
    done = make_trainer(output_dir, name, **settings)
    done.train(resume_from_checkpoint=resume)
    return done


EVALUATED = {"eval_strategy": "steps", "eval_steps": 6}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, EVALUATED) for name in MODELS),
        ("plain", {"gradient_accumulation_steps": 3, "max_grad_norm": 0.1}),
        ("llama", {"gradient_accumulation_steps": 2, "max_grad_norm": 0.0}),
        ("plain", {"optim": "sgd", "lr_scheduler_type": "cosine", "warmup_steps": 4}),
        ("plain", {"optim": "adafactor", "label_smoothing_factor": 0.1}),
    ],
)
def test_training_is_that_of_the_cpu(tmp_path, name, settings):
    ours = train(tmp_path / "xla", name, **settings)
    assert (ours.args.device.type, ours.args.parallel_mode) == ("xla", ParallelMode.TPU)
    assert {parameter.device.type for parameter in ours.model.parameters()} == {"xla"}
    assert ours.accelerator.distributed_type == "XLA"
    assert_close(ours, train(tmp_path / "cpu", name, use_cpu=True, **settings))


def test_adamw_torch_xla_steps_as_torchs(tmp_path):
    ours = train(tmp_path / "a", optim="adamw_torch_xla")
    assert type(ours.optimizer).__module__ == "torch_xla.amp.syncfree.adamw"
    assert_close(ours, train(tmp_path / "b", optim="adamw_torch"))


def test_bfloat16_is_autocast_with_float32_outputs(tmp_path):
    """Autocast around the forward pass, with float32 outputs; torch's CPU rounds the same 8 bits at other places."""
    ours = train(tmp_path / "xla", "llama", bf16=True)
    full = train(tmp_path / "full", "llama")
    losses = [[line["loss"] for line in numbers(run) if "loss" in line] for run in (ours, full)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    assert losses[0] != losses[1]
    assert {parameter.dtype for parameter in ours.model.parameters()} == {torch.float32}
    seen = []
    ours.model.register_forward_hook(lambda module, args, output: seen.append(output["logits"].dtype))
    predicted = ours.predict(ours.eval_dataset)
    assert seen and predicted.predictions.dtype == "float32"
    assert_close(ours, train(tmp_path / "cpu", "llama", bf16=True, use_cpu=True), tolerance=1e-2)


@pytest.mark.parametrize("name", ["plain", "llama"])
def test_resume_within_an_epoch_is_exact(tmp_path, name):
    """To the bit, dropout included: the random state of the device is part of the checkpoint."""
    settings = {"dropout": True, "save_strategy": "steps", "save_steps": 5, **EVALUATED}
    whole = train(tmp_path, name, **settings)
    resumed = train(tmp_path, name, str(tmp_path / "checkpoint-5"), **settings)
    assert numbers(resumed)[-4:-1] == numbers(whole)[-4:-1]
    assert all(torch.equal(value, weights(whole)[key]) for key, value in weights(resumed).items())
    states = torch.load(tmp_path / "checkpoint-5" / "rng_state.pth", weights_only=False)
    assert isinstance(states["xla"], int)


@pytest.mark.parametrize("first_on_cpu", [True, False])
def test_checkpoints_resume_between_cpu_and_xla(tmp_path, first_on_cpu):
    whole = train(tmp_path / "whole", "bert", use_cpu=True)
    train(tmp_path, "bert", use_cpu=first_on_cpu, save_strategy="steps", save_steps=5)
    folder = tmp_path / "checkpoint-5"
    state = torch.load(folder / "optimizer.pt", weights_only=True)
    kept = [value for entry in state["state"].values() for value in entry.values()]
    assert {value.device.type for value in kept} == {"cpu"}
    resumed = train(tmp_path, "bert", str(folder), use_cpu=not first_on_cpu)
    assert resumed.args.device.type == ("xla" if first_on_cpu else "cpu")
    assert_close(resumed, whole, compared=slice(-3, -1))  # the last line has the mean loss of this call's steps


def test_checkpoints_written_in_the_background_resume(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 5}
    whole = train(tmp_path, "plain", lightning_config={"async_checkpoint": True}, **settings)
    resumed = train(tmp_path, "plain", str(tmp_path / "checkpoint-5"), **settings)
    assert all(torch.equal(value, weights(whole)[key]) for key, value in weights(resumed).items())


def test_checkpoint_of_lightning_resumes(tmp_path):
    class Save(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 5:
                whole.save_lightning_checkpoint(str(tmp_path / "x.ckpt"))

    whole = make_trainer(tmp_path / "a", callbacks=[Save()])
    whole.train()
    resumed = train(tmp_path / "b", "plain", str(tmp_path / "x.ckpt"))
    assert all(torch.equal(value, weights(whole)[key]) for key, value in weights(resumed).items())


def test_tied_weights_stay_tied_and_are_saved_once(tmp_path):
    """Moving a model to XLA unties them; they stay tied here, and are written once."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def make():
        torch.manual_seed(1)
        sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        sizes |= {"num_key_value_heads": 2, "intermediate_size": 32}
        config = LlamaConfig(**sizes, tie_word_embeddings=True)
        return without_dropout(LlamaForCausalLM(config))

    ours = train(tmp_path / "xla", "llama", model=make())
    assert ours.model.lm_head.weight is ours.model.model.embed_tokens.weight
    ours.save_model()
    assert "lm_head.weight" not in load_file(tmp_path / "xla" / "model.safetensors")
    assert_close(ours, train(tmp_path / "cpu", "llama", model=make(), use_cpu=True))
    again = LlamaForCausalLM.from_pretrained(tmp_path / "xla")
    assert torch.equal(again.lm_head.weight, ours.model.lm_head.weight.detach().cpu())


class Counts(TrainerCallback):
    """How often torch_xla has compiled, and has read a number from the device, when a step has ended."""

    def __init__(self):
        self.compiled, self.read = {}, {}

    def on_step_end(self, args, state, control, **kwargs):
        self.compiled[state.global_step] = metrics.metric_data("CompileTime")[0]
        self.read[state.global_step] = metrics.metric_data("TransferFromDeviceTime")[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"logging_steps": 100},
        {"logging_steps": 7, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 4},
        {"gradient_accumulation_steps": 2, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2},
    ],
    ids=["training", "all", "accumulation"],
)
def test_nothing_is_compiled_twice(tmp_path, settings):
    """After the first steps and evaluations; the learning rate and the step's number change all the time."""
    counts = Counts()
    train(tmp_path, samples=40, max_steps=50, callbacks=[counts], lr_scheduler_type="cosine", dropout=True, **settings)
    assert counts.compiled[50] == counts.compiled[9], counts.compiled
    if "eval_strategy" not in settings:
        assert counts.compiled[50] == counts.compiled[5] == counts.compiled[2], counts.compiled
        assert counts.read[50] == counts.read[1], "no step reads from the device"


def test_ragged_last_batch_compiles_once_more_and_warns(tmp_path, caplog):
    """Ten epochs have two shapes of batches."""
    counts = Counts()
    settings = {"samples": 17, "per_device_train_batch_size": 7}  # shapes that no other test has compiled
    train(tmp_path, max_steps=30, callbacks=[counts], **settings)
    assert "dataloader_drop_last=True" in caplog.text
    assert counts.compiled[30] == counts.compiled[7] > counts.compiled[2]
    caplog.clear()
    train(tmp_path, max_steps=6, dataloader_drop_last=True, **settings)
    assert "dataloader_drop_last" not in caplog.text


class InfiniteOnce(Trainer):
    calls = 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs)
        self.calls += 1
        return loss * torch.tensor(math.inf, device=loss.device) if self.calls == 3 else loss


@pytest.mark.parametrize("filters", [True, False])
def test_infinite_losses_are_filtered_as_on_the_cpu(tmp_path, filters, caplog):
    runs = [
        make_trainer(
            tmp_path, kind=InfiniteOnce, logging_nan_inf_filter=filters, max_steps=3, learning_rate=0.0, use_cpu=cpu
        )
        for cpu in (False, True)
    ]
    losses = [run.train().training_loss for run in runs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6, nan_ok=True)
    assert math.isfinite(losses[0]) == filters
    assert "not finite" in caplog.text and ("leaves it out" in caplog.text) == filters


@pytest.mark.parametrize("given", [{"debug": "tpu_metrics_debug"}, {"tpu_metrics_debug": True}])
@pytest.mark.filterwarnings("ignore:Old names:FutureWarning")
def test_tpu_metrics_debug_prints_the_metrics(tmp_path, capsys, given):
    train(tmp_path, max_steps=10, eval_strategy="epoch", **given)
    assert capsys.readouterr().out.count("Metric: CompileTime") == 2  # at the end of the epoch, and of its evaluation


def test_use_cpu_keeps_training_on_the_cpu(tmp_path):
    trainer = train(tmp_path, use_cpu=True, max_steps=1)
    assert trainer.args.device == torch.device("cpu")
    assert trainer.args.parallel_mode == ParallelMode.NOT_PARALLEL


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fp16": True}, "use bf16"),
        ({"torch_compile": True}, "XLA already compiles"),
        ({"tpu_num_cores": 8}, "run --tpu"),
        ({"fsdp": True}, r"fsdp_config=\{'xla': True\}"),
    ],
)
def test_unsupported_settings_are_refused(tmp_path, settings, message):
    with pytest.raises(UnsupportedArgument, match=message):
        make_trainer(tmp_path, **settings)


def test_optimizer_made_before_the_model_moved_is_refused(tmp_path):
    model = MODELS["plain"][0]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    args = make_trainer(tmp_path).args
    with pytest.raises(InvalidArgument, match=r"model\.to"):
        Trainer(model, args, optimizers=(optimizer, None))
    model.to(args.device)
    Trainer(
        model, args, train_dataset=MODELS["plain"][1](), optimizers=(torch.optim.SGD(model.parameters(), lr=0.1), None)
    ).train()


def test_predictions_are_those_of_the_cpu(tmp_path):
    ours, other = (make_trainer(tmp_path, "bert", use_cpu=cpu) for cpu in (False, True))
    found, expected = (run.predict(run.eval_dataset).predictions for run in (ours, other))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_tensors_of_the_script_are_on_the_xla_device():
    assert torch.zeros(1, device=torch_xla.device()).device == torch.device("xla", 0)


def test_chips_are_counted_by_the_rule_of_torch_xla():
    assert their_tpu._GOOGLE_PCI_VENDOR_ID == devices._GOOGLE
    assert tuple(their_tpu._TPU_PCI_DEVICE_IDS) == devices._TPUS
    assert devices.count_tpu_chips() == their_tpu.num_available_chips()
