"""Label smoothing, NEFTune, checkpointed activations, compilation, fp16, batch sizes that fit, and the rest."""

import importlib
import itertools
import logging
import sys
import types
import weakref

import pytest
import torch
from torch import nn

import hftrainer
from hftrainer.errors import InvalidArgument, MissingPackage
from tests.parity.support import accuracy, assert_same, assert_same_weights, build, compare, record, train
from tests.parity.test_evaluation import make_t5, t5_data
from tests.tiny import MODELS, Plain, make_bert, plain_data

transformers = importlib.import_module("transformers")
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}


def decoder_data(count=38):
    """With the decoder's inputs, which a model cannot make of labels that the smoother has taken."""
    shift = make_t5()._shift_right
    return [{**row, "decoder_input_ids": shift(row["labels"][None])[0]} for row in t5_data(count)]


MODELS.setdefault("t5", (make_t5, decoder_data))


@pytest.mark.parametrize("model", ["bert", "llama", "peft", "t5"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_label_smoothing(tmp_path, model, accumulation):
    """The shift of causal models included; `num_items_in_batch` divides where the model takes it."""
    settings = {"label_smoothing_factor": 0.2, "gradient_accumulation_steps": accumulation, **EVALUATED}
    smoothed, _ = compare(tmp_path, model, **settings)
    plain = train("hftrainer", model, tmp_path / "plain", **{**settings, "label_smoothing_factor": 0.0})
    assert smoothed.logs[0]["loss"] != plain.logs[0]["loss"]


class NumberEach(nn.Module):
    """Returns a number for each row, and no loss."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.scale * x


MODELS.setdefault("number each", (NumberEach, lambda: [{"x": float(number)} for number in range(38)]))


def test_first_number_is_the_loss(tmp_path, caplog):
    """Of a model that returns a number for each row; the evaluation has no labels and no loss."""
    hftrainer.loss._warn_once.cache_clear()
    ours, _ = compare(tmp_path, "number each", **EVALUATED)
    assert ours.logs[0]["loss"] != 0
    (said,) = {line.message for line in caplog.records if line.name == "hftrainer.loss"}
    assert "the first of them is the loss" in said


def test_label_smoothing_in_seq2seq(tmp_path):
    results = []
    for name in ("hftrainer", "transformers"):
        library = importlib.import_module(name)
        args = library.Seq2SeqTrainingArguments(
            str(tmp_path),
            label_smoothing_factor=0.1,
            predict_with_generate=True,
            generation_max_length=6,
            use_cpu=True,
            disable_tqdm=True,
            report_to="none",
        )
        trainer = library.Seq2SeqTrainer(make_t5(), args, compute_metrics=lambda p: {})
        results.append(trainer.evaluate(decoder_data(5))["eval_loss"])
    assert results[0] == results[1]


def test_label_smoothing_of_several_labels(tmp_path):
    model = make_bert()
    model.config.problem_type = "multi_label_classification"
    args = hftrainer.TrainingArguments(str(tmp_path), label_smoothing_factor=0.1, use_cpu=True)
    with pytest.warns(UserWarning, match="label_smoothing_factor"):
        assert hftrainer.Trainer(model, args).label_smoother is None


@pytest.mark.parametrize("model", ["bert", "llama", "peft"])
def test_neftune(tmp_path, model):
    noisy, _ = compare(tmp_path, model, neftune_noise_alpha=5.0, **EVALUATED)
    quiet = train("hftrainer", model, tmp_path / "quiet", **EVALUATED)
    assert noisy.logs[0]["loss"] != quiet.logs[0]["loss"]


def test_neftune_is_taken_off(tmp_path):
    trainer, _ = build("hftrainer", "bert", tmp_path, neftune_noise_alpha=5.0, max_steps=1)
    embeddings = trainer.model.get_input_embeddings()
    trainer.train()
    assert not embeddings._forward_hooks
    plain, _ = build("hftrainer", "plain", tmp_path, neftune_noise_alpha=5.0)
    with pytest.raises(InvalidArgument, match="Plain has no get_input_embeddings"):
        plain.train()


@pytest.mark.parametrize("kwargs", [None, {"use_reentrant": False}, {"use_reentrant": False, "every_n_layers": 2}])
@pytest.mark.parametrize("model", ["bert", "llama"])
def test_activation_checkpointing(tmp_path, model, kwargs):
    settings = {"activation_checkpointing": True, "activation_checkpointing_kwargs": kwargs}
    checkpointed, _ = compare(tmp_path, model, **settings)
    kept = train("hftrainer", model, tmp_path / "kept")
    assert_same_weights(checkpointed.weights, kept.weights)  # only memory and time differ


def test_activations_are_computed_again(tmp_path):
    """By the name of v4 too; and a model without it says so."""
    calls = []
    trainer, _ = build("hftrainer", "llama", tmp_path, gradient_checkpointing=True, max_steps=1)
    trainer.model.model.layers[0].mlp.act_fn.register_forward_hook(lambda *_: calls.append(1))
    trainer.train()
    assert len(calls) == 2  # forward, and again in backward
    plain, _ = build("hftrainer", "plain", tmp_path, gradient_checkpointing=True)
    with pytest.raises(InvalidArgument, match=r"Plain has not: add it"):
        plain.train()


@pytest.mark.parametrize("model", ["plain", "bert"])
@pytest.mark.parametrize("bf16", [False, True])
def test_compilation(tmp_path, model, bf16):
    settings = {"torch_compile_backend": "aot_eager", "max_steps": 4, "bf16": bf16, "logging_steps": 1}
    torch._dynamo.reset()
    compiled = train("hftrainer", model, tmp_path / "ours", **settings)
    torch._dynamo.reset()
    theirs = train("transformers", model, tmp_path / "theirs", **settings)
    assert_same(compiled, theirs)


def test_compilation_settings(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **kwargs: asked.append(kwargs))
    for settings in ({"torch_compile": True}, {"torch_compile_mode": "reduce-overhead"}):
        trainer, _ = build("hftrainer", "plain", tmp_path, max_steps=1, **settings)
        trainer.train()
    assert asked == [
        {"backend": "inductor", "mode": None, "fullgraph": False, "dynamic": None},
        {"backend": "inductor", "mode": "reduce-overhead", "fullgraph": False, "dynamic": None},
    ]


def train_in_fp16(name, model, folder, resume=None, first_scale=2.0**16, **settings):
    """transformers leaves fp16 out on a CPU; here it gets what it has on a GPU."""
    trainer, recorder = build(name, model, folder, fp16=True, logging_steps=1, **{"optim": "adamw_torch", **settings})
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=first_scale)
    if name == "transformers":
        trainer.accelerator.native_amp = True
    else:
        trainer._hftrainer.engine.scaler = trainer.accelerator.scaler
    trainer.train(resume_from_checkpoint=resume)
    scale = trainer.accelerator.scaler.state_dict()
    return record(trainer, recorder, folder, scale=scale)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("model", ["llama", "plain"])
@pytest.mark.parametrize("first_scale", [2.0**16, 2.0**26], ids=["fits", "overflows"])
def test_fp16(tmp_path, model, first_scale, accumulation):
    """Losses, norms, rates and scales; a step that is skipped does not move the schedule on."""
    settings = {"gradient_accumulation_steps": accumulation, "max_steps": 12, "first_scale": first_scale}
    settings |= {"save_strategy": "steps", "save_steps": 4}
    ours = train_in_fp16("hftrainer", model, tmp_path / "ours", **settings)
    assert_same(ours, train_in_fp16("transformers", model, tmp_path / "theirs", **settings))
    assert "scaler.pt" in ours.files["checkpoint-4"]
    rates = [line["learning_rate"] for line in ours.logs if "learning_rate" in line]
    skipped = sum(before == after for before, after in itertools.pairwise(rates))
    assert (skipped > 1) is (first_scale > 2**16)
    for origin in ("ours", "theirs"):
        folder = str(tmp_path / origin / "checkpoint-4")
        resumed = train_in_fp16("hftrainer", model, tmp_path / "ours", folder, **settings)
        assert_same_weights(resumed.weights, ours.weights)
        assert resumed.extra == ours.extra


def test_fp16_with_fused_steps(tmp_path):
    """The fused optimizer leaves steps out by itself, which transformers does not see, and moves the rate on."""
    settings = {"max_steps": 12, "first_scale": 2.0**26}
    fused = train_in_fp16("hftrainer", "llama", tmp_path / "a", optim="adamw_torch_fused", **settings)
    plain = train_in_fp16("hftrainer", "llama", tmp_path / "b", **settings)
    assert fused.logs[:-1] == plain.logs[:-1]


def test_fp16_with_a_training_step_of_ones_own(tmp_path):
    def own(library):
        class Own(library.Trainer):
            def training_step(self, model, inputs, num_items_in_batch=None):
                return super().training_step(model, inputs, num_items_in_batch)

        return Own

    settings = {"max_steps": 12, "gradient_accumulation_steps": 2, "first_scale": 2.0**26}
    automatic = train_in_fp16("hftrainer", "plain", tmp_path / "a", **settings)
    manual = train_in_fp16("hftrainer", "plain", tmp_path / "b", trainer_class=own, **settings)
    assert_same_weights(manual.weights, automatic.weights)
    assert manual.logs[:-1] == automatic.logs[:-1]


class Greedy(Plain):
    """Runs out of memory above some samples in a batch while training, or at one call."""

    def __init__(self, limit=4, at_call=None):
        super().__init__()
        self.limit, self.at_call, self.calls = limit, at_call, 0

    def forward(self, x, labels=None):
        self.calls += self.training
        if self.training and (len(x) > self.limit if self.at_call is None else self.calls == self.at_call):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return super().forward(x, labels)


def greedy(**kwargs):
    torch.manual_seed(1)
    return Greedy(**kwargs)


@pytest.mark.parametrize("user_optimizer", [False, True])
def test_batch_size_that_fits(tmp_path, user_optimizer):
    """Ends at the size that fits, with the result of starting there, and keeps it in the checkpoint."""

    def run(folder, model, **settings):
        given = {"model": model, "train_dataset": plain_data()}
        if user_optimizer:
            given["optimizers"] = (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), None)
        saved = {"save_strategy": "steps", "save_steps": 5, **EVALUATED}
        trainer, recorder = build("hftrainer", "plain", folder, trainer=given, **saved, **settings)
        trainer.train()
        return trainer, record(trainer, recorder, folder)

    found, ours = run(tmp_path / "a", greedy(), per_device_train_batch_size=16, auto_find_batch_size=True)
    assert found._train_batch_size == found.state.train_batch_size == 4
    _, expected = run(tmp_path / "b", greedy(), per_device_train_batch_size=4)
    assert_same_weights(ours.weights, expected.weights)
    assert ours.logs == expected.logs
    assert ours.files == expected.files
    # A resumed run begins with that size.
    given = {"model": greedy(), "train_dataset": plain_data()}
    if user_optimizer:
        given["optimizers"] = (torch.optim.SGD(given["model"].parameters(), lr=0.1, momentum=0.9), None)
    resumed, _ = build(
        "hftrainer",
        "plain",
        tmp_path / "a",
        trainer=given,
        per_device_train_batch_size=16,
        auto_find_batch_size=True,
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-5"))
    assert resumed._train_batch_size == 4


def test_memory_that_runs_out_later(tmp_path):
    """After some steps: the run begins again where it began, not with what the failed one left."""
    given = {"train_dataset": plain_data()}
    settings = {"per_device_train_batch_size": 8, "max_steps": 6}
    trainer, recorder = build(
        "hftrainer",
        "plain",
        tmp_path / "a",
        trainer={**given, "model": greedy(at_call=4)},
        auto_find_batch_size=True,
        **settings,
    )
    trainer.train()
    settings["per_device_train_batch_size"] = 4
    expected = train("hftrainer", "plain", tmp_path / "b", trainer={**given, "model": greedy(limit=99)}, **settings)
    ours = record(trainer, recorder, tmp_path / "a", **expected.extra)
    assert_same_weights(ours.weights, expected.weights)
    assert ours.logs == expected.logs


def test_memory_that_cannot_be_saved(tmp_path):
    settings = {"auto_find_batch_size": True, "per_device_train_batch_size": 4}
    trainer, _ = build("hftrainer", "plain", tmp_path, trainer={"model": greedy(limit=0)}, **settings)
    with pytest.raises(RuntimeError, match="one sample does not fit"):
        trainer.train()

    class EatsInEvaluation(Plain):
        def forward(self, x, labels=None):
            if not self.training:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
            return super().forward(x, labels)

    trainer, _ = build("hftrainer", "plain", tmp_path, trainer={"model": EatsInEvaluation()}, **settings, **EVALUATED)
    with pytest.raises(InvalidArgument, match="reduce per_device_eval_batch_size=8"):
        trainer.train()
    trainer, _ = build("hftrainer", "plain", tmp_path, trainer={"model": greedy(limit=0)})
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()


def test_emptied_caches(tmp_path, monkeypatch):
    emptied = []
    monkeypatch.setattr("hftrainer.devices.empty_cache", lambda: emptied.append(1))
    compare(tmp_path, "plain", torch_empty_cache_steps=3, max_steps=7)
    assert len(emptied) == 3  # before steps 1, 4 and 7


def test_liger_kernel(tmp_path, monkeypatch):
    trainer, _ = build("hftrainer", "llama", tmp_path, use_liger_kernel=True, max_steps=1)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    with pytest.raises(MissingPackage, match="pip install liger-kernel"):
        trainer.train()
    stand_in, applied = types.ModuleType("liger_kernel.transformers"), []
    stand_in._apply_liger_kernel_to_instance = lambda model, **config: applied.append((model, config))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", stand_in)
    trainer.args.liger_kernel_config = {"rope": False}
    trainer.train()
    assert applied == [(trainer.model, {"rope": False})]
    adapted, _ = build("hftrainer", "peft", tmp_path, use_liger_kernel=True, max_steps=1)
    adapted.train()
    assert applied[-1] == (adapted.model.get_base_model(), {})


def test_tf32(tmp_path, monkeypatch):
    make = lambda value: build("hftrainer", "plain", tmp_path, tf32=value)  # noqa: E731
    with pytest.raises(InvalidArgument, match="tf32=True needs an NVIDIA GPU"):
        make(True)
    make(False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    from hftrainer.model_changes import set_tf32

    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for value in (True, False):
            set_tf32(value)
            assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is value
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


class Remembers(Plain):
    """Gets its own output back as `mems`, as XLNet does."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x, labels=None, mems=None):
        self.seen.append(None if mems is None else float(mems.detach().sum()))
        outputs = super().forward(x, labels)
        state = outputs["logits"].detach()
        return (outputs["loss"], state) if labels is not None else (state, state)


def test_past_index(tmp_path):
    """As documented until v4.57: an output of each step goes into the next, and begins anew with each epoch."""
    model = Remembers()
    given = {"model": model, "train_dataset": plain_data(8), "eval_dataset": plain_data(16)}
    trainer, _ = build("hftrainer", "plain", tmp_path, trainer=given, past_index=1, logging_steps=1)
    trainer.train()
    first = model.seen[:4]
    assert first[0] is None and first[2] is None  # two epochs of two steps
    assert first[1] is not None and first[3] is not None
    model.seen.clear()
    trainer.evaluate()
    assert model.seen[0] is None and model.seen[1] is not None
    plain, _ = build("hftrainer", "plain", tmp_path, trainer={**given, "model": Remembers()})
    plain.train()
    assert set(plain.model.seen) == {None}


def test_tokens_per_second(tmp_path):
    """As v4.48 reports it: at the end of training, of all input tokens."""
    trainer, _ = build("hftrainer", "llama", tmp_path, include_tokens_per_second=True, max_steps=3)
    metrics = trainer.train().metrics
    assert metrics["train_tokens_per_second"] == pytest.approx(3 * 4 * 12 / metrics["train_runtime"], rel=0.05)
    assert "train_tokens_per_second" not in build("hftrainer", "llama", tmp_path, max_steps=3)[0].train().metrics


def test_speed_and_flos(tmp_path):
    ours, theirs = compare(tmp_path, "bert", gradient_accumulation_steps=3)
    assert ours.logs[-1]["total_flos"] == theirs.logs[-1]["total_flos"] > 0


class Dirty(Plain):
    """Its loss is not a number at some steps."""

    calls = 0

    def forward(self, x, labels=None):
        outputs = super().forward(x, labels)
        self.calls += self.training
        return {**outputs, "loss": outputs["loss"] * (float("nan") if self.calls in (3, 5) else 1.0)}


def test_warning_of_a_loss_that_is_no_number(tmp_path, caplog):
    trainer, _ = build("hftrainer", "plain", tmp_path, trainer={"model": Dirty()}, max_steps=6)
    with caplog.at_level(logging.WARNING, logger="hftrainer"):
        trainer.train()
    said = [message for message in caplog.messages if "The loss is nan at optimizer step 3" in message]
    assert len(said) == 1
    assert "learning_rate" in said[0] and "underflow_overflow" in said[0]
    assert not [message for message in caplog.messages if "step 5" in message]


# ---- Several losses --------------------------------------------------------------------------------------------------


class TwoLosses(Plain):
    """Returns its loss in parts."""

    def __init__(self, with_total=True):
        super().__init__()
        self.with_total = with_total

    def forward(self, x, labels=None):
        outputs = super().forward(x, labels)
        size = outputs["logits"].square().mean()
        total = {"loss": outputs["loss"] + size} if self.with_total else {}
        return {"loss": {"entropy": outputs["loss"], "size": size, **total}, "logits": outputs["logits"]}


@pytest.mark.parametrize("where", ["model", "model without a total", "compute_loss"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_several_losses(tmp_path, where, accumulation):
    torch.manual_seed(1)
    model = Plain() if where == "compute_loss" else TwoLosses(with_total=where == "model")

    class InParts(hftrainer.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            size = outputs["logits"].square().mean()
            loss = {"entropy": outputs["loss"], "size": size}
            return (loss, outputs) if return_outputs else loss

    class Summed(hftrainer.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            loss = outputs["loss"] + outputs["logits"].square().mean()
            return (loss, outputs) if return_outputs else loss

    settings = {"gradient_accumulation_steps": accumulation, "logging_steps": 2, **EVALUATED}
    kind = InParts if where == "compute_loss" else hftrainer.Trainer
    parts = train(
        "hftrainer", "plain", tmp_path / "a", trainer={"model": model}, trainer_class=lambda _: kind, **settings
    )
    torch.manual_seed(1)
    whole = train(
        "hftrainer", "plain", tmp_path / "b", trainer={"model": Plain()}, trainer_class=lambda _: Summed, **settings
    )
    assert_same_weights({name.removeprefix("inner."): value for name, value in parts.weights.items()}, whole.weights)
    for ours, theirs in zip(parts.logs, whole.logs, strict=True):
        if "learning_rate" in ours:
            assert ours["loss"] == theirs["loss"]
            assert ours["entropy"] + ours["size"] == pytest.approx(ours["loss"], rel=1e-5)
        if "eval_loss" in ours:
            assert ours["eval_loss"] == theirs["eval_loss"]


def test_log_metric(tmp_path):
    """The mean over all steps since the last log line; nothing is read in between."""

    class Own(hftrainer.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            step = self.state.global_step
            self.log_metric("twice", 2.0 * step)
            self.log_metric("tensor", torch.tensor(float(step), requires_grad=True) + 1)
            if step == 2:
                self.log_metric("seldom", 7)
            return (loss, outputs) if return_outputs else loss

    settings = {"max_steps": 6, "logging_steps": 3}
    ours = train("hftrainer", "plain", tmp_path / "a", trainer_class=lambda _: Own, **settings)
    lines = [line for line in ours.logs if "learning_rate" in line]
    assert [line["twice"] for line in lines] == [2.0, 8.0]
    assert [line["tensor"] for line in lines] == [2.0, 5.0]
    assert [line.get("seldom") for line in lines] == [7.0, None]
    plain = train("hftrainer", "plain", tmp_path / "b", **settings)
    assert [line["loss"] for line in lines] == [line["loss"] for line in plain.logs if "learning_rate" in line]


def test_no_further_transfer(tmp_path, monkeypatch):
    """One read of the device per log line, however many numbers it has."""
    reads = []
    original = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(self.shape) or original(self))
    trainer, _ = build("hftrainer", "plain", tmp_path, trainer={"model": TwoLosses()}, max_steps=4, logging_steps=2)
    trainer.train()
    assert [shape for shape in reads if shape == (3,)] == [(3,), (3,)]


# ---- Seeds and samplers ----------------------------------------------------------------------------------------------


class Draws(torch.utils.data.Dataset):
    """Each sample says which random numbers its worker draws."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        import random

        import numpy as np

        drawn = torch.tensor([random.random(), np.random.rand(), float(torch.rand(()))])
        return {"x": torch.cat([drawn, torch.zeros(5)]).float(), "labels": torch.tensor(index % 3)}


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_are_seeded_alike(tmp_path, workers):
    compare(tmp_path, "plain", trainer={"train_dataset": Draws()}, dataloader_num_workers=workers)


def with_samplers(signature):
    def own(library):
        class Own(library.Trainer):
            if signature == "old":

                def _get_train_sampler(self):
                    return torch.utils.data.SequentialSampler(self.train_dataset)

            else:

                def _get_train_sampler(self, train_dataset=None):
                    return torch.utils.data.SequentialSampler(train_dataset)

            def _get_eval_sampler(self, eval_dataset):
                order = torch.Generator().manual_seed(3)
                return torch.utils.data.SubsetRandomSampler(range(len(eval_dataset)), order)

        return Own

    return own


@pytest.mark.parametrize("signature", ["old", "new"])
def test_samplers_of_ones_own(tmp_path, signature):
    if signature == "old":  # transformers 5.23 calls it with the dataset only
        ours = train("hftrainer", "plain", tmp_path, trainer_class=with_samplers("old"), **EVALUATED)
        new = train("hftrainer", "plain", tmp_path / "new", trainer_class=with_samplers("new"), **EVALUATED)
        assert_same_weights(ours.weights, new.weights)
        return
    compare(tmp_path, "plain", trainer_class=with_samplers("new"), trainer={"compute_metrics": accuracy}, **EVALUATED)


# ---- What a review found ---------------------------------------------------------------------------------------------


def found_and_started(tmp_path, prepare=lambda trainer: None, model=None, **settings):
    """A run that memory drove from 8 samples to 4, and one that began there."""
    outcomes = []
    for name, size, limit in (("found", 8, {"at_call": settings.pop("at", 4)}), ("started", 4, {"limit": 99})):
        found = name == "found"
        given = {"model": (model or greedy)(**limit) if model is None else model(found)}
        trainer, recorder = build(
            "hftrainer",
            "plain",
            tmp_path / name,
            per_device_train_batch_size=size,
            auto_find_batch_size=found,
            trainer={**given, **settings.get("trainer", {})},
            **{key: value for key, value in settings.items() if key != "trainer"},
        )
        prepare(trainer)
        trainer.train()
        outcomes.append((trainer, record(trainer, recorder, tmp_path / name)))
    (found, ours), (started, expected) = outcomes
    assert_same_weights(ours.weights, expected.weights)
    assert ours.logs == expected.logs
    return found, started


def test_found_with_layer_wise_optimizers(tmp_path):
    """The hooks of the failed attempt's optimizers step no more."""
    settings = {"optim": "galore_adamw_layerwise", "optim_target_modules": ["layers.0", "layers.4"]}
    found_and_started(tmp_path, optim_args="rank=2", max_steps=6, **settings)


def test_found_with_fp16(tmp_path):
    def with_a_large_scale(trainer):
        trainer.accelerator.scaler = trainer._hftrainer.engine.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)

    found, started = found_and_started(tmp_path, with_a_large_scale, fp16=True, max_steps=12, logging_steps=1, at=6)
    assert found.accelerator.scaler.state_dict() == started.accelerator.scaler.state_dict()


def test_memory_that_runs_out_in_the_optimizer(tmp_path):
    class Boom(torch.optim.SGD):
        failed = False

        def step(self, closure=None):
            if not Boom.failed:
                Boom.failed = True
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
            return super().step(closure)

    model = greedy(limit=99)
    given = {"model": model, "optimizers": (Boom(model.parameters(), lr=0.1), None)}
    settings = {"fp16": True, "max_steps": 4, "auto_find_batch_size": True}
    trainer, _ = build("hftrainer", "plain", tmp_path, trainer=given, **settings)
    assert trainer.train().global_step == 4
    assert trainer._train_batch_size == 2


def test_found_with_buffers_and_quantized_weights(tmp_path):
    """Buffers that no checkpoint has come back too; frozen weights that cannot be loaded stay."""

    class Buffered(Greedy):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.register_buffer("seen", torch.zeros(()), persistent=False)
            self.frozen = nn.Linear(8, 8)
            self.frozen.requires_grad_(False)

        def state_dict(self, *args, **kwargs):
            state = super().state_dict(*args, **kwargs)
            return {**state, "frozen.weight.quant_map": torch.zeros(2)} if self.calls else state

        def forward(self, x, labels=None):
            self.seen = self.seen + self.training
            outputs = super().forward(self.frozen(x), labels)
            return {**outputs, "loss": outputs["loss"] * self.seen}

    def make(found):
        torch.manual_seed(1)
        return Buffered(**({"at_call": 4} if found else {"limit": 99}))

    found_and_started(tmp_path, model=make, max_steps=6)


def test_found_counts_and_lengths(tmp_path):
    """FLOs, the log of metrics, and the groups of lengths begin anew; the failed attempt's checkpoints go."""
    from datasets import Dataset

    rows = plain_data(38)
    data = Dataset.from_dict(
        {
            "x": [row["x"].tolist() for row in rows],
            "labels": [int(row["labels"]) for row in rows],
            "length": [i % 11 for i in range(38)],
        }
    )
    settings = {"train_sampling_strategy": "group_by_length", "max_steps": 8, "save_strategy": "steps", "save_steps": 3}
    found, started = found_and_started(tmp_path, at=5, trainer={"train_dataset": data}, logging_steps=2, **settings)
    assert found.state.total_flos == started.state.total_flos
    names = [sorted(path.name for path in (tmp_path / run).glob("checkpoint-*")) for run in ("found", "started")]
    assert names[0] == names[1] == ["checkpoint-3", "checkpoint-6", "checkpoint-8"]


def test_found_after_resuming(tmp_path):
    """Halved once more after a resume: the checkpoint says so."""
    settings = {
        "auto_find_batch_size": True,
        "per_device_train_batch_size": 8,
        "save_strategy": "steps",
        "save_steps": 1,
    }
    first, _ = build("hftrainer", "plain", tmp_path, trainer={"model": greedy(limit=99)}, max_steps=2, **settings)
    first.train()
    second, _ = build("hftrainer", "plain", tmp_path, trainer={"model": greedy(limit=4)}, max_steps=4, **settings)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    state = hftrainer.TrainerState.load_from_json(str(tmp_path / "checkpoint-4" / "trainer_state.json"))
    assert state.train_batch_size == second._train_batch_size == 4


def test_the_failed_attempt_is_let_go(tmp_path):
    """Its optimizer is gone when the smaller batch is tried."""
    made, alive = [], []

    class Watches(hftrainer.Trainer):
        def create_optimizer(self, model=None):
            optimizer = super().create_optimizer(model)
            if not made or made[-1]() is not optimizer:
                made.append(weakref.ref(optimizer))
            return optimizer

        def compute_loss(self, model, inputs, *args, **kwargs):
            if len(made) == 2:
                alive.append(made[0]() is not None)
            return super().compute_loss(model, inputs, *args, **kwargs)

    trainer, _ = build(
        "hftrainer",
        "plain",
        tmp_path,
        trainer={"model": greedy(at_call=4)},
        trainer_class=lambda _: Watches,
        auto_find_batch_size=True,
        max_steps=4,
    )
    trainer.train()
    assert alive and not any(alive)


def test_lomo_cannot_start_again(tmp_path):
    trainer, _ = build("hftrainer", "llama", tmp_path, optim="lomo", auto_find_batch_size=True)
    with pytest.raises(InvalidArgument, match="optim='lomo' leaves hooks"):
        trainer.train()


def test_log_metric_is_about_training(tmp_path):
    """Values of an evaluation, and of a run before, are no part of the mean."""

    class Own(hftrainer.Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            self.log_metric("training", float(model.training))
            self.log_metric("size", len(inputs["x"]))
            return super().compute_loss(model, inputs, *args, **kwargs)

    settings = {"max_steps": 5, "logging_steps": 2, **EVALUATED}
    trainer, _ = build("hftrainer", "plain", tmp_path, trainer_class=lambda _: Own, **settings)
    trainer.evaluate()
    for _ in range(2):
        trainer.train()
        lines = [line for line in trainer.state.log_history if "learning_rate" in line]
        assert [(line["training"], line["size"]) for line in lines] == [(1.0, 4.0)] * 2


@pytest.mark.parametrize("wrong", ["loss", "metric"])
def test_what_cannot_be_logged(tmp_path, wrong):
    class Own(hftrainer.Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            loss, outputs = super().compute_loss(model, inputs, True)
            if wrong == "metric":
                self.log_metric("logits", outputs["logits"])
            return {"loss": loss, "aux": None, "logits": outputs["logits"]}

    trainer, _ = build("hftrainer", "plain", tmp_path, trainer_class=lambda _: Own, max_steps=1)
    with pytest.raises(InvalidArgument, match=r"'logits' cannot be logged: it is a tensor of shape \(4, 3\)"):
        trainer.train()


def test_greedy_scheduler_of_transformers(tmp_path):
    """Given as an object, which is no scheduler of torch's."""
    runs = []
    for name in ("hftrainer", "transformers"):
        torch.manual_seed(1)
        model = Plain()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = importlib.import_module("transformers.optimization").GreedyLR(optimizer, patience=0)
        given = {"model": model, "optimizers": (optimizer, schedule)}
        settings = {"max_steps": 8, "metric_for_best_model": "loss", "logging_steps": 1, **EVALUATED}
        runs.append(train(name, "plain", tmp_path / name, trainer=given, **settings))
    assert_same(*runs)
