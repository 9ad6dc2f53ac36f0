"""Which columns of a dataset reach the model, and how many tokens they hold."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from hftrainer.compat import peers
from hftrainer.compat.messages import log_once
from hftrainer.errors import InvalidArgument, RemovedColumn, UnknownKey
from hftrainer.model.inspection import called_model

logger = logging.getLogger(__name__)


def signature_columns(model: Any, label_names: Sequence[str]) -> list[str]:
    """The keys that `model.forward` takes, and those that collators turn into labels."""
    parameters = list(inspect.signature(called_model(model).forward).parameters)
    return list(dict.fromkeys([*parameters, "label", "label_ids", *label_names]))


def remove_unused_columns(dataset: Any, columns: Sequence[str], description: str | None, model_name: str) -> Any:
    """A `datasets.Dataset` with only the columns in `columns`.

    Raises:
        InvalidArgument: when no column is left; names the dataset's columns and the model's arguments.
    """
    ignored = [name for name in dataset.column_names if name not in columns]
    if len(ignored) == len(dataset.column_names):
        raise InvalidArgument(
            f"No column of the {description or 'given'} dataset is an argument of {model_name}.forward: the dataset "
            f"has {', '.join(sorted(ignored))}; the model takes {', '.join(columns)}. Rename the columns, or set "
            "remove_unused_columns=False and let your data collator build the inputs."
        )
    if ignored:
        logger.info("Columns that %s.forward does not take have been ignored: %s", model_name, ", ".join(ignored))
        return dataset.remove_columns(ignored)
    return dataset


def explain_removed(error: KeyError, datasets: Sequence[Any], columns: Sequence[str]) -> None:
    """Explain a KeyError of a collator or a loss, if its key is one of the columns that are removed.

    Args:
        error: the error; that of a loader's worker has the text of its traceback.
        datasets: what the samples came from.
        columns: those that are not removed.

    Raises:
        RemovedColumn: in place of such an error.
    """
    missing = {*error.args, *re.findall(r"^KeyError: '(.+)'$", str(error), re.MULTILINE)}
    removed = {name for dataset in datasets for name in _columns_of(dataset)} - {*columns}
    for name in removed & {name for name in missing if isinstance(name, str)}:
        raise RemovedColumn(
            f"The data collator or the loss reads the column {name!r}, which was removed since the model's forward "
            "does not take it: set remove_unused_columns=False, and let the collator or compute_loss drop what the "
            "model does not take."
        ) from error


def explain_unknown(error: TypeError, model: Any) -> None:
    """Explain an error of calling the model with a keyword that its forward does not take.

    Raises:
        UnknownKey: in place of such an error.
    """
    found = re.search(r"(\w+)\.forward\(\) got an unexpected keyword argument '(\w+)'", str(error))
    if found and found[1] in (type(model).__name__, type(peers.without_adapters(model)).__name__):
        raise UnknownKey(
            f"The batch has {found[2]!r}, which {found[1]}.forward does not take: let data_collator drop it (the "
            "argument remove_unused_columns drops columns of the dataset only), or add it to forward."
        ) from error


def _columns_of(dataset: Any) -> Iterable[str]:
    if peers.is_any_dataset(dataset):
        return dataset.column_names or ()
    if isinstance(dataset, (list, tuple)) and dataset and isinstance(dataset[0], Mapping):
        return dataset[0].keys()
    return ()


class RemoveColumnsCollator:
    """A collator that first drops from each sample the keys that the model does not take.

    Raises:
        InvalidArgument: when the samples have keys, but none that the model takes.
    """

    def __init__(
        self,
        data_collator: Callable[[list[Any]], Any],
        columns: Sequence[str],
        model_name: str,
        description: str | None,
    ) -> None:
        self.data_collator = data_collator
        self.columns = frozenset(columns)
        self.model_name = model_name
        self.description = description

    def __call__(self, features: list[Any]) -> Any:
        """Drop, then collate."""
        return self.data_collator([self._kept(feature) for feature in features])

    def _kept(self, feature: Any) -> Any:
        if not isinstance(feature, (dict, Mapping)) or feature.keys() <= self.columns:
            return feature
        kept = {name: value for name, value in feature.items() if name in self.columns}
        if feature and not kept:
            raise InvalidArgument(
                f"No key of the {self.description or 'given'} samples is an argument of {self.model_name}.forward: "
                f"the samples have {', '.join(map(str, feature))}; the model takes {', '.join(sorted(self.columns))}. "
                "Rename the keys, or set remove_unused_columns=False and let your data collator build the inputs."
            )
        return kept


def count_tokens(inputs: Mapping[str, Any], main_input: str, how: str, pad_token_id: int | None) -> torch.Tensor | None:
    """Tokens in a batch, shape `()`; None if the batch lacks `main_input`.

    Args:
        inputs: the batch.
        main_input: the key of the token ids, of shape `(batch, length)`.
        how: 'all', or 'non_padding' to exclude padding by the attention mask or the padding token.
        pad_token_id: the padding token, if there is one.
    """
    if main_input not in inputs:
        log_once(logger, f"Input tokens are not counted: the batch has no {main_input!r}. Set model.main_input_name.")
        return None
    tokens = inputs[main_input]
    if how == "non_padding" and "attention_mask" in inputs:
        return inputs["attention_mask"].sum()
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
    """Input tokens in a loader, or in its first batch times `max_steps`; reads the data."""
    tokens = 0
    for batch in loader:
        count = batch["input_ids"].numel()
        if max_steps is not None:
            return count * max_steps
        tokens += count
    return tokens
