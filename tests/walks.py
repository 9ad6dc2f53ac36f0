"""The walks of ARCHITECTURE.md, traced: `python -m tests.walks` prints the files that each passes."""

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from hftrainer import Trainer, TrainerCallback, TrainingArguments
from tests.tiny import make_plain, plain_data

ROOT = Path(__file__).parents[1]
FOLDERS = {
    str(ROOT / "hftrainer"): ROOT / "hftrainer",
    str(ROOT / "adapters"): ROOT / "adapters" / "hftrainer_lightning",
}


def file_of(frame: FrameType) -> str | None:
    """The file of a frame, below `hftrainer/` or the adapter; None for others'."""
    name = frame.f_code.co_filename
    folder = next((folder for start, folder in FOLDERS.items() if name.startswith(start)), None)
    return None if folder is None else str(Path(name).relative_to(folder))


@contextlib.contextmanager
def traced(found: list[str]) -> Iterator[None]:
    """Note each file when a function of it is first called in the block."""

    def on_event(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (name := file_of(frame)) is not None and name not in found:
            found.append(name)

    sys.setprofile(on_event)
    try:
        yield
    finally:
        sys.setprofile(None)


def trainer_in(folder: str, *callbacks: Any, **settings: Any) -> Trainer:
    """A Trainer of four steps of two micro-batches each."""
    args = TrainingArguments(
        folder,
        per_device_train_batch_size=2,
        logging_steps=2,
        save_steps=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **{"max_steps": 4, "gradient_accumulation_steps": 2, **settings},
    )
    return Trainer(make_plain(), args, train_dataset=plain_data(20), callbacks=list(callbacks))


class OneEpoch(TrainerCallback):
    """Traces an epoch, of which only one step is trained."""

    def __init__(self, found: list[str]) -> None:
        self.tracing = traced(found)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.tracing.__enter__()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.tracing.__exit__(None, None, None)


def walks() -> dict[str, list[str]]:
    """Name → the files that are passed, by their first call."""
    batch: list[str] = []
    save: list[str] = []
    resume: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer_in(f"{folder}/one step", OneEpoch(batch), max_steps=1, gradient_accumulation_steps=1).train()
        trainer_in(folder).train()
        resumed = trainer_in(folder)
        with traced(resume):
            resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
        with traced(save):
            resumed._save_checkpoint(resumed.model_wrapped, None)
    return {"One batch": batch, "One save": save, "One resume": resume}


if __name__ == "__main__":
    for name, files in walks().items():
        print(f"{name}: {' → '.join(files)}")
