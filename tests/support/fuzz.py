"""Contents that somebody made up, for the fuzzers.

`make soak` tries many more (`FUZZ=1000`); a failure prints the seed of its case.
"""

import contextlib
import copy
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hftrainer.errors

TRIED = int(os.environ.get("FUZZ", "12"))
FIRST = int(os.environ.get("FUZZ_FIRST", "0"))
#: Errors that say what is wrong with a file or an argument.
CLEAR = tuple(kind for kind in vars(hftrainer.errors).values() if isinstance(kind, type))
SECONDS = 20


def seeds(name: str, tried: int = TRIED) -> Iterator[tuple[int, random.Random]]:
    """The numbers of the cases, and what they are made up with."""
    for seed in range(FIRST, FIRST + tried):
        yield seed, random.Random(f"{name} {seed}")


@contextlib.contextmanager
def clear(name: str, case: Any) -> Iterator[None]:
    """Let a case be accepted, or refused with a clear error; fail if it takes long or raises anything else."""
    start = time.monotonic()
    try:
        yield
    except CLEAR:
        pass
    except Exception as error:
        pytest.fail(f"{name} {case}: {type(error).__name__}: {error}")
    assert time.monotonic() - start < SECONDS, case


class Mischief:
    """Leaves a folder behind when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


def anything(rng: random.Random) -> Any:
    """A value that a writer of JSON or of torch.save might have put there."""
    return rng.choice(
        [
            *(None, True, -1, 0, 10**12, -(10**30), 2.5, float("nan"), float("inf"), "", "x" * 300, "../../outside"),
            *([], {}, [1, "2", None], {"a": {"b": []}}, [[[[]]]], {"0": 1}),
        ]
    )


def tensors(rng: random.Random) -> Any:
    return rng.choice(
        [torch.zeros(0), torch.zeros(3, 5), torch.full((2,), float("nan")), torch.tensor(7), anything(rng)]
    )


def mutate(value: Any, rng: random.Random, make: Any = anything) -> Any:
    """A copy in which one part, anywhere, is another value, gone, or there under another name."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.85:
        value = copy.copy(value)
        key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        how = rng.random()
        if how < 0.15:
            del value[key]
        elif how < 0.25 and isinstance(value, dict):
            value[rng.choice(["more", 7, "../x"])] = make(rng)
        else:
            value[key] = mutate(value[key], rng, make)
        return value
    return make(rng)


def scramble(path: Path, rng: random.Random) -> None:
    """Other bytes: flipped, cut, or in between."""
    data = bytearray(path.read_bytes())
    how = rng.random()
    if how < 0.3:
        del data[rng.randrange(len(data)) :]
    elif how < 0.8:
        for _ in range(rng.choice([1, 8, 200])):
            data[rng.randrange(len(data))] = rng.randrange(256)
    else:
        place = rng.randrange(len(data))
        data[place:place] = rng.randbytes(rng.choice([1, 64]))
    path.write_bytes(bytes(data))
