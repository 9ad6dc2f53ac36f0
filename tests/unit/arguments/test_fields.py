"""TrainingArguments has the fields and defaults of transformers, and ignores none of them."""

import dataclasses
import importlib
import json
import logging
import os
import re

import pytest
import torch

import hftrainer
from hftrainer import Trainer, TrainingArguments
from hftrainer.arguments.checks.unsupported import check_supported
from hftrainer.arguments.fields.argument import arguments_of
from hftrainer.arguments.lightning_plan import make_plan
from hftrainer.arguments.old_names import FIELDS, KEPT
from hftrainer.arguments.resolved import ResolvedArguments
from hftrainer.errors import InvalidArgument, UnsupportedArgument
from tests.support.arguments import CASES
from tests.support.releases import TRANSFORMERS, pinned
from tests.support.small_models import make_plain

transformers = importlib.import_module("transformers")
OURS = {field.name: field for field in dataclasses.fields(TrainingArguments)}
TABLE = arguments_of(hftrainer.Seq2SeqTrainingArguments)
THEIRS = {field.name: field for field in dataclasses.fields(transformers.TrainingArguments) if field.init}
OWN = {
    *("lightning_config", "elastic", "eval_memmap_dir", "save_on_interrupt", "observe", "save_minutes", "eval_minutes"),
    *("metrics_port", "storage_url", "keep_local", "checkpoint_format", "new_tracker_run", "param_groups"),
    *("mixture_weights", "mixture_temperature", "mixture_column"),
    *("tokens_per_batch", "flatten_batches", "on_divergence", "divergence_threshold", "max_rollbacks"),
}
LEGACY = set(FIELDS)
#: Arguments whose defaults have changed since v4.48, or are written in another way.
CHANGED = {
    *("average_tokens_across_devices", "fsdp", "gradient_checkpointing", "include_num_input_tokens_seen"),
    *("lr_scheduler_kwargs", "optim", "output_dir", "report_to"),
}


def default(field):
    return field.default_factory() if field.default is dataclasses.MISSING else field.default


@pytest.mark.parametrize(
    "name",
    [pytest.param(arg, marks=[pytest.mark.newest_peer] * (arg in CHANGED)) for arg in sorted(THEIRS.keys() - LEGACY)],
)
def test_default_is_that_of_transformers(name):
    assert default(OURS[name]) == default(THEIRS[name])


@pytest.mark.skipif(not LEGACY & THEIRS.keys(), reason="the installed transformers has no old name")
def test_default_of_old_name_is_that_of_transformers():
    """Empty defaults, such as '' and False, count as None."""
    names = LEGACY & THEIRS.keys()
    ours = {name: KEPT.get(name, default(OURS[name])) or None for name in names}
    assert ours == {name: default(THEIRS[name]) or None for name in names}


@pytest.mark.parametrize("name", sorted(OURS))
def test_every_field_has_a_row_and_a_docstring(name):
    assert TABLE[name].kind in ("mapped", "handled", "inert", "refused")
    assert TABLE[name].detail or TABLE[name].kind == "handled"
    text = OURS[name].metadata["help"]
    assert text.endswith(".")
    assert name in OWN or "Since v" in text or "(v4." in text or TABLE[name].since == "4.1"  # which releases had it


@pytest.mark.newest_peer
def test_fields_are_those_of_newest_transformers():
    """transformers 5.24 has 114; ours has 35 old ones and its own in addition."""
    ours, theirs = (
        {field.name for field in dataclasses.fields(library.Seq2SeqTrainingArguments) if field.init}
        for library in (hftrainer, transformers)
    )
    assert ours - LEGACY - OWN == theirs
    assert OURS.keys() - LEGACY - OWN == THEIRS.keys()
    assert (len(THEIRS), len(LEGACY)) == (114, 35)


def test_every_refused_argument_has_a_case():
    refused = {name for name, row in TABLE.items() if row.kind == "refused"}
    assert refused <= {name for name, case in CASES.items() if case.refusal}


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        *((name, case.value, f"is not supported: {case.refusal}") for name, case in CASES.items() if case.refusal),
        ("fp16_opt_level", "O3", "is not supported: "),
        ("fp16_backend", "apx", "is not supported: .*cuda_amp"),
    ],
)
def test_unsupported_argument_is_refused_by_name(name, value, reason):
    args = TrainingArguments("x", use_cpu=True)
    assert not check_supported(ResolvedArguments(args))
    setattr(args, name, value)
    (message,) = check_supported(ResolvedArguments(args))
    assert re.match(f"{name}={value!r} {reason}", message)
    with pytest.raises(UnsupportedArgument, match=name):
        Trainer(make_plain(), args)


@pytest.mark.usefixtures("deepspeed_installed")
@pytest.mark.parametrize("name", sorted(OURS.keys() - LEGACY))
def test_only_mapped_arguments_change_the_plan(name, monkeypatch):
    """What is mapped to a setting of Lightning, and only that, changes the plan."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    needs = {"fsdp": True} if name == "fsdp_config" else CASES[name].settings

    def plan(**settings):
        args = TrainingArguments(**{"output_dir": "x", "use_cpu": True, **needs, **settings})
        return dataclasses.replace(make_plan(ResolvedArguments(args)), read_once={})

    changed = plan(**{name: CASES[name].value})
    assert (changed != plan()) is (TABLE[name].kind == "mapped")
    assert changed.device.startswith("cuda" if name == "use_cpu" else "cpu")
    assert changed.precision == {"bf16": "bf16-mixed", "fp16": "16-mixed"}.get(name, "32-true")
    with pytest.raises(dataclasses.FrozenInstanceError):
        changed.device = "cuda:1"


@pytest.mark.parametrize(
    ("name", "value"), [("find_unused_parameters", False), ("bucket_cap_mb", 0), ("broadcast_buffers", False)]
)
def test_false_and_zero_reach_ddp(name, value):
    args = TrainingArguments("x", use_cpu=True, **{f"ddp_{name}": value})
    assert make_plan(ResolvedArguments(args)).ddp == {name: value}


def test_construction_leaves_files_environment_and_random_state_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ), torch.get_rng_state()
    args = TrainingArguments()
    assert args.output_dir == "trainer_output"
    assert not list(tmp_path.iterdir())
    assert dict(os.environ) == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_subclass_field_may_be_unset(tmp_path):
    @dataclasses.dataclass
    class WithLater(TrainingArguments):
        later: int = dataclasses.field(init=False)

    assert check_supported(ResolvedArguments(WithLater(str(tmp_path), use_cpu=True))) == []


def test_unset_arguments_follow_from_others():
    args = TrainingArguments("~/x", eval_strategy="steps", logging_steps=7, load_best_model_at_end=True, save_steps=14)
    assert args.output_dir.startswith("/")
    assert (args.eval_steps, args.do_eval) == (7, True)
    assert (args.metric_for_best_model, args.greater_is_better) == ("loss", False)
    assert TrainingArguments("x", metric_for_best_model="accuracy").greater_is_better is True
    assert TrainingArguments("x", metric_for_best_model="eval_loss").greater_is_better is False
    assert TrainingArguments("x", ddp_timeout=90).ddp_timeout_delta.total_seconds() == 90


@pytest.mark.parametrize(
    "library", [hftrainer, pytest.param(transformers, marks=pytest.mark.newest_peer)], ids=["ours", "theirs"]
)
@pytest.mark.parametrize(("steps", "of_200"), [(0, 0), (10, 10), (0.1, 20), (0.001, 1)])
def test_warmup_steps_below_one_are_a_share(library, steps, of_200):
    assert library.TrainingArguments("x", warmup_steps=steps).get_warmup_steps(200) == of_200


#: What transformers fills in at construction is not known before training here.
FILLED_IN = {"fsdp_config", "fsdp", "dataloader_pin_memory"}
if pinned("transformers") > TRANSFORMERS:
    FILLED_IN |= CHANGED | {"local_rank", "run_name"}


def different(ours, theirs):
    return {name for name in theirs.keys() - LEGACY if ours[name] != theirs[name]} - FILLED_IN


def test_to_dict_matches_transformers():
    settings = {"output_dir": "x", "eval_strategy": "epoch", "hub_token": "secret", "use_cpu": True}
    args, theirs = TrainingArguments(**settings), transformers.TrainingArguments(**settings).to_dict()
    newer = OURS.keys() - LEGACY - OWN - THEIRS.keys()
    assert args.to_dict().keys() == (theirs.keys() - LEGACY) | newer
    assert not different(args.to_dict(), theirs)
    assert "secret" not in args.to_json_string() + repr(args)
    assert json.loads(args.to_json_string()) == args.to_dict()
    assert all(type(value) in (bool, int, float, str) for value in args.to_sanitized_dict().values())


def test_public_names_can_be_imported():
    for name in hftrainer.__all__:
        assert getattr(hftrainer, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Trainr'"):
        hftrainer.Trainr  # noqa: B018


def test_compatibility_page_is_up_to_date():
    from scripts.compatibility_page import DIFFERENCES, GROUPS, PAGE, page

    assert set(DIFFERENCES) == set(GROUPS)
    assert PAGE.read_text(encoding="utf-8") == page(), "run python scripts/compatibility_page.py"


@pytest.mark.parametrize(
    ("method", "values"),
    [
        ("set_training", {"learning_rate": 0.1, "batch_size": 3, "max_steps": 7, "gradient_accumulation_steps": 2}),
        (
            "set_evaluate",
            {"strategy": "steps", "steps": 5, "batch_size": 3, "accumulation_steps": 2, "loss_only": True},
        ),
        ("set_testing", {"batch_size": 5, "loss_only": True}),
        ("set_save", {"strategy": "epoch", "steps": 7, "total_limit": 3}),
        ("set_logging", {"strategy": "epoch", "first_step": True, "level": "error"}),
        ("set_push_to_hub", {"model_id": "org/name", "strategy": "end"}),
        ("set_optimizer", {"name": "sgd", "beta1": 0.5}),
        ("set_lr_scheduler", {"name": "cosine", "warmup_steps": 0.1}),
        ("set_dataloader", {"train_batch_size": 3, "num_workers": 2, "sampler_seed": 5}),
    ],
)
@pytest.mark.parametrize("defaults", [True, False])
def test_setter_methods_match_transformers(method, values, defaults):
    if defaults and method != "set_push_to_hub":
        values = {}
    ours, theirs = TrainingArguments("x"), transformers.TrainingArguments("x", eval_delay=0)
    assert getattr(ours, method)(**values) is ours
    getattr(theirs, method)(**values)
    theirs.eval_delay = theirs.eval_delay or 0  # None would fail when training compares it
    theirs.report_to = [] if theirs.report_to == "none" else theirs.report_to
    assert not different(ours.to_dict(), theirs.to_dict())


def test_arguments_changed_by_a_setter_are_checked_again(tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True).set_logging(steps=0)
    with pytest.raises(InvalidArgument, match="logging_steps=0"):
        Trainer(make_plain(), args)


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error", "critical"])
def test_log_level_is_that_of_the_rank(level, monkeypatch, tmp_path):
    number = getattr(logging, level.upper())
    settings = {"log_level": level, "log_level_replica": "error", "use_cpu": True}
    args, elsewhere = (TrainingArguments(str(tmp_path), **settings) for _ in range(2))
    assert args.get_process_log_level() == number
    before = transformers.logging.get_verbosity()
    try:
        Trainer(make_plain(), args)
        assert logging.getLogger("hftrainer.trainer").getEffectiveLevel() == number
        assert transformers.logging.get_verbosity() == number
    finally:
        transformers.logging.set_verbosity(before)
        logging.getLogger("hftrainer").setLevel(logging.NOTSET)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "1")
    assert elsewhere.get_process_log_level() == logging.ERROR
    assert args.get_process_log_level() == number  # the rank was read when its Trainer was made


def test_passive_log_level_changes_nothing(tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    Trainer(make_plain(), args)
    assert logging.getLogger("hftrainer").level == logging.NOTSET
    assert args.get_process_log_level() == logging.getLogger("hftrainer").getEffectiveLevel()
