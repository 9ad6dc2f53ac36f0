"""Argument names of older releases: accepted, translated once, and still readable afterwards."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hftrainer.arguments._field import arg
from hftrainer.arguments.choices import DebugOption, spelled
from hftrainer.errors import InvalidArgument

if TYPE_CHECKING:
    from hftrainer.arguments.base import BaseArguments


@dataclass(kw_only=True)
class LegacyArguments:
    """Arguments that transformers 5.24 no longer has. The help names the releases that had them."""

    evaluation_strategy: str | None = arg(None, "Old name of `eval_strategy` (v4.0-v4.48).")
    no_cuda: bool = arg(False, "Old name of `use_cpu` (v4.0-v4.57).")
    per_gpu_train_batch_size: int | None = arg(None, "Old name of `per_device_train_batch_size` (v4.0-v4.57).")
    per_gpu_eval_batch_size: int | None = arg(None, "Old name of `per_device_eval_batch_size` (v4.0-v4.57).")
    warmup_ratio: float | None = arg(None, "Share of all steps to warm up, now `warmup_steps` below 1 (v4.2-v5.0).")
    adafactor: bool = arg(False, "Now `optim='adafactor'` (v4.2-v4.57).")
    group_by_length: bool = arg(False, "Now `train_sampling_strategy='group_by_length'` (v4.2-v5.0).")
    include_inputs_for_metrics: bool = arg(False, "Now `include_for_metrics=['inputs']` (v4.17-v4.57).")
    torchdynamo: str | None = arg(None, "Old name of `torch_compile_backend` (v4.22-v4.57).")
    xpu_backend: str | None = arg(None, "Old name of `ddp_backend` (v4.15-v4.30).")
    push_to_hub_model_id: str | None = arg(None, "Name part of `hub_model_id` (v4.7-v4.57).")
    push_to_hub_organization: str | None = arg(None, "Organization part of `hub_model_id` (v4.7-v4.57).")
    push_to_hub_token: str | None = arg(None, "Old name of `hub_token` (v4.7-v4.57).")
    # With None in second place both parsers read one word; a list is for scripts.
    sharded_ddp: str | None | list[str] = arg(
        None, "FairScale's sharding, now `fsdp`; alone it means 'simple' (v4.1-v4.30).", bare="simple"
    )
    fsdp_min_num_params: int | None = arg(None, "Now `fsdp_config['min_num_params']` (v4.20-v4.57).")
    fsdp_transformer_layer_cls_to_wrap: str | None = arg(
        None, "Now `fsdp_config['transformer_layer_cls_to_wrap']` (v4.22-v4.57)."
    )
    dispatch_batches: bool | None = arg(None, "Now `accelerator_config['dispatch_batches']` (v4.35-v4.48).")
    split_batches: bool | None = arg(None, "Now `accelerator_config['split_batches']` (v4.35-v4.48).")
    tpu_metrics_debug: bool = arg(False, "Now `debug='tpu_metrics_debug'` (v4.0-v4.57).")

    overwrite_output_dir: bool = arg(False, "For your script; the Trainer does not read it (v4.0-v4.57).")
    logging_dir: str | None = arg(None, "Folder of the trackers' files (v4.0-v5.0).")
    use_mps_device: bool = arg(False, "Train on Apple's GPU, which is now used automatically (v4.21-v4.57).")
    save_safetensors: bool = arg(True, "Write safetensors instead of torch's pickles (v4.28-v4.57).")
    fp16_backend: str | None = arg(None, "Library of mixed precision (v4.0-v4.57).")
    half_precision_backend: str | None = arg(None, "Library of mixed precision (v4.15-v4.57).")
    fp16_opt_level: str | None = arg(None, "Optimization level of Apex (v4.0-v4.57).")
    past_index: int | None = arg(None, "Index of the output that is passed to the next step; -1 for none (v4.0-v4.57).")
    use_legacy_prediction_loop: bool = arg(False, "Evaluate by `prediction_loop` (v4.4-v4.57).")
    include_tokens_per_second: bool = arg(False, "Report tokens per second (v4.35-v4.57).")
    jit_mode_eval: bool = arg(False, "Trace the model for evaluation (v4.23-v4.57).")
    use_ipex: bool = arg(False, "Optimize with Intel's extension (v4.23-v4.48).")
    ray_scope: str | None = arg(None, "Scope of Ray Tune's best trial (v4.30-v4.57).")
    tpu_num_cores: int | None = arg(None, "Number of TPU cores, which launchers now set (v4.0-v4.57).")
    mp_parameters: str | None = arg(None, "SageMaker's model parallelism (v4.5-v4.57).")
    model_parallel: bool = arg(False, "Naive model parallelism of GPT-2 and T5 (v4.0-v4.1).")


@dataclass(frozen=True)
class Rename:
    """How an old argument is translated to the current one.

    Attributes:
        new: the current argument.
        spelled: the current spelling, as a warning shows it.
        write: `(new value, old value) → new value`.
        read: `new value → old value`, for reading the old name.
        merges: whether the old value is added to the new one, instead of replacing it.
        takes_false: whether False is a value that was given; otherwise it means "not given".
    """

    new: str
    spelled: str
    write: Callable[[Any, Any], Any]
    read: Callable[[Any], Any]
    merges: bool = False
    takes_false: bool = False


def _same(new: str) -> Rename:
    return Rename(new, new, lambda now, old: old, lambda now: now)


def _value(new: str, value: str, otherwise: str | None = None) -> Rename:
    """An old switch for one of the new argument's values; without `otherwise`, switching it off has no effect."""

    def write(now: Any, old: Any) -> Any:
        if old:
            return value
        return otherwise if otherwise is not None and now == value else now

    return Rename(new, f"{new}={value!r}", write, lambda now: now == value)


def _item(new: str, value: str) -> Rename:
    def write(now: Any, old: Any) -> Any:
        others = [word for word in _words(now) if word != value]
        return [*others, value] if old else others

    return Rename(new, f"{new}=[{value!r}]", write, lambda now: value in (now or ()), merges=True)


def _key(new: str, key: str, *, takes_false: bool = False) -> Rename:
    def write(now: Any, old: Any) -> Any:
        if isinstance(now, str):
            raise InvalidArgument(f"{new} is the path of a file: set {key!r} there.")
        keys = {**(now.to_dict() if hasattr(now, "to_dict") else now or {}), key: old}
        return {name: value for name, value in keys.items() if value is not None}

    def read(now: Any) -> Any:
        return now.get(key) if isinstance(now, dict) else getattr(now, key, None)

    return Rename(new, f"{new}[{key!r}]", write, read, merges=True, takes_false=takes_false)


def _words(value: Any) -> list[Any]:
    return value.split() if isinstance(value, str) else list(value or [])


#: FairScale's options → FSDP's.
SHARDED_DDP = {
    "simple": "shard_grad_op",
    "zero_dp_2": "shard_grad_op",
    "zero_dp_3": "full_shard",
    "offload": "offload",
    "cpu_offload": "offload",
    "auto_wrap": "auto_wrap",
}


def _fsdp_of(_: Any, old: bool | str | list[Any]) -> str:
    words = ["simple"] if old is True else [spelled(word) for word in _words(old)]
    unknown = [word for word in words if word not in SHARDED_DDP]
    if unknown:
        raise InvalidArgument(f"sharded_ddp={old!r}: unknown {unknown}; it takes {', '.join(SHARDED_DDP)}.")
    return " ".join(SHARDED_DDP[word] for word in words)


def _hub_organization(now: str | None, old: str | None) -> str:
    name = (now or "").split("/")[-1]
    return f"{old}/{name}" if old else name


#: Under install(): the fields here that the installed release has, and the fields of ours that it lacks.
CURRENT: set[str] = set()
HIDDEN: dict[str, Any] = {}
FIELDS = dict(LegacyArguments.__dataclass_fields__)

RENAMED: dict[str, Rename] = {
    "evaluation_strategy": _same("eval_strategy"),
    "no_cuda": _same("use_cpu"),
    "per_gpu_train_batch_size": _same("per_device_train_batch_size"),
    "per_gpu_eval_batch_size": _same("per_device_eval_batch_size"),
    "warmup_ratio": Rename("warmup_steps", "warmup_steps", lambda now, old: old, lambda now: now if now < 1 else 0.0),
    "adafactor": _value("optim", "adafactor"),
    "group_by_length": _value("train_sampling_strategy", "group_by_length", otherwise="random"),
    "include_inputs_for_metrics": _item("include_for_metrics", "inputs"),
    "torchdynamo": _same("torch_compile_backend"),
    "xpu_backend": _same("ddp_backend"),
    "push_to_hub_model_id": _same("hub_model_id"),
    "push_to_hub_organization": Rename(
        "hub_model_id",
        "hub_model_id",
        _hub_organization,
        lambda now: now.split("/")[0] if "/" in (now or "") else None,
        True,
    ),
    "push_to_hub_token": _same("hub_token"),
    "sharded_ddp": Rename("fsdp", "fsdp", _fsdp_of, lambda now: None),
    "fsdp_min_num_params": _key("fsdp_config", "min_num_params"),
    "fsdp_transformer_layer_cls_to_wrap": _key("fsdp_config", "transformer_layer_cls_to_wrap"),
    "dispatch_batches": _key("accelerator_config", "dispatch_batches", takes_false=True),
    "split_batches": _key("accelerator_config", "split_batches"),
    "tpu_metrics_debug": _item("debug", "tpu_metrics_debug"),
}
#: Old arguments without a new name → their values when not given.
KEPT: dict[str, Any] = {
    "save_safetensors": True,
    "fp16_backend": "auto",
    "half_precision_backend": "auto",
    "fp16_opt_level": "O1",
    "past_index": -1,
    "ray_scope": "last",
    "mp_parameters": "",
}


#: Old arguments that are accepted though what they chose has gone → that value, and what is done instead.
GONE: dict[str, tuple[Any, str]] = {
    "fp16_backend": (
        "apex",
        _APEX := "apex.amp is gone from NVIDIA Apex: fp16=True uses torch's float16 autocast, as its level O1 did; "
        "leave the argument out",
    ),
    "half_precision_backend": ("apex", _APEX),
    "jit_mode_eval": (
        True,
        "torch has discontinued TorchScript: evaluations run the model as it is; torch_compile=True compiles it",
    ),
    "use_ipex": (
        True,
        "Intel has moved its extension into torch: the model runs by torch's own kernels; leave the argument out",
    ),
}


class _Reading(threading.local):
    """The arguments whose old names this thread has read last."""

    def __init__(self) -> None:
        self.last: Callable[[], BaseArguments | None] = lambda: None


_reading = _Reading()


def mirror(name: str) -> property:
    """A property for an old name, which reads and writes the new one."""
    rename = RENAMED[name]

    def get(self: BaseArguments) -> Any:
        _reading.last = weakref.ref(self)
        if name in vars(self):  # a subclass's own field, or a field of the installed release
            return vars(self)[name]
        pending = vars(self).get("_pending_legacy")
        return pending[name] if pending is not None else rename.read(getattr(self, rename.new))

    def set_(self: BaseArguments, value: Any) -> None:
        is_made = vars(self).get("_legacy_done")
        if name in vars(self):
            vars(self)[name] = value
        elif not is_made:  # the generated __init__ is running
            vars(self).setdefault("_pending_legacy", {})[name] = value
        if is_made and (name not in vars(self) or (name in CURRENT and not keeps_ratio(name))):
            setattr(self, rename.new, rename.write(getattr(self, rename.new), value))

    return property(get, set_, doc=f"Old name of `{rename.spelled}`.")


def value(args: Any, name: str) -> Any:
    """An old argument without a new name; its default if the arguments lack it, or it is a subclass's own field."""
    found, default = getattr(args, name, None), KEPT.get(name, False)
    return default if found is None or found == default or name in redeclared(type(args)) else found


def gone(args: Any, before: Any = None) -> list[str]:
    """A sentence for each argument that chooses what has gone, if it differs from that of `before`."""
    return [
        f"{name}={old!r}: {instead}."
        for name, (old, instead) in GONE.items()
        if value(args, name) == old != value(before, name)
    ]


@dataclass
class Copied:
    """Keywords that are all fields of an existing object, as `dataclasses.replace` passes them.

    An old name then only repeats the value of the new one, unless the old name is what was replaced.

    Attributes:
        source: the object; None if it is not known, for example if the fields were kept and the object deleted.
    """

    source: BaseArguments | None


def copied(given: dict[str, Any]) -> Copied | None:
    """The object that these keywords copy; None if a script wrote them."""
    if not all(given.get(name) is not None for name in KEPT):
        return None
    last = _reading.last()
    # Each object has its own lists and its own accelerator_config.
    shared = (name for name, value in given.items() if isinstance(value, list) or name == "accelerator_config")
    is_source = last is not None and any(given[name] is getattr(last, name, None) for name in shared)
    return Copied(last if is_source else None)


def redeclared(kind: type) -> frozenset[str]:
    """Old names that a subclass declares as fields of its own, as libraries do that support several releases.

    They are arguments of the subclass, with its values and meanings: nothing here reads or changes them.
    """
    if not issubclass(kind, LegacyArguments):
        return frozenset()
    theirs = kind.__dataclass_fields__
    return frozenset(name for name in FIELDS.keys() - CURRENT if theirs.get(name, FIELDS[name]) is not FIELDS[name])


def translate(args: BaseArguments, defaults: dict[str, Any], copy: Copied | None) -> None:
    """Write the values given by old names to the new ones, with one FutureWarning for all that is old.

    Args:
        args: freshly initialized.
        defaults: the fields' defaults.
        copy: set if `args` is a copy of an object.

    Raises:
        InvalidArgument: if an old and a new name are given with different values.
    """
    pending = vars(args).pop("_pending_legacy", {})
    vars(args)["_legacy_done"] = True
    own = redeclared(type(args))
    # Without a default on the class, the property of the old name has taken the value.
    vars(args).update({name: pending.pop(name) for name in own & pending.keys()})
    pending |= _take_hidden(args, own)
    vars(args).update({name: pending.setdefault(name, vars(args).get(name)) for name in CURRENT & RENAMED.keys()})
    source = None if copy is None else copy.source
    if copy is None:
        given, before = {name: value for name, value in pending.items() if _is_given(name, value)}, defaults
    elif source is None:
        given, before = {}, {}
    else:
        given = {name: value for name, value in pending.items() if value != getattr(source, name, defaults.get(name))}
        before = {RENAMED[name].new: getattr(source, RENAMED[name].new) for name in given}
    for name, value in given.items():
        _translate_one(args, name, value, before)
    for name, default in KEPT.items():
        if getattr(args, name, default) is None and name not in own:
            setattr(args, name, default)
    now = [f"{name} is now {RENAMED[name].spelled}" for name in given if name not in CURRENT]
    if vars(args)["debug"] is True:  # the only option until v4.5
        args.debug = DebugOption.TPU_METRICS_DEBUG.value
        now.append(f"debug=True is now debug={args.debug!r}")
    sentences = [f"Old names of training arguments: {', '.join(now)}"] if now else []
    if copy is None or source is not None:
        sentences += gone(args, source)
    if sentences:
        warnings.warn("\n".join(sentences), FutureWarning, stacklevel=5)


def _take_hidden(args: BaseArguments, own: Set[str]) -> dict[str, Any]:
    """The values given by old names that the installed release lacks; values without a new name stay attributes."""
    names = ((HIDDEN.keys() & FIELDS.keys()) - own) & vars(args).keys()
    found = {name: vars(args).pop(name) for name in names} | vars(args).pop("_hidden_given", {})
    fields = type(args).__dataclass_fields__  # those of a subclass from before `install()` have the old names too
    stay = {name for name, value in found.items() if value not in (None, HIDDEN[name].default)} - RENAMED.keys()
    vars(args).update({name: value for name, value in found.items() if name in stay or name in fields})
    return {name: value for name, value in found.items() if name in RENAMED}


def keeps_ratio(name: str) -> bool:
    """Whether an argument is the `warmup_ratio` of v4, which does not change `warmup_steps`."""
    return name == "warmup_ratio" and "no_cuda" in CURRENT


def _is_given(name: str, value: Any) -> bool:
    return RENAMED[name].takes_false if value is False else value not in (None, False, "", [])


def _translate_one(args: BaseArguments, name: str, value: Any, before: dict[str, Any]) -> None:
    rename = RENAMED[name]
    now = getattr(args, rename.new)
    if name == "warmup_ratio":
        if keeps_ratio(name) and 0 <= value <= 1:
            return
        if not 0 <= value < 1:
            raise InvalidArgument(f"warmup_ratio={value!r}: give a fraction of all steps, at least 0 and below 1.")
        if now >= 1 or (now and now != before[rename.new]):  # documented since v4.2: warmup_steps overrides it
            return
    wanted = rename.write(now, value)
    if not rename.merges and now != before[rename.new] and now != wanted:
        first, second = (
            (name, rename.new) if name.endswith("_token") else (f"{name}={value!r}", f"{rename.new}={now!r}")
        )
        raise InvalidArgument(f"{first} and {second}: the first is the old name of the second; give one of them.")
    setattr(args, rename.new, wanted)
