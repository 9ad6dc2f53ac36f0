"""Pickles a Trainer for another process, which rebuilds the parts that belong to a process."""

from __future__ import annotations

import copyreg
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hftrainer.arguments.behaviours import follow
from hftrainer.assembly import copying
from hftrainer.callbacks.base import is_kind
from hftrainer.callbacks.progress import ProgressCallback
from hftrainer.errors import InvalidArgument

if TYPE_CHECKING:
    from hftrainer.trainer import Trainer


@dataclass(frozen=True)
class PackedTrainer:
    """A pickled Trainer.

    Attributes:
        pickled: the Trainer, pickled by Ray's cloudpickle, which includes functions and classes of the script.
        folder: the working directory, to which its paths are relative.
    """

    pickled: bytes
    folder: str

    def unpack(self) -> Trainer:
        """Unpickle the Trainer and make it ready to train here. Change to its working directory if that exists."""
        from ray import cloudpickle

        trainer: Trainer = cloudpickle.loads(self.pickled)
        if os.path.isdir(self.folder):
            os.chdir(self.folder)
        for arguments in filter(None, (vars(trainer.args), trainer._hftrainer.searched_arguments)):
            arguments["output_dir"] = os.path.join(self.folder, arguments["output_dir"])
        follow(trainer._hftrainer.behaviours.release)  # install() was not called in this process
        trainer._hftrainer.setup.set_log_level()
        trainer._hftrainer.setup.follow_arguments()
        copying.rebuild(trainer)
        for callback in list(trainer.callback_handler.callbacks):
            if is_kind(callback, "NotebookProgressCallback"):
                trainer.pop_callback(callback)
                trainer.add_callback(ProgressCallback)
        return trainer


def pack(trainer: Trainer) -> PackedTrainer:
    """Pickle a Trainer without changing it.

    Raises:
        InvalidArgument: if an attribute or a callback cannot be pickled, with its name.
    """
    state = copying.state_of(trainer)
    try:
        return PackedTrainer(_pickled(trainer, trainer, state), os.getcwd())
    except Exception as error:
        raise InvalidArgument(
            f"{_unpicklable(trainer, state)} cannot be pickled for Ray's processes ({error}). Create it there instead, "
            "for example in a callback's on_train_begin."
        ) from error


def _pickled(value: Any, trainer: Trainer, state: dict[str, Any]) -> bytes:
    """Pickle a value. References to the Trainer in it become references to a Trainer with this state."""
    from ray import cloudpickle

    class Pickler(cloudpickle.CloudPickler):
        def reducer_override(self, obj: Any) -> Any:
            if obj is trainer:
                make = copyreg.__newobj__  # type: ignore[attr-defined]
                return make, (type(trainer),), state, None, None, copying.take  # `unpack` rebuilds the rest
            return super().reducer_override(obj)

    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


def _unpicklable(trainer: Trainer, state: dict[str, Any]) -> str:
    """The name of the first callback or attribute that cannot be pickled."""
    for name, value in _parts(trainer, state):
        try:
            _pickled(value, trainer, {})
        except Exception:
            return name
    return type(trainer).__name__


def _parts(trainer: Trainer, state: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for callback in [*trainer.callback_handler.callbacks, *trainer._hftrainer.lightning_callbacks]:
        yield f"The callback {type(callback).__name__}", callback
    for name, value in state.items():
        yield f"{type(trainer).__name__}.{name}", value
