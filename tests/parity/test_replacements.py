"""What replaced methods do to a run: the same as under transformers."""

import contextlib
from functools import partial

import pytest
import torch

from tests.support.parity import alike, build, record, train

EVERY_STEP = {"eval_strategy": "steps", "eval_steps": 2, "logging_steps": 1}


def train_both(tmp_path, change, model="plain", **settings):
    """Our run with a Trainer that `change` has changed; that of transformers is the same."""

    def run(name):
        trainer, recorder = build(name, model, tmp_path / name, **settings)
        with change(trainer) or contextlib.nullcontext():
            output = trainer.train()
        return record(trainer, recorder, tmp_path / name, loss=output.training_loss)

    return alike(run)


def plain_optimizer_step(trainer):
    """A function on the optimizer itself, which is no method of it."""
    step = trainer.create_optimizer().step
    trainer.optimizer.step = lambda closure=None: (step(), step())[1]


def doubled(trainer):
    """As a library does that scales the loss for itself."""
    original = trainer.accelerator.backward
    trainer.accelerator.backward = lambda loss, **kwargs: original(loss * 2, **kwargs)


@contextlib.contextmanager
def noisy_step(trainer):
    """`Trainer.training_step = f` on the class itself."""
    kind = type(trainer)
    original = kind.training_step

    def training_step(self, *args, **kwargs):
        loss = original(self, *args, **kwargs)
        for parameter in self.model.parameters():
            parameter.grad.add_(0.01)
        return loss

    kind.training_step = training_step
    try:
        yield
    finally:
        kind.training_step = original


def fused(trainer):
    """As libraries do that run backward within the forward pass: nothing is left for the accelerator."""
    original = trainer.compute_loss

    def compute_loss(model, inputs, return_outputs=False, num_items_in_batch=None):
        found = original(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        if not return_outputs:
            (found * 3).backward()
        return found

    trainer.compute_loss = compute_loss
    trainer.accelerator.backward = lambda loss: None


def other_norm(trainer):
    trainer.accelerator.clip_grad_norm_ = lambda parameters, max_norm, norm_type=2: torch.nn.utils.clip_grad_norm_(
        list(parameters), max_norm / 10, norm_type=1
    )


def half_context(name, trainer):
    """The loss in bfloat16, by the context that is around it."""
    setattr(trainer, name, lambda *args, **kwargs: torch.autocast("cpu", dtype=torch.bfloat16))


def rows_of_last_process(trainer):
    trainer.accelerator.gather_for_metrics = lambda data, *args, **kwargs: data[:1]


def wrapped_forward(trainer):
    """`_wrap_model` on the instance, as it was replaced to wrap a model in one's own module."""

    class Scaled(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, **inputs):
            outputs = self.module(**inputs)
            return {**outputs, "loss": outputs["loss"] * 3}

    def wrap(model, training=True, dataloader=None):
        return Scaled(model) if training and not isinstance(model, Scaled) else model

    trainer._wrap_model = wrap


CHANGES = {
    "accelerator.backward": doubled,
    "accelerator.backward that does nothing": fused,
    "Trainer.training_step": noisy_step,
    "accelerator.clip_grad_norm_": other_norm,
    "autocast_smart_context_manager": partial(half_context, "autocast_smart_context_manager"),
    "compute_loss_context_manager": partial(half_context, "compute_loss_context_manager"),
    "accelerator.gather_for_metrics": rows_of_last_process,
    "_wrap_model": wrapped_forward,
    "optimizer.step": plain_optimizer_step,
}


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("change", CHANGES)
def test_replacement_changes_the_run_alike(tmp_path, change, accumulation):
    settings = {**EVERY_STEP, "gradient_accumulation_steps": accumulation}
    ours = train_both(tmp_path, CHANGES[change], **settings)
    unchanged = train("hftrainer", "plain", tmp_path / "unchanged", **settings)
    assert ours.logs != unchanged.logs


@pytest.mark.parametrize("step", [0, 3])
def test_backward_that_a_callback_replaces(tmp_path, step):
    """In the middle of a run too; it is called from the next optimizer step on."""

    def change(trainer):
        class Replace(type(trainer.callback_handler.callbacks[0]).__mro__[1]):
            def on_train_begin(self, args, state, control, **kwargs):
                if step == 0:
                    doubled(trainer)

            def on_step_end(self, args, state, control, **kwargs):
                if state.global_step == step:
                    doubled(trainer)

        trainer.add_callback(Replace())

    ours = train_both(tmp_path, change, gradient_accumulation_steps=2, **EVERY_STEP)
    assert ours.logs != train("hftrainer", "plain", tmp_path / "unchanged", **EVERY_STEP).logs


def test_lightning_counts_steps_when_backward_is_replaced_within_a_run(tmp_path):
    """Lightning's counters go on, for its callbacks."""
    from lightning.pytorch.callbacks import Callback

    seen = []

    class Count(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            seen.append((trainer.global_step, module.automatic_optimization))

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.global_step == 2:
                doubled(made)

    made, _ = build("hftrainer", "plain", tmp_path, trainer={"callbacks": [Count()]}, max_steps=4, logging_steps=1)
    made.train()
    assert seen == [(1, True), (2, True), (3, False), (4, False)]


def test_optimizer_that_prepare_replaces(tmp_path):
    """`accelerator.prepare` may return another optimizer: the run steps that one."""

    def change(trainer):
        original = trainer.accelerator.prepare

        def prepare(*objects):
            prepared = original(*objects)
            if not isinstance(prepared, tuple):
                return prepared
            model, _ = prepared
            return model, torch.optim.SGD(model.parameters(), lr=0.3)

        trainer.accelerator.prepare = prepare

    ours = train_both(tmp_path, change, **EVERY_STEP, lr_scheduler_type="constant", warmup_steps=0)
    plain = train("hftrainer", "plain", tmp_path / "plain", **EVERY_STEP, lr_scheduler_type="constant", warmup_steps=0)
    assert ours.logs != plain.logs


class Closing(torch.optim.SGD):
    """As sharpness-aware optimizers do: steps twice when it is given a closure, whose parameter has no default."""

    given: list = []

    def step(self, closure):
        self.given.append(closure)
        super().step()
        if closure is not None:
            with torch.enable_grad():
                closure()
            super().step()


@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 3}, {"bf16": True}])
@pytest.mark.parametrize("change", [lambda trainer: None, doubled], ids=["automatic", "manual"])
def test_optimizer_that_runs_a_closure_is_given_none(tmp_path, settings, change):
    Closing.given.clear()
    train_both(tmp_path, change, trainer={"optimizer_cls_and_kwargs": (Closing, {"lr": 0.1})}, **settings)
    assert Closing.given and set(Closing.given) == {None}


def test_optimizer_that_needs_a_closure_fails_alike(tmp_path):
    for name in ("hftrainer", "transformers"):
        wanted = (torch.optim.LBFGS, {"lr": 0.1})
        trainer, _ = build(name, "plain", tmp_path / name, trainer={"optimizer_cls_and_kwargs": wanted}, weight_decay=0)
        trainer.create_optimizer = partial(set_lbfgs, trainer)
        with pytest.raises(TypeError, match="'NoneType' object is not callable"):
            trainer.train()


def set_lbfgs(trainer, model=None):
    trainer.optimizer = torch.optim.LBFGS(trainer.model.parameters())
    return trainer.optimizer


class Batch:
    """A batch that is an object: neither a mapping nor sized."""

    def __init__(self, samples):
        self.x = torch.stack([sample["x"] for sample in samples])
        self.labels = torch.stack([sample["labels"] for sample in samples])


def with_objects(library):
    class Own(library.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(inputs.x, inputs.labels)
            return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

        def _prepare_inputs(self, inputs):
            return inputs

        def floating_point_ops(self, inputs):
            return 0

        def _get_num_items_in_batch(self, batch_samples, device):
            return None

        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            with torch.no_grad():
                loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
            return loss, outputs["logits"], inputs.labels

    return Own


def test_batches_that_are_objects(tmp_path):
    settings = {**EVERY_STEP, "remove_unused_columns": False, "trainer": {"data_collator": Batch}}
    train_both(tmp_path, lambda trainer: None, trainer_class=with_objects, **settings)


def with_plain_loader(library):
    class Own(library.Trainer):
        def get_eval_dataloader(self, eval_dataset=None):
            return torch.utils.data.DataLoader(self.eval_dataset, batch_size=8, collate_fn=self.data_collator)

    return Own


def test_evaluation_loader_that_is_not_prepared_keeps_its_rows(tmp_path):
    """In the last step of an epoch of 38 samples accelerate cuts each batch of 8 to 38 % 4 rows: see the ledger."""
    rows = {}
    for name in ("hftrainer", "transformers"):
        given = {"compute_metrics": lambda prediction: {"rows": len(prediction.label_ids)}}
        settings = {"eval_strategy": "steps", "eval_steps": 5, "num_train_epochs": 1, "trainer": given}
        trainer, _ = build(name, "plain", tmp_path / name, trainer_class=with_plain_loader, **settings)
        trainer.train()
        rows[name] = [line["eval_rows"] for line in trainer.state.log_history if "eval_rows" in line]
    assert rows == {"hftrainer": [19, 19], "transformers": [19, 6]}


def test_replaced_before_the_seq2seq_trainer_is_imported(tmp_path, processes):
    """A library that replaces `Trainer.training_step` at once reaches subclasses that are imported later."""
    script = f"""
import hftrainer
from tests.support.tiny import make_plain, plain_data
from tests.support.methods import count_calls

calls = count_calls(hftrainer.Trainer, "training_step")
args = hftrainer.Seq2SeqTrainingArguments({str(tmp_path)!r}, max_steps=3, use_cpu=True, report_to="none")
hftrainer.Seq2SeqTrainer(make_plain(), args, train_dataset=plain_data(20)).train()
print("called", len(calls))
"""
    done = processes.run("-c", script, cwd=tmp_path, fresh=True)
    assert "called 3" in done.stdout, done.stderr
