"""A copy of the state of a search with Ray, which Ray overwrites in place: a kill may cut the original off."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from hftrainer.checkpointing.manifest import flush_to_disk
from hftrainer.errors import DamagedCheckpoint
from hftrainer.reporting.metrics import write_whole

logger = logging.getLogger(__name__)

_STATE = "experiment_state-*.json"
_COPY = "hftrainer_state_copy.json"
#: How JSON and pickles end, which are all that Ray writes here.
_ENDS = (b"}", b"]", b".")


def keeps_copy(folder: Path) -> Any:
    """A Ray callback that copies the state of the search in `folder` after each change."""
    from ray import tune

    class KeepsCopy(tune.Callback):
        """Copies the state when it is whole, and not just being written."""

        seen: dict[str, tuple[int, int]] | None = None

        def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
            stamps = _stamps(folder)
            if stamps == self.seen or not any(folder.glob(_STATE)):
                return
            contents = {path.name: path.read_bytes() for path in _files(folder)}
            if _stamps(folder) == stamps and all(_is_whole(name, data) for name, data in contents.items()):
                _write(folder / _COPY, json.dumps({name: data.decode("latin-1") for name, data in contents.items()}))
                self.seen = stamps

    return KeepsCopy()


def restore(folder: Path, resume: Any) -> None:
    """Put the copy in the place of a state that was cut off.

    Args:
        folder: of the search.
        resume: the keyword of `ray.tune.run`.

    Raises:
        DamagedCheckpoint: if there is no copy: Ray would begin a new search.
    """
    cut_off = [path for path in _files(folder) if not _is_whole(path.name, path.read_bytes())]
    if not cut_off:
        return
    copy = folder / _COPY
    if not copy.is_file():
        raise DamagedCheckpoint(
            f"{cut_off[0]} is truncated: the search was killed while Ray wrote it, and resume={resume!r} would start a "
            "new search. Remove the file to resume from the previous state, if there is one, or give another name."
        )
    logger.warning("%s is truncated: the search goes on from the state before it, which was copied.", cut_off[0])
    for path in cut_off:
        path.unlink()
    for name, data in json.loads(copy.read_text(encoding="utf-8")).items():
        _write(folder / os.path.basename(name), data, encoding="latin-1")


def _files(folder: Path) -> list[Path]:
    """The files of the state: of the trials, of the search algorithm and of callbacks."""
    return sorted(path for path in folder.glob("[!_]*") if path.suffix in (".json", ".pkl") and path.name != _COPY)


def _stamps(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in _files(folder)}


def _is_whole(name: str, data: bytes) -> bool:
    if not Path(name).match(_STATE):
        return data.endswith(_ENDS)
    try:
        json.loads(data)
    except ValueError:
        return False
    return True


def _write(path: Path, text: str, encoding: str = "utf-8") -> None:
    def write(beside: str) -> None:
        Path(beside).write_text(text, encoding=encoding, newline="")
        flush_to_disk(beside)

    write_whole(str(path), write)
