"""`MicroBatches` reads an epoch in windows, gives each micro-batch its position, and begins where a run resumes."""

import itertools
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from hftrainer import Trainer
from hftrainer.training.divergence import SkippedSamples
from hftrainer.training.run_lengths import RunLengths
from hftrainer.training.steps.micro_batches import MicroBatches, MicroBatchPosition
from hftrainer.training.stopping import FlagSync


class RecordingTrainer(Trainer):
    """Counts ten items in a micro-batch; `calls` has the micro-batches that are read, and what is restored."""

    def get_batch_samples(self, iterator, num_batches, device):
        window = list(itertools.islice(iterator, num_batches))
        self.calls.extend(window)
        return window, len(window) * 10

    def _load_rng_state(self, folder):
        self.calls.append("restored")


@pytest.fixture
def make_batches(make_trainer):
    """Makes the micro-batches "0", "1" ... of a run; a run plans another accumulation if a callback changes it."""

    def make_batches(count, accumulation=2, *, start=(None, 0, 0), planned=None, length=None, data_state=None, ranks=1):
        trainer = make_trainer(kind=RecordingTrainer, gradient_accumulation_steps=planned or accumulation)
        trainer.args.gradient_accumulation_steps, trainer.calls = accumulation, []
        parts = trainer._hftrainer
        parts.run.resumed_progress = data_state and SimpleNamespace(data=data_state)
        parts.run.attempt.begin(trainer.state, trainer.args.device)
        parts.run.resume_folder, parts.run.attempt.first_epoch, parts.run.attempt.finished_micro_batches = start
        parts.run.attempt.lengths = RunLengths(1, 0, 0, 0, 0, length or count, 0)
        flag_sync = FlagSync(parts, trainer.calls.clear)
        flag_sync.is_distributed = ranks > 1
        return MicroBatches(parts, flag_sync, [str(index) for index in range(count)])

    return make_batches


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
def test_windows_have_as_many_micro_batches_as_a_step(make_batches, settings, expected):
    batches = make_batches(**settings)
    assert read_windows(batches) == expected
    assert batches.step_phase.has_begun == bool(expected)


def test_window_is_read_whole_before_its_first_micro_batch(make_batches):
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
@pytest.mark.parametrize(("ranks", "trained"), [(1, ["0"]), (2, ["0", "1", "2"])])
def test_flag_ends_the_epoch_once_all_ranks_know_it(make_batches, flag, ranks, trained):
    """In several processes, this rank's flag alone ends nothing."""
    batches = make_batches(3, ranks=ranks)
    setattr(batches.trainer.control, flag, True)
    assert list(batches) == trained


def test_skipped_window_is_read_but_belongs_to_no_step(make_batches):
    batches = make_batches(6)
    batches.run.skipped_samples = SkippedSamples(batches.trainer, None, None)
    batches.run.skipped_samples.windows = {(0, 4): 1, (1, 0): 1}
    assert list(batches) == ["0", "1", "2", "3"]
    assert not batches.step_phase.has_begun
    assert batches.position == MicroBatchPosition(5, 4, 2, 20)


@pytest.mark.parametrize(
    ("finished", "has_data_state", "is_early", "calls"),
    [
        (2, False, False, ["2", "3", "restored"]),  # transformers saves the states after the window is read
        (2, True, False, ["restored", "generators", "2", "3"]),
        (0, False, False, ["restored", "0", "1"]),
        (0, False, True, ["restored", "0", "1"]),
    ],
)
def test_random_states_are_restored_once_and_only_in_the_resumed_epoch(
    make_batches, monkeypatch, finished, has_data_state, is_early, calls
):
    reader = make_batches(4).reader
    reader.open_epoch(1)
    data_state = reader.state_dict() if has_data_state else None
    batches = make_batches(4, start=("folder", 1, finished), data_state=data_state)
    seen = batches.trainer.calls
    monkeypatch.setattr(batches.reader, "restore_generators", lambda state: seen.append("generators"))
    if is_early:
        batches.restore_rng_before_reading()
    next(iter(batches))
    assert seen == calls
    batches.epoch = 2
    seen.clear()
    assert list(batches) == ["0", "1", "2", "3"] == seen
