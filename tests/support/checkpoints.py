"""Small runs that write checkpoints, callbacks for them, and damage to their files."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from hftrainer import Trainer, TrainerCallback, TrainingArguments
from hftrainer.checkpointing.layout import MANIFEST_NAME
from tests.support import small_models
from tests.support.parity import assert_same_weights

BACKGROUND = {"lightning_config": {"async_checkpoint": True}}
#: An evaluation at each checkpoint, of which the best is loaded at the end.
BEST = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True}


def make_tied() -> torch.nn.Module:
    model = small_models.make_plain()
    model.twin = torch.nn.Linear(8, 16)
    model.twin.weight = model.layers[0].weight
    return model


MODELS = {name: small_models.MODELS[name] for name in ("plain", "bert", "llama", "peft")}
MODELS["tied"] = (make_tied, small_models.plain_data)


def make_trainer(folder: Path, model: str = "plain", callbacks=(), trainer_class=Trainer, **settings: Any) -> Any:
    """A Trainer of nine steps with a checkpoint at each third; `trainer` has the keywords of the Trainer itself."""
    make_model, make_data = MODELS[model]
    defaults = {"max_steps": 9, "save_steps": 3, "logging_steps": 3, "per_device_train_batch_size": 4}
    defaults |= {"learning_rate": 1e-2, "disable_tqdm": True, "use_cpu": True, "report_to": "none"}
    trainer_kwargs = settings.pop("trainer", {})
    args = TrainingArguments(str(folder), **{**defaults, **settings})
    if not {"model", "model_init"} & trainer_kwargs.keys():
        trainer_kwargs = {"model": make_model(), **trainer_kwargs}
    if "train_dataset" not in trainer_kwargs:
        samples = make_data()
        trainer_kwargs = {"train_dataset": samples, "eval_dataset": samples[:9], **trainer_kwargs}
    return trainer_class(args=args, callbacks=list(callbacks), **trainer_kwargs)


def train_to_end(trainer: Any, resume: Any = None) -> Any:
    trainer.train(resume_from_checkpoint=str(resume) if isinstance(resume, Path) else resume)
    return trainer


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def assert_same_end(trainer: Any, other: Any) -> None:
    assert trainer.state.global_step == other.state.global_step
    assert_same_weights(trainer.model.state_dict(), other.model.state_dict())


class OnSave(TrainerCallback):
    def __init__(self, act: Callable[[Path], Any]) -> None:
        self.act = act

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.act(Path(args.output_dir, f"checkpoint-{state.global_step}"))


class AtStep(TrainerCallback):
    def __init__(self, step: int, act: Callable[[], Any], event: str = "on_step_end") -> None:
        self.step, self.act = step, act
        setattr(self, event, self._at)

    def _at(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.act()


class SetFlag(TrainerCallback):
    """Sets a control flag at an event of this step."""

    def __init__(self, flag: str, step: int, event: str = "on_step_end") -> None:
        self.flag, self.step = flag, step
        setattr(self, event, self._at)

    def _at(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            setattr(control, self.flag, True)


class KeepsState(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"count": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip(path: Path, place: int | None = None, bits: int = 0x10) -> None:
    """Change bits of one byte, by default of the middle one."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if place is None else place] ^= bits
    path.write_bytes(content)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0" * 100)


#: Kinds of damage that a disk does to a file.
HARM = {"truncated": truncate, "flipped": flip, "deleted": os.remove, "empty": empty, "grown": grow}


class MaliciousPickle:
    """Leaves a folder behind when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


def copy_without_manifest(source: Path, folder: Path) -> Path:
    """Replace a folder by a copy of a checkpoint without its manifest, which an attacker would adapt."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    (folder / MANIFEST_NAME).unlink()
    return folder
