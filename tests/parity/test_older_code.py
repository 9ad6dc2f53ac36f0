"""Code of older releases: overrides by their own signatures, and evaluation loops that were copied and edited."""

import contextlib
import importlib
import inspect

import numpy as np
import pytest
import torch

import hftrainer
from hftrainer.errors import UnsupportedArgument
from tests.support.methods import TRAINER
from tests.support.parity import (
    accuracy,
    alike,
    assert_same,
    build,
    comparable,
    compare,
    record,
    train,
)

EVERY_STEP = {"eval_strategy": "steps", "eval_steps": 2, "logging_steps": 1, "save_strategy": "steps", "save_steps": 4}


def train_as(methods, folder, **settings):
    """Our run with a subclass of these methods."""
    own = type("Own", (hftrainer.Trainer,), methods)
    return train("hftrainer", "plain", folder, trainer_class=lambda _: own, **{**EVERY_STEP, **settings})


# ---- Signatures ------------------------------------------------------------------------------------------------


def test_save_checkpoint_with_metrics(tmp_path):
    """`_save_checkpoint(model, trial, metrics)`, passed on, until v4.46: multimodal trainers still do it."""
    seen = []

    def _save_checkpoint(self, model, trial, metrics=None):
        seen.append(metrics)
        super(type(self), self)._save_checkpoint(model, trial, metrics)

    settings = {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
    ours = train_as({"_save_checkpoint": _save_checkpoint}, tmp_path / "ours", **settings)
    assert_same(ours, train("transformers", "plain", tmp_path / "theirs", **EVERY_STEP, **settings))
    assert len(seen) == 5
    assert all("eval_loss" in metrics for metrics in seen)


def test_best_metric_of_an_override(tmp_path):
    """The metrics that an override passes on decide which model is the best, as they did."""

    def _save_checkpoint(self, model, trial, metrics=None):
        super(type(self), self)._save_checkpoint(model, trial, metrics={"eval_own": float(self.state.global_step)})

    def evaluate(self, *args, **kwargs):
        return {**super(type(self), self).evaluate(*args, **kwargs), "eval_own": -1.0}

    own = type("Own", (hftrainer.Trainer,), {"_save_checkpoint": _save_checkpoint, "evaluate": evaluate})
    settings = {"metric_for_best_model": "own", "greater_is_better": True, "load_best_model_at_end": True}
    trainer, _ = build("hftrainer", "plain", tmp_path, trainer_class=lambda _: own, **EVERY_STEP, **settings)
    trainer.train()
    assert trainer.state.best_metric == trainer.state.max_steps
    assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{trainer.state.max_steps}")


def of_v4_4(self, tr_loss, model, trial, epoch):
    super(type(self), self)._maybe_log_save_evaluate(tr_loss, model, trial, epoch)


def of_v4_37(self, tr_loss, model, trial, epoch, ignore_keys_for_eval):
    super(type(self), self)._maybe_log_save_evaluate(tr_loss, model, trial, epoch, ignore_keys_for_eval)


def of_v4_45(self, tr_loss, grad_norm, model, trial, epoch, ignore_keys):
    super(type(self), self)._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, epoch, ignore_keys)


def of_v4_49(self, tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time):
    parent = super(type(self), self)
    parent._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time)


def of_v5(self, tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate=None):
    super(type(self), self)._maybe_log_save_evaluate(
        tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate=learning_rate
    )


def of_any(self, *args, **kwargs):
    super(type(self), self)._maybe_log_save_evaluate(*args, **kwargs)


def by_name(self, **kwargs):
    super(type(self), self)._maybe_log_save_evaluate(**kwargs)


@pytest.mark.parametrize("signature", [of_v4_4, of_v4_37, of_v4_45, of_v4_49, of_v5, of_any, by_name])
def test_maybe_log_save_evaluate(tmp_path, signature):
    ours = train_as({"_maybe_log_save_evaluate": signature}, tmp_path / "ours", include_num_input_tokens_seen="all")
    settings = {**EVERY_STEP, "include_num_input_tokens_seen": "all"}
    assert_same(ours, train("transformers", "plain", tmp_path / "theirs", **settings))


def test_maybe_log_save_evaluate_gets_the_values_of_its_release(tmp_path):
    seen = {}

    def _maybe_log_save_evaluate(self, tr_loss, model, trial, epoch, ignore_keys_for_eval):
        seen.update(tr_loss=tr_loss, model=model, trial=trial, epoch=epoch, ignored=ignore_keys_for_eval)

    train_as({"_maybe_log_save_evaluate": _maybe_log_save_evaluate}, tmp_path, max_steps=2, eval_strategy="no")
    assert seen["tr_loss"].ndim == 0
    assert isinstance(seen["model"], torch.nn.Module)
    assert (seen["trial"], seen["epoch"], seen["ignored"]) == (None, 0, None)


def test_inner_training_loop_gets_batch_size_and_arguments(tmp_path):
    seen = []

    def watched(library):
        class Own(library.Trainer):
            def _inner_training_loop(self, batch_size=None, args=None, resume_from_checkpoint=None, **kwargs):
                seen.append((batch_size, args is self.args, args.logging_steps, resume_from_checkpoint, sorted(kwargs)))
                return super()._inner_training_loop(batch_size, args, resume_from_checkpoint, **kwargs)

        return Own

    compare(tmp_path, "plain", trainer_class=watched)
    assert seen == [(4, True, 2, None, ["ignore_keys_for_eval", "trial"])] * 2


def test_other_old_signatures(tmp_path):
    seen = []

    def training_step(self, model, inputs):
        seen.append("training_step")
        return super(type(self), self).training_step(model, inputs)

    def log(self, logs):
        seen.append("log")
        super(type(self), self).log(logs)

    def save_model(self, output_dir=None):
        seen.append("save_model")
        super(type(self), self).save_model(output_dir, _internal_call=True)

    def _get_train_sampler(self):
        seen.append("_get_train_sampler")
        return super(type(self), self)._get_train_sampler()

    def get_batch_samples(self, epoch_iterator, num_batches):
        seen.append("get_batch_samples")
        return super(type(self), self).get_batch_samples(epoch_iterator, num_batches, self.args.device)

    def create_scheduler(self, num_training_steps, optimizer=None):
        seen.append("create_scheduler")
        return super(type(self), self).create_scheduler(num_training_steps, optimizer)

    def _wrap_model(self, model, training=True):
        seen.append("_wrap_model")
        return super(type(self), self)._wrap_model(model, training)

    methods = {name: each for name, each in locals().items() if callable(each)}
    ours = train_as(methods, tmp_path / "ours")
    assert_same(ours, train("transformers", "plain", tmp_path / "theirs", **EVERY_STEP))
    assert set(seen) == methods.keys()


@pytest.mark.parametrize("name", ["_rotate_checkpoints", "_sorted_checkpoints"])
def test_rotation_of_older_releases(tmp_path, name):
    """`_rotate_checkpoints` and `_sorted_checkpoints`, which transformers called until v5.0."""
    seen = []

    def _rotate_checkpoints(self, use_mtime=False, output_dir=None):
        seen.append((use_mtime, output_dir))
        super(type(self), self)._rotate_checkpoints(use_mtime=use_mtime, output_dir=output_dir)

    def _sorted_checkpoints(self, output_dir=None, checkpoint_prefix="checkpoint", use_mtime=False):
        """The first checkpoint is never among those that may be deleted."""
        found = super(type(self), self)._sorted_checkpoints(output_dir, checkpoint_prefix, use_mtime)
        seen.append(found)
        return [path for path in found if not path.endswith("checkpoint-2")]

    settings = {"save_steps": 2, "max_steps": 10, "save_total_limit": 2}
    ours = train_as({name: locals()[name]}, tmp_path / "ours", **settings)
    if name == "_rotate_checkpoints":
        assert_same(ours, train("transformers", "plain", tmp_path / "theirs", **{**EVERY_STEP, **settings}))
        assert seen == [(True, str(tmp_path / "ours"))] * 5
    else:
        assert sorted(ours.files) == ["checkpoint-10", "checkpoint-2", "checkpoint-8"]
        assert [path[-1] for path in seen[1]] == ["2", "4"]


# ---- Evaluation loops ------------------------------------------------------------------------------------------


def copied(library):
    """A Trainer with the evaluation loop of the installed transformers, as a script that has copied it has."""
    loop = importlib.import_module("transformers").Trainer.evaluation_loop
    return type("Own", (library.Trainer,), {"evaluation_loop": loop})


@pytest.mark.parametrize("model", ["plain", "bert", "llama"])
@pytest.mark.parametrize("settings", [{}, {"bf16": True}, {"eval_do_concat_batches": False}])
def test_copied_evaluation_loop(tmp_path, model, settings):
    def run(name):
        given = {"compute_metrics": lambda prediction: {"rows": len(prediction.label_ids)}}
        trainer, recorder = build(
            name, model, tmp_path / name, trainer_class=copied, trainer=given, **EVERY_STEP, max_steps=4, **settings
        )
        before = trainer.evaluate()
        trainer.train()
        after, predicted = trainer.evaluate(), trainer.predict(trainer.eval_dataset)
        done = comparable([before, after, predicted.metrics])
        return record(trainer, recorder, tmp_path / name, metrics=done)

    alike(run)


def of_v4_30(self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"):
    """What an edited loop of v4.2x and v4.3x does, in short, with the helpers that it had."""
    model = self._wrap_model(self.model, training=False, dataloader=dataloader)
    if len(self.accelerator._models) == 0 and model is self.model:
        model = self.accelerator.prepare_model(model, evaluation_mode=True)
    model.eval()
    self.callback_handler.eval_dataloader = dataloader
    losses, logits, labels = [], [], []
    for inputs in dataloader:
        loss, outputs, truth = self.prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
        losses.append(self._nested_gather(loss.repeat(self.args.eval_batch_size)).cpu().numpy())
        logits.append(self._gather_and_numpify(self._pad_across_processes(outputs), "logits"))
        labels.append(self._gather_and_numpify(self._pad_across_processes(truth), "labels"))
        self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
    if self.args.past_index and hasattr(self, "_past"):
        delattr(self, "_past")
    count = len(dataloader.dataset)
    predictions, label_ids = np.concatenate(logits)[:count], np.concatenate(labels)[:count]
    metrics = self.compute_metrics(hftrainer.EvalPrediction(predictions, label_ids))
    metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
    metrics[f"{metric_key_prefix}_loss"] = float(np.concatenate(losses)[:count].mean())
    return hftrainer.trainer_utils.EvalLoopOutput(predictions, label_ids, metrics, count)


@pytest.mark.parametrize("settings", [{}, {"bf16": True}])
def test_evaluation_loop_with_older_helpers(tmp_path, settings):
    losses = []
    for methods in ({"evaluation_loop": of_v4_30}, {}):
        own = type("Own", (hftrainer.Trainer,), methods)
        given = {"compute_metrics": accuracy}
        trainer, _ = build(
            "hftrainer", "bert", tmp_path, trainer_class=lambda _, own=own: own, trainer=given, **EVERY_STEP, **settings
        )
        before = trainer.evaluate()
        trainer.train()
        done = [before, trainer.evaluate(), *trainer.state.log_history]
        losses.append([line.get(name) for line in done for name in ("eval_loss", "eval_accuracy")])
    assert losses[0] == losses[1]


# ---- Subclasses with an `evaluate` of their own ----------------------------------------------------------------


def answering(kind):
    """As question answering does: a loop without metrics, then metrics of what was made of its predictions."""

    def make(library):
        class Own(getattr(library, kind)):
            def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
                dataloader = self.get_eval_dataloader(eval_dataset)
                compute, self.compute_metrics = self.compute_metrics, None
                with contextlib.ExitStack() as stack:
                    stack.callback(setattr, self, "compute_metrics", compute)
                    output = self.evaluation_loop(
                        dataloader, description="Evaluation", prediction_loss_only=None, ignore_keys=ignore_keys
                    )
                found = {"eval_rows": float(len(output.predictions)), **output.metrics}
                self.log(found)
                self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, found)
                return found

        return Own

    return make


@pytest.mark.parametrize("kind", ["Trainer", "Seq2SeqTrainer"])
def test_own_evaluate_that_calls_the_loop(tmp_path, kind, monkeypatch):
    """19 samples in batches of 8: the last one counts by its size, also in a Seq2SeqTrainer, whose own does not."""
    for name in ("hftrainer", "transformers"):
        library = importlib.import_module(name)
        if kind == "Seq2SeqTrainer":
            monkeypatch.setattr(library, "TrainingArguments", library.Seq2SeqTrainingArguments)
    ours = compare(tmp_path, "plain", trainer_class=answering(kind), **EVERY_STEP)
    plain = train("hftrainer", "plain", tmp_path / "plain", **EVERY_STEP)
    losses = [[line["eval_loss"] for line in each.logs if "eval_loss" in line] for each in (ours, plain)]
    assert losses[0] == losses[1]


def test_seq2seq_evaluate_counts_the_last_batch_as_a_full_one(tmp_path, monkeypatch):
    """As in transformers, which gathers by `accelerator.gather` there, for that one pass."""
    monkeypatch.setattr(hftrainer, "TrainingArguments", hftrainer.Seq2SeqTrainingArguments)
    trainer, _ = build("hftrainer", "plain", tmp_path, trainer_class=lambda library: library.Seq2SeqTrainer)
    as_full = trainer.evaluate()["eval_loss"]
    loader = trainer.get_eval_dataloader()
    by_size = trainer.evaluation_loop(loader, "Evaluation").metrics["eval_loss"]
    assert as_full != by_size
    assert trainer.evaluate()["eval_loss"] == as_full


# ---- Copies of methods -----------------------------------------------------------------------------------------

#: Those that are the loop itself, which Lightning's takes the place of.
LOOP = {"_finalize_training", "_inner_training_loop", "_prepare_for_training", "_run_epoch", "train"}
#: What needs attributes of the copied construction.
OTHERS = sorted({*TRAINER} - LOOP - {"_has_mixed_mesh_grads"})
POPULAR = """
    training_step compute_loss prediction_step evaluate predict _save save_model _save_checkpoint get_batch_samples
    _maybe_log_save_evaluate create_optimizer create_scheduler log _get_train_sampler get_train_dataloader
""".split()


def copies(names):
    kind = importlib.import_module("transformers").Trainer
    return {name: inspect.getattr_static(kind, name) for name in names}


@pytest.mark.parametrize("names", [OTHERS, *([name] for name in POPULAR)], ids=lambda names: names[0])
def test_copied_methods(tmp_path, names):
    """transformers' own functions run on our Trainer, as those do that scripts have copied and edited."""
    settings = {"gradient_accumulation_steps": 3, "load_best_model_at_end": True, "metric_for_best_model": "loss"}
    ours = train_as(copies(names), tmp_path / "ours", **settings)
    assert_same(ours, train("transformers", "plain", tmp_path / "theirs", **EVERY_STEP, **settings))


def test_copied_training_loop(tmp_path):
    """Which cannot run: the error says what can be done instead."""
    with pytest.raises(UnsupportedArgument, match=r"_inner_training_loop: a copy .* override\s+training_step"):
        train_as(copies(["_inner_training_loop"]), tmp_path)


def test_own_epoch_must_run_ours(tmp_path):
    with pytest.raises(UnsupportedArgument, match=r"_run_epoch: .* must call super\(\)\._run_epoch"):
        train_as({"_run_epoch": lambda self, **kwargs: None}, tmp_path / "none")

    def _run_epoch(self, **kwargs):
        super(type(self), self)._run_epoch(**{**kwargs, "steps_in_epoch": 3})

    with pytest.raises(UnsupportedArgument, match="_run_epoch: steps_in_epoch cannot be changed"):
        train_as({"_run_epoch": _run_epoch}, tmp_path / "other")
