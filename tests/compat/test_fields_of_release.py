"""Under `install()`, the fields and attributes of fresh arguments are those of the installed release."""

import dataclasses
import inspect
import typing
from types import SimpleNamespace

import pytest
import transformers

import hftrainer
from tests.support.known_differences import ATTRIBUTES
from tests.support.releases import TRANSFORMERS
from tests.support.small_models import make_plain, plain_data

Theirs = transformers.TrainingArguments
#: Our own arguments, and attributes of either implementation.
ONLY_OURS = {
    *("elastic", "eval_memmap_dir", "eval_minutes", "lightning_config", "metrics_port", "observe", "save_minutes"),
    *("save_on_interrupt", "storage_url", "keep_local", "checkpoint_format", "new_tracker_run", "param_groups"),
    *("mixture_weights", "mixture_temperature", "mixture_column"),
    *("tokens_per_batch", "flatten_batches", "on_divergence", "divergence_threshold", "max_rollbacks"),
    *("explain", "hf_deepspeed_config"),
}
BEFORE_5 = TRANSFORMERS < (5,)
#: Argument of another release → the value given, the argument that it sets, and that one's value.
FOREIGN = {
    "evaluation_strategy": ("steps", "eval_strategy", "steps"),
    "per_gpu_train_batch_size": (3, "per_device_train_batch_size", 3),
    "warmup_ratio": (0.25, "warmup_steps", 0 if BEFORE_5 else 0.25),
    "group_by_length": (True, "train_sampling_strategy", "group_by_length"),
    "train_sampling_strategy": ("sequential", "train_sampling_strategy", "sequential"),
    "save_safetensors": (False, "save_safetensors", False),
    "use_cache": (True, "use_cache", True),
}


@pytest.fixture(autouse=True)
def _installed():
    before = {field.name for field in dataclasses.fields(hftrainer.TrainingArguments)}
    hftrainer.install()
    yield
    hftrainer.uninstall()
    assert [field.name for field in dataclasses.fields(hftrainer.TrainingArguments)][1] == "overwrite_output_dir"
    assert {field.name for field in dataclasses.fields(hftrainer.TrainingArguments)} == before
    assert hasattr(hftrainer.TrainingArguments("x"), "evaluation_strategy")


def make(kind=hftrainer.TrainingArguments, **settings):
    return kind(output_dir="x", use_cpu=True, report_to="none", **settings)


def comparable_value(value):
    if isinstance(value, list):
        return list(map(comparable_value, value))
    if type(value).__name__ in ("PartialState", "ProcessState"):
        return value.process_index, value.num_processes
    return value.to_dict() if hasattr(value, "to_dict") else getattr(value, "value", value)


@pytest.mark.parametrize("kind", ["TrainingArguments", "Seq2SeqTrainingArguments"])
def test_fields_are_those_of_the_release(kind):
    ours, theirs = getattr(hftrainer, kind), {field.name for field in dataclasses.fields(Theirs)} - {"_n_gpu"}
    if kind != "TrainingArguments":
        theirs |= ours.__annotations__.keys()
    own = {field.name for field in dataclasses.fields(ours)}
    assert own - ONLY_OURS == theirs == set(inspect.signature(ours).parameters) - ONLY_OURS
    assert theirs - {"include_for_metrics"} <= typing.get_type_hints(ours).keys()


def test_attribute_values_differ_only_as_recorded():
    """compatibility.toml records what differs."""
    ours, theirs = make(), make(Theirs)
    names = {name for name in {*dir(ours), *dir(theirs)} if not name.startswith("_")}
    pairs = {name: [comparable_value(getattr(args, name, "absent")) for args in (ours, theirs)] for name in names}
    differ = {name for name, (one, two) in pairs.items() if one != two and not (callable(one) and callable(two))}
    release = ".".join(map(str, TRANSFORMERS))
    expected = [row["names"].split() for row in ATTRIBUTES if release in row["releases"].split()]
    assert differ - {"logging_dir"} == {name for names in expected for name in names}  # which has the time


def test_dataclasses_replace_copies_arguments():
    """SpanMarker copies what it gets, with `include_inputs_for_metrics` where the release has it."""
    copy = dataclasses.replace(make(learning_rate=1e-3, lr_scheduler_kwargs={}, label_names=["own"]), seed=7)
    assert (copy.learning_rate, copy.label_names, copy.seed) == (1e-3, ["own"], 7)


@dataclasses.dataclass
class Before(hftrainer.TrainingArguments):
    """A subclass from before install()."""

    gamma: int = 7


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["ours", "before", "after", "by parser", "by their parser"])
@pytest.mark.parametrize("name", FOREIGN)
def test_argument_names_of_other_releases_are_translated(name, kind, tmp_path):
    @dataclasses.dataclass
    class After(hftrainer.TrainingArguments):
        gamma: int = 7

    value, new, now = FOREIGN[name]
    if "parser" in kind:
        library = transformers if "their" in kind else hftrainer
        words = ["--output_dir", "x", "--use_cpu", f"--{name}", str(value)]
        (args,) = library.HfArgumentParser(After).parse_args_into_dataclasses(words)
        (parsed,) = library.HfArgumentParser(After).parse_dict({"output_dir": "x", "use_cpu": True, name: value})
        assert getattr(parsed, new) == now
    else:
        args = make({"ours": hftrainer.TrainingArguments, "before": Before, "after": After}[kind], **{name: value})
    assert getattr(args, new) == now
    is_theirs = name in Theirs.__dataclass_fields__
    assert (name in type(args).__dataclass_fields__) is (is_theirs or kind == "before")
    assert hasattr(args, name) is (is_theirs or name == new or kind == "before")
    assert (getattr(args, name) == value) if is_theirs else True
    assert args.get_warmup_steps(100) == (25 if name == "warmup_ratio" else 0)
    assert hftrainer.Trainer(make_plain(), args, eval_dataset=plain_data()).args is args


@pytest.mark.skipif(not BEFORE_5, reason="transformers 5 has none of these")
def test_subclass_may_redeclare_an_argument_of_the_release():
    @dataclasses.dataclass
    class Config(hftrainer.TrainingArguments):
        warmup_ratio: float = 0.5
        group_by_length: bool = True

    args = make(Config)
    assert (args.warmup_steps, args.get_warmup_steps(10), args.train_sampling_strategy) == (0, 5, "group_by_length")
    args = make(per_gpu_train_batch_size=2)
    args.group_by_length = True
    assert (args.train_sampling_strategy, args.train_batch_size, args.group_by_length) == ("group_by_length", 2, True)


@pytest.mark.skipif("warmup_ratio" not in Theirs.__dataclass_fields__, reason="it is no field of this release")
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("ratio", [0.0, 0.3])
@pytest.mark.parametrize("declared", [False, True], ids=["given", "the default of a subclass"])
def test_warmup_ratio_and_steps_together_count_as_in_the_release(declared, ratio, steps):
    """Until v4.57 the steps overrule the ratio; in v5.0 to v5.2 the ratio overrules the steps, even if it is 0."""

    def warmup(library):
        @dataclasses.dataclass
        class Config(library.TrainingArguments):
            warmup_ratio: float = ratio

        args = (
            make(Config, warmup_steps=steps)
            if declared
            else make(library.TrainingArguments, warmup_steps=steps, warmup_ratio=ratio)
        )
        return args.get_warmup_steps(10), args.warmup_steps

    assert warmup(hftrainer) == warmup(SimpleNamespace(TrainingArguments=Theirs))


def test_refused_and_misspelled_arguments_raise():
    with pytest.raises(hftrainer.errors.UnsupportedArgument, match="mp_parameters='x' is not supported"):
        hftrainer.Trainer(make_plain(), make(mp_parameters="x"))
    with pytest.raises(TypeError, match="did you mean 'eval_strategy'"):
        make(eval_strateg="no")
