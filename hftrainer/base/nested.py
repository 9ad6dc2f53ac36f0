"""Nested containers: mappings, sequences, named tuples and dataclasses of tensors and arrays."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

#: `isinstance` checks these types in order, so the most frequent are first.
_CONTAINERS = (tuple, dict, list, Mapping)


def map_leaves(data: Any, types: type | tuple[type, ...], function: Callable[[Any], Any]) -> Any:
    """A copy of nested data with `function` applied to each value of `types`.

    Mappings, sequences and instances of dataclasses keep their type. A container that is one of `types` is passed to
    `function` itself. Values of other types are unchanged.
    """
    if isinstance(data, types):
        return function(data)
    if isinstance(data, (Mapping, Sequence)) and not isinstance(data, (str, bytes)):
        return rebuild_container(data, lambda value: map_leaves(value, types, function))
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        names = [field.name for field in dataclasses.fields(data) if field.init]
        return dataclasses.replace(data, **{name: map_leaves(getattr(data, name), types, function) for name in names})
    return data


def rebuild_container(container: Any, convert: Callable[[Any], Any]) -> Any:
    """A container of the same type, with `convert` applied to each value of a mapping or sequence."""
    cls: Any = type(container)
    # Only other types need `isinstance(container, Mapping)`, which is slow.
    if isinstance(container, (tuple, list)) or not isinstance(container, (dict, Mapping)):
        values = [convert(value) for value in container]
        return cls(*values) if hasattr(container, "_fields") else cls(values)  # the former for a named tuple
    items = {key: convert(value) for key, value in container.items()}
    return cls(container.default_factory, items) if isinstance(container, defaultdict) else cls(items)


def nested_apply(function: Callable[[Any], Any], data: Any) -> Any:
    """Apply `function` to every leaf of nested mappings, lists and tuples."""
    # The common case first, since `isinstance(data, Mapping)` is slow.
    if isinstance(data, torch.Tensor):
        return function(data)
    if isinstance(data, _CONTAINERS):
        return rebuild_container(data, lambda value: nested_apply(function, value))
    return function(data)


def nested_detach(tensors: Any) -> Any:
    """Detach every tensor; other leaves are unchanged."""
    return nested_apply(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, tensors)


def nested_numpify(tensors: Any) -> Any:
    """Convert tensors to NumPy arrays; bfloat16, which NumPy lacks, becomes float32."""
    return nested_apply(_numpify, tensors)


def _numpify(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    leaf = leaf.cpu()
    return (leaf.float() if leaf.dtype == torch.bfloat16 else leaf).numpy()


def iterate_arrays(data: Any) -> Iterator[Any]:
    """The tensors and NumPy arrays in nested mappings, lists and tuples."""
    if isinstance(data, (torch.Tensor, np.ndarray)):
        yield data
    elif isinstance(data, _CONTAINERS):
        for value in data.values() if isinstance(data, (dict, Mapping)) else data:
            yield from iterate_arrays(value)


def drop_all_rows(data: Any, *, lists_of_samples: bool = False) -> Any:
    """The nested outputs without rows; with `lists_of_samples`, lists are empty too."""
    if lists_of_samples:
        data = map_leaves(data, list, lambda _: [])
    return map_leaves(data, (torch.Tensor, np.ndarray), lambda rows: (rows if rows.ndim else rows.reshape(1))[:0])


def find_batch_size(tensors: Any) -> int | None:
    """The first dimension of the first tensor in nested containers, or None."""
    return next((array.shape[0] for array in iterate_arrays(tensors) if array.ndim), None)
