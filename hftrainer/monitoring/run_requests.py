"""Requests to a live run: files that `python -m hftrainer ask` writes, and intervals in minutes."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

#: The folder of requests in the run's folder. A request is an empty file `<name>`, its answer a file `<name>.done`.
FOLDER = ".requests"
#: Request → the control flag that it sets in `TrainerControl`.
FLAGS = {"save": "should_save", "evaluate": "should_evaluate", "stop": "should_training_stop"}
REQUESTS = (*FLAGS, "profile")
_FLAG_OF_ACTIVITY = {"saving": FLAGS["save"], "evaluation": FLAGS["evaluate"]}
#: Seconds between two checks of the folder.
_PERIOD = 1.0
_PROFILED_STEPS = 10


class Requests:
    """Sets control flags for requests, and for `save_minutes` and `eval_minutes`.

    Only the main process has this object. All ranks act at the same step, as for any flag that one rank sets.

    Args:
        folder: the run's `output_dir`.
        args: the training arguments.
        since_evaluation: for a resumed run, seconds between the last evaluation and the checkpoint.
        can_evaluate: whether the run has an evaluation set.

    Attributes:
        has_stopped: whether a request has stopped the run.
    """

    has_stopped = False

    def __init__(self, folder: str, args: Any, since_evaluation: float, *, can_evaluate: bool) -> None:
        self._folder = Path(folder, FOLDER)
        self._minutes = {"saving": args.save_minutes, "evaluation": args.eval_minutes}
        now = time.monotonic()
        self._last_times = {"saving": now, "evaluation": now - since_evaluation}
        # 'stop' saves a checkpoint, unless the run saves none.
        self._can_evaluate, self._saves = can_evaluate, args.save_strategy != "no"
        self._next_poll = now
        self._profile: _Profile | None = None
        # Requests to an earlier run.
        for path in self._list_requests():
            path.unlink(missing_ok=True)

    @property
    def since_evaluation(self) -> float:
        """Seconds since the last evaluation.

        Without `eval_minutes` it is 0, so that equal runs write equal checkpoints.
        """
        return 0.0 if self._minutes["evaluation"] is None else time.monotonic() - self._last_times["evaluation"]

    def record_end(self, activity: str) -> None:
        """Record the end of an activity, 'evaluation' or 'saving'."""
        self._last_times[activity] = time.monotonic()

    def poll(self, control: Any, step: int) -> None:
        """Set the control flags that are due after an optimizer step, and execute requests."""
        now = time.monotonic()
        for activity, minutes in self._minutes.items():
            if minutes is not None and now - self._last_times[activity] >= 60 * minutes:
                setattr(control, _FLAG_OF_ACTIVITY[activity], True)
        if self._profile is not None and step >= self._profile.last_step:
            self.close()
        if now >= self._next_poll:
            self._next_poll = now + _PERIOD
            for path in self._list_requests():
                self._execute(path, control, step)

    def _list_requests(self) -> list[Path]:
        return [path for name in REQUESTS if (path := self._folder / name).exists()]

    def _execute(self, path: Path, control: Any, step: int) -> None:
        """Execute the request in a file, and write the answer."""
        name, answer = path.name, f"at step {step:,}"
        if name == "evaluate" and not self._can_evaluate:
            answer = "refused: the run has no eval_dataset"
        elif name == "profile":
            folder = path.parent.parent / "profile"
            answer = f"the next {_PROFILED_STEPS} steps, from step {step + 1:,}, are traced to {folder}"
            self._profile = self._profile or _Profile(folder, step)
        else:
            setattr(control, FLAGS[name], True)
            self.has_stopped |= name == "stop"
            control.should_save |= name == "stop" and self._saves
            if name != "evaluate" and control.should_save:
                answer += f", in {path.parent.parent / f'checkpoint-{step}'}"
        logger.warning("Request %r: %s.", name, answer)
        # On a full disk, the answer is missing.
        with contextlib.suppress(OSError):
            path.with_suffix(".done").write_text(json.dumps({"step": step, "answer": answer}))
        path.unlink(missing_ok=True)

    def close(self) -> None:
        """Stop the running trace, if any."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None


class _Profile:
    """A trace of the next steps by torch's profiler, in a file for Perfetto or chrome://tracing."""

    def __init__(self, folder: Path, step: int) -> None:
        self._folder, self.last_step = folder, step + _PROFILED_STEPS
        self._first_step = step + 1
        # Imported late: `ask` needs no torch.
        import torch

        self._profiler = torch.profiler.profile(record_shapes=True)
        self._profiler.start()

    def stop(self) -> None:
        """Write the trace."""
        self._profiler.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"steps-{self._first_step}.json.gz"
        self._profiler.export_chrome_trace(str(path))
        logger.warning("The trace is in %s: open it in https://ui.perfetto.dev.", path)


def send_request(folder: str, request: str, timeout: float) -> str | None:
    """Send a request to a run and return its answer; None after a timeout.

    Args:
        folder: the run's `output_dir`.
        request: one of `REQUESTS`.
        timeout: seconds to wait; a run answers after its optimizer step.
    """
    path = Path(folder, FOLDER, request)
    answer_file = path.with_suffix(".done")
    path.parent.mkdir(exist_ok=True)
    answer_file.unlink(missing_ok=True)
    path.touch()
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if answer_file.exists() and not path.exists():
            answer: str = json.loads(answer_file.read_text())["answer"]
            answer_file.unlink()
            return answer
        time.sleep(0.2)
    path.unlink(missing_ok=True)
    return None
