"""Hides the engine's frames in tracebacks of a script's errors, and all of a Ctrl-C's; adds notes to errors.

HFTRAINER_TRACEBACK=full keeps all frames.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import re
import sys
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, embedding, nll_loss

from hftrainer.base.messages import TRACEBACK_VARIABLE, print_interrupt_notes, wrap_text

logger = logging.getLogger(__name__)

#: Packages whose frames lead from `train()` to the script's code, and from there to the function that fails.
_ENGINE = frozenset(
    """
    hftrainer hftrainer_deepspeed hftrainer_lightning hftrainer_ray hftrainer_tensorflow hftrainer_xla
    accelerate contextlib deepspeed enum functools lightning torch
    """.split()
)
_WITHOUT_NOTE = {"hftrainer", "contextlib", "enum", "functools"}


class HideEngineFrames(contextlib.AbstractContextManager[None]):
    """Context manager that removes the engine's frames from tracebacks, except the last.

    An error of `hftrainer.errors` has none: its message says what to change, in the line of the script that is left.
    Before Python 3.11 tracebacks stay complete, since changes in `__exit__` are lost.
    """

    def __exit__(self, kind: Any, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is None or sys.version_info < (3, 11) or os.environ.get(TRACEBACK_VARIABLE) == "full":
            return
        is_shorter, visited_ids = False, set()
        link: BaseException | None = error
        while link is not None and id(link) not in visited_ids:
            visited_ids.add(id(link))
            _shorten_worker_text(link)
            frames = _frames(link.__traceback__)
            # The last frames handle the signal, or stop the run after it.
            while isinstance(link, KeyboardInterrupt) and frames and _package_of(frames[-1]) in _ENGINE - {"torch"}:
                frames.pop()
            kept = [] if type(link).__module__ == "hftrainer.errors" or _note_override(link, frames) else frames[-1:]
            shown = [frame for frame in frames if frame in kept or _package_of(frame) not in _ENGINE]
            link.__traceback__ = _join_frames(shown)
            # Errors of arguments pass through these too, where no engine runs.
            is_shorter |= bool({*map(_package_of, frames[:-1])} & _ENGINE - _WITHOUT_NOTE)
            link = link.__cause__ or link.__context__
        if is_shorter and isinstance(error, Exception):
            # Below the other notes, which explain the error.
            text = f"(The engine's frames are hidden: {TRACEBACK_VARIABLE}=full shows them.)"
            vars(error)["__notes__"] = [*(note for note in getattr(error, "__notes__", []) if note != text), text]


def _note_override(error: BaseException, frames: list[TracebackType]) -> bool:
    """Add to a TypeError the parameters that the called override of a Trainer lacks; False for any other error."""
    match = re.match(r"((?:\S+\.)?(\w+))\(\) ", str(error)) if isinstance(error, TypeError) else None
    # The call of a script has a frame of the script.
    if match is None or not frames or _package_of(frames[-1]) not in _ENGINE:
        return False
    kind = type(frames[0].tb_frame.f_locals.get("self"))
    override, bases = getattr(kind, match[2], None), [base for base in kind.__mro__ if match[2] in vars(base)]
    ours = [vars(base)[match[2]] for base in bases if base.__module__.startswith("hftrainer.")]
    if not ours or not inspect.isfunction(override) or override.__qualname__ != match[1] or override in ours:
        return False
    parameters = [value.replace(annotation=value.empty) for value in inspect.signature(ours[0]).parameters.values()]
    place = f"{match[1]} ({override.__code__.co_filename}, line {override.__code__.co_firstlineno})"
    add_note(error, f"A Trainer passes {place} other arguments: define it with {inspect.Signature(parameters)}.")
    return True


def _shorten_worker_text(error: BaseException) -> None:
    """Remove the engine's frames from the traceback that torch puts into the message of a loader worker's error."""
    if error.args and "in DataLoader worker process" in str(error.args[0]):
        folders = [path for name in _ENGINE for path in getattr(sys.modules.get(name), "__path__", ())]
        frame = rf'  File "(?:{"|".join(map(re.escape, folders))})/.*\n(?: {{4}}.*\n)*'
        # torch passes a KeyError's text in a type of its own, which has its line breaks.
        error.args = (type(error.args[0])(re.sub(frame, "", error.args[0])), *error.args[1:])


def _frames(trace: TracebackType | None) -> list[TracebackType]:
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    return frames


def _package_of(trace: TracebackType) -> str:
    return str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0]


def _join_frames(frames: list[TracebackType]) -> TracebackType | None:
    trace = None
    for frame in reversed(frames):
        trace = TracebackType(trace, frame.tb_frame, frame.tb_lasti, frame.tb_lineno or 0)
    return trace


def add_note(error: BaseException, text: str) -> None:
    """Add a line below the error's message, once. Log the line if Python shows no notes (3.10)."""
    # Of several ranks, each prints its number before the lines of an error.
    margin = len(f"[rank{torch.distributed.get_rank()}]: ") if torch.distributed.is_initialized() else 0
    notes, text = getattr(error, "__notes__", []), wrap_text(text, sys.stderr, margin)
    if text not in notes:
        vars(error)["__notes__"] = [*notes, text]
        if sys.version_info < (3, 11):
            logger.error(text.removeprefix("[hftrainer] "))  # which the log has too


def hide_interrupt_traceback() -> None:
    """Let an uncaught Ctrl-C print its notes alone, unless something else prints the script's errors."""
    if sys.excepthook is sys.__excepthook__ and os.environ.get(TRACEBACK_VARIABLE) != "full":
        sys.excepthook = _print_uncaught


def _print_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not print_interrupt_notes(error):
        sys.__excepthook__(kind, error, trace)


def read_variable(error: BaseException, name: str) -> Any:
    """A variable of torch's function that reads a batch, in which this process raised the error, or None.

    Args:
        error: the error.
        name: 'idx' for the index of the sample being read, 'data' for the samples being collated.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__") == "torch.utils.data._utils.fetch" and name in frame.f_locals:
            return frame.f_locals[name]
    return None


def describe_shapes(value: Any) -> str:
    """The types and shapes in a batch, by key, as text for a message."""
    if isinstance(value, Mapping) and value:
        return ", ".join(f"{name}: {describe_shapes(item)}" for name, item in value.items())
    if isinstance(value, tuple):
        return f"({', '.join(map(describe_shapes, value))})"
    # Nested tensors have no shape.
    if isinstance(value, np.ndarray) or (isinstance(value, torch.Tensor) and not value.is_nested):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return describe_type(value)


def describe_type(value: Any) -> str:
    """The type's name, with its article; None for None."""
    if value is None:
        return "None"
    name = type(value).__name__
    # Of initials, such as SGD, the first is spoken by its name.
    vowel = "[AEFHILMNORSX]" if name[:2].isupper() else "(?i)[aeio]|un(?!i)"
    return f"{'an' if re.match(vowel, name) else 'a'} {name}"


#: Column → what to do if an index in it is too large for the model.
_REMEDIES = {
    "input_ids": "use the model's tokenizer, or resize_token_embeddings",
    "labels": "count them from 0, and load the model with num_labels to match",
    "positions": "shorten the samples",
}


#: Pattern of the messages of losses that get one-hot labels where they need class indices.
_ONE_HOT_ERRORS = "batch_size .* to match target|class probabilities, got Long|multi-target not supported"

#: Pattern of an error's message → what has probably caused it, and the remedy, with the pattern's groups. {columns} are
#: those that have one of the groups as a size, except n, which the model needs.
_EXPLANATIONS = {
    "device-side assert": "A label or another index is probably out of range: with use_cpu=True, the error names it.",
    r"'target' \(position 2\) must be Tensor, not None": "The loss gets no labels: add them to the batch.",
    r"(?i)\bdouble\)? (?:and|!=) (?:bias type \()?float": (
        "The input is float64, the weights are float32: convert it with .float()."
    ),
    r"(?i)\b(?:long|int|byte|unsigned char)\)? (?:and|!=) (?:bias type \()?float": (
        "The input has integers, the weights are float32: convert it with .float()."
    ),
    "no padding token": "Set the tokenizer's pad_token, and model.config.pad_token_id = tokenizer.pad_token_id.",
    r"multiplied \(\d+x(\d+) and (?P<n>\d+)x": r"A layer got \1 features but takes \2: correct {columns} or the layer.",
    r"to have (?P<n>\d+) channels, but got (\d+)": r"Dimension 1 must have the \1 channels: permute {columns}.",
    r"tensor a \((\d+)\) must match the size of tensor b \((\d+)\)": r"Sizes \1 and \2 differ: compare {columns}.",
    "'indices' to have one of .* Long": "Indices such as input_ids must be integers: convert them with .long().",
    r"^Unexpected keyword arguments: [\w,]+$": "If gradient_checkpointing_kwargs has these names, correct them.",
    "class probabilities, got Long": "The labels have a number for each class: convert these with .float().",
    "cast to the desired output type Long": "This loss needs float labels: convert them with .float().",
    r"batch_size \((\d+)\) to .* \((\d+)\)": r"The loss got \1 rows of logits and \2 labels: compare {columns}.",
    "same as input size": "The labels need a column for each class of the model: load it with num_labels to match.",
    "multi-target not supported": "The labels have a dimension too many: pass one class index per sample.",
}


def note_batch(error: Exception, place: str, inputs: Any, model: Any) -> None:
    """Add to an error the batch and, for an index that is too large, the column and the limit.

    Args:
        error: the error.
        place: where it happened.
        inputs: the batch.
        model: the model; its configuration, if it has one, has limits.
    """
    batch = describe_shapes(inputs)
    # The message of a batch that is no dict has its type already.
    add_note(error, f"This happened in {place}" + ("." if batch in str(error) else f", with the batch {batch}."))
    if explanation := _explain_by_batch(error, inputs, getattr(model, "config", None)):
        add_note(error, explanation)


def _explain_by_batch(error: Exception, inputs: Any, config: Any) -> str | None:
    """What in the batch has probably caused the error, and the remedy."""
    columns = inputs if isinstance(inputs, Mapping) else {}
    lookups = [function.__code__ for function in (embedding, cross_entropy, nll_loss, binary_cross_entropy_with_logits)]
    calls = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code in lookups]
    call = calls[-1] if calls else {}
    if isinstance(error, IndexError) and call:
        return _explain_index(call, columns)
    if explanation := _explain_length(error, columns, config) or _explain_labels(error, call, columns.get("labels")):
        return explanation
    matches = ((re.search(pattern, str(error)), text) for pattern, text in _EXPLANATIONS.items())
    match, text = next((match for match in matches if match[0]), (None, ""))
    return match and match.expand(text).format(columns=_columns_of_size(columns, match))


def _explain_index(call: dict[str, Any], columns: Mapping[str, Any]) -> str:
    """The column whose values are too large or negative for the model, in the call of torch's function."""
    is_label = "target" in call
    indices = call["target" if is_label else "input"]
    rows = call["input" if is_label else "weight"].shape
    name = next((name for name, value in columns.items() if value is indices), "labels" if is_label else "positions")
    indices = indices[indices != call.get("ignore_index")]
    low, high = indices.min(), indices.max()
    allowed = rows[: 1 + is_label][-1] - 1
    found = f"The values of {name} are {low} to {high}" if low < high else f"The value of {name} is {low}"
    return f"{found}, but the model accepts 0 to {allowed}: {_REMEDIES.get(name, 'correct them')}."


def _explain_length(error: Exception, columns: Mapping[str, Any], config: Any) -> str | None:
    """Samples that are longer than the model's positions."""
    length = [0, *getattr(columns.get("input_ids"), "shape", ())][-1]
    limit = getattr(config, "max_position_embeddings", None)
    remedy = f"tokenize with truncation=True, max_length={limit}"
    text = f"Samples of {length} tokens exceed max_position_embeddings={limit}: {remedy}."
    return text if limit is not None and length > limit and str(limit) in str(error) else None


def _explain_labels(error: Exception, call: dict[str, Any], labels: Any) -> str | None:
    """Labels of a type or shape that the loss does not take, in the call of torch's function."""
    target: Any = call.get("target")
    logits: Any = call.get("input")
    # Probabilities of classes are floats, and have the shape of the logits.
    if target is not None and target.dtype != torch.long and target.ndim < logits.ndim and logits.shape[-1] > 1:
        return f"The labels are {str(target.dtype).removeprefix('torch.')}: use torch.long for class indices."
    if re.search(_ONE_HOT_ERRORS, str(error)) and _is_one_hot(labels):
        remedy = "pass the index of the class, labels.argmax(-1)"
        return f"The labels are one-hot, {describe_shapes(labels)}, but the loss takes one class per sample: {remedy}."
    return None


def _columns_of_size(columns: Mapping[str, Any], match: re.Match[str]) -> str:
    """The columns with a size in the message, and their shapes."""
    sizes = {int(size) for size in match.groups()} - {int(size) for size in match.groupdict().values()}
    tensors = {
        name: value for name, value in columns.items() if isinstance(value, torch.Tensor) and not value.is_nested
    }
    # Rows of labels are counted in all; a feature or a channel has a dimension.
    totals = {} if match.groupdict() else {name: value.numel() for name, value in tensors.items()}
    found = [name for name, value in tensors.items() if sizes & {totals.get(name), *value.shape[1:]}]
    return ", ".join(f"{name} {tuple(tensors[name].shape)}" for name in found) or "the batch's shapes"


def _is_one_hot(labels: Any) -> bool:
    is_table = isinstance(labels, torch.Tensor) and labels.ndim == 2 and labels.shape[1] > 1
    return is_table and bool(((labels == 0) | (labels == 1)).all() and (labels.sum(-1) == 1).all())
