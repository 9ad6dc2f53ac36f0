"""Runs through `install()` are those of the installed release of transformers, exactly.

`make test-versions` runs this file beside each of several releases. A case is a function of a folder that trains with
the classes that `transformers` has, and returns what can be compared. `SHOWN_BY` names the case that shows each
difference of an earlier release: without the difference, it finds something else.
"""

import contextlib
import copy
import inspect
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers

import hftrainer
from hftrainer.releases import followed
from hftrainer.releases.earlier import POLICIES
from tests.support import small_models
from tests.support.parity import Record, accuracy, assert_same, build, record, train
from tests.support.releases import TRANSFORMERS
from tests.support.small_models import Plain, make_bert, make_plain, pad, plain_data, tokenizer

STEPS = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3}
ACCUMULATING = {"gradient_accumulation_steps": 4}  # 10 micro-batches: the last window has 2
BEST = {**STEPS, "load_best_model_at_end": True}
METRICS = {"trainer": {"compute_metrics": accuracy}}
by_length = {"group_by_length": True} if TRANSFORMERS < (5,) else {"train_sampling_strategy": "group_by_length"}


def train_case(model, **settings):
    return lambda folder: train("transformers", model, folder, **copy.deepcopy(settings))


def begin(folder, model, step, **settings):
    """Write the checkpoint that a case resumes from: by transformers itself, whoever resumes."""
    assert transformers.Trainer.__module__ == "transformers.trainer"
    train("transformers", model, folder, **{**settings, "save_steps": step})


def resume(folder, model, step, again=(), **settings):
    shutil.copytree(folder.parent / "begun" / f"checkpoint-{step}", folder / f"checkpoint-{step}")
    return train("transformers", model, folder, resume=True, **{**settings, "save_steps": step, **dict(again)})


def resume_case(model, step, **settings):
    return partial(resume, model=model, step=step, **settings)


def items_given_to_a_loss_function(model, folder, **settings):
    seen = []

    def loss(outputs, labels, num_items_in_batch=None):
        items = num_items_in_batch
        seen.append((str(getattr(items, "dtype", type(items))), None if items is None else float(items)))
        losses = torch.nn.functional.cross_entropy(outputs["logits"].flatten(0, -2), labels.flatten(), reduction="sum")
        return losses / (labels.numel() if items is None else items)

    found = train("transformers", model, folder, trainer={"compute_loss_func": loss}, max_steps=5, **STEPS, **settings)
    found.extra["items"] = seen
    return found


def items_given_to_an_override(folder):
    """The items that an override of compute_loss gets with a model that does not ask for them."""
    seen = []

    class Own(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            seen.append(None if num_items_in_batch is None else float(num_items_in_batch))
            return super().compute_loss(model, inputs, return_outputs=return_outputs)

    found = train("transformers", "plain", folder, trainer_class=lambda library: Own, max_steps=3, **ACCUMULATING)
    found.extra["items"] = seen
    return found


def divided_by_the_loss_alone(folder):
    """With the division of accelerate turned off, as ms-swift does; v5.2 to v5.5 divide gradients a second time."""

    class Own(transformers.Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.accelerator.gradient_state.plugin_kwargs["num_steps"] = 1

    return train("transformers", "plain", folder, trainer_class=lambda library: Own, max_steps=3, **ACCUMULATING)


def overrides_of_all_that_make_an_optimizer(folder):
    calls = []

    class Own(transformers.Trainer):
        def create_optimizer_and_scheduler(self, num_training_steps):
            calls.append("both")
            super().create_optimizer_and_scheduler(num_training_steps)

        def create_optimizer(self, *args, **kwargs):
            calls.append("optimizer")
            return super().create_optimizer(*args, **kwargs)

        def create_scheduler(self, *args, **kwargs):
            calls.append("scheduler")
            return super().create_scheduler(*args, **kwargs)

    found = train("transformers", "plain", folder, trainer_class=lambda library: Own, max_steps=1)
    found.extra["calls"] = calls
    return found


class Keywords(Plain):
    """Takes num_items_in_batch, and labels under a name that is not counted."""

    def forward(self, x, target=None, **kwargs):
        return super().forward(x, target)


def items_that_nobody_counts(folder):
    torch.manual_seed(1)
    data = [{"x": row["x"], "target": row["labels"]} for row in plain_data()]
    trainer_kwargs = {"model": Keywords(), "train_dataset": data, "eval_dataset": data[:19]}
    return train("transformers", "plain", folder, trainer=trainer_kwargs, label_names=["target"], **ACCUMULATING)


class Scale(torch.nn.Module):
    """A custom normalization: its class is unknown, but its name is known."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(16))

    def forward(self, x):
        return x * self.weight


def a_model_of_its_own(name, folder):
    """Which of its parameters decay, and the operations that it counts itself."""
    model = make_plain()
    model.layers[1] = torch.nn.Sequential()
    model.layers[1].add_module(name, Scale())
    model.floating_point_ops = lambda inputs: 7 * len(inputs["x"])
    trainer, recorder = build("transformers", "plain", folder, trainer={"model": model}, **STEPS)
    trainer.train()
    return record(trainer, recorder, folder, decays=trainer.get_decay_parameter_names(trainer.model))


def special_tokens_and_printed_lines(folder, capsys, bos=7, eos=8):
    """What the processing class changes in the model's config, and in which form log lines are printed."""
    model = make_bert()
    model.config.bos_token_id, model.config.eos_token_id = bos, eos
    capsys.readouterr()
    trainer_kwargs = {"model": model, "processing_class": tokenizer()}
    trainer, recorder = build("transformers", "bert", folder, trainer=trainer_kwargs)
    trainer.train()
    lines = [line for line in capsys.readouterr().out.splitlines() if "'loss'" in line]
    assert lines
    return record(trainer, recorder, folder, config=model.config.to_dict(), lines=lines)


def the_cache_of_a_config(folder):
    model = small_models.make_llama()
    trainer, recorder = build("transformers", "llama", folder, trainer={"model": model}, max_steps=1)
    trainer.train()
    return record(trainer, recorder, folder, use_cache=model.config.use_cache)


def a_trial_with_another_seed(folder):
    """The weights with which a trial begins."""
    begun = {}

    class Begun(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            begun.update({name: value.clone() for name, value in model.state_dict().items()})

    trainer_kwargs = {"model": None, "model_init": Plain, "callbacks": [Begun()]}
    trainer, _ = build("transformers", "plain", folder, trainer=trainer_kwargs, max_steps=2, eval_strategy="epoch")
    trainer.hyperparameter_search(lambda trial: {"seed": 7}, n_trials=1, backend="optuna")
    return Record(logs=[], events=[], files={}, state_keys=[], weights=begun)


def a_batch_size_set_later(folder):
    trainer, recorder = build("transformers", "plain", folder, max_steps=3)
    trainer.args.per_device_train_batch_size = 2
    trainer.train()
    return record(trainer, recorder, folder)


def before_and_after_training(folder):
    trainer, recorder = build("transformers", "llama", folder, max_steps=3)
    trainer.evaluate()
    trainer.train()
    output = trainer.predict(trainer.eval_dataset)
    return record(trainer, recorder, folder, names=sorted(output.metrics), predicted=output.predictions.tolist())


class Past(Plain):
    """Its config says nothing of the state that it returns."""

    def forward(self, x, labels=None):
        name = "past_key_values" if TRANSFORMERS < (5, 24) else "cache"
        return {**super().forward(x, labels), name: torch.zeros(len(x), 2)}


def predictions_with_a_past(folder):
    torch.manual_seed(1)
    model = Past()
    model.config = transformers.PretrainedConfig()
    trainer, recorder = build("transformers", "plain", folder, trainer={"model": model})
    predicted = trainer.predict(trainer.eval_dataset).predictions
    return record(trainer, recorder, folder, arrays=len(predicted) if isinstance(predicted, tuple) else 1)


def an_infinite_loss(folder):
    data = copy.deepcopy(plain_data())
    data[3]["x"][0] = float("nan")
    return train("transformers", "plain", folder, trainer={"eval_dataset": data}, **STEPS)


def grouped_by_length(folder):
    """Which random numbers an evaluation draws, and so what training draws after it."""
    rows = small_models.varied_language_data(38)
    trainer_kwargs = {"train_dataset": rows, "eval_dataset": rows[:19], "data_collator": pad}
    return train("transformers", "llama", folder, trainer=trainer_kwargs, **STEPS, **by_length)


def the_best_model_when_it_is_logged(folder):
    """Whether the weights are the best ones already when the last line is logged."""
    sums = []

    class Weights(transformers.TrainerCallback):
        def on_log(self, args, state, control, model=None, **kwargs):
            sums.append(sum(parameter.sum().item() for parameter in model.parameters()))

    settings = {**BEST, "greater_is_better": True, "trainer": {"callbacks": [Weights()]}}  # the first, then
    trainer, recorder = build("transformers", "plain", folder, **settings)
    recorder.events = sums
    trainer.train()
    return record(trainer, recorder, folder)


def a_tokenizer_of_the_collator(folder):
    collate = transformers.DataCollatorWithPadding(tokenizer())
    return train("transformers", "bert", folder, trainer={"data_collator": collate}, max_steps=3, **STEPS)


def the_lengths_of_a_run(folder, **settings):
    """With the signature of the release, and the values that it returns."""
    seen = []

    class Lengths(transformers.Trainer):
        def set_initial_training_values(self, args, dataloader, *more):
            values = super().set_initial_training_values(args, dataloader, *more)
            seen.append((more, tuple(values), [str(type(value)) for value in values]))
            return tuple(values)

    found = train("transformers", "plain", folder, trainer_class=lambda library: Lengths, **settings)
    found.extra["lengths"] = seen
    return found


class OwnDefault(transformers.BertForSequenceClassification):
    """Saves .bin files unless safe_serialization is passed, as SpanMarker's models do."""

    def save_pretrained(self, save_directory, safe_serialization=False, **kwargs):
        super().save_pretrained(save_directory, safe_serialization=safe_serialization, **kwargs)
        Path(save_directory, "told").write_text(str(safe_serialization))


def a_model_with_another_format_by_default(folder):
    settings = {"save_strategy": "epoch", "trainer": {"model_init": lambda: OwnDefault(make_bert().config)}}
    found = train("transformers", "bert", folder, **settings)
    found.extra["told"] = (folder / "checkpoint-10" / "told").read_text()
    assert found.extra["told"] == str(TRANSFORMERS < (5, 0))
    return found


FP16 = {"fp16": True, "save_strategy": "steps", "save_steps": 3, "max_steps": 3}
OTHER_SIZE = {"per_device_train_batch_size": 6, "ignore_data_skip": True}
CASES = {
    # A row for each pair of settings of the matrix in test_matrix.py.
    "plain": train_case("plain", **STEPS, **METRICS),
    "plain, accumulating, bf16": train_case("plain", max_steps=5, gradient_accumulation_steps=3, bf16=True),
    "bert, accumulating": train_case("bert", gradient_accumulation_steps=3, **STEPS, **METRICS),
    "bert, bf16": train_case("bert", max_steps=5, bf16=True, **STEPS),
    "llama, accumulating": train_case("llama", **ACCUMULATING, **STEPS),
    "llama, bf16": train_case("llama", max_steps=5, bf16=True),
    # The last of 20 steps is not a multiple of 3, so that no evaluation is due.
    "best model": train_case("plain", **BEST),
    "best model, one kept": train_case("plain", **BEST, save_total_limit=1),
    "accumulating, divided once": divided_by_the_loss_alone,
    "by epoch": train_case("plain", eval_strategy="epoch", save_strategy="epoch"),
    "not clipped": train_case("plain", max_grad_norm=0.0),
    "evaluated at the start": train_case("plain", eval_on_start=True, **STEPS),
    "part of an epoch": train_case("plain", num_train_epochs=1.35, **ACCUMULATING),
    "accumulating": train_case("plain", **ACCUMULATING),
    "smoothed": train_case("bert", label_smoothing_factor=0.1, **STEPS),
    "smoothed, accumulating": train_case("llama", label_smoothing_factor=0.1, **ACCUMULATING, **STEPS),
    "tokens seen": train_case("llama", include_num_input_tokens_seen=True, **STEPS),
    "neftune": train_case("llama", neftune_noise_alpha=5.0, gradient_checkpointing=True),
    "cosine": train_case("llama", optim="adamw_torch", lr_scheduler_type="cosine"),
    "plateau": train_case("plain", lr_scheduler_type="reduce_lr_on_plateau", metric_for_best_model="loss", **STEPS),
    "fp16": train_case("plain", **FP16),
    "resumed within an epoch": resume_case("llama", 4, logging_steps=1, **STEPS),
    "resumed at the end of an epoch": resume_case("llama", 10, logging_steps=1, **STEPS),
    "resumed, accumulating": resume_case("llama", 2, logging_steps=1, gradient_accumulation_steps=3, **STEPS),
    "resumed, full windows": resume_case("llama", 3, logging_steps=1, gradient_accumulation_steps=5, **STEPS),
    "resumed with another batch size": resume_case("plain", 4, again=OTHER_SIZE, save_strategy="steps", max_steps=7),
    "items of a plain model": partial(items_given_to_a_loss_function, "plain"),
    "items of a language model": partial(items_given_to_a_loss_function, "llama", gradient_accumulation_steps=3),
    "items for an override": items_given_to_an_override,
    "items that nobody counts": items_that_nobody_counts,
    "overrides of all that make an optimizer": overrides_of_all_that_make_an_optimizer,
    "a norm": partial(a_model_of_its_own, "norm"),
    "a layernorm": partial(a_model_of_its_own, "layernorm"),
    "special tokens": special_tokens_and_printed_lines,
    "end tokens": partial(special_tokens_and_printed_lines, bos=None, eos=[8, 9]),
    "the cache of a config": the_cache_of_a_config,
    "a trial with another seed": a_trial_with_another_seed,
    "a batch size set later": a_batch_size_set_later,
    "before and after training": before_and_after_training,
    "predictions with a past": predictions_with_a_past,
    "an infinite loss": an_infinite_loss,
    "grouped by length": grouped_by_length,
    "the best model when it is logged": the_best_model_when_it_is_logged,
    "a tokenizer of the collator": a_tokenizer_of_the_collator,
    "the lengths of a run": the_lengths_of_a_run,
    "the lengths of some steps": partial(the_lengths_of_a_run, max_steps=5, gradient_accumulation_steps=3),
    "a model with another format by default": a_model_with_another_format_by_default,
}
#: The last release that does something differently → what, and the case that shows it, or the test elsewhere.
SHOWN_BY = {
    "5.22": {"filters_nonfinite_eval_losses": "an infinite loss", "skips_logits": "tests/parity/test_model_changes.py"},
    "5.18": {"averages_train_loss_over_call": "resumed within an epoch", "num_items": "items of a plain model"},
    "5.17": {"aligns_only_set_tokens": "end tokens"},
    "5.15": {"evaluation_generator": "grouped by length"},
    "5.14": {"smooths_over_items": "smoothed, accumulating"},
    "5.9": {"counted_labels": "llama, accumulating"},
    "5.5": {"gradient_divisor": "accumulating"},
    "5.3": {"evaluates_last_step": "best model"},
    "5.2": {
        "epoch_before_training": "before and after training",
        "loads_best_after_logging": "the best model when it is logged",
        "logs_grad_norm_without_clipping": "not clipped",
        "makes_model_before_trial": "a trial with another seed",
        "reads_batch_size_once": "a batch size set later",
        "returns_steps_in_epoch": "the lengths of a run",
    },
    "5.1": {"resumes_with_batch_size_of_arguments": "resumed with another batch size"},
    "5.0": {"calls_create_scheduler": "overrides of all that make an optimizer"},
    "4.57": (
        {"estimates_total_flos": "a norm", "logged_loss": "plain"}
        | {"printed": "special tokens", "sets_use_cache": "the cache of a config"}
    ),
    "4.56": {"divides_eval_loss_by_items": "llama, accumulating"},
    "4.55": {"aligns_special_tokens": "special tokens"},
    "4.54": {"loss_divisor": "accumulating"},
    "4.52": {"decay_parameter_names": "a norm", "divides_uncounted_loss": "items that nobody counts"},
    "4.51": {
        "logs_tokens_per_second": "tokens seen",
        "seeds_workers_by_rank": "tests/distributed/test_data.py",
        "steps_of_epoch": "accumulating",
    },
    "4.50": {"counts_items_only_if_used": "items for an override", "logs_rate_of_step": "plain"},
    "4.49": (
        {"num_items": "items of a plain model", "records_best_step": "best model"}
        | {"saves_last_step_with": "by epoch", "saves_tokenizer_of_collator": "a tokenizer of the collator"}
    ),
    "4.48": {
        "decay_parameter_names": "a layernorm",
        "excludes_past_key_values": "predictions with a past",
        "saves_scaler": "fp16",
    },
}
SKIPPED = {
    "fp16": (True, "transformers leaves fp16 out on a CPU: tests/parity/test_precision.py"),
    "resumed, accumulating": (TRANSFORMERS < (4, 52), "the ledger: a resumed run with a ragged last window"),
    "the lengths of a run": (TRANSFORMERS < (4, 49), "set_initial_training_values is there since v4.49"),
    "the lengths of some steps": (TRANSFORMERS < (4, 49), "set_initial_training_values is there since v4.49"),
}


@contextlib.contextmanager
def install_ours():
    hftrainer.install()
    try:
        assert transformers.Trainer is hftrainer.Trainer
        yield
    finally:
        hftrainer.uninstall()


@pytest.fixture
def observe(tmp_path, capsys):
    def run(name, who):
        case = CASES[name]
        function = getattr(case, "func", case)
        if function is resume and not (tmp_path / "begun").exists():
            settings = {key: value for key, value in case.keywords.items() if key != "again"}
            begin(tmp_path / "begun", **settings)
        more = {"capsys": capsys} if function is special_tokens_and_printed_lines else {}
        return case(tmp_path / who, **more)

    return run


@pytest.mark.parametrize("name", CASES)
def test_run_is_that_of_the_installed_release(observe, name):
    condition, reason = SKIPPED.get(name, (False, ""))
    if condition:
        pytest.skip(reason)
    theirs = observe(name, "theirs")
    with install_ours():
        ours = observe(name, "ours")
    assert_same(ours, theirs)


def test_every_difference_between_releases_has_a_case():
    expected = {str(kind.last_release): set(kind.own_changes) for kind in POLICIES[:-1]}
    assert {release: set(names) for release, names in SHOWN_BY.items()} == expected


@pytest.mark.newest_peer
@pytest.mark.parametrize(
    ("kind", "decision"),
    [(kind, name) for kind in reversed(POLICIES[:-1]) for name in SHOWN_BY[str(kind.last_release)]],
)
def test_case_fails_without_the_difference_that_it_shows(observe, monkeypatch, kind, decision):
    """Each difference is tried in the last release that has it."""
    name = SHOWN_BY[str(kind.last_release)][decision]
    if name not in CASES:
        assert Path(__file__).parents[2].joinpath(name).is_file()
        return
    later = type("Later", (kind,), {decision: inspect.getattr_static(kind.__base__, decision)})
    if getattr(CASES[name], "func", None) is resume:
        observe(name, "theirs")  # which writes what is resumed from
    found = []
    # The end of install_ours() makes it by the replaced function, also for tests after this one.
    monkeypatch.setattr(followed, "_default", followed._default)
    for policy in (kind, later):
        monkeypatch.setattr(followed, "make_policy", lambda release, policy=policy: policy(kind.last_release))
        with install_ours():
            found.append(observe(name, str(len(found))))
    with pytest.raises(AssertionError):
        assert_same(*found)


def test_transformers_module_held_by_the_script_is_swapped_too():
    """`import transformers` may give another module than `sys.modules` has later: it executes itself again."""
    with install_ours():
        assert {transformers.Trainer, sys.modules["transformers"].Trainer} == {transformers.trainer.Trainer}
        assert transformers.Trainer.__module__ == "hftrainer.trainer"
    assert {transformers.Trainer, sys.modules["transformers"].Trainer} == {transformers.trainer.Trainer}
    assert transformers.Trainer.__module__ == "transformers.trainer"
