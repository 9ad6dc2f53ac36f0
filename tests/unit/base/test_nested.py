"""Nested data keeps its structure when its leaves are mapped."""

import dataclasses
from collections import OrderedDict, UserList, defaultdict, deque, namedtuple

import pytest
import torch
from transformers import BatchEncoding
from transformers.modeling_outputs import SequenceClassifierOutput

from hftrainer.base.nested import map_leaves

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass(frozen=True)
class Output:
    scores: object
    count: int = dataclasses.field(default=3, init=False)


CONTAINERS = [
    lambda leaf: leaf,
    lambda leaf: [leaf, ["text", None, 2.5]],
    lambda leaf: (leaf, b"bytes"),
    lambda leaf: Pair(leaf, {"inner": leaf}),
    lambda leaf: UserList([leaf]),
    lambda leaf: OrderedDict(b=leaf, a=leaf),
    lambda leaf: defaultdict(list, a=leaf),
    lambda leaf: BatchEncoding({"input_ids": leaf}),
    lambda leaf: SequenceClassifierOutput(logits=leaf, hidden_states=(leaf, leaf)),
    lambda leaf: Output({"of a field": leaf}),
    lambda leaf: {"not a sequence": {1, 2}, "nor a mapping": deque("ab")},
]


@pytest.mark.parametrize("make", CONTAINERS, ids=lambda make: type(make(0)).__name__)
def test_map_leaves_keeps_container_types(make):
    found, expected = map_leaves(make(torch.tensor([3])), torch.Tensor, lambda leaf: leaf.item() * 2), make(6)
    assert type(found) is type(expected)
    assert found == expected


def test_map_leaves_keeps_a_default_factory():
    assert map_leaves(defaultdict(list), torch.Tensor, torch.clone)["new"] == []


def test_map_leaves_passes_matching_containers_whole():
    assert map_leaves({"a": [1, [2]], "b": (3,)}, list, len) == {"a": 2, "b": (3,)}
