"""Random contents of files: strategies of hypothesis, and how many examples are tried.

`make test` tries the same few each time. `make soak` tries many new ones (FUZZ=1000), and says how to repeat a failure.
"""

import contextlib
import copy
import os
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from hftrainer import errors
from tests.support.checkpoints import MaliciousPickle

_MANY = int(os.environ.get("FUZZ", "0"))
#: Errors that say what is wrong with a file or an argument.
CLEAR = tuple(kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, BaseException))


def with_examples(test: Callable) -> Callable:
    """Call a test with `data`, whose method `draw` draws from a strategy, for each example."""
    # No check of health: the fixtures of one test serve all its examples.
    how = {"database": None, "deadline": None, "print_blob": True, "suppress_health_check": list(HealthCheck)}
    return settings(max_examples=_MANY or 12, derandomize=not _MANY, **how)(given(data=st.data())(test))


def accepted_or_refused() -> contextlib.AbstractContextManager[None]:
    """What is inside succeeds, or raises one of the clear errors."""
    return contextlib.suppress(*CLEAR)


#: Values that JSON can hold.
_odd = st.sampled_from([-1, 0, 10**12, -(10**30), "x" * 300, "../../outside"])
values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=9) | _odd,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("0ab"), inner, max_size=2),
    max_leaves=4,
)
#: Values that torch.save can write.
tensors = values | st.sampled_from(
    [torch.zeros(0), torch.zeros(3, 5), torch.full((2,), float("nan")), torch.tensor(7)]
).map(torch.clone)


@st.composite
def mutated(draw: Any, value: Any, make: Any = values) -> Any:
    """A copy in which one part, anywhere, is another value, gone, or there under another name."""
    if not isinstance(value, (dict, list)) or not value or draw(st.integers(0, 6)) == 6:
        return draw(make)
    value = copy.copy(value)
    key = draw(st.sampled_from(list(value) if isinstance(value, dict) else range(len(value))))
    how = draw(st.integers(0, 9))
    if how == 9:
        del value[key]
    elif how == 8 and isinstance(value, dict):
        value[draw(st.sampled_from(["more", 7, "../x"]))] = draw(make)
    else:
        value[key] = draw(mutated(value[key], make))
    return value


@st.composite
def pickled(draw: Any, value: Any, trace: Any) -> Any:
    """The same for a pickle of torch, which may also hold what leaves a trace when it is run."""
    value = draw(mutated(value, tensors))
    return {"all": value, "more": MaliciousPickle(trace)} if draw(st.integers(0, 9)) == 9 else value


@st.composite
def scrambled(draw: Any, data: bytes) -> bytes:
    """Other bytes: cut, changed, or with more in between."""
    places = st.integers(0, len(data) - 1)
    place, how = draw(places), draw(st.sampled_from(["cut", "changed", "changed", "more"]))
    if how == "cut":
        return data[:place]
    if how == "more":
        return data[:place] + draw(st.binary(min_size=1, max_size=64)) + data[place:]
    changed = bytearray(data)
    for place, byte in draw(st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=64)):
        changed[place] = byte
    return bytes(changed)
