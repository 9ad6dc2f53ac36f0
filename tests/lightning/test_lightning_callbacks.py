"""Lightning callbacks in the `callbacks` list, next to those of Hugging Face."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, Timer

from hftrainer import Trainer, TrainerCallback, TrainingArguments
from tests.support.tiny import make_plain, plain_data


class Recorder(Callback):
    """Writes down every hook of Lightning."""

    def __init__(self):
        self.hooks = []


class HFRecorder(TrainerCallback):
    def __init__(self, hooks):
        self.hooks = hooks

    def on_step_begin(self, args, state, control, **kwargs):
        self.hooks.append("hf:on_step_begin")

    def on_step_end(self, args, state, control, **kwargs):
        self.hooks.append("hf:on_step_end")

    def on_evaluate(self, args, state, control, **kwargs):
        self.hooks.append("hf:on_evaluate")


def _note(name):
    def hook(self, trainer, pl_module, *args, **kwargs):
        self.hooks.append(name)

    return hook


HOOKS = [name for name in vars(Callback) if name.startswith("on_") and "checkpoint" not in name] + ["setup", "teardown"]
for _name in HOOKS:
    setattr(Recorder, _name, _note(_name))


def make_trainer(tmp_path, callbacks, **settings):
    defaults = {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "use_cpu": True,
    }
    args = TrainingArguments(str(tmp_path), **{**defaults, **settings})
    data = plain_data()
    return Trainer(make_plain(), args, train_dataset=data, eval_dataset=data[:9], callbacks=callbacks)


def test_both_kinds_see_fit_and_validation(tmp_path):
    recorder = Recorder()
    make_trainer(tmp_path, [HFRecorder(recorder.hooks), recorder]).train()
    hooks = recorder.hooks
    expected = ["setup", "on_fit_start", "on_train_start", "on_train_epoch_start"]
    assert [hook for hook in hooks if not hook.startswith("hf:")][:4] == expected
    assert hooks.count("on_train_batch_start") == hooks.count("on_train_batch_end") == 4
    assert hooks.count("hf:on_step_begin") == hooks.count("hf:on_step_end") == 4
    assert hooks.count("on_validation_epoch_end") == hooks.count("hf:on_evaluate") == 2
    assert hooks.count("on_validation_batch_end") == 4
    assert hooks[-1] == "teardown"
    step = hooks[hooks.index("on_train_batch_start") : hooks.index("on_train_batch_end")]
    assert step == [
        "on_train_batch_start",
        "hf:on_step_begin",
        "on_before_zero_grad",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
    ]
    validation = hooks.index("on_validation_start")
    assert hooks.index("hf:on_step_end", hooks.index("hf:on_step_end") + 1) < validation < hooks.index("hf:on_evaluate")


def test_batches_are_the_inputs(tmp_path):
    """A Lightning callback gets the batch that the model gets, and the loss."""
    seen = []

    class Looks(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            seen.append((sorted(batch), float(outputs["loss"]), batch_idx, trainer.global_step))
            assert isinstance(pl_module.model, torch.nn.Module)
            assert trainer.optimizers[0].param_groups

    make_trainer(tmp_path, [Looks]).train()
    assert [(batch, step) for batch, _, _, step in seen] == [(["labels", "x"], step) for step in (1, 2, 3, 4)]
    assert all(loss > 0 for _, loss, _, _ in seen)


def test_early_stopping(tmp_path):
    stopper = EarlyStopping(monitor="eval_loss", patience=1, min_delta=10.0)
    trainer = make_trainer(tmp_path, [stopper], max_steps=20)
    assert trainer.train().global_step < 20
    assert stopper.stopped_epoch is not None


def test_model_checkpoint_writes_beside_ours(tmp_path):
    checkpoint = ModelCheckpoint(dirpath=tmp_path / "lightning", monitor="eval_loss", save_top_k=1)
    trainer = make_trainer(tmp_path, [checkpoint], save_strategy="steps", save_steps=2)
    trainer.train()
    assert (tmp_path / "checkpoint-2").is_dir()
    saved = torch.load(checkpoint.best_model_path, weights_only=False)
    assert {name.removeprefix("model.") for name in saved["state_dict"]} == set(trainer.model.state_dict())


def test_add_pop_remove(tmp_path):
    trainer = make_trainer(tmp_path, [])
    first, second = Recorder(), Recorder()
    trainer.add_callback(first)
    trainer.add_callback(second)
    trainer.add_callback(Recorder)
    assert trainer.pop_callback(second) is second
    trainer.remove_callback(Recorder)
    trainer.train()
    assert not first.hooks
    assert not second.hooks
    assert trainer.pop_callback(second) is None
    assert len(trainer._hftrainer.lightning_callbacks) == 1


def test_same_numbers_with_lightning_callbacks(tmp_path):
    without = make_trainer(tmp_path / "a", [])
    without.train()
    with_callbacks = make_trainer(tmp_path / "b", [Recorder(), EarlyStopping("eval_loss", patience=99)])
    with_callbacks.train()
    for ours, other in zip(without.model.parameters(), with_callbacks.model.parameters(), strict=True):
        assert torch.equal(ours, other)


def test_lightning_objects_are_there(tmp_path):
    trainer = make_trainer(tmp_path, [])
    assert trainer.lightning_trainer is None
    trainer.train()
    assert isinstance(trainer.lightning_trainer, pl.Trainer)
    assert isinstance(trainer.lightning_module, pl.LightningModule)
    assert trainer.lightning_module.model is trainer.model
    assert trainer.lightning_trainer.global_step == 4


@pytest.mark.parametrize("accumulation", [1, 3])
def test_counters_after_resuming(tmp_path, accumulation):
    """Lightning's own counters go on from the checkpoint as if there had been no interruption."""
    settings = {
        "max_steps": 9,
        "gradient_accumulation_steps": accumulation,
        "save_strategy": "steps",
        "save_steps": 3,
        "eval_strategy": "no",
    }

    class Counts(Callback):
        def __init__(self):
            self.seen = []

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.seen.append((trainer.current_epoch, batch_idx, trainer.global_step))

    whole, rest = Counts(), Counts()
    make_trainer(tmp_path, [whole], **settings).train()
    make_trainer(tmp_path, [rest], **settings).train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert rest.seen
    assert rest.seen == whole.seen[-len(rest.seen) :]


class Counts(Callback):
    """Counts the optimizer steps that it has seen, and keeps the count."""

    def __init__(self):
        self.count = 0
        self.loaded_before_fit = None

    def on_fit_start(self, trainer, pl_module):
        self.loaded_before_fit = self.count

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]


def test_states_are_in_the_checkpoint(tmp_path):
    """They come back on resume, as in an undisturbed run; without such callbacks there is no file of theirs."""

    def make():
        stopper = EarlyStopping(monitor="eval_loss", patience=50, min_delta=10.0)
        return [Counts(), stopper, Timer(duration={"hours": 1})]

    settings = {"max_steps": 8, "save_strategy": "steps", "save_steps": 2}
    whole = make_trainer(tmp_path / "a", make(), **settings)
    whole.train()
    resumed = make_trainer(tmp_path / "b", make(), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-4"))
    counts, stopper, timer = resumed._hftrainer.lightning_callbacks
    assert (counts.loaded_before_fit, counts.count) == (4, 8)
    assert stopper.wait_count == whole._hftrainer.lightning_callbacks[1].wait_count == 3
    assert stopper.best_score == whole._hftrainer.lightning_callbacks[1].best_score
    saved = torch.load(tmp_path / "a" / "checkpoint-4" / "lightning_callbacks.pt", weights_only=True)
    assert timer.time_elapsed("train") > saved["callbacks"]["Timer"]["time_elapsed"]["train"]
    plain = make_trainer(tmp_path / "c", [], **settings)
    plain.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-4"))
    assert not (tmp_path / "c" / "checkpoint-8" / "lightning_callbacks.pt").exists()
    only = make_trainer(tmp_path / "d", make(), save_only_model=True, **settings)
    only.train()
    assert not (tmp_path / "d" / "checkpoint-8" / "lightning_callbacks.pt").exists()
