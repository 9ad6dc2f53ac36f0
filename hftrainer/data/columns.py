"""Which columns of a dataset reach the model."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hftrainer.compat import peers
from hftrainer.errors import InvalidArgument, RemovedColumn

logger = logging.getLogger(__name__)


def signature_columns(model: Any, label_names: Sequence[str]) -> list[str]:
    """The keys that `model.forward` takes, and those that collators turn into labels."""
    parameters = list(inspect.signature(peers.without_adapters(model).forward).parameters)
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
