"""A replaced method does to a run what it does in transformers, or did in the release whose signature it has."""

import functools
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from lightning.pytorch.callbacks import Callback
from torch import nn

import hftrainer
from hftrainer.errors import UnsupportedArgument
from tests.support import parity
from tests.support.changed_trainers import (
    Doubled,
    assert_changed_alike,
    copies,
    library_of,
    methods_of,
    parent,
    run_changed,
    run_plain,
)
from tests.support.parity import LIBRARIES, accuracy, assert_agree, assert_same, build, seq2seq, train
from tests.support.small_models import make_plain

SAVED = {"save_strategy": "steps", "save_steps": 4}
ROWS = {"compute_metrics": lambda prediction: {"rows": len(prediction.label_ids)}}
BEST = {**SAVED, "load_best_model_at_end": True, "metric_for_best_model": "loss"}


def replace(path: str, make: Callable[[Any], Any]) -> Callable[[Any], None]:
    holder, _, name = path.rpartition(".")

    def change(trainer):
        replaced = getattr(trainer, holder) if holder else trainer
        setattr(replaced, name, make(getattr(replaced, name)))

    return change


def smoothed_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    outputs = model(inputs["x"])
    loss = nn.functional.cross_entropy(outputs["logits"], inputs["labels"], label_smoothing=0.1)
    return (loss, {"loss": loss, **outputs}) if return_outputs else loss


def larger_step(self, model, inputs, num_items_in_batch=None):
    model.train()
    loss = self.compute_loss(model, self._prepare_inputs(inputs)) / self.current_gradient_accumulation_steps
    self.accelerator.backward(loss * 1.5)
    return loss.detach()


def noisy_step(original):
    def training_step(self, *args, **kwargs):
        loss = original(self, *args, **kwargs)
        for parameter in self.model.parameters():
            parameter.grad.add_(0.01)
        return loss

    return training_step


def own_optimizer(self, *args):
    if self.optimizer is None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.args.learning_rate, momentum=0.9)
    return self.optimizer


def loss_with_slope(self, model, inputs, prediction_loss_only, ignore_keys=None):
    """Forces and the like are gradients, in evaluation too."""
    loss, logits, labels = parent(self).prediction_step(model, inputs, prediction_loss_only, ignore_keys)
    with torch.enable_grad():
        x = inputs["x"].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x)["logits"].sum(), x)
    return loss + slope.abs().mean(), logits, labels


def evaluate_answers(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
    """As question answering does: a loop without metrics, then metrics of what was made of its predictions."""
    compute, self.compute_metrics = self.compute_metrics, None
    loader = self.get_eval_dataloader(eval_dataset)
    output = self.evaluation_loop(loader, "Evaluation", prediction_loss_only=None, ignore_keys=ignore_keys)
    self.compute_metrics = compute
    found = {"eval_rows": float(len(output.predictions)), **output.metrics}
    self.log(found)
    self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, found)
    return found


def step_twice(trainer):
    step = trainer.create_optimizer().step
    trainer.optimizer.step = lambda closure=None: (step(), step())[1]


def backward_in_compute_loss(trainer):
    """As libraries do that run backward within the forward pass: nothing is left for the accelerator."""
    original = trainer.compute_loss

    def compute_loss(model, inputs, return_outputs=False, num_items_in_batch=None):
        found = original(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        if not return_outputs:
            (found * 3).backward()
        return found

    trainer.compute_loss = compute_loss
    trainer.accelerator.backward = lambda loss: None


def other_optimizer(prepare):
    def replacement(*objects):
        prepared = prepare(*objects)
        return (prepared[0], torch.optim.SGD(prepared[0].parameters(), lr=0.3)) if len(objects) == 2 else prepared

    return replacement


def scaled_model(_):
    return lambda model, training=True, **_: Doubled(model) if training and type(model) is not Doubled else model


def stop_early(trainer):
    def check_metric_value(self, args, state, control, metric_value):
        self.early_stopping_patience_counter += len(state.log_history) > 12

    kind = library_of(trainer).EarlyStoppingCallback
    trainer.add_callback(type("OnTheThird", (kind,), {"check_metric_value": check_metric_value})(2))


def model_of_star(*args):
    assert args == (None,)  # no trial
    return make_plain()


class Closing(torch.optim.SGD):
    """A sharpness-aware optimizer takes a second step when it is given a closure, whose parameter has no default."""

    def step(self, closure):
        assert closure is None
        return super().step()


CLOSING = {"trainer": {"optimizer_cls_and_kwargs": (Closing, {"lr": 0.1})}}
CONSTANT = {"lr_scheduler_type": "constant", "warmup_steps": 0}
DOUBLED = replace("accelerator.backward", lambda original: lambda loss, **kwargs: original(loss * 2, **kwargs))
#: What is replaced → how, and settings; `same` if the run stays as it was.
CHANGES: dict[str, dict[str, Any]] = {
    "compute_loss": {"methods": {"compute_loss": smoothed_loss}},
    "training_step": {"methods": {"training_step": larger_step}},
    "training_step of the class": {"patched": {"training_step": noisy_step}},
    "loss_is_scaled_for_ga": {"methods": {"loss_is_scaled_for_ga": True}, "gradient_accumulation_steps": 3},
    "create_optimizer": {"methods": {"create_optimizer": own_optimizer}},
    "log": {"methods": {"log": lambda self, logs, *args: parent(self).log({**logs, "keys": len(logs)}, *args)}},
    "prediction_step": {"methods": {"prediction_step": loss_with_slope}},
    "evaluate": {"methods": {"evaluate": lambda self, **kw: {**parent(self).evaluate(**kw), "eval_extra": 1.0}}},
    "evaluate, by the loop": {"methods": {"evaluate": evaluate_answers}},
    "evaluate of Seq2SeqTrainer": {"methods": {"evaluate": evaluate_answers}, "trainer_class": seq2seq},
    "_wrap_model": {"change": replace("_wrap_model", scaled_model)},
    **{
        name: {"change": replace(name, lambda _: lambda *args, **kwargs: torch.autocast("cpu", torch.bfloat16))}
        for name in ("autocast_smart_context_manager", "compute_loss_context_manager")
    },
    "check_metric_value": {"change": stop_early, "num_train_epochs": 4, **BEST},
    "model_init": {"trainer": {"model_init": model_of_star}, "same": True},
    "accelerator.backward": {"change": DOUBLED},
    "accelerator.backward, when training begins": {"change": DOUBLED, "step": 0},
    "accelerator.backward, in the middle": {"change": DOUBLED, "step": 3},
    "accelerator.backward that does nothing": {"change": backward_in_compute_loss},
    "accelerator.clip_grad_norm_": {
        "change": replace("accelerator.clip_grad_norm_", lambda clip: lambda of, limit, *_: clip(of, limit / 10, 1))
    },
    "accelerator.gather_for_metrics": {
        "change": replace("accelerator.gather_for_metrics", lambda _: lambda data, *args, **kwargs: data[:1])
    },
    "accelerator.prepare": {"change": replace("accelerator.prepare", other_optimizer), **CONSTANT},
    "optimizer.step": {"change": step_twice},
    "optimizer.step with a closure": {**CLOSING, "same": True},
    "optimizer.step with a closure, in bfloat16": {**CLOSING, "bf16": True, "same": True},
    "optimizer.step with a closure, after backward": {**CLOSING, "change": DOUBLED},
    "optimizer.step with a closure, after backward in bfloat16": {**CLOSING, "bf16": True, "change": DOUBLED},
}
RUNS = [(n, a) for n in CHANGES for a in (1, 3) if a == CHANGES[n].get("gradient_accumulation_steps", a)]


@pytest.mark.parametrize(("name", "accumulation"), RUNS)
def test_replacement_changes_the_run_alike(tmp_path, name, accumulation):
    assert_changed_alike(tmp_path, **{"gradient_accumulation_steps": accumulation, **CHANGES[name]})


class Batch:
    def __init__(self, samples):
        self.x, self.labels = (torch.stack([sample[name] for sample in samples]) for name in ("x", "labels"))


def test_batches_may_be_objects(tmp_path):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(inputs.x, inputs.labels)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        with torch.no_grad():
            return *model(inputs.x, inputs.labels).values(), inputs.labels

    methods = {
        "compute_loss": compute_loss,
        "prediction_step": prediction_step,
        "_prepare_inputs": lambda self, inputs: inputs,
        "floating_point_ops": lambda self, inputs: 0,
        "_get_num_items_in_batch": lambda self, batch_samples, device: None,
    }
    settings = {"methods": methods, "trainer": {"data_collator": Batch}, "remove_unused_columns": False}
    assert_agree(lambda name: run_changed(name, tmp_path / name, **settings))


def test_optimizer_that_needs_a_closure_fails_alike(tmp_path):
    def set_lbfgs(self, model=None):
        self.optimizer = torch.optim.LBFGS(self.model.parameters())
        return self.optimizer

    for name in LIBRARIES:
        with pytest.raises(TypeError, match="'NoneType' object is not callable"):
            run_changed(name, tmp_path / name, methods={"create_optimizer": set_lbfgs})


def test_evaluation_loader_that_is_not_prepared_keeps_its_rows(tmp_path):
    """In the last step of an epoch of 38 samples accelerate cuts each of the 3 batches to 38 % 4 = 2 rows."""

    def get_eval_dataloader(self, eval_dataset=None):
        return torch.utils.data.DataLoader(self.eval_dataset, batch_size=8, collate_fn=self.data_collator)

    settings = {"eval_steps": 5, "num_train_epochs": 1, "trainer": ROWS}
    methods = {"get_eval_dataloader": get_eval_dataloader}
    runs = [run_changed(name, tmp_path / name, methods=methods, **settings) for name in LIBRARIES]
    rows = [[line["eval_rows"] for line in run.logs if "eval_rows" in line][:2] for run in runs]
    assert rows == [[19, 6], [19, 19]]


def test_seq2seq_evaluate_counts_the_last_batch_as_a_full_one(tmp_path):
    """It gathers with `accelerator.gather`, but only in that call."""

    def run(name):
        trainer, _ = build(name, "plain", tmp_path, trainer_class=seq2seq)
        as_full = trainer.evaluate()["eval_loss"]
        by_size = trainer.evaluation_loop(trainer.get_eval_dataloader(), "Evaluation").metrics["eval_loss"]
        return as_full, by_size, trainer.evaluate()["eval_loss"]

    as_full, by_size, again = assert_agree(run)
    assert as_full == again != by_size


def test_lightning_counts_steps_when_backward_is_replaced_within_a_run(tmp_path):
    seen = []

    class Count(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            seen.append(trainer.global_step)

    run_changed("hftrainer", tmp_path, change=DOUBLED, step=2, max_steps=4, trainer={"callbacks": [Count()]})
    assert seen == [1, 2, 3, 4]


def test_method_replaced_before_seq2seq_is_imported_is_called(tmp_path, processes):
    """As by a library that patches `Trainer.training_step` when it is imported."""
    script = f"""
import hftrainer
from tests.support.small_models import make_plain, plain_data

original = hftrainer.Trainer.training_step
hftrainer.Trainer.training_step = lambda *args, **kwargs: (print("called"), original(*args, **kwargs))[1]
args = hftrainer.Seq2SeqTrainingArguments({str(tmp_path)!r}, max_steps=3, use_cpu=True, report_to="none")
hftrainer.Seq2SeqTrainer(make_plain(), args, train_dataset=plain_data(20)).train()
"""
    done = processes.run("-c", script, cwd=tmp_path, fresh=True)
    assert done.stdout.splitlines().count("called") == 3, done.stderr


#: Signature of an older release [-> arguments it passes on] → a check of its values; `bool` accepts any.
OLDER: dict[str, Callable[[dict[str, Any]], Any]] = {
    "_get_eval_sampler(*args, **kwargs)": lambda values: values["args"],
    "_get_train_sampler()": bool,
    "_inner_training_loop(batch_size=None, args=None, resume_from_checkpoint=None, **kwargs)": lambda values: (
        (values["batch_size"], values["args"], values["resume_from_checkpoint"]) == (4, values["self"].args, None)
        and values["kwargs"] == {"trial": None, "ignore_keys_for_eval": None}
    ),
    "_maybe_log_save_evaluate(tr_loss, model, trial, epoch)": lambda values: values["epoch"] in (0, 1),
    "_maybe_log_save_evaluate(tr_loss, model, trial, epoch, ignore_keys_for_eval)": lambda values: (
        (values["tr_loss"].ndim, values["trial"], values["ignore_keys_for_eval"]) == (0, None, None)
        and isinstance(values["model"], nn.Module)
    ),
    "_maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, epoch, ignore_keys)": bool,
    "_maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, epoch, ignore_keys, start_time)": bool,
    "_maybe_log_save_evaluate(tr_loss, norm, model, trial, epoch, ignore, start, learning_rate=None)": bool,
    "_maybe_log_save_evaluate(*args, **kwargs)": lambda values: len(values["args"]) == 7,
    "_maybe_log_save_evaluate(**kwargs)": bool,
    "_rotate_checkpoints(use_mtime=False, output_dir=None)": lambda values: (
        values["use_mtime"] is True and values["output_dir"] == values["self"].args.output_dir
    ),
    "_save(output_dir=None, state_dict=None)": lambda of: re.search(r"[/_](checkpoint-\d+|final)$", of["output_dir"]),
    "_save_checkpoint(model, trial, metrics=None)": lambda values: "eval_loss" in values["metrics"],
    "_wrap_model(model, training=True)": bool,
    "compute_loss(model, inputs)": bool,
    "compute_loss(model, inputs, return_outputs=False)": bool,
    "compute_loss(model, inputs, return_outputs=False, **kwargs)": lambda of: "num_items_in_batch" in of["kwargs"],
    "create_scheduler(num_training_steps)": bool,
    "create_scheduler(num_training_steps, optimizer=None)": lambda values: values["optimizer"],
    "get_batch_samples(epoch_iterator, num_batches) -> epoch_iterator, num_batches, self.args.device": bool,
    "log(logs)": bool,
    "save_model(output_dir=None)": lambda values: values["output_dir"],
    "training_step(*args, **kwargs)": bool,
    "training_step(model, inputs)": bool,
}


@pytest.mark.parametrize("signature", OLDER)
def test_override_with_an_older_signature_runs_alike(tmp_path, signature):
    name, parameters, passed_on = re.fullmatch(r"(\w+)\((.*?)\)(?: -> (.*))?", signature).groups()
    passed_on = passed_on or re.sub(r"=\w+", "", parameters)
    calls, namespace = [], {"parent": parent}
    text = f"def {name}(self, {parameters}):\n note(locals())\n return parent(self).{name}({passed_on})"
    exec(text, namespace | {"note": calls.append}, methods := {})
    counts_tokens = "no" if name == "log" else "all"  # their speed is logged since `log` knows when training began
    settings = {**BEST, "save_total_limit": 2, "include_num_input_tokens_seen": counts_tokens}
    settings |= {"trainer": {"compute_metrics": accuracy}}
    ours = run_changed("hftrainer", tmp_path, methods=methods, **settings)
    assert_same(ours, run_plain("transformers", **settings))
    assert calls and all(map(OLDER[signature], calls))


def test_sorted_checkpoints_override_protects_a_checkpoint(tmp_path):
    """The override has the signature of v5.0."""

    def _sorted_checkpoints(self, output_dir=None, checkpoint_prefix="checkpoint", use_mtime=False):
        found = parent(self)._sorted_checkpoints(output_dir, checkpoint_prefix, use_mtime)
        return [path for path in found if not path.endswith("checkpoint-4")]

    settings = {**SAVED, "save_total_limit": 2}
    ours = run_changed("hftrainer", tmp_path, methods={"_sorted_checkpoints": _sorted_checkpoints}, **settings)
    assert sorted(ours.files) == ["checkpoint-16", "checkpoint-20", "checkpoint-4", "final"]


def test_metrics_are_passed_only_to_overrides_that_name_them(tmp_path):
    """An override with `*args`, as in ms-swift, may call one without `metrics`, as in TRL."""

    class Plain(hftrainer.Trainer):
        def _save_checkpoint(self, model, trial):
            super()._save_checkpoint(model, trial)

    class Passing(Plain):
        def _save_checkpoint(self, *args, **kwargs):
            super()._save_checkpoint(*args, **kwargs)

    ours = run_changed("hftrainer", tmp_path, trainer_class=lambda library: Passing, **SAVED)
    assert "checkpoint-20" in ours.files


def test_metrics_passed_on_by_an_override_decide_the_best_model(tmp_path):
    """As in transformers until v4.46."""

    def _save_checkpoint(self, model, trial, metrics=None):
        parent(self)._save_checkpoint(model, trial, metrics={"eval_own": float(self.state.global_step)})

    def evaluate(self, *args, **kwargs):
        return {**parent(self).evaluate(*args, **kwargs), "eval_own": -1.0}

    trainers, methods = [], {"_save_checkpoint": _save_checkpoint, "evaluate": evaluate}
    settings = {**BEST, "metric_for_best_model": "own", "greater_is_better": True}
    run_changed("hftrainer", tmp_path, change=trainers.append, methods=methods, **settings)
    state = trainers[0].state
    assert (state.best_metric, state.best_model_checkpoint) == (20, str(tmp_path / "checkpoint-20"))


#: Methods that need attributes of transformers' `__init__`, and the loop, which Lightning replaces.
NOT_COPIED = """
    _build_accelerator_args _inner_training_loop _run_epoch _validate_args create_accelerator_and_postprocess
""".split()
POPULAR = """
    training_step compute_loss prediction_step evaluate predict _save save_model _save_checkpoint get_batch_samples
    _maybe_log_save_evaluate create_optimizer create_scheduler log _get_train_sampler get_train_dataloader train
""".split()
#: Methods of transformers that a script has copied, and settings.
COPIED: dict[str, tuple[list[str], dict[str, Any]]] = {
    **{name: ([name], {}) for name in POPULAR},
    "all but these": (sorted(methods_of(transformers.Trainer) - {*NOT_COPIED}), {}),
    "train with NEFTune": (["train"], {"model": "bert", "neftune_noise_alpha": 5.0}),
    "train with model_init": (["train"], {"trainer": {"model_init": make_plain}}),
    "evaluation_loop": (["evaluation_loop"], {"trainer": ROWS}),
    "evaluation_loop of llama": (["evaluation_loop"], {"trainer": ROWS, "model": "llama"}),
    "evaluation_loop in bfloat16": (["evaluation_loop"], {"trainer": ROWS, "model": "bert", "bf16": True}),
    "evaluation_loop of lists": (["evaluation_loop"], {"trainer": ROWS, "eval_do_concat_batches": False}),
}


@pytest.mark.parametrize("case", COPIED)
def test_copied_methods_of_transformers_run_alike(tmp_path, case):
    """As scripts do that have copied and edited them."""
    names, further = COPIED[case]
    settings = {"gradient_accumulation_steps": 3, "change": lambda trainer: trainer.evaluate(), **BEST, **further}
    ours = run_changed("hftrainer", tmp_path, methods=copies(names), **settings)
    assert_same(ours, run_plain("transformers", **settings))


def test_copied_train_method_resumes(tmp_path):
    def run(name):
        settings = {"trainer_class": lambda library: type("Own", (library.Trainer,), copies(["train"])), **SAVED}
        train(name, "plain", tmp_path / name, **settings)
        return train(name, "plain", tmp_path / name, resume=str(tmp_path / name / "checkpoint-8"), **settings).weights

    assert_agree(run, parity.assert_same_weights)


def loop_of_v4_30(self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"):
    """The core of an edited evaluation loop of v4.2x and v4.3x, with the helpers of that time."""
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
    losses, *pair = (np.concatenate(each)[:count] for each in (losses, logits, labels))
    metrics = {**self.compute_metrics(hftrainer.EvalPrediction(*pair)), "loss": float(losses.mean())}
    metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
    return hftrainer.trainer_utils.EvalLoopOutput(*pair, metrics, count)


@pytest.mark.parametrize("settings", [{}, {"bf16": True}])
def test_evaluation_loop_with_older_helpers(tmp_path, settings):
    def values(**methods):
        before = []
        options = {"trainer": {"compute_metrics": accuracy}, "change": lambda made: before.append(made.evaluate())}
        ours = run_changed("hftrainer", tmp_path, methods=methods, model="bert", **options, **settings)
        return [line.get(n) for line in [*before, *ours.logs] for n in ("eval_loss", "eval_accuracy")]

    assert values(evaluation_loop=loop_of_v4_30) == values()


def recompile(function, old="self._hftrainer", new="(self or None)._hftrainer"):
    """Compile the changed text of a function in the module of a tool, as Unsloth and Axolotl do."""
    text = textwrap.dedent(inspect.getsource(function)).replace(function.__name__, "_fast", 1).replace(old, new)
    exec("from __future__ import annotations\n" + text, namespace := {"__name__": "a_tool.patches", "torch": torch})
    return namespace["_fast"]


def loop_of_transformers(_):
    """A tool that took the text before `install()` puts transformers' loop into our class."""
    loop = recompile(transformers.Trainer._inner_training_loop)
    loop.__globals__.update({name: value for name, value in vars(transformers.trainer).items() if name != "__name__"})
    return loop


def patch_instance(trainer):
    trainer._inner_training_loop = functools.partial(recompile(trainer._inner_training_loop), trainer)
    trainer._save = recompile(trainer._save).__get__(trainer)


def patch_class(trainer):
    type(trainer)._inner_training_loop = recompile(trainer._inner_training_loop)


def other_steps(self, **kwargs):
    parent(self)._run_epoch(**{**kwargs, "steps_in_epoch": 3})


BEFORE = {"patched": {"_inner_training_loop": recompile}, "change": lambda trainer: pytest.fail("it was constructed")}
WHY = r"_inner_training_loop \(by a_tool.patches\).*Tools that rewrite the Trainer"
BOTH = r"(?s)(?=.*_save \(by a_tool.patches\))(?=.*_inner_training_loop \(by a_tool)"
COPY = r"_inner_training_loop: a copy of transformers' own loop cannot run.* override\s+training_step"
#: What is replaced → how, and the error.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "rewritten in the class": (BEFORE, WHY),
    "rewritten in the class of a subclass": ({**BEFORE, "methods": {"own": 1}}, WHY),
    "rewritten in the class after construction": ({"change": patch_class, "methods": {"own": 1}}, WHY),
    "rewritten on the instance": ({"change": patch_instance}, BOTH),
    "text of transformers' loop": ({"patched": {"_inner_training_loop": loop_of_transformers}}, COPY),
    "copied loop": ({"methods": copies(["_inner_training_loop"])}, COPY),
    "no epoch": (
        {"methods": {"_run_epoch": lambda self, **_: None}},
        r"_run_epoch: .* must call super\(\)\._run_epoch",
    ),
    "epoch of other length": ({"methods": {"_run_epoch": other_steps}}, "_run_epoch: steps_in_epoch cannot be changed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_replaced_loop_is_refused_with_the_reason(tmp_path, case):
    how, why = REFUSED[case]
    with pytest.raises(UnsupportedArgument, match=why):
        run_changed("hftrainer", tmp_path, **how)


def recompile_unchanged(function):
    """As Axolotl leaves a function in which it finds nothing to replace."""
    made = recompile(function, "tr_loss_scalar = nested_gather", "")
    made.__globals__.update({name: value for name, value in function.__globals__.items() if name != "__name__"})
    return made


def test_recompiled_but_unchanged_methods_are_accepted(tmp_path):
    names = ("evaluation_loop", "_maybe_log_save_evaluate")
    ours = run_changed("hftrainer", tmp_path / "patched", patched=dict.fromkeys(names, recompile_unchanged), **BEST)
    assert_same(ours, run_changed("hftrainer", tmp_path / "plain", **BEST))


def test_wrapping_overrides_are_accepted(tmp_path):
    """Also those that are executed from text, or read `_hftrainer`."""
    text = """
class Own(Trainer):
    def training_step(self, *args, **kwargs):
        assert self._hftrainer.run.loop is not None
        return super().training_step(*args, **kwargs)
"""
    exec(text, namespace := {"Trainer": hftrainer.Trainer, "__name__": "a_script"})

    def change(trainer):
        trainer.compute_loss = functools.partial(hftrainer.Trainer.compute_loss, trainer)
        original = trainer.log
        trainer.log = lambda *args, **kwargs: original(*args, **kwargs)

    def log(self, *args, **kwargs):
        assert self._hftrainer.run is not None
        return hftrainer.Trainer.log(self, *args, **kwargs)

    namespace["Own"].log = log
    assert run_changed("hftrainer", tmp_path, change, trainer_class=lambda _: namespace["Own"]).logs
