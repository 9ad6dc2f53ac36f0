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
from tests.support.parity import EVALUATED, accuracy, assert_same, build, comparable, compare, subclass, train

EVERY_STEP = {**EVALUATED, "logging_steps": 1, "save_strategy": "steps", "save_steps": 4}
BEST = {"load_best_model_at_end": True, "metric_for_best_model": "loss"}


def train_as(methods, folder, **settings):
    """Our run with a subclass of these methods."""
    return train("hftrainer", "plain", folder, trainer_class=subclass(**methods), **{**EVERY_STEP, **settings})


def assert_as_without(tmp_path, methods, **settings):
    """Our run with these methods does what transformers does without them."""
    ours = train_as(methods, tmp_path / "ours", **settings)
    assert_same(ours, train("transformers", "plain", tmp_path / "theirs", **{**EVERY_STEP, **settings}))


# ---- Signatures ------------------------------------------------------------------------------------------------


def test_save_checkpoint_with_metrics(tmp_path):
    """`_save_checkpoint(model, trial, metrics)`, passed on, until v4.46: multimodal trainers still do it."""
    seen = []

    def _save_checkpoint(self, model, trial, metrics=None):
        seen.append(metrics)
        super(type(self), self)._save_checkpoint(model, trial, metrics)

    assert_as_without(tmp_path, {"_save_checkpoint": _save_checkpoint}, **BEST)
    assert len(seen) == 5
    assert all("eval_loss" in metrics for metrics in seen)


def test_best_metric_of_an_override(tmp_path):
    """The metrics that an override passes on decide which model is the best, as they did."""

    def _save_checkpoint(self, model, trial, metrics=None):
        super(type(self), self)._save_checkpoint(model, trial, metrics={"eval_own": float(self.state.global_step)})

    def evaluate(self, *args, **kwargs):
        return {**super(type(self), self).evaluate(*args, **kwargs), "eval_own": -1.0}

    own = subclass(_save_checkpoint=_save_checkpoint, evaluate=evaluate)
    settings = {"metric_for_best_model": "own", "greater_is_better": True, "load_best_model_at_end": True}
    trainer, _ = build("hftrainer", "plain", tmp_path, trainer_class=own, **EVERY_STEP, **settings)
    trainer.train()
    state = trainer.state
    assert state.best_metric == state.max_steps
    assert state.best_model_checkpoint.endswith(f"checkpoint-{state.max_steps}")


#: The release of each signature of `_maybe_log_save_evaluate`, all of which pass on what they get.
SIGNATURES = {
    "4.4": "tr_loss, model, trial, epoch",
    "4.37": "tr_loss, model, trial, epoch, ignore_keys_for_eval",
    "4.45": "tr_loss, grad_norm, model, trial, epoch, ignore_keys",
    "4.49": "tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time",
    "5": "tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate=None",
    "any": "*args, **kwargs",
    "by name": "**kwargs",
}


@pytest.mark.parametrize("release", SIGNATURES)
def test_maybe_log_save_evaluate(tmp_path, release):
    signature = SIGNATURES[release]
    given = signature.replace("=None", "=learning_rate")
    code = f"lambda self, {signature}: super(type(self), self)._maybe_log_save_evaluate({given})"
    assert_as_without(tmp_path, {"_maybe_log_save_evaluate": eval(code)}, include_num_input_tokens_seen="all")


def test_maybe_log_save_evaluate_gets_the_values_of_its_release(tmp_path):
    seen = []

    def _maybe_log_save_evaluate(self, tr_loss, model, trial, epoch, ignore_keys_for_eval):
        seen.append((tr_loss.ndim, isinstance(model, torch.nn.Module), trial, epoch, ignore_keys_for_eval))

    train_as({"_maybe_log_save_evaluate": _maybe_log_save_evaluate}, tmp_path, max_steps=2, eval_strategy="no")
    assert set(seen) == {(0, True, None, 0, None)}


def test_inner_training_loop_gets_batch_size_and_arguments(tmp_path):
    seen = []

    def _inner_training_loop(self, batch_size=None, args=None, resume_from_checkpoint=None, **kwargs):
        seen.append((batch_size, args is self.args, args.logging_steps, resume_from_checkpoint, sorted(kwargs)))
        return super(type(self), self)._inner_training_loop(batch_size, args, resume_from_checkpoint, **kwargs)

    compare(tmp_path, "plain", trainer_class=subclass(_inner_training_loop=_inner_training_loop))
    assert seen == [(4, True, 2, None, ["ignore_keys_for_eval", "trial"])] * 2


def test_other_old_signatures(tmp_path):
    seen = set()

    def parent(self, name):
        seen.add(name)
        return getattr(super(type(self), self), name)

    def get_batch_samples(self, epoch_iterator, num_batches):
        return parent(self, "get_batch_samples")(epoch_iterator, num_batches, self.args.device)

    def create_scheduler(self, num_training_steps, optimizer=None):
        return parent(self, "create_scheduler")(num_training_steps, optimizer)

    methods = {
        "training_step": lambda self, model, inputs: parent(self, "training_step")(model, inputs),
        "log": lambda self, logs: parent(self, "log")(logs),
        "save_model": lambda self, output_dir=None: parent(self, "save_model")(output_dir, _internal_call=True),
        "_get_train_sampler": lambda self: parent(self, "_get_train_sampler")(),
        "get_batch_samples": get_batch_samples,
        "create_scheduler": create_scheduler,
        "_wrap_model": lambda self, model, training=True: parent(self, "_wrap_model")(model, training),
    }
    assert_as_without(tmp_path, methods)
    assert seen == methods.keys()


ROTATED = {"save_steps": 2, "max_steps": 10, "save_total_limit": 2}


def test_rotate_checkpoints_of_older_releases(tmp_path):
    """transformers called it until v5.0."""
    seen = []

    def _rotate_checkpoints(self, use_mtime=False, output_dir=None):
        seen.append((use_mtime, output_dir))
        super(type(self), self)._rotate_checkpoints(use_mtime=use_mtime, output_dir=output_dir)

    assert_as_without(tmp_path, {"_rotate_checkpoints": _rotate_checkpoints}, **ROTATED)
    assert seen == [(True, str(tmp_path / "ours"))] * 5


def test_sorted_checkpoints_of_older_releases(tmp_path):
    """The first checkpoint is never among those that may be deleted."""
    seen = []

    def _sorted_checkpoints(self, output_dir=None, checkpoint_prefix="checkpoint", use_mtime=False):
        found = super(type(self), self)._sorted_checkpoints(output_dir, checkpoint_prefix, use_mtime)
        seen.append([path[-1] for path in found])
        return [path for path in found if not path.endswith("checkpoint-2")]

    ours = train_as({"_sorted_checkpoints": _sorted_checkpoints}, tmp_path, **ROTATED)
    assert sorted(ours.files) == ["checkpoint-10", "checkpoint-2", "checkpoint-8"]
    assert seen[1] == ["2", "4"]


# ---- Evaluation loops ------------------------------------------------------------------------------------------


def evaluate_around_training(trainer):
    before = trainer.evaluate()
    trainer.train()
    return comparable([before, trainer.evaluate(), trainer.predict(trainer.eval_dataset).metrics])


@pytest.mark.parametrize("model", ["plain", "bert", "llama"])
@pytest.mark.parametrize("settings", [{}, {"bf16": True}, {"eval_do_concat_batches": False}])
def test_copied_evaluation_loop(tmp_path, model, settings):
    """The evaluation loop of the installed transformers, as a script that has copied it has."""
    copied = subclass(evaluation_loop=importlib.import_module("transformers").Trainer.evaluation_loop)
    given = {"compute_metrics": lambda prediction: {"rows": len(prediction.label_ids)}}
    settings = {"trainer_class": copied, "trainer": given, "max_steps": 4, **EVERY_STEP, **settings}
    compare(tmp_path, model, script=evaluate_around_training, **settings)


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
    def run(**methods):
        given = {"trainer": {"compute_metrics": accuracy}, "trainer_class": subclass(**methods)}
        found = train("hftrainer", "bert", tmp_path, script=evaluate_around_training, **given, **EVERY_STEP, **settings)
        lines = [*found.extra["script"], *found.logs]
        return [line.get(name) for line in lines for name in ("eval_loss", "eval_accuracy", "test_loss")]

    assert run(evaluation_loop=of_v4_30) == run()


# ---- Subclasses with an `evaluate` of their own ----------------------------------------------------------------


def evaluate_answers(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
    """As question answering does: a loop without metrics, then metrics of what was made of its predictions."""
    dataloader = self.get_eval_dataloader(eval_dataset)
    compute, self.compute_metrics = self.compute_metrics, None
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, self, "compute_metrics", compute)
        given = {"description": "Evaluation", "prediction_loss_only": None, "ignore_keys": ignore_keys}
        output = self.evaluation_loop(dataloader, **given)
    found = {"eval_rows": float(len(output.predictions)), **output.metrics}
    self.log(found)
    self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, found)
    return found


@pytest.mark.parametrize("kind", ["", "Seq2Seq"])
def test_own_evaluate_that_calls_the_loop(tmp_path, kind):
    """19 samples in batches of 8: the last one counts by its size, also in a Seq2SeqTrainer, whose own does not."""

    def own(library):
        return type("Own", (getattr(library, f"{kind}Trainer"),), {"evaluate": evaluate_answers})

    ours = compare(tmp_path, "plain", kind=kind, trainer_class=own, **EVERY_STEP)
    plain = train("hftrainer", "plain", tmp_path / "plain", **EVERY_STEP)
    assert [line.get("eval_loss") for line in ours.logs] == [line.get("eval_loss") for line in plain.logs]


def test_seq2seq_evaluate_counts_the_last_batch_as_a_full_one(tmp_path):
    """As in transformers, which gathers by `accelerator.gather` there, for that one pass."""
    trainer, _ = build("hftrainer", "plain", tmp_path, kind="Seq2Seq")
    as_full = trainer.evaluate()["eval_loss"]
    by_size = trainer.evaluation_loop(trainer.get_eval_dataloader(), "Evaluation").metrics["eval_loss"]
    assert as_full == trainer.evaluate()["eval_loss"] != by_size


# ---- Copies of methods -----------------------------------------------------------------------------------------

#: Those that are the loop itself, which Lightning's takes the place of.
LOOP = {"_finalize_training", "_inner_training_loop", "_prepare_for_training", "_run_epoch", "train"}
#: What needs no attributes of the copied construction.
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
    assert_as_without(tmp_path, copies(names), gradient_accumulation_steps=3, **BEST)


def run_epoch_of_three_steps(self, **kwargs):
    super(type(self), self)._run_epoch(**{**kwargs, "steps_in_epoch": 3})


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (copies(["_inner_training_loop"]), r"_inner_training_loop: a copy .* override\s+training_step"),
        ({"_run_epoch": lambda self, **kwargs: None}, r"_run_epoch: .* must call super\(\)\._run_epoch"),
        ({"_run_epoch": run_epoch_of_three_steps}, "_run_epoch: steps_in_epoch cannot be changed"),
    ],
    ids=["copied loop", "without ours", "another length"],
)
def test_what_cannot_run(tmp_path, methods, message):
    """The error says what can be done instead."""
    with pytest.raises(UnsupportedArgument, match=message):
        train_as(methods, tmp_path)
