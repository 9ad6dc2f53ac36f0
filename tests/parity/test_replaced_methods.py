"""Whatever transformers calls is called, wherever it was replaced: as often, and between the same events."""

import functools
import tempfile
from pathlib import Path

import accelerate
import pytest
import transformers

import hftrainer
from hftrainer.training.accelerator import EngineAccelerator
from tests.support.differences import NOT_CALLED_ALIKE
from tests.support.methods import TRAINER, WAYS, Calls, methods_of, run

#: Who runs backward follows from these, so each is replaced in a run of its own too.
DECIDE = {
    "trainer": ("training_step", "_prepare_context_parallel_inputs"),
    "accelerator": ("backward", "no_sync"),
}
ACCELERATOR = """
    backward clip_grad_norm_ free_memory gather gather_for_metrics no_sync pad_across_processes prepare
    prepare_data_loader prepare_model prepare_optimizer unscale_gradients unwrap_model
""".split()


@functools.cache
def calls_of(library: str, way: str, names: frozenset[str]) -> tuple[Calls, list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        return run(library, way, set(names), Path(folder))


def ours_can(way: str) -> frozenset[str]:
    if way == "accelerator":
        return frozenset(methods_of(EngineAccelerator) & methods_of(accelerate.Accelerator))
    return frozenset(methods_of(hftrainer.Trainer))


def theirs(way: str) -> tuple[Calls, list[str]]:
    if way == "accelerator":
        return calls_of("transformers", way, ours_can(way))
    return calls_of("transformers", "class", frozenset(methods_of(transformers.Trainer)))


def ours(way: str, name: str) -> tuple[Calls, list[str]]:
    """The calls of a method, when all are replaced that do not decide who runs backward; else it alone."""
    deciding = {each for names in DECIDE.values() for each in names}
    return calls_of("hftrainer", way, frozenset({name}) if name in deciding else ours_can(way) - deciding)


CASES = [*((way, name) for way in WAYS for name in TRAINER), *(("accelerator", name) for name in ACCELERATOR)]


@pytest.mark.parametrize(("way", "name"), [case for case in CASES if case[1] not in NOT_CALLED_ALIKE])
def test_replaced_method_is_called_alike(way, name):
    (their_calls, their_events), (our_calls, our_events) = theirs(way), ours(way, name)
    print(f"{way} {name}: {len(our_calls.get(name, []))} calls, as {len(their_calls[name])}")
    assert our_calls.get(name, []) == their_calls[name]
    assert our_events == their_events


@pytest.mark.parametrize(("way", "names"), [("class", TRAINER), ("accelerator", ACCELERATOR)])
def test_table_is_what_transformers_calls(way, names):
    called, _ = theirs(way)
    assert sorted(called) == sorted(names)


def test_all_replaced_at_once():
    """The run is the same when its methods are replaced, though others are called for it."""
    events = {tuple(calls_of("hftrainer", way, ours_can(way))[1]) for way in (*WAYS, "accelerator")}
    assert events == {tuple(theirs("class")[1])}


@pytest.mark.parametrize("name", [name for name in NOT_CALLED_ALIKE if name not in ACCELERATOR])
def test_ledger_of_calls_is_needed(name):
    if name in TRAINER:
        assert ours("class", name)[0].get(name, []) != theirs("class")[0][name]
    else:
        assert ours("class", name)[0].get(name, []) and name not in theirs("class")[0]
