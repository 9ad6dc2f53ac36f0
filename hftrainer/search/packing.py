"""A Trainer on its way into another process, which makes anew what belongs to a process."""

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
    from hftrainer.training.trainer_api import TrainerApi


@dataclass(frozen=True)
class PackedTrainer:
    """A pickled Trainer.

    Attributes:
        pickled: by Ray's cloudpickle, which takes functions and classes of the script along.
        folder: the working directory that its relative paths are meant in.
    """

    pickled: bytes
    folder: str

    def unpack(self) -> TrainerApi:
        """The Trainer, ready to train in this process, which goes into its folder if that is there."""
        from ray import cloudpickle

        trainer: TrainerApi = cloudpickle.loads(self.pickled)
        if os.path.isdir(self.folder):
            os.chdir(self.folder)
        for arguments in filter(None, (vars(trainer.args), trainer._hftrainer.searched_arguments)):
            arguments["output_dir"] = os.path.join(self.folder, arguments["output_dir"])
        follow(trainer._hftrainer.behaviours.release)  # nobody has called install() here
        trainer._hftrainer.settings.set_log_level()
        trainer._hftrainer.settings.follow_arguments()
        copying.rebuild(trainer)
        for callback in list(trainer.callback_handler.callbacks):
            if is_kind(callback, "NotebookProgressCallback"):
                trainer.pop_callback(callback)
                trainer.add_callback(ProgressCallback)
        return trainer


def pack(trainer: TrainerApi) -> PackedTrainer:
    """Pickle a Trainer, which stays as it is.

    Raises:
        InvalidArgument: when something of it cannot be pickled, with its name.
    """
    state = copying.state_of(trainer)
    try:
        return PackedTrainer(_pickled(trainer, trainer, state), os.getcwd())
    except Exception as error:
        raise InvalidArgument(
            f"{_unpicklable(trainer, state)} cannot be sent to the processes in which Ray trains ({error}): make it "
            "when it is first needed there, for instance in a callback's on_train_begin."
        ) from error


def _pickled(value: Any, trainer: TrainerApi, state: dict[str, Any]) -> bytes:
    """Pickle a value; wherever it refers to the Trainer, that has this state."""
    from ray import cloudpickle

    class Pickler(cloudpickle.CloudPickler):
        def reducer_override(self, obj: Any) -> Any:
            if obj is trainer:
                make = copyreg.__newobj__  # type: ignore[attr-defined]
                return make, (type(trainer),), state, None, None, copying.take  # rebuilt when it is in its folder
            return super().reducer_override(obj)

    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


def _unpicklable(trainer: TrainerApi, state: dict[str, Any]) -> str:
    """The name of the first thing in a Trainer that cannot be pickled."""
    for name, value in _parts(trainer, state):
        try:
            _pickled(value, trainer, {})
        except Exception:
            return name
    return type(trainer).__name__


def _parts(trainer: TrainerApi, state: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for callback in [*trainer.callback_handler.callbacks, *trainer._hftrainer.lightning_callbacks]:
        yield f"The callback {type(callback).__name__}", callback
    for name, value in state.items():
        yield f"{type(trainer).__name__}.{name}", value
