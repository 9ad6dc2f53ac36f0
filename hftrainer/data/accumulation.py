"""The training data as Lightning's loop consumes it: micro-batches, grouped into one window per optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hftrainer.data.schedule import TrainingSchedule


@dataclass(slots=True)
class AccumulationWindow:
    """The current micro-batch and its position in the optimizer step.

    Attributes:
        size: actual micro-batches in the step; the last step of an epoch may have fewer.
        num_items: items that the loss is averaged over in the whole step, or None when not needed.
        opens: this is the step's first micro-batch.
        closes: the optimizer steps after this micro-batch.
        sample: index of the micro-batch in the epoch.
    """

    size: int
    num_items: Any
    opens: bool
    closes: bool
    sample: int


class MicroBatchIterator:
    """An iterable over the micro-batches of an epoch; `window` describes the last one yielded.

    A whole window is fetched before its first micro-batch is used, as in `transformers.Trainer`: the number of items
    in a window must be known before its first loss.

    Args:
        schedule: the lengths of the run.
        planned: micro-batches per optimizer step in the epoch that begins, as the schedule counts them.
        accumulation: the current value: callbacks may change the argument, and the next window uses the new value.
            The epoch keeps its planned number of windows, as in `transformers.Trainer`.
        open_epoch: called with no argument when an epoch's iteration begins; returns its batch iterator.
        get_window: `(iterator, count) -> (micro-batches, num_items)`.
        on_first_window: called once after the first window of an iteration is fetched.
        interrupted: whether a callback has ended the epoch or the training.
    """

    def __init__(
        self,
        schedule: TrainingSchedule,
        planned: Callable[[], int],
        accumulation: Callable[[], int],
        *,
        open_epoch: Callable[[], Iterator[Any]],
        get_window: Callable[[Iterator[Any], int], tuple[list[Any], Any]],
        on_first_window: Callable[[], None],
        interrupted: Callable[[], bool],
    ) -> None:
        self.schedule = schedule
        self._planned = planned
        self._accumulation = accumulation
        self.window: AccumulationWindow | None = None
        self.position = 0  # micro-batches of the current epoch that are done, set before resuming
        self._open_epoch = open_epoch
        self._get_window = get_window
        self._on_first_window = on_first_window
        self._interrupted = interrupted

    def __len__(self) -> int:
        """Micro-batches in an epoch; for data without a length, as many as `max_steps` needs."""
        return self.schedule.steps_in_epoch

    def __iter__(self) -> Iterator[Any]:
        # Nothing happens before the first micro-batch is requested: Lightning calls iter() before the epoch begins.
        index, self.position = self.position, 0
        iterator = self._open_epoch()
        total = self.schedule.steps_in_epoch
        size = self._accumulation()
        remainder = total % size or size
        last_update = math.ceil(total / self._planned()) - 1
        first = True
        for update in range(index // size, last_update + 1):
            wanted = remainder if update == last_update else self._accumulation()
            samples, num_items = self._get_window(iterator, wanted)
            if first:
                self._on_first_window()
                first = False
            if not samples:
                return
            for sample in samples:
                size = self._accumulation()
                self.window = AccumulationWindow(
                    size=len(samples),
                    num_items=num_items,
                    opens=index % size == 0,
                    closes=(index + 1) % size == 0 or index + 1 == total,
                    sample=index,
                )
                index += 1
                yield sample
                if self._interrupted():
                    return

    # Lightning checks that a loader has a state to decide whether an epoch can be resumed in the middle.

    def state_dict(self) -> dict[str, int]:
        """Position in the epoch, in micro-batches."""
        return {"position": 0 if self.window is None else self.window.sample + 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Begin the next iteration at the micro-batch of `state`."""
        self.position = state["position"]
