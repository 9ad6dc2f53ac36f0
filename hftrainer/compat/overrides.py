"""Detects overrides of our methods, and calls them with the arguments of their release."""

from __future__ import annotations

import difflib
import functools
import logging
import types
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from hftrainer.base.signatures import accepted_args, can_call, has_parameter, max_positional_arguments
from hftrainer.base.tracebacks import HideEngineFrames
from hftrainer.errors import UnsupportedArgument, WrongObject

logger = logging.getLogger(__name__)

TrainerType = TypeVar("TrainerType", bound=type)


_RECORDS: dict[type, dict[str, Any]] = {}


def record_methods(recorded_class: TrainerType) -> TrainerType:
    """Class decorator that records our methods, so that later replacements count as overrides.

    Inherited methods come from the record of the base class, where a library may already have replaced them.
    """
    if recorded_class not in _RECORDS:
        inherited = next((_RECORDS[base] for base in recorded_class.__mro__ if base in _RECORDS), None)
        names = dir(recorded_class) if inherited is None else list(vars(recorded_class))
        _RECORDS[recorded_class] = {**(inherited or {}), **{name: getattr(recorded_class, name) for name in names}}
    return recorded_class


@functools.lru_cache(maxsize=64)
def _find_record(trainer_class: Any) -> dict[str, Any]:
    """The recorded methods of the first of our classes in the MRO of `trainer_class`."""
    return next((_RECORDS[base] for base in trainer_class.__mro__ if base in _RECORDS), {})


def is_overridden(instance: Any, *names: str) -> bool:
    """Whether one of these methods differs from the recorded one.

    Libraries replace methods on an instance, in a subclass, or on our own class.
    """
    instance_class: Any = type(instance)
    attributes, record = vars(instance), _find_record(instance_class)
    # `any` takes twice as long, and each step calls this several times.
    for name in names:
        if name in attributes or not _is_ours(getattr(instance_class, name, None), record.get(name, _NOT_OURS)):
            return True
    return False


_NOT_OURS = object()


def _is_ours(method: Any, ours: Any) -> bool:
    """Whether a method is the recorded one, or a tool's unchanged copy of its source."""
    if method is ours:
        return True
    code, our_code = (getattr(function, "__code__", None) for function in (method, ours))
    if code is None or our_code is None or (code.co_names, code.co_code) != (our_code.co_names, our_code.co_code):
        return False
    method_globals = method.__globals__
    return all(method_globals.get(name) is value for name, value in ours.__globals__.items() if name in code.co_names)


#: Number of positional values of `_maybe_log_save_evaluate` → their names, until v4.4, v4.37, v4.45, v4.49, and since.
_LOG_SAVE_EVALUATE = {
    4: "tr_loss model trial epoch",
    5: "tr_loss model trial epoch ignore_keys_for_eval",
    6: "tr_loss grad_norm model trial epoch ignore_keys_for_eval",
    7: "tr_loss grad_norm model trial epoch ignore_keys_for_eval start_time",
    8: "tr_loss grad_norm model trial epoch ignore_keys_for_eval start_time learning_rate",
}


def call_log_save_evaluate(trainer: Any, **values: Any) -> None:
    """Call `_maybe_log_save_evaluate` with the positional and keyword arguments that its release passes."""
    method = trainer._maybe_log_save_evaluate
    count = max_positional_arguments(method)
    value_count = 7 if count is None else count
    names = _LOG_SAVE_EVALUATE[min(max(value_count, 4), 8)].split() if value_count else []
    other_values = {name: value for name, value in values.items() if name not in names}
    method(*[values[name] for name in names], **accepted_args(method, other_values))


#: Methods of transformers' Trainer that we never call → what to do instead of overriding them.
_ALTERNATIVES = {
    "_build_accelerator_args": (
        "no Accelerator is built: set the training arguments (accelerator_config, fsdp, deepspeed, "
        "ddp_...), or override create_accelerator_and_postprocess and change self.accelerator after super()"
    ),
    "_defer_fsdp_gradient_reduction": "the engine synchronizes gradients: use accelerator.no_sync",
    "_sync_replicated_trainable_parameters": "the engine synchronizes gradients: add hooks to the parameters instead",
    "_tune_save_checkpoint": "Ray gets the checkpoint that the step has saved: override save_model instead",
}


def refuse_uncalled_methods(trainer_class: type, *names: str) -> None:
    """Refuse a subclass of the Trainer with methods that transformers calls but hftrainer never calls.

    Args:
        trainer_class: the class.
        names: the methods.

    Raises:
        UnsupportedArgument: names each method and what to do instead.
    """
    record = _find_record(trainer_class)
    overridden = [name for name in names if getattr(trainer_class, name, None) is not record.get(name)]
    if errors := [f"{trainer_class.__name__}.{name} is never called: {_ALTERNATIVES[name]}." for name in overridden]:
        raise UnsupportedArgument("\n".join(errors))


_PREDICTION = "prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None), or pass compute_metrics"
#: Method of a LightningModule → its replacement in a subclass of the Trainer.
_LIGHTNING_METHODS = {
    "configure_optimizers": "create_optimizer(self), which sets self.optimizer, or pass optimizers",
    **dict.fromkeys(("validation_step", "test_step", "predict_step"), _PREDICTION),
    "train_dataloader": "get_train_dataloader(self), or pass train_dataset",
    "val_dataloader": "get_eval_dataloader(self, eval_dataset=None), or pass eval_dataset",
    **dict.fromkeys(("test_dataloader", "predict_dataloader"), "get_test_dataloader(self, test_dataset)"),
}


def names_in_code(script_class: type) -> set[str]:
    """The names and strings in the code of a class and its bases.

    Our classes are skipped, since they call no method of a script.
    """
    names: set[str] = set()
    pending = [item for base in script_class.__mro__ if base not in _RECORDS for item in vars(base).values()]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            names.add(item)
        elif isinstance(item, types.CodeType):
            pending += item.co_names + item.co_consts
        elif isinstance(item, (tuple, frozenset)):
            pending += item
        elif isinstance(item, (types.FunctionType, classmethod, staticmethod, property, functools.cached_property)):
            pending += [getattr(item, part, None) for part in ("__code__", "__wrapped__", "fget", "fset", "func")]
    return names


def check_lightning_methods(subclass: Any, hooks: Collection[str]) -> None:
    """Warn about methods of a LightningModule in a subclass of the Trainer, and about misspelt ones of a Trainer.

    A method that the subclass itself calls causes no warning.

    Args:
        subclass: the class.
        hooks: the names of Lightning's hooks and of callback events.

    Raises:
        WrongObject: for a `training_step` with Lightning's parameters.
    """
    step = subclass.training_step
    # A Trainer passes self and three arguments.
    if has_parameter(step, "batch_idx") and not can_call(step, None, None, None, None):
        raise WrongObject(
            f"{subclass.__name__}.training_step takes batch_idx, as in a LightningModule, but a Trainer passes it "
            "model, inputs and num_items_in_batch. Override compute_loss(self, model, inputs, return_outputs=False, "
            "num_items_in_batch=None) instead, and return the loss."
        )
    script_names = [] if subclass in _RECORDS else sorted(set(dir(subclass)) - _find_record(subclass).keys())
    is_callback = hasattr(subclass, "on_init_end")
    hooks = [name for name in hooks if name.endswith(("_start", "_begin", "_end")) and not is_callback]
    ours = [name for name in _find_record(subclass) if not name.startswith("_")]
    public_names = [name for name in script_names if name in vars(subclass) and not name.startswith("_")]
    replacements = {name: _suggest_override(name, ours) for name in public_names}
    replacements |= dict.fromkeys(hooks, "a callback, in Trainer(callbacks=[...])") | _LIGHTNING_METHODS
    methods = [name for name in script_names if replacements.get(name) and callable(getattr(subclass, name))]
    called_names = names_in_code(subclass) if methods else set()
    if unused := [name for name in methods if name not in called_names]:
        lines = "".join(f"\n- {name}: {replacements[name]}" for name in unused)
        logger.warning("%s has methods that a Trainer never calls. Replacements:%s", subclass.__name__, lines)


def _suggest_override(name: str, ours: Collection[str]) -> str | None:
    """The end of the warning about a method of a script whose name is nearly one of ours."""
    match = next(iter(difflib.get_close_matches(name, ours, 1, 0.9)), None)
    # A name with a suffix is the script's own.
    return None if match is None or name.startswith(f"{match}_") else f"did you mean {match}?"


def refuse_rewritten(trainer: Any) -> None:
    """Refuse methods that a tool generated from our source, since they lack our modules' names.

    Args:
        trainer: the Trainer; methods of its class and of the instance are checked.

    Raises:
        UnsupportedArgument: names each method and the module that generated it.
    """
    kind: Any = type(trainer)
    attributes, descriptions = vars(trainer), []
    for name, ours in _find_record(kind).items():
        if not isinstance(ours, types.FunctionType):
            continue
        method = attributes[name] if name in attributes else getattr(kind, name, None)
        if not _is_ours(method, ours) and (module := _find_rewriter(name, method, ours)) is not None:
            descriptions.append(f"{name} (by {module})")
    if descriptions:
        raise UnsupportedArgument(
            f"{kind.__name__} has methods that were generated from hftrainer's source: {', '.join(descriptions)}. "
            "Tools that rewrite the Trainer's private loop, as Unsloth does, cannot work with another "
            "engine: turn that patch off, or train with transformers' own Trainer. Instead of a patch, override "
            "training_step, get_batch_samples, compute_loss or _run_epoch and call super()."
        )


def _find_rewriter(name: str, method: Any, ours: Any) -> str | None:
    """The module that generated a function from our source text; None for any other function.

    Only our methods use `_hftrainer`. An override that uses it also calls the original method.
    """
    # Only a functools.partial has `func`.
    method = getattr(method, "func", method)
    code = getattr(getattr(method, "__func__", method), "__code__", None)
    if code is None or "_hftrainer" not in code.co_names or "super" in code.co_names:
        return None
    our_code = getattr(getattr(ours, "__func__", ours), "__code__", code)
    # The function calls the original, as in `Trainer.log(self, ...)`.
    if name in code.co_names and name not in our_code.co_names:
        return None
    module = getattr(method, "__globals__", {}).get("__name__", "?")
    return None if module.partition(".")[0] in ("hftrainer", "hftrainer_lightning") else module


# A decorator, hence the lowercase name.
class overridable_property:
    """A read-only property that a subclass or an instance may replace with any attribute."""

    def __init__(self, getter: Callable[[Any], Any]) -> None:
        self.getter = getter
        self.__doc__ = getter.__doc__

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        with HideEngineFrames():
            return self if instance is None else self.getter(instance)
