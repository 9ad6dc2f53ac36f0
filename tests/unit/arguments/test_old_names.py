"""Old names of arguments do what they did, by their new names, or are refused with the reason."""

import dataclasses
import functools
import json
import pickle
import warnings
from pathlib import Path

import pytest

from hftrainer import Trainer, TrainingArguments
from hftrainer.arguments.checks.unsupported import check_supported
from hftrainer.arguments.old_names import FIELDS, KEPT, RENAMED
from hftrainer.arguments.resolved import ResolvedArguments
from hftrainer.errors import InvalidArgument
from tests.support.arguments import CASES, make_quiet_trainer
from tests.support.small_models import make_plain

#: Each value of an old name, the new name and its value.
MEANINGS = [(old, value, case.new, now) for old, case in CASES.items() for value, now in case.meanings]


def make(**settings):
    return TrainingArguments(**{"output_dir": "x", "use_cpu": True, **settings})


def test_every_old_name_has_a_case():
    assert {row[0] for row in MEANINGS} == RENAMED.keys()
    assert len(FIELDS) == 35


@pytest.mark.parametrize(("old", "value", "new", "now"), MEANINGS)
def test_old_name_sets_the_new_argument(old, value, new, now):
    with pytest.warns(FutureWarning, match=f"{old}(=0.25)? is now {new}"):
        args = TrainingArguments("x", **{old: value})
    assert getattr(args, new) == now
    if old not in ("sharded_ddp", "push_to_hub_organization"):
        assert getattr(args, old) == value
    # What it asks for is done, or refused by its new name, like the new name itself.
    same = TrainingArguments("x", **{new: now})
    assert check_supported(ResolvedArguments(args)) == check_supported(ResolvedArguments(same))


@pytest.mark.parametrize("name", ["jit_mode_eval", "use_ipex"])
def test_switches_without_effect_warn(name):
    with pytest.warns(FutureWarning, match=f"{name}=True: .* the model"):
        args = make(**{name: True})
    assert getattr(args, name) is True
    assert not check_supported(ResolvedArguments(args))


@pytest.mark.parametrize(
    ("name", "value"), [("fp16_backend", "amp"), ("half_precision_backend", "cuda_amp"), ("fp16_opt_level", "O1")]
)
def test_old_float16_backend_values_are_accepted(name, value):
    assert not check_supported(ResolvedArguments(make(**{name: value})))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"evaluation_strategy": "steps", "eval_strategy": "epoch"},
            "evaluation_strategy='steps' and eval_strategy='e",
        ),
        ({"per_gpu_train_batch_size": 3, "per_device_train_batch_size": 4}, "per_gpu_train_batch_size=3"),
        ({"warmup_ratio": 1.5}, "warmup_ratio=1.5"),
        ({"sharded_ddp": "zero_dp_4"}, "zero_dp_4"),
        ({"fsdp_config": "file.json", "fsdp_min_num_params": 3}, "path of a file"),
    ],
)
def test_old_name_that_contradicts_the_new_is_refused(settings, message):
    with pytest.raises(InvalidArgument, match=message):
        TrainingArguments("x", **settings)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_old_and_new_name_may_be_given_together():
    assert make(evaluation_strategy="steps", eval_strategy="steps").eval_strategy == "steps"
    assert make(warmup_ratio=0.1, warmup_steps=7).get_warmup_steps(100) == 7  # documented since v4.2
    args = make(push_to_hub_model_id="name", push_to_hub_organization="org")
    assert (args.hub_model_id, args.push_to_hub_organization) == ("org/name", "org")
    assert make(hub_model_id=3).hub_model_id == 3


def test_old_names_give_one_warning_at_the_callers_line():
    with pytest.warns(FutureWarning) as caught:
        TrainingArguments("x", no_cuda=True, evaluation_strategy="steps", logging_steps=3, warmup_ratio=0.1)
    (warning,) = caught
    assert "warmup_ratio=0.1 is now warmup_steps=0.1" in str(warning.message)
    assert Path(warning.filename) == Path(__file__)
    assert "no_cuda is now use_cpu" in str(warning.message)
    assert "evaluation_strategy is now eval_strategy" in str(warning.message)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_old_name_reads_as_it_was_set():
    args = make(evaluation_strategy="steps")
    assert (args.evaluation_strategy, args.no_cuda) == ("steps", False)
    args.eval_strategy = "epoch"
    assert args.evaluation_strategy == "steps"
    args.evaluation_strategy = "no"
    assert args.eval_strategy == "no"
    assert {name: getattr(args, name) for name in KEPT} == KEPT


def test_replace_and_pickle_keep_old_names():
    """A copy has the values of the old names; they take effect where they differ, as in the releases that had them."""
    with pytest.warns(FutureWarning):
        args = TrainingArguments("x", evaluation_strategy="steps", no_cuda=True, include_inputs_for_metrics=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        changed = dataclasses.replace(args, seed=3, evaluation_strategy=None, eval_strategy="epoch")
        assert (changed.eval_strategy, changed.use_cpu, changed.seed) == ("epoch", True, 3)
        assert changed.include_for_metrics == ["inputs"]
        assert pickle.loads(pickle.dumps(args)) == args
    with pytest.warns(FutureWarning, match="no_cuda is now use_cpu"):
        assert dataclasses.replace(args, use_cpu=False).use_cpu


#: Old names that do not undo what they did: one reads as None whatever fsdp says, the switch does not know which
#: optimizer was there before, and torch_compile has its own default backend.
ONE_WAY = {"sharded_ddp", "adafactor", "torchdynamo"}


@pytest.mark.parametrize(("old", "value", "new", "now"), MEANINGS)
def test_replace_by_old_name_sets_the_new_argument(old, value, new, now):
    """SpanMarker does so, with `include_inputs_for_metrics`."""
    source = make(use_cpu=old != "no_cuda", hub_model_id="a/x")
    with pytest.warns(FutureWarning, match=old):
        changed = dataclasses.replace(source, **{old: value})
    assert getattr(changed, new) == now
    assert dataclasses.replace(changed) == changed
    if old not in ONE_WAY:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            back = dataclasses.replace(changed, **{old: getattr(source, old)})
        assert getattr(back, old) == getattr(source, old)


def test_replace_by_several_old_names():
    source = make(eval_strategy="steps", warmup_steps=0.1, eval_steps=3)
    with pytest.warns(FutureWarning):
        changed = dataclasses.replace(source, evaluation_strategy="epoch", warmup_ratio=0.2, seed=3)
    assert (changed.eval_strategy, changed.warmup_steps, changed.seed) == ("epoch", 0.2, 3)


def test_old_switch_set_to_false_undoes_it():
    args = make(train_sampling_strategy="group_by_length", optim="sgd")
    args.include_inputs_for_metrics = True
    args.include_inputs_for_metrics = True
    assert args.include_for_metrics == ["inputs"]
    args.group_by_length = args.adafactor = args.include_inputs_for_metrics = False
    assert (args.train_sampling_strategy, args.optim, args.include_for_metrics) == ("random", "sgd", [])
    args.group_by_length = False
    assert args.train_sampling_strategy == "random"


def test_old_names_are_not_serialized():
    text = TrainingArguments("x", logging_dir="logs").to_json_string()
    assert not set(json.loads(text)) & set(RENAMED)
    assert json.loads(text)["logging_dir"] == "logs"


def test_instance_attributes_are_only_the_arguments():
    """Libraries save `vars(args)`; ms-swift's arguments do not call our `__post_init__` at once."""

    class Own(TrainingArguments):
        def __post_init__(self):
            pass

    assert vars(Own("x")).keys().isdisjoint({"_hidden_values"})


def test_trainer_subclass_keeps_its_own_tokenizer(tmp_path):
    class Aligning(Trainer):
        def __init__(self, *args, tokenizer, **kwargs):
            self.tokenizer = tokenizer
            super().__init__(*args, **kwargs)

    trainer = make_quiet_trainer(tmp_path, functools.partial(Aligning, tokenizer="mine"))
    assert (trainer.tokenizer, trainer.processing_class) == ("mine", None)
    trainer.tokenizer = "another"
    assert trainer.tokenizer == "another"


@dataclasses.dataclass
class OwnRatio(TrainingArguments):
    """Has the old name as a field of its own, for both generations of transformers, and moves it itself."""

    warmup_ratio: float | None = dataclasses.field(default_factory=lambda: None)
    group_by_length: bool = False

    def __post_init__(self):
        if self.warmup_ratio is not None:
            self.warmup_steps, self.warmup_ratio = self.warmup_ratio, None
        super().__post_init__()


@pytest.mark.parametrize(("arguments", "steps"), [({}, 0), ({"warmup_ratio": 0.1}, 0.1), ({"warmup_steps": 12}, 12)])
def test_old_name_declared_by_a_subclass_keeps_its_value(arguments, steps):
    args = OwnRatio(output_dir="x", use_cpu=True, **arguments)
    assert (args.warmup_steps, args.warmup_ratio) == (steps, None)
    for copied in (dataclasses.replace(args), pickle.loads(pickle.dumps(args)), OwnRatio(**args.to_dict())):
        assert (copied.warmup_steps, copied.warmup_ratio, copied.group_by_length) == (steps, None, False)
    args.warmup_ratio = 0.5
    assert (args.warmup_steps, args.warmup_ratio, args.to_dict()["warmup_ratio"]) == (steps, 0.5, 0.5)


@dataclasses.dataclass
class OwnFields(TrainingArguments):
    warmup_ratio: float = 1.0
    group_by_length: bool = True
    save_safetensors: bool = False
    model_parallel: bool = True
    tpu_num_cores: int = 3
    fp16_opt_level: str = None
    half_precision_backend: str = dataclasses.field(default_factory=lambda: "apex")


def test_subclass_fields_named_like_old_names_stay_its_own(tmp_path, recwarn):
    """GLiNER has a warmup_ratio. transformers 5.24 knows none of these."""
    args = OwnFields(str(tmp_path), use_cpu=True, report_to="none")
    assert (args.warmup_steps, args.train_sampling_strategy, args.warmup_ratio) == (0, "random", 1.0)
    own = {name: getattr(args, name) for name in vars(OwnFields)["__annotations__"]}
    assert list(own.values()) == [1.0, True, False, True, 3, None, "apex"] and own.items() <= args.to_dict().items()
    assert not [line.argument for line in args.explain().lines if line.argument in own]
    Trainer(make_plain(), args).save_model()
    assert (tmp_path / "model.safetensors").exists()
    assert not [warning for warning in recwarn if warning.category is FutureWarning]
