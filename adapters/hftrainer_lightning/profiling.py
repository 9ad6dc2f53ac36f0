"""A profiler's report with the Trainer's names.

Lightning names measurements after its own hooks. The report translates them to the Trainer's steps, and is printed
once; the recorded data does not change.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch.profilers import AdvancedProfiler, Profiler, PyTorchProfiler, SimpleProfiler

from hftrainer_lightning import private_api

#: Lightning's name → ours. Each includes everything that runs within it.
WORDS = {
    "run_training_epoch": "epoch",
    "run_training_batch": "micro-batch (all but its data and its end)",
    "train_dataloader_next": "get_batch_samples",
    "training_step": "compute_loss (forward)",
    "backward": "backward",
    "on_after_backward": "sum of the loss, token and flop counts",
    "configure_gradient_clipping": "clipping, grad_norm, on_pre_optimizer_step",
    "optimizer_step": "optimizer step with its closure (forward, backward, clipping)",
    "on_train_batch_start": "on_step_begin",
    "on_train_batch_end": "on_step_end, log, evaluate, save",
    "on_train_start": "on_train_begin",
    "on_train_epoch_start": "on_epoch_begin",
    "on_train_epoch_end": "on_epoch_end, log, evaluate, save",
    **dict.fromkeys(("val_next", "test_next", "predict_next"), "evaluation batches"),
    **dict.fromkeys(("validation_step", "test_step", "predict_step"), "prediction_step"),
    **dict.fromkeys(
        ("on_validation_epoch_end", "on_test_epoch_end", "on_predict_epoch_end"), "compute_metrics, end of evaluation"
    ),
}
#: Other actions that take a smaller fraction of the recorded time than this are shown as one row.
SMALL = 0.001
REST = "all else"


def translated(action: str) -> str:
    """Our name of an action: '[Strategy]SingleDevice.backward' is 'backward'."""
    owner, _, hook = action.rpartition(".")
    if owner.startswith("[Callback]"):  # its settings may follow in braces
        return f"{owner.removeprefix('[Callback]').partition('{')[0]}.{hook}"
    return WORDS.get(hook, hook)


def detached(profiler: Any) -> Any:
    """A copy of the profiler that shares its records, for Lightning to attach to a module.

    The user's own belongs to the training arguments, which are saved with each checkpoint and must not hold a module.
    """
    if not isinstance(profiler, Profiler):
        return profiler
    copied = object.__new__(type(profiler))  # copy.copy would drop settings of AdvancedProfiler
    vars(copied).update(vars(profiler))
    return copied


def translate_report(profiler: Profiler) -> None:
    """Make `profiler` report our names, and print its report unless it writes it to a file."""
    if type(profiler).summary is Profiler.summary:  # it has no report
        return
    summary = functools.partial(_summary, profiler)
    vars(profiler).update(summary=summary, describe=functools.partial(_describe, profiler))


def _describe(profiler: Profiler) -> None:
    describe = type(profiler).describe
    if profiler.filename:
        describe(profiler)
        return
    text = profiler.summary()
    if text and getattr(profiler, "local_rank", 0) == 0:
        print(text)
    with _replaced(profiler, "summary", str):  # empty, because Lightning would log the summary again
        describe(profiler)


def _summary(profiler: Profiler) -> str:
    summary = type(profiler).summary
    for kind, (attribute, translate) in _TRANSLATIONS.items():
        if isinstance(profiler, kind):
            with _replaced(profiler, attribute, translate(getattr(profiler, attribute))):
                return summary(profiler)
    if isinstance(profiler, PyTorchProfiler):
        for event in private_api.recorded_events(profiler):
            event.name = _translated_event(event.name)
    return summary(profiler)


def _names(seconds: dict[str, float]) -> dict[str, str]:
    """Our names of the actions, longest duration first; REST for negligible ones."""
    least = SMALL * math.fsum(seconds.values())
    names = {action: translated(action) for action in sorted(seconds, key=seconds.__getitem__, reverse=True)}
    steps = WORDS.values()
    return {action: name if name in steps or seconds[action] >= least else REST for action, name in names.items()}


def _durations(recorded: dict[str, list[float]]) -> dict[str, list[float]]:
    """Seconds of each call by our names."""
    found: dict[str, list[float]] = {}
    for action, name in _names({action: math.fsum(durations) for action, durations in recorded.items()}).items():
        found.setdefault(name, []).extend(recorded[action])
    return found


def _profiles(recorded: dict[str, Any]) -> dict[str, Any]:
    """The profile of each action by our names; of two with the same name, the longer one."""
    seconds = {action: math.fsum(call.inlinetime for call in it.getstats()) for action, it in recorded.items()}
    found: dict[str, Any] = {}
    for action, name in _names(seconds).items():
        if name != REST:
            found.setdefault(name, recorded[action])
    return found


#: Kind of profiler → the attribute with its records, and the function that translates their names.
_TRANSLATIONS: dict[type[Profiler], tuple[str, Callable[[Any], Any]]] = {
    SimpleProfiler: ("recorded_durations", _durations),
    AdvancedProfiler: ("profiled_actions", _profiles),
}


def _translated_event(name: str) -> str:
    if name.startswith("[pl][profile]"):
        return translated(name.removeprefix("[pl][profile]"))
    if name.startswith("[pl][module]"):  # '[pl][module]torch.nn.modules.linear.Linear: model.head'
        kind, _, owner = name.removeprefix("[pl][module]").partition(": ")
        return f"{owner} ({kind.rpartition('.')[2]})"
    return name


@contextlib.contextmanager
def _replaced(owner: Any, attribute: str, value: Any) -> Iterator[None]:
    before = getattr(owner, attribute)
    setattr(owner, attribute, value)
    try:
        yield
    finally:
        setattr(owner, attribute, before)
