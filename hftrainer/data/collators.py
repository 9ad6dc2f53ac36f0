"""Turns samples into the model's inputs: collators, column removal and token counts."""

from __future__ import annotations

import inspect
import logging
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hftrainer.base.messages import log_once
from hftrainer.base.tracebacks import add_note, describe_type
from hftrainer.compat import libraries
from hftrainer.errors import InvalidSetup, RemovedColumn, UnknownKey, WrongObject
from hftrainer.model.inspection import called_model

logger = logging.getLogger(__name__)


def default_data_collator(features: Sequence[Any], return_tensors: str = "pt") -> dict[str, Any]:
    """Stack the values of equal keys, without padding.

    Args:
        features: the samples, mappings or objects with attributes; all have the keys of the first. `label` (a number)
            or `label_ids` (a sequence) becomes `labels`; other strings and None values are dropped.
        return_tensors: 'pt' for torch tensors, 'np' for arrays.

    Returns:
        A tensor of shape `(batch, ...)` for each key.

    Raises:
        WrongObject: for samples without keys, such as the tuples of a `TensorDataset`.
    """
    samples = [feature if isinstance(feature, (dict, Mapping)) else _read_attributes(feature) for feature in features]
    first = samples[0]
    batch: dict[str, Any] = {}
    name = "label" if first.get("label") is not None else "label_ids"
    if (label := first.get(name)) is not None:
        labels = [sample[name] for sample in samples]
        kind = label if name == "label" else label[0]
        batch["labels"] = _stack(name, labels, _stack_labels, kind)
    for key, value in first.items():
        if isinstance(value, str) and key == "labels":
            log_once(logger, f"'labels' is dropped: its values are texts, such as {value!r}. A model needs numbers.")
        elif key not in ("label", "label_ids") and value is not None and not isinstance(value, str):
            try:
                values = [sample[key] for sample in samples]
            except KeyError as error:
                add_note(error, f"Not all samples of this batch have {key!r}, but the first has.")
                raise
            batch[key] = _stack(key, values, _stack_values)
    if return_tensors == "np":
        return {key: value.numpy() for key, value in batch.items()}
    return batch


def _read_attributes(sample: Any) -> dict[str, Any]:
    if isinstance(sample, list) and sample and isinstance(sample[0], Mapping):
        raise WrongObject("A sample is a list of dicts. For several datasets, pass a dict: {'a': first, 'b': second}.")
    if sample is None:
        raise WrongObject("A sample is None, as its dataset returned nothing: check its __getitem__, or remove it.")
    attributes: dict[str, Any] | None = getattr(sample, "__dict__", None)
    if not attributes:
        raise WrongObject(
            f"A sample is {describe_type(sample)}, but the model needs named inputs: let the dataset return dicts "
            "whose keys are parameters of its forward, such as {'x': x, 'labels': y}; or name the parts in a collator: "
            "data_collator=lambda samples: dict(zip(('x', 'labels'), torch.utils.data.default_collate(samples)))."
        )
    return attributes


def _stack_labels(values: list[Any], sample: Any) -> torch.Tensor:
    """Int64 labels if `sample` is an integer, else float32. Tensors with dimensions are stacked."""
    first = values[0]
    if isinstance(first, torch.Tensor) and first.ndim > 0:
        return torch.stack(values)
    number = sample.item() if isinstance(sample, torch.Tensor) else sample
    return torch.tensor(values, dtype=torch.long if isinstance(number, (int, np.integer)) else torch.float)


def _stack_values(values: list[Any]) -> torch.Tensor:
    if isinstance(values[0], torch.Tensor):
        return torch.stack(values)
    if isinstance(values[0], np.ndarray):
        return torch.from_numpy(np.stack(values))
    return torch.tensor(values)


def _stack(key: str, values: list[Any], stack: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """The result of `stack(values, *args)`.

    Raises:
        InvalidSetup: if it fails; the error names the key, and the first value that is no number, or the lengths.
    """
    try:
        return stack(values, *args)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = "pass processing_class=tokenizer to pad them, or a data_collator that does"
        others = [(place, other) for place, value in enumerate(values, start=1) if (other := _describe_other(value))]
        if others:
            place, (kind, advice) = others[0]
            where = f"in {len(others)} of {len(values)} samples (first in number {place} of the batch)"
            reason = f"they are {kind} {where}; {advice}"
        raise InvalidSetup(f"The values of {key!r} do not fit into one tensor ({error}): {reason}.") from None


def _describe_other(value: Any) -> tuple[str, str] | None:
    """The kind of a value that is no number or array of them, and what to do about it; None for numbers."""
    if isinstance(value, (list, tuple)):
        inner = next(filter(None, map(_describe_other, value)), None)
        return inner and (f"{describe_type(value)} with {inner[0]}", inner[1])
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic, int, float, complex)):
        return None
    if isinstance(value, str):
        return f"text ({reprlib.repr(value)})", "tokenize or encode it, or pass a data_collator"
    advice = "make its keys columns" if isinstance(value, Mapping) else "convert it to numbers"
    return describe_type(value), "replace or remove these" if value is None else f"{advice}, or pass a data_collator"


@dataclass
class DataCollatorWithPadding:
    """Pads the samples of a batch to one length with the tokenizer's `pad`.

    Args:
        tokenizer: a tokenizer or sequence feature extractor of transformers.
        padding: True or 'longest' for the longest sample of the batch, 'max_length', or False.
        max_length: length in tokens for 'max_length'.
        pad_to_multiple_of: round the length up to a multiple of this, in tokens.
        return_tensors: 'pt' or 'np'.
    """

    tokenizer: Any
    padding: bool | str = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"

    def __call__(self, features: list[dict[str, Any]]) -> Any:
        """Pad and stack the samples. `label` and `label_ids` are renamed `labels`."""
        # Silence fast tokenizers' advice to pad while encoding: the samples are already encoded here.
        warnings = getattr(self.tokenizer, "deprecation_warnings", {})
        is_silent = warnings.get("Asking-to-pad-a-fast-tokenizer", False)
        warnings["Asking-to-pad-a-fast-tokenizer"] = True
        try:
            batch = self.tokenizer.pad(
                features,
                padding=self.padding,
                max_length=self.max_length,
                pad_to_multiple_of=self.pad_to_multiple_of,
                return_tensors=self.return_tensors,
            )
        finally:
            warnings["Asking-to-pad-a-fast-tokenizer"] = is_silent
        for key in ("label", "label_ids"):
            if key in batch:
                batch["labels"] = batch.pop(key)
        return batch


#: Collators that drop texts and None, by their names here and in transformers.
_DROPPING = ("default_data_collator", "DefaultDataCollator")
#: Collators that draw no random numbers.
_WITHOUT_DRAWS = (*_DROPPING, "DataCollatorWithPadding", "DataCollatorForTokenClassification")


def draws_nothing(collate_fn: Any, known: Sequence[str] = _WITHOUT_DRAWS) -> bool:
    """Whether a collator is one of those that are known to draw no random numbers."""
    if isinstance(collate_fn, RemoveColumnsCollator):
        collate_fn = collate_fn.data_collator
    definition = collate_fn if inspect.isfunction(collate_fn) else type(collate_fn)
    return definition.__name__ in known and definition.__module__ in (__name__, "transformers.data.data_collator")


def holds_samples(dataset: Any) -> bool:
    """Whether a dataset stores its samples instead of computing them on access."""
    if libraries.is_map_style_dataset(dataset):
        return bool(dataset.format["type"] != "custom")
    return type(dataset) in (list, tuple) and all(type(sample) is dict for sample in dataset)


# ---- Columns of datasets, and keys of samples ------------------------------------------------------------------------


def signature_columns(model: Any, label_names: Sequence[str]) -> list[str]:
    """The keys that `model.forward` accepts, and those that collators turn into labels."""
    parameters = list(inspect.signature(called_model(model).forward).parameters)
    return list(dict.fromkeys([*parameters, "label", "label_ids", *label_names]))


def remove_unused_columns(dataset: Any, columns: Sequence[str], description: str | None, model_name: str) -> Any:
    """A `datasets.Dataset` with only the columns in `columns`.

    Raises:
        InvalidSetup: if all columns would be removed; names the dataset's columns and the model's arguments.
    """
    ignored = [name for name in dataset.column_names if name not in columns]
    if len(ignored) == len(dataset.column_names):
        raise InvalidSetup(
            f"No column of the {description or 'given'} dataset is an argument of {model_name}.forward: the dataset "
            f"has {', '.join(sorted(ignored))}; the model accepts {', '.join(columns)}. Rename the columns, or set "
            "remove_unused_columns=False and let your data collator build the inputs."
        )
    if ignored:
        logger.info("Columns that %s.forward does not accept are ignored: %s", model_name, ", ".join(ignored))
        return dataset.remove_columns(ignored)
    return dataset


def explain_removed_column(error: KeyError, datasets: Sequence[Any], columns: Sequence[str]) -> None:
    """Explain a KeyError of a collator or loss for a removed column.

    Args:
        error: the error; from a loader's worker, its message is the text of a traceback.
        datasets: the sources of the samples.
        columns: the columns that are kept.

    Raises:
        RemovedColumn: in place of such an error.
    """
    missing_keys = {*error.args, *re.findall(r"^KeyError: '(.+)'$", str(error), re.MULTILINE)}
    removed = {name for dataset in datasets for name in _columns_of(dataset)} - {*columns}
    for name in removed & {name for name in missing_keys if isinstance(name, str)}:
        raise RemovedColumn(
            f"The data collator or the loss reads the column {name!r}, which was removed since the model's forward "
            "does not accept it: set remove_unused_columns=False, and let the collator or compute_loss drop what the "
            "model does not accept."
        ) from error


def note_columns(error: Exception, datasets: Sequence[Any], columns: Sequence[str], collator: Any) -> None:
    """Add notes with the columns that were removed, and those that the default collator cannot use.

    Args:
        error: the error.
        datasets: the sources of the samples.
        columns: the columns that are kept.
        collator: the script's collator.
    """
    if removed := sorted({str(name) for dataset in datasets for name in _columns_of(dataset)} - {*columns}):
        add_note(
            error,
            f"The samples also have {', '.join(removed)}, which the model's forward does not accept, so they were "
            "removed. Tokenize texts, and name the labels as forward does.",
        )
    if draws_nothing(collator, _DROPPING):
        for reason in filter(None, (_dropped_reason(datasets, name) for name in columns)):
            add_note(error, f"{reason}.")


def _dropped_reason(datasets: Sequence[Any], name: str) -> str:
    """Why the default collator cannot use a key, as a sentence without its period; empty if it can."""
    for value in [data[0][name] for data in datasets if holds_samples(data) and len(data) and name in data[0]]:
        if other := _describe_other(value):
            return f"{name!r} is {other[0]} in the samples, but the default collator needs numbers: {other[1]}"
    return ""


def explain_call_error(error: TypeError, model: Any, datasets: Sequence[Any]) -> None:
    """Explain the error of a model call with an unknown or missing argument.

    Args:
        error: the error.
        model: the model.
        datasets: the sources of the samples.

    Raises:
        UnknownKey: in place of such an error.
    """
    match = re.search(
        r"(\w+)\.forward\(\) (?:got an unexpected keyword argument '(?P<unknown>\w+)'|missing .*: (?P<missing>'.*'))",
        str(error),
    )
    if match is None or match[1] not in (type(model).__name__, type(libraries.unwrap_peft(model)).__name__):
        return
    kind, unknown, missing = match.groups()
    if unknown:
        advice = "let data_collator drop it (remove_unused_columns drops columns of the dataset only), or add it"
        if "label" in unknown:
            advice = f"add a parameter {unknown}=None to forward, and return the loss if it is not None"
        text = f"The batch has {unknown!r}, which {kind}.forward does not accept: {advice}."
    else:
        have = _describe_keys(datasets, missing.strip("'"), signature_columns(model, ()))
        text = f"The batch has no {missing.replace(' and ', ' or ')}, which {kind}.forward needs{have}"
    explained = UnknownKey(text).with_traceback(error.__traceback__)
    for note in getattr(error, "__notes__", ()):
        add_note(explained, note)
    raise explained from None


def _describe_keys(datasets: Sequence[Any], missing: str, columns: Sequence[str]) -> str:
    """What the samples have in place of a key that the batch lacks, and what to do, as the end of a sentence."""
    keys = dict.fromkeys(name for dataset in datasets for name in _columns_of(dataset))
    if missing in keys:
        dropped = "the samples have it, but data_collator or compute_loss has dropped it"
        return f": {_dropped_reason(datasets, missing) or dropped}."
    have = f"; the samples have {', '.join(map(str, keys))}" if keys else ""
    others = [name for name in keys if name not in columns]
    is_renamed = len(others) == 1 and missing in columns and not _dropped_reason(datasets, others[0])
    advice = f"Rename {others[0]!r} to {missing!r}" if is_renamed else "Rename the key, tokenize texts first"
    return f"{have}. {advice}, or let a data_collator build the inputs."


def describe_columns(samples: Any, dataset: Any, collator: Any) -> str:
    """The columns that a collator gets, as the end of a sentence; empty if they are unknown.

    Args:
        samples: the samples that it got, or None.
        dataset: their dataset.
        collator: the collator.
    """
    columns = samples[0] if samples and isinstance(samples[0], Mapping) else _columns_of(dataset)
    names = list(map(str, columns))
    kept_names = getattr(collator, "columns", names)
    removed = ", ".join(name for name in names if name not in kept_names)
    text = f" (remove_unused_columns has removed {removed})" if removed else ""
    kept = ", ".join(name for name in names if name in kept_names)
    return f"; the first has {kept}{text}" if names else ""


def _columns_of(dataset: Any) -> Iterable[str]:
    if libraries.is_dataset_or_stream(dataset):
        return dataset.column_names or ()
    if isinstance(dataset, (list, tuple)) and dataset and isinstance(dataset[0], Mapping):
        return dataset[0].keys()
    return ()


@dataclass(eq=False)
class RemoveColumnsCollator:
    """A collator that first drops the keys that the model does not accept.

    Raises:
        InvalidSetup: when the samples have keys, but none that the model accepts.
    """

    data_collator: Callable[[list[Any]], Any]
    columns: frozenset[str]
    model_name: str
    description: str | None

    def __call__(self, features: list[Any]) -> Any:
        """Drop the keys, then collate the samples."""
        return self.data_collator([self._drop_keys(feature) for feature in features])

    def _drop_keys(self, feature: Any) -> Any:
        if not isinstance(feature, (dict, Mapping)) or self.columns.issuperset(feature):
            return feature
        selection = {name: value for name, value in feature.items() if name in self.columns}
        if feature and not selection:
            raise InvalidSetup(
                f"No key of the {self.description or 'given'} samples is an argument of {self.model_name}.forward: "
                f"the samples have {', '.join(map(str, feature))}; the model accepts {', '.join(sorted(self.columns))}"
                ". Rename the keys, or set remove_unused_columns=False and let your data collator build the inputs."
            )
        return selection


def count_tokens(inputs: Mapping[str, Any], main_input: str, how: str, pad_token_id: int | None) -> torch.Tensor | None:
    """Tokens in a batch, shape `()`; None if the batch lacks `main_input`.

    Args:
        inputs: the batch.
        main_input: the key of the token ids, of shape `(batch, length)`.
        how: 'all', or 'non_padding' to exclude padding by the attention mask or the padding token.
        pad_token_id: the padding token, or None.
    """
    if main_input not in inputs:
        log_once(logger, f"Input tokens are not counted: the batch has no {main_input!r}. Set model.main_input_name.")
        return None
    tokens: torch.Tensor = inputs[main_input]
    if how == "non_padding" and "attention_mask" in inputs:
        mask: torch.Tensor = inputs["attention_mask"]
        return mask.sum()
    if how == "non_padding" and pad_token_id is not None:
        return (tokens != pad_token_id).sum()
    if how == "non_padding":
        log_once(
            logger,
            "Could not determine method to count non-padding tokens: there is neither an attention_mask nor a "
            "pad_token_id, so padding is counted too.",
        )
    return torch.tensor(tokens.numel(), device=tokens.device)


def number_of_tokens(loader: Iterable[Any], max_steps: int | None) -> int:
    """Input tokens in a loader, or in its first batch times `max_steps`. Reads the data."""
    tokens = 0
    for batch in loader:
        batch_tokens: int = batch["input_ids"].numel()
        if max_steps is not None:
            return batch_tokens * max_steps
        tokens += batch_tokens
    return tokens
