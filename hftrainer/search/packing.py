"""Pickles a Trainer for another process, which rebuilds the parts that belong to a process."""

from __future__ import annotations

import copyreg
import io
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hftrainer.callbacks.handler import is_instance_by_name
from hftrainer.callbacks.progress import ProgressCallback
from hftrainer.errors import InvalidArgument
from hftrainer.releases.followed import follow

if TYPE_CHECKING:
    from hftrainer.trainer import Trainer
    from hftrainer.training.components import Components


@dataclass(frozen=True)
class PackedTrainer:
    """A pickled Trainer.

    Attributes:
        pickled: the Trainer, pickled by cloudpickle, which includes functions and classes of the script.
        folder: the working directory, to which its paths are relative.
    """

    pickled: bytes
    folder: str

    def unpack(self) -> Components:
        """Unpickle a Trainer, and make it ready to train here, in its working directory if that exists."""
        components: Components = pickle.loads(self.pickled)
        trainer = components.trainer
        if os.path.isdir(self.folder):
            os.chdir(self.folder)
        for arguments in filter(None, (vars(trainer.args), components.searched_arguments)):
            arguments["output_dir"] = os.path.join(self.folder, arguments["output_dir"])
        follow(components.policy.release)  # install() was not called in this process
        components.setup.set_log_level()
        components.setup.follow_arguments()
        components.rebuild()
        for callback in list(trainer.callback_handler.callbacks):
            if is_instance_by_name(callback, "NotebookProgressCallback"):
                trainer.pop_callback(callback)
                trainer.add_callback(ProgressCallback)
        return components


def pack(components: Components) -> PackedTrainer:
    """Pickle a Trainer without changing it.

    Raises:
        InvalidArgument: if an attribute or a callback cannot be pickled, with its name.
    """
    trainer, state = components.trainer, components.state_of_trainer()
    try:
        return PackedTrainer(_pickled(components, trainer, state), os.getcwd())
    except Exception as error:
        raise InvalidArgument(
            f"{_unpicklable(components, state)} cannot be pickled for the processes of the search ({error}). Create it "
            "there instead, for example in a callback's on_train_begin."
        ) from error


def _pickled(value: Any, trainer: Trainer, state: dict[str, Any]) -> bytes:
    """Pickle a value. References to the Trainer in it become references to a Trainer with this state."""
    import cloudpickle

    class Pickler(cloudpickle.CloudPickler):
        def reducer_override(self, obj: Any) -> Any:
            if obj is trainer:
                make = copyreg.__newobj__  # type: ignore[attr-defined]
                return make, (type(trainer),), state, None, None, _set_state  # `unpack` rebuilds the rest
            return super().reducer_override(obj)

    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


def _set_state(trainer: Trainer, state: dict[str, Any]) -> None:
    vars(trainer).update(state)


def _unpicklable(components: Components, state: dict[str, Any]) -> str:
    """The name of the first callback or attribute that cannot be pickled."""
    for name, value in _parts(components, state):
        try:
            _pickled(value, components.trainer, {})
        except Exception:
            return name
    return type(components.trainer).__name__


def _parts(components: Components, state: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for callback in [*components.trainer.callback_handler.callbacks, *components.lightning_callbacks]:
        yield f"The callback {type(callback).__name__}", callback
    for name, value in vars(components.search).items() if components.search is not None else ():
        if value is not components:
            yield f"The search's {name.strip('_')}", value
    for name, value in state.items():
        yield f"{type(components.trainer).__name__}.{name}", value
