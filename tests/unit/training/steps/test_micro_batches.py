"""`MicroBatches` reads an epoch in windows, gives each micro-batch its position, and begins where a run resumes."""

import itertools
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from hftrainer import TrainerControl
from hftrainer.training.run import Attempt, Run
from hftrainer.training.run_lengths import RunLengths
from hftrainer.training.steps.micro_batches import MicroBatches, MicroBatchPosition
from hftrainer.training.stopping import FlagSync


def make_batches(count, accumulation=2, *, start=(None, 0, 0), planned=None, length=None, progress=None):
    """Micro-batches "0", "1" ...; `batches.trainer.calls` has what is read and restored."""
    calls = []

    def get_batch_samples(iterator, num_batches, device):
        window = list(itertools.islice(iterator, num_batches))
        calls.extend(window)
        return window, len(window) * 10

    args = SimpleNamespace(gradient_accumulation_steps=accumulation, world_size=1)
    trainer = SimpleNamespace(args=args, control=TrainerControl(), calls=calls, get_batch_samples=get_batch_samples)
    trainer._load_rng_state = lambda folder: calls.append("restored")
    run = Run(resumed_progress=progress)
    run.loss_since_log = torch.zeros(())
    engine = SimpleNamespace(accumulation_steps_of=lambda epoch, value=planned or accumulation: value)
    model_setup = SimpleNamespace(check_accumulation=lambda value: None)
    parts = SimpleNamespace(trainer=trainer, run=run, engine=engine, model_setup=model_setup)
    lengths, loader = RunLengths(1, 0, 0, 0, 0, length or count, 0), [str(index) for index in range(count)]
    return MicroBatches(parts, Attempt(None, None, lengths, *start), FlagSync(parts, calls.clear), loader)


class Window(NamedTuple):
    start: int
    size: int
    indices: list[int]
    is_ended: bool = True


def read_windows(batches):
    """The windows of an epoch, from the positions of its micro-batches."""
    found = []
    for _ in batches:
        at = batches.position
        if at.is_first:
            found.append(Window(at.window_start, at.window_size, [], is_ended=False))
        window = found[-1]
        assert not window.is_ended
        assert (window.start, window.size) == (at.window_start, at.window_size)
        window.indices.append(at.index)
        found[-1] = window._replace(is_ended=at.is_last)
    return found


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"count": 4}, [Window(0, 2, [0, 1]), Window(2, 2, [2, 3])]),
        ({"count": 5}, [Window(0, 2, [0, 1]), Window(2, 2, [2, 3]), Window(4, 1, [4])]),
        ({"count": 2, "accumulation": 3}, [Window(0, 2, [0, 1])]),
        ({"count": 0, "length": 8}, []),
        # A stream: nothing tells that its last one ends a window.
        ({"count": 3, "length": 8}, [Window(0, 2, [0, 1]), Window(2, 1, [2], is_ended=False)]),
        # An epoch keeps its planned number of windows.
        ({"count": 6, "planned": 3}, [Window(0, 2, [0, 1]), Window(2, 2, [2, 3])]),
        ({"count": 5, "start": ("checkpoint-3", 1, 2)}, [Window(2, 2, [2, 3]), Window(4, 1, [4])]),
    ],
)
def test_windows_have_as_many_micro_batches_as_a_step(settings, expected):
    batches = make_batches(**settings)
    assert read_windows(batches) == expected
    assert batches.step_phase.has_begun == bool(expected)


def test_window_is_read_whole_before_its_first_micro_batch():
    batches = make_batches(4)
    assert batches.position == MicroBatchPosition(-1, 0, 0, None, is_first=False, is_last=True)
    iterator = iter(batches)
    assert batches.trainer.calls == [], "Lightning calls iter() before the epoch begins"
    assert not batches.step_phase.has_begun
    assert next(iterator) == "0"
    assert batches.trainer.calls == ["0", "1"]
    assert batches.step_phase.has_begun
    assert batches.position.num_items == 20
    assert batches.state_dict() == {"position": 1}


@pytest.mark.parametrize("flag", ["should_epoch_stop", "should_training_stop"])
@pytest.mark.parametrize("is_agreed", [True, False])
def test_flag_ends_the_epoch_once_all_ranks_know_it(flag, is_agreed):
    batches = make_batches(3)
    setattr(batches.trainer.control, flag, True)
    batches._flag_sync.is_distributed = not is_agreed
    assert list(batches) == (["0"] if is_agreed else ["0", "1", "2"])


def test_skipped_window_is_read_but_belongs_to_no_step():
    batches = make_batches(6)
    batches.run.skipped_samples = SimpleNamespace(windows={(0, 4), (1, 0)})
    assert list(batches) == ["0", "1", "2", "3"]
    assert not batches.step_phase.has_begun
    assert batches.position == MicroBatchPosition(5, 4, 2, 20)


@pytest.mark.parametrize(
    ("finished", "saved", "is_early", "calls"),
    [
        (2, None, False, ["2", "3", "restored"]),  # transformers saves the states after the window is read
        (2, {"opened": None, "held": "states"}, False, ["restored", "states", "2", "3"]),
        (0, None, False, ["restored", "0", "1"]),
        (0, None, True, ["restored", "0", "1"]),
    ],
)
def test_random_states_are_restored_once_and_only_in_the_resumed_epoch(finished, saved, is_early, calls):
    batches = make_batches(4, start=("folder", 1, finished), progress=saved and SimpleNamespace(data=saved))
    seen = batches.trainer.calls
    restore = {"restore": lambda state: None, "restore_generators": seen.append, "capture": dict}
    batches.reader._generators = SimpleNamespace(**restore)
    if is_early:
        batches.restore_rng_before_reading()
    next(iter(batches))
    assert seen == calls
    batches.epoch = 2
    seen.clear()
    assert list(batches) == ["0", "1", "2", "3"] == seen
