"""Habits from Lightning, and misspelt names that neither library checks, get a message with the name that works."""

import functools
import re

import lightning.pytorch as pl
import pytest
import torch
import transformers
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from hftrainer import Seq2SeqTrainingArguments, Trainer, TrainerCallback, TrainingArguments
from hftrainer.errors import UnknownArgument, WrongObject
from tests.support.small_models import make_plain, plain_data


def test_lightning_methods_and_keywords_get_a_hint(make_args):
    trainer = Trainer(make_plain(), make_args())
    with pytest.raises(AttributeError, match=r"Trainer has no method 'fit'.*: call train\(\)"):
        trainer.fit()
    assert not hasattr(trainer, "fit")
    with pytest.raises(UnknownArgument, match=r"train\(\) has no argument 'ckpt_path'.*'resume_from_checkpoint'\?"):
        trainer.train(ckpt_path="last.ckpt")
    with pytest.raises(UnknownArgument, match="'max_epochs'; did you mean 'num_train_epochs' of TrainingArguments"):
        trainer.train(max_epochs=1)
    with pytest.raises(UnknownArgument, match=r"no argument 'resume'; did you mean 'resume_from_checkpoint'\?"):
        trainer.train(resume="last")


@pytest.mark.parametrize(
    ("hook", "parameters"),
    [
        ("on_train_start", "trainer, pl_module"),
        ("on_train_batch_end", "trainer, pl_module, outputs, batch, batch_idx"),
        ("on_validation_end", "trainer, pl_module"),
    ],
)
def test_lightning_hook_with_wrong_parameters_is_named(make_args, hook, parameters):
    def handle(self):
        raise AssertionError

    handle.__qualname__ = f"Own.{hook}"
    own = type("Own", (pl.Callback,), {hook: handle})
    args, data = make_args(max_steps=1, eval_strategy="steps", eval_steps=1), plain_data()
    trainer = Trainer(make_plain(), args, train_dataset=data, eval_dataset=data, callbacks=[own()])
    for run in (trainer.evaluate if "validation" in hook else trainer.train, trainer.train):
        with pytest.raises(TypeError, match="positional argument") as caught:
            run()
        assert f"Own.{hook} is called with ({parameters}), but takes ()." in caught.value.__notes__


def test_type_error_raised_in_a_hook_gets_no_hint(make_args):
    class Own(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            raise TypeError("on_train_start() is mine")

    with pytest.raises(TypeError, match="mine") as caught:
        Trainer(make_plain(), make_args(), train_dataset=plain_data(), callbacks=[Own()]).train()
    assert not any("is called with" in note for note in caught.value.__notes__)


def test_missing_attribute_of_lightnings_trainer_keeps_its_message(make_args):
    trainer = Trainer(make_plain(), make_args(max_steps=1), train_dataset=plain_data())
    trainer.train()
    with pytest.raises(AttributeError, match=r"^'Trainer' object has no attribute 'max_epochz'"):
        print(trainer.lightning_trainer.max_epochz)


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("strategy", "ddp", "pass TrainingArguments(..., lightning_config={'strategy': 'ddp'})"),
        ("strategy", "fsdp", "it must be 'auto' or 'ddp'. For sharding, set the argument fsdp or deepspeed."),
        ("precision", "bf16-mixed", "lightning_config={'precision': 'bf16-mixed'})"),
        ("devices", 2, "lightning_config={'devices': 2})"),
        ("profiler", "simple", "lightning_config={'profiler': 'simple'})"),
        ("accelerator", "gpu", "use use_cpu=True for the CPU; other devices are found"),
        ("logger", True, "use report_to or Trainer(loggers=[...])"),
        ("datamodule", None, "use its datasets: data.setup('fit'), Trainer(..., train_dataset=data.train)"),
    ],
)
def test_keywords_of_lightnings_trainer_get_a_hint(make_args, name, value, hint):
    for make in (TrainingArguments, functools.partial(Trainer, make_plain(), make_args())):
        with pytest.raises(UnknownArgument, match=f"has no argument {name!r}: .*{re.escape(hint)}"):
            make(**{name: value})


def test_lightning_module_with_a_forward_trains(make_args, caplog):
    class Lit(LightningModule):
        def __init__(self):
            super().__init__()
            self.plain = make_plain()

        def forward(self, x, labels=None):
            return self.plain(x, labels)

        def configure_optimizers(self):
            raise AssertionError

        configure_callbacks = configure_optimizers

    Trainer(Lit(), make_args(), train_dataset=plain_data()).train()
    assert "Lit is a LightningModule, but a Trainer calls only its forward" in caplog.text
    assert "lr_scheduler_type, or Trainer(optimizers=...)\n- configure_callbacks: Trainer(callbacks=" in caplog.text


def test_lightning_module_step_may_serve_as_compute_loss(make_args):
    class Lit(LightningModule):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(8, 3)

        def training_step(self, batch, _):
            return torch.nn.functional.cross_entropy(self.linear(batch["x"]), batch["labels"])

    class OwnLoss(Trainer):
        def compute_loss(self, model, inputs, **_):
            return model.training_step(inputs, 0)

    args = make_args(remove_unused_columns=False)
    assert OwnLoss(Lit(), args, train_dataset=plain_data()).train().global_step == args.max_steps


def test_lightning_module_methods_of_a_trainer_are_listed(make_args, caplog):
    class Lit(Trainer):
        def configure_optimizers(self):
            raise AssertionError

        validation_step = on_train_epoch_end = on_fit_start = configure_optimizers
        # A script's own names, and what its own code calls.
        on_generation_start = on_fit_end = on_train_end = on_train_start = test_step = val_dataloader = id
        predict_dataloader = None
        # Misspelt, and again a script's own.
        comput_loss = get_train_dataloder = _compute_loss = compute_loss_fn = compute_loss_2 = evaluate_all = id

        @torch.no_grad()
        def on_demand(self):
            self.on_fit_end()
            return lambda: self.on_train_end()

        @property
        def loader(self):
            return self.val_dataloader()

        @functools.cached_property
        def step(self):
            return [getattr(self, name) for name in ("on_train_start", "test_step")]

        def train_dataloader(self):
            return super().get_train_dataloader()

        def get_train_dataloader(self):
            return self.train_dataloader()

    Lit(make_plain(), make_args(), train_dataset=plain_data()).train()
    (listed,) = (each.getMessage() for each in caplog.records if "never calls" in each.getMessage())
    first, *lines = listed.split("\n")
    assert first == "Lit has methods that a Trainer never calls. Replacements:"
    names = ["comput_loss: did you mean compute_loss?", "configure_optimizers: create_op"]
    names += ["get_train_dataloder: did you mean get_train_dataloader?", "on_fit_start: a callback, "]
    names += ["on_train_epoch_end", "validation_step"]
    assert all(line.startswith(f"- {name}") for line, name in zip(lines, names, strict=True))


def test_training_step_with_batch_idx_is_refused(make_args):
    class Lit(Trainer):
        def training_step(self, batch, batch_idx):
            raise AssertionError

    with pytest.raises(WrongObject, match=r"Lit\.training_step takes batch_idx.*Override compute_loss\(self, model"):
        Lit(make_plain(), make_args())


@pytest.mark.parametrize(
    "step",
    [
        lambda self, model, inputs, batch_idx=None: Trainer.training_step(self, model, inputs, batch_idx),
        lambda self, model, inputs, number=None, batch_idx=0: Trainer.training_step(self, model, inputs, number),
    ],
    ids=["in place of num_items_in_batch", "after it"],
)
def test_training_step_with_optional_batch_idx_is_accepted(make_args, step):
    kind = type("Own", (Trainer,), {"training_step": step})
    assert kind(make_plain(), make_args(), train_dataset=plain_data()).train().global_step == 2


@pytest.mark.parametrize(
    ("base", "name", "meant"),
    [
        (TrainerCallback, "on_train_epoch_ends", "on_epoch_end"),
        (TrainerCallback, "on_epoch_finish", "on_epoch_end"),
        (TrainerCallback, "on_train_start", "on_train_begin"),
        (TrainerCallback, "on_validation_end", "on_evaluate"),
        (TrainerCallback, "on_fire", None),
        (transformers.TrainerCallback, "on_step_ends", "on_step_end"),
        (transformers.TrainerCallback, "on_fire", None),
        (pl.Callback, "on_train_epoch_ends", "on_train_epoch_end"),
        (pl.Callback, "on_train_begin", "on_train_start"),
        (pl.Callback, "on_step_begin", "on_train_batch_start"),
        (pl.Callback, "on_train_start", None),
    ],
)
def test_misspelt_callback_event_is_named(make_args, caplog, base, name, meant):
    Trainer(make_plain(), make_args(), callbacks=[type("Own", (base,), {name: lambda *_, **__: None})])
    found = [each.getMessage() for each in caplog.records if "never called" in each.getMessage()]
    assert found == ([f"Own.{name} is never called; did you mean {meant}?"] if meant else [])


def test_event_method_that_the_callback_calls_is_accepted(make_args, caplog):
    class Own(TrainerCallback):
        def on_save(self, *args, **kwargs):
            self.on_save_checkpoint()

        def on_save_checkpoint(self):
            raise AssertionError

    Trainer(make_plain(), make_args(), callbacks=[Own])
    assert "never called" not in caplog.text


@pytest.mark.parametrize("make_callback", [EarlyStopping, functools.partial(ModelCheckpoint, dirpath="saved")])
def test_val_loss_monitor_suggests_eval_loss(make_args, caplog, monkeypatch, tmp_path, make_callback):
    monkeypatch.chdir(tmp_path)

    def train(monitor, **settings):
        callbacks = [make_callback(monitor=monitor)]
        data = {"train_dataset": plain_data(), "eval_dataset": plain_data(8)}
        Trainer(make_plain(), make_args(**settings), callbacks=callbacks, **data).train()

    train("eval_loss", eval_strategy="steps", eval_steps=2)
    assert "monitor" not in caplog.text
    with pytest.raises(Exception, match="val_loss"):
        train("val_loss", eval_strategy="steps", eval_steps=2)
    name = getattr(make_callback, "func", make_callback).__name__
    assert f"{name}(monitor='val_loss'): the metrics" in caplog.text and "did you mean 'eval_loss'?" in caplog.text


@pytest.mark.parametrize("kind", [TrainingArguments, Seq2SeqTrainingArguments, type("Own", (TrainingArguments,), {})])
def test_misspelt_attribute_of_arguments_is_named(tmp_path, caplog, kind):
    args = kind(str(tmp_path), use_cpu=True)
    args.lerning_rate, args.max_step = 1e-3, 1
    # A script's own names.
    args.learning_rate_of_head, args.my_epochs, args._max_step, args.warmup_ratio = 1e-3, 1, 1, 0.1
    Trainer(make_plain(), args)
    found = [each.getMessage() for each in caplog.records if "is no argument" in each.getMessage()]
    meant = {"lerning_rate": "learning_rate", "max_step": "max_steps"} if kind.__name__ != "Own" else {}
    assert found == [f"args.{it} is no argument, and has no effect; did you mean args.{meant[it]}?" for it in meant]
