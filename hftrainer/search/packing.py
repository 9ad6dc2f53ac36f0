"""Pickles a Trainer for another process, which rebuilds the parts that belong to a process."""

from __future__ import annotations

import copyreg
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hftrainer.callbacks.base import is_kind
from hftrainer.callbacks.progress import ProgressCallback
from hftrainer.errors import InvalidArgument
from hftrainer.releases.followed import follow

if TYPE_CHECKING:
    from hftrainer.search.backend import SearchContext
    from hftrainer.training.trainer_api import TrainerApi


@dataclass(frozen=True)
class PackedTrainer:
    """A pickled Trainer.

    Attributes:
        pickled: the Trainer, pickled by Ray's cloudpickle, which includes functions and classes of the script.
        folder: the working directory, to which its paths are relative.
    """

    pickled: bytes
    folder: str

    def unpack(self) -> SearchContext:
        """Unpickle a Trainer, and make it ready to train here, in its working directory if that exists."""
        from ray import cloudpickle

        context: SearchContext = cloudpickle.loads(self.pickled)
        trainer = context.trainer
        if os.path.isdir(self.folder):
            os.chdir(self.folder)
        for arguments in filter(None, (vars(trainer.args), context.searched_arguments)):
            arguments["output_dir"] = os.path.join(self.folder, arguments["output_dir"])
        follow(context.policy.release)  # install() was not called in this process
        context.settings.set_log_level()
        context.settings.follow_arguments()
        context.rebuild()
        for callback in list(trainer.callback_handler.callbacks):
            if is_kind(callback, "NotebookProgressCallback"):
                trainer.pop_callback(callback)
                trainer.add_callback(ProgressCallback)
        return context


def pack(context: SearchContext) -> PackedTrainer:
    """Pickle a Trainer without changing it.

    Raises:
        InvalidArgument: if an attribute or a callback cannot be pickled, with its name.
    """
    trainer, state = context.trainer, context.state_of_trainer()
    try:
        return PackedTrainer(_pickled(context, trainer, state), os.getcwd())
    except Exception as error:
        raise InvalidArgument(
            f"{_unpicklable(context, state)} cannot be pickled for Ray's processes ({error}). Create it there instead, "
            "for example in a callback's on_train_begin."
        ) from error


def _pickled(value: Any, trainer: TrainerApi, state: dict[str, Any]) -> bytes:
    """Pickle a value. References to the Trainer in it become references to a Trainer with this state."""
    from ray import cloudpickle

    class Pickler(cloudpickle.CloudPickler):
        def reducer_override(self, obj: Any) -> Any:
            if obj is trainer:
                make = copyreg.__newobj__  # type: ignore[attr-defined]
                return make, (type(trainer),), state, None, None, _set_state  # `unpack` rebuilds the rest
            return super().reducer_override(obj)

    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


def _set_state(trainer: TrainerApi, state: dict[str, Any]) -> None:
    vars(trainer).update(state)


def _unpicklable(context: SearchContext, state: dict[str, Any]) -> str:
    """The name of the first callback or attribute that cannot be pickled."""
    for name, value in _parts(context, state):
        try:
            _pickled(value, context.trainer, {})
        except Exception:
            return name
    return type(context.trainer).__name__


def _parts(context: SearchContext, state: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for callback in [*context.trainer.callback_handler.callbacks, *context.lightning_callbacks]:
        yield f"The callback {type(callback).__name__}", callback
    for name, value in state.items():
        yield f"{type(context.trainer).__name__}.{name}", value
