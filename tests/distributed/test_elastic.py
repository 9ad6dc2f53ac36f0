"""Runs that change their size are the undisturbed run: the same samples in each step, and the same weights."""

import collections
import functools
import json
import os
import random

import pytest
import torch

from tests.distributed.cases_elastic import KINDS, SAMPLES, train_part
from tests.support.processes import RanksFailed

#: Samples of a step; 5 steps an epoch, 15 in all.
GLOBAL_BATCH = 8
#: Processes, samples of a micro-batch, strategy, and the step after which all of them are killed.
RUNS = {
    "fewer and more": [(2, 4, "replicas", [4]), (1, 8, "replicas", [7]), (2, 1, "replicas", None)],
    "sharded": [(2, 2, "fsdp", [3]), (1, 4, "replicas", [9]), (2, 4, "fsdp", None)],
    "in the middle of an epoch": [(1, 2, "replicas", [5]), (2, 2, "replicas", [13]), (1, 1, "replicas", None)],
}
#: `make soak` makes more of them.
RANDOM_RUNS = int(os.environ.get("FUZZ", "2"))


def random_run(draw):
    """Parts of other sizes and strategies, of which all but the last are killed at some event."""
    parts, step = [], 0
    while step is not None:
        count = draw.choice([1, 2, 4])
        size = draw.choice([size for size in (1, 2, 4, 8) if GLOBAL_BATCH % (size * count) == 0])
        strategy = draw.choice(["replicas", "fsdp"]) if count > 1 else "replicas"
        step = draw.randrange(step + 1, 15) if step < 13 and draw.random() < 0.8 else None
        events = ["on_step_begin", "on_pre_optimizer_step", "on_step_end"]
        events += ["on_substep_end"] if size * count < GLOBAL_BATCH else []
        events += ["on_save"] if step is not None and step % 2 == 0 else []
        killed = (step, draw.choice(events), draw.choice([None, *range(count)]))
        parts.append((count, size, strategy, killed if step is not None else None))
    return parts


def samples_of_steps(folder):
    """Step → its samples, as the last part that reached it has read them."""
    found = collections.defaultdict(lambda: collections.defaultdict(list))
    for name in os.listdir(folder):
        if name.startswith("read-"):
            for line in (folder / name).read_text().splitlines():
                step, part, indices = json.loads(line)
                found[step][part] += indices
    return {step: sorted(parts[max(parts)]) for step, parts in found.items()}


def run(processes, folder, parts, library="hftrainer", kind="map-style"):
    """Train all parts; returns the weights and the log lines of the last."""
    for number, (count, size, strategy, killed) in enumerate(parts):
        # Only the first part that has saved says how large a step is.
        accumulation = 1 if [*folder.glob("checkpoint-*")] else GLOBAL_BATCH // (count * size)
        given = folder, number, size, accumulation, strategy, killed, library, kind
        if killed is None:
            return processes.run_ranks(train_part, count, *given)[0]
        with pytest.raises(RanksFailed):
            processes.run_ranks(train_part, count, *given)
    raise AssertionError("the last part goes on to the end")


@pytest.fixture(scope="module")
def undisturbed(processes, tmp_path_factory):
    @functools.cache
    def of_kind(kind):
        folder = tmp_path_factory.mktemp("undisturbed")
        weights, lines = run(processes, folder, [(1, GLOBAL_BATCH, "replicas", None)], kind=kind)
        samples = samples_of_steps(folder)
        assert [len(each) for each in samples.values()] == [GLOBAL_BATCH] * 15
        for epoch in range(3):
            read = [index for step in range(5 * epoch + 1, 5 * epoch + 6) for index in samples[step]]
            assert sorted(read) == [*range(SAMPLES)]
        return weights, lines, samples

    return of_kind


@pytest.mark.parametrize(
    ("kind", "name"),
    [*(("map-style", name) for name in RUNS), *((kind, "fewer and more") for kind in KINDS if kind != "map-style")],
)
def test_run_that_changes_its_size_is_the_undisturbed_one(processes, tmp_path, undisturbed, kind, name):
    check(undisturbed(kind), tmp_path, *run(processes, tmp_path, RUNS[name], kind=kind))


@pytest.mark.parametrize("seed", range(RANDOM_RUNS))
def test_random_changes_of_size_are_the_undisturbed_run(processes, tmp_path, undisturbed, seed):
    draw = random.Random(seed)
    kind, parts = draw.choice([*KINDS]), random_run(draw)
    print(kind, parts)
    check(undisturbed(kind), tmp_path, *run(processes, tmp_path, parts, kind=kind))


def check(undisturbed, folder, weights, lines):
    expected_weights, expected_lines, samples = undisturbed
    assert samples_of_steps(folder) == samples
    assert [line["step"] for line in lines] == [line["step"] for line in expected_lines]
    for line, expected in zip(lines, expected_lines, strict=True):
        # float64, but the sum of the losses of a step, and its gradients, are added up in another order.
        assert line["loss"] == pytest.approx(expected["loss"], abs=1e-6)
        assert line["learning_rate"] == expected["learning_rate"]
        assert line["epoch"] == pytest.approx(expected["epoch"])
    for key, value in expected_weights.items():
        torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("library", "size", "steps", "missing"), [("transformers", 8, 3, 16), ("hftrainer", 4, 5, 0)])
def test_no_sample_is_skipped_when_processes_double(processes, tmp_path, library, size, steps, missing):
    """huggingface/transformers#40245: twice the processes skip as many batches each, and so twice the samples."""
    run(processes, tmp_path, [(1, 8, "replicas", [3]), (2, size, "replicas", None)], library)
    read = samples_of_steps(tmp_path)
    of_epoch = {index for step in range(1, steps + 1) for index in read[step]}
    assert SAMPLES - len(of_epoch) == missing
