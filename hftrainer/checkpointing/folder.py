"""Inspects, publishes, discards and removes `checkpoint-N` folders, so that each is complete or absent.

All files are written into a staging folder beside `checkpoint-N`, then the manifest; all are flushed to the disk; then
the folder is renamed to `checkpoint-N`, by the one process that writes. Overrides of `_save` find the run's folder as
the parent of theirs, and the step at the end of its name. The name also says which process writes there: another run in
the same output folder completes or removes only folders of processes that have ended (`parallel/environment.py`).

Where a folder cannot be renamed (some network file systems, object stores), the files are copied one by one:
`trainer_state.json` last, since a folder without it is not a checkpoint, and before it the manifest, which lists the
others.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hftrainer.checkpointing import names
from hftrainer.checkpointing.checks import has_format, unreadable_reason
from hftrainer.checkpointing.files import Entry, crc32_of_file, flush_to_disk, list_files, read_manifest, write_manifest
from hftrainer.checkpointing.weights import has_weights, holds_parts, missing_shard
from hftrainer.errors import CheckpointNotFound, DamagedCheckpoint
from hftrainer.parallel.environment import has_writer_ended, process_identifier

logger = logging.getLogger(__name__)

#: Files with weights, and indices of their shards.
_WEIGHTS = re.compile(r"(\.safetensors|model.*\.bin|\.index\.json|model_states\.pt)$")
#: Names of files that hold weights, for a folder without a manifest.
_HOLDS_WEIGHTS = re.compile(r"(\.safetensors|model(_fsdp)?\.bin|pytorch_model-.*\.bin|\.distcp)$")
#: All files that a resumed run reads; added files with other names are not checked.
_READ = re.compile(
    rf"{_WEIGHTS.pattern}|^((optimizer|rng_state|progress)[\w-]*|scheduler|scaler|lightning_callbacks)\.(pt|pth|bin)$"
    rf"|^{re.escape(names.TRAINER_STATE_NAME)}$"
)
#: Ends of the names of files of torch's distributed checkpoints.
_OF_PARTS = (names.PART_SUFFIX, names.LIST_OF_PARTS)
_REPLACED, _REMOVED = "replaced_", "removed_"
#: Folders of one process, and what they are renamed to. The leading underscore keeps them out of repositories. The only
#: hyphen is the one before the step, since some scripts split names there.
_BESIDE = re.compile(
    rf"^_tmp_(?P<owner>.+\.\d+\.\d*)_(?P<what>{_REPLACED}|{_REMOVED}|)"
    rf"(?P<name>({names.PREFIX_CHECKPOINT_DIR}|uploads)-\d+)$"
)


def _is_of_weights(name: str) -> bool:
    """Whether a file, or a part in a folder of torch's distributed checkpoints, holds weights or lists their shards."""
    if name.endswith(_OF_PARTS):
        return not name.startswith(f"{names.PARTS['optimizer']}/")
    return _WEIGHTS.search(Path(name).name) is not None


@dataclass(frozen=True)
class Inspection:
    """How a checkpoint differs from its manifest: names of files, and why a run cannot resume from it.

    Converting weights adds, removes and resizes files. Different bytes in a file of the same size are typical of a
    failing disk.

    Attributes:
        folder: the checkpoint.
        added: new files.
        removed: missing files.
        resized: files with a different size.
        altered: files with the same size but different contents.
        fault: what is wrong, naming the file, even if all changes are intended: the state or weights are missing, or
            the manifest or a changed file cannot be read; None if a run can resume.
    """

    folder: Path
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    resized: tuple[str, ...] = ()
    altered: tuple[str, ...] = ()
    fault: str | None = None

    @property
    def changes(self) -> str:
        """All differences from the manifest, as text; empty if there are none."""
        kinds = {"added": self.added, "removed": self.removed, "different size": self.resized}
        kinds["same size, different contents"] = self.altered
        return "; ".join(f"{kind}: {', '.join(files)}" for kind, files in kinds.items() if files)

    @property
    def why_not_whole(self) -> str | None:
        """Why automatic selection skips this checkpoint: a fault, or a change to a file that the manifest lists."""
        changed = {"is missing": self.removed, "has another size than when it was written": self.resized}
        first = next((f"{self.folder / files[0]} {reason}" for reason, files in changed.items() if files), None)
        return first or self.unusable_reason

    @property
    def unusable_reason(self) -> str | None:
        """Why a script cannot use this checkpoint by name: a fault, or altered contents of the same size."""
        if self.altered:
            return f"the contents of {self.folder / self.altered[0]} have changed since it was written, not its size"
        return self.fault

    @property
    def can_be_accepted(self) -> bool:
        """Whether `accept` can repair it: altered files, or a damaged manifest."""
        return names.MANIFEST_NAME in (self.fault or "") or (bool(self.altered) and self.fault is None)


class CheckpointFolder:
    """A checkpoint on the disk; it need not exist.

    Args:
        path: the `checkpoint-N` folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.staging, self._replaced = staging_folder(path), staging_folder(path, _REPLACED)

    # ---- Inspecting --------------------------------------------------------------------------------------------

    def inspect(self, *, contents: bool = True, only_weights: bool = False) -> Inspection:
        """Compare the folder with its manifest; without one, find the damage that the files themselves show.

        Args:
            contents: compare checksums too, which reads all files.
            only_weights: check only the weights.
        """
        try:
            return self._inspect(contents, only_weights)
        except OSError as error:  # the checkpoint is being deleted, or the disk fails
            fault = f"{error.filename or self.path} cannot be read ({error.strerror or error})"
        except DamagedCheckpoint as error:  # the manifest, or a file that names others
            fault = str(error).rstrip(".")
        return Inspection(self.path, fault=fault)

    def _inspect(self, contents: bool, only_weights: bool) -> Inspection:
        state = self.path / names.TRAINER_STATE_NAME
        if not (only_weights or state.is_file()):
            return Inspection(self.path, fault=f"{state} is missing")
        listed = read_manifest(self.path)
        if listed is None:
            return Inspection(self.path, fault=self._visible_damage())
        asked = _is_of_weights if only_weights else bool
        entries = {name: entry for name, entry in listed.items() if asked(name)}
        found = {name: self.path / name for name in list_files(self.path) if asked(name)}
        added = [name for name in found if name not in entries]
        removed = [name for name in entries if name not in found]
        kept = [name for name in entries if name in found]
        resized = [name for name in kept if found[name].stat().st_size != entries[name].size]
        altered: list[str] = []
        if contents:
            same_size = (name for name in kept if name not in resized)
            altered = [name for name in same_size if crc32_of_file(found[name]) != entries[name].crc32]
        text = [name for name in resized if not name.endswith(_OF_PARTS)]
        read = [found[name] for name in (*text, *added) if name in text or _READ.search(found[name].name)]
        fault = next((f"{path} {reason}" for path in read if (reason := unreadable_reason(path)) is not None), None)
        if fault is None and not altered:  # so that indices can be trusted
            fault = self._missing_weights(removed) or self._damaged_part(removed, resized, {*kept} - {*resized})
        return Inspection(self.path, tuple(added), tuple(removed), tuple(resized), tuple(altered), fault)

    def _visible_damage(self) -> str | None:
        """The damage that the files of a folder without a manifest show; None if they show none."""
        found = list_files(self.path)
        for path in (self.path / name for name in found):
            if has_format(path) and (reason := unreadable_reason(path, load=False)):
                return f"{path} {reason}"
        if (shard := missing_shard(str(self.path))) is not None:
            return f"{shard} is missing"
        holds_weights = holds_parts(str(self.path)) or any(_HOLDS_WEIGHTS.search(Path(name).name) for name in found)
        return None if holds_weights else f"{self.path} holds no weights"

    def _missing_weights(self, removed: Iterable[str]) -> str | None:
        """Which weights are missing without a replacement; weights in a subclass's own format are not known here."""
        if (shard := missing_shard(str(self.path))) is not None:
            return f"{shard} is missing"
        weights = next((self.path / name for name in removed if _WEIGHTS.search(Path(name).name)), None)
        is_replaced = weights is None or has_weights(str(self.path))
        return None if is_replaced else f"{weights} is missing, and no weights replace it"

    def _damaged_part(self, removed: list[str], resized: list[str], unchanged: Container[str]) -> str | None:
        """Which part is missing or has another size, though the list of parts beside it is as it was written."""
        for name in (*removed, *resized):
            is_listed = Path(name).with_name(names.LIST_OF_PARTS).as_posix() in unchanged
            if name.endswith(names.PART_SUFFIX) and is_listed:
                return f"{self.path / name} {'is missing' if name in removed else 'has another size than was written'}"
        return None

    @property
    def why_no_checkpoint(self) -> str | None:
        """Why the folder is not a checkpoint at all; None if it has a trainer state."""
        if (self.path / names.TRAINER_STATE_NAME).is_file():
            return None
        if self.path.is_dir():
            return f"it lacks {names.TRAINER_STATE_NAME}"
        return "it is not a folder" if self.path.exists() else "the folder does not exist"

    def accept(self) -> Inspection:
        """Accept the checkpoint in its current state: check that its files can be read, and write a new manifest.

        Returns:
            Differences from the old manifest; none if there was no manifest, or if it could not be read.

        Raises:
            CheckpointNotFound: for a folder that is not a checkpoint, or that lacks weights.
            DamagedCheckpoint: for a file that cannot be read; the error names it.
        """
        if (reason := self.why_no_checkpoint) is not None:
            raise CheckpointNotFound(f"{self.path} is not a checkpoint: {reason}; name a checkpoint-xxx folder.")
        found = self.inspect()
        for name in list_files(self.path):
            path = self.path / name
            is_read = name not in found.added or _READ.search(path.name)
            if is_read and has_format(path) and (reason := unreadable_reason(path)):
                raise DamagedCheckpoint(f"{path} {reason}: a run cannot resume from it; restore the file.")
        if (reason := self._missing_weights(found.removed)) is not None:
            raise CheckpointNotFound(f"{reason}: a run cannot resume from it; restore the file.")
        write_manifest(self.path)
        return found

    # ---- Writing -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Create an empty staging folder."""
        shutil.rmtree(self.staging, ignore_errors=True)
        self.staging.mkdir(parents=True)

    def publish(self, written: Mapping[str, Entry] | None = None) -> None:
        """Write the manifest, flush, and rename the staging folder to its final name; see `write_manifest`."""
        write_manifest(self.staging, written)
        if self.path.exists():  # an earlier run in the same output folder wrote this step, perhaps only in part
            shutil.rmtree(self._replaced, ignore_errors=True)
            _move(self.path, self._replaced)
        _move(self.staging, self.path)
        flush_to_disk(self.path.parent)
        shutil.rmtree(self._replaced, ignore_errors=True)

    def discard(self) -> None:
        """Remove the partial checkpoint, and restore the one that it was meant to replace."""
        is_better = self.inspect().why_not_whole and not CheckpointFolder(self._replaced).inspect().why_not_whole
        if is_better or (self._replaced.exists() and not self.path.exists()):
            shutil.rmtree(self.path, ignore_errors=True)
            _move(self._replaced, self.path)
        shutil.rmtree(self.staging, ignore_errors=True)
        shutil.rmtree(self._replaced, ignore_errors=True)

    def remove(self) -> None:
        """Delete the checkpoint so that no partial one is ever visible: rename it first."""
        if self.path.is_symlink():
            self.path.unlink()
            return
        path = staging_folder(self.path, _REMOVED)
        shutil.rmtree(path, ignore_errors=True)
        try:
            self.path.rename(path)
        except OSError:  # cannot be renamed: first delete the file that makes it a checkpoint
            path = self.path
            (path / names.TRAINER_STATE_NAME).unlink(missing_ok=True)
        shutil.rmtree(path)

    def complete(self, left: Path) -> None:
        """Publish the folder of a process that was killed between flush and rename, or between two renames."""
        is_whole = (left / names.MANIFEST_NAME).is_file() and CheckpointFolder(left).inspect().why_not_whole is None
        if is_whole and self.inspect().why_not_whole is not None:
            if self.path.exists():
                shutil.rmtree(self.path)
            _move(left, self.path)
            logger.warning(
                "%s was complete, but not yet renamed, when its process was killed: renamed it now.", self.path
            )


def _move(source: Path, target: Path) -> None:
    """Rename a folder; copy it if renaming fails."""
    try:
        source.rename(target)
    except OSError as error:
        logger.warning("%s cannot be renamed (%s): copying its files one by one.", source, error)
        _copy_in_order(source, target)
        shutil.rmtree(source)


def _copy_in_order(source: Path, target: Path) -> None:
    """Copy a checkpoint so that the target is not a checkpoint until the last file is copied."""
    last = (names.MANIFEST_NAME, names.TRAINER_STATE_NAME)
    files = [path for path in source.rglob("*") if path.is_file() and path.relative_to(source).as_posix() not in last]
    for path in [*files, *(source / name for name in last if (source / name).is_file())]:
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        flush_to_disk(copy)


def staging_folder(folder: str | Path, what: str = "") -> Path:
    """The folder beside `folder` in which this process stages it, or keeps the one that it replaces or removes."""
    owner = process_identifier().replace("-", "~").replace(" ", ".")
    return Path(folder).with_name(f"_tmp_{owner}_{what}{Path(folder).name}")


def final_folder(folder: str) -> str:
    """The final folder of a staging folder; any other folder unchanged."""
    path = Path(folder)
    found = _BESIDE.match(path.name)
    return str(path.with_name(found["name"])) if found else folder


def clear_stale(output_dir: str) -> None:
    """Complete the checkpoints that ended processes left in `output_dir`; remove their other folders."""
    if not os.path.isdir(output_dir):
        return
    beside = [
        (found["what"], path, found) for path in Path(output_dir).iterdir() if (found := _BESIDE.match(path.name))
    ]
    for what, path, found in sorted(beside):  # a staged folder comes before the folder that it was meant to replace
        try:
            if not has_writer_ended(path, " ".join(found["owner"].replace("~", "-").rsplit(".", 2))):
                continue
            if what != _REMOVED:
                CheckpointFolder(path.with_name(found["name"])).complete(path)
            if path.exists():
                shutil.rmtree(path)
        except OSError as error:
            logger.warning("%s, left by a killed process, could not be removed: %s", path, error)


# ---- The checkpoints of a run ----------------------------------------------------------------------------------------


def _step_of(folder: Path) -> int | None:
    step = names.step_of(folder.name)
    return step if step is not None and folder.is_dir() else None


def checkpoints_newest_first(folder: str) -> Iterator[str]:
    """The `checkpoint-xxx` folders, most optimizer steps first."""
    steps = {step: path for path in Path(folder).iterdir() if (step := _step_of(path)) is not None}
    return (os.path.join(folder, steps[step].name) for step in sorted(steps, reverse=True))


def get_last_checkpoint(folder: str) -> str | None:
    """The whole `checkpoint-xxx` folder with the most optimizer steps in `folder`, or None.

    Damaged folders are skipped, with a warning that names the file. (transformers returns the one with the most
    steps, whole or not.)
    """
    for path in checkpoints_newest_first(folder):
        reason = CheckpointFolder(path).inspect().why_not_whole
        if reason is None:
            return path
        logger.warning("%s is damaged and is skipped: %s.", path, reason)
    return None


def sort_checkpoints(output_dir: str) -> list[str]:
    """The checkpoint folders that a Trainer has written, oldest first.

    By modification time, so that an earlier run's higher step in the same folder does not count as newer; by step if
    all times lie within a second, as on file systems that do not keep them.
    """
    folders = [
        (path.stat().st_mtime, step, str(path))
        for path in Path(output_dir).iterdir()
        if (step := _step_of(path)) is not None and (path / names.TRAINER_STATE_NAME).is_file()
    ]
    times = [time for time, _, _ in folders]
    by_time = bool(times) and max(times) - min(times) >= 1.0
    return [path for _, _, path in sorted(folders if by_time else ((0.0, step, path) for _, step, path in folders))]


def rotate_checkpoints(
    output_dir: str,
    save_total_limit: int | None,
    best: str | None,
    keep: Sequence[str] = (),
    checkpoints: Sequence[str] | None = None,
) -> None:
    """Delete the oldest checkpoints beyond `save_total_limit`; the newest complete one and the best are always kept.

    Args:
        output_dir: the folder of the checkpoints.
        save_total_limit: maximum number to keep; None for all.
        best: the best one, if any.
        keep: others to keep, such as the one just written.
        checkpoints: existing checkpoints, oldest first; default: all in `output_dir`.
    """
    if save_total_limit is None or save_total_limit <= 0:
        return
    checkpoints = sort_checkpoints(output_dir) if checkpoints is None else checkpoints
    staying = [path for path in (best, *keep) if path is not None]
    kept = {path for path in checkpoints if any(_is_same(path, other) for other in staying)}
    kept.update(checkpoints[-1:])
    for path in reversed(checkpoints):
        if CheckpointFolder(path).inspect(contents=False).why_not_whole is None:
            kept.add(path)
            break
    surplus = len(checkpoints) - max(save_total_limit, len(kept))
    for checkpoint in [path for path in checkpoints if path not in kept][: max(surplus, 0)]:
        logger.info("Deleting older checkpoint %s: save_total_limit=%s.", checkpoint, save_total_limit)
        CheckpointFolder(checkpoint).remove()


def complete_rotation(last: str, output_dir: str, save_total_limit: int | None, best: str | None) -> None:
    """Complete the rotation of a process that was killed right after its last save; storage errors are logged.

    Args:
        last: the last checkpoint of a finished run; ignored if it is not in `output_dir`.
        output_dir: the folder of the checkpoints.
        save_total_limit: maximum number to keep; None for all.
        best: the best one, if any.
    """
    if not _is_same(output_dir, os.path.dirname(os.path.abspath(last))):
        return
    try:
        rotate_checkpoints(output_dir, save_total_limit, best, [last])
    except OSError as error:
        logger.warning("Checkpoints beyond save_total_limit=%s were not deleted: %s", save_total_limit, error)


def delete_all_but_best(best: str, output_dir: str) -> None:
    """Delete every checkpoint except `best`, for `save_total_limit=1` at the end of a run.

    Delete nothing if `best` is damaged.
    """
    if CheckpointFolder(best).inspect(only_weights=True).unusable_reason is not None:
        return
    for checkpoint in sort_checkpoints(output_dir):
        if not _is_same(checkpoint, best):
            logger.info("Deleting checkpoint %s: save_total_limit=1, and %s is the best.", checkpoint, best)
            try:
                CheckpointFolder(checkpoint).remove()
            except OSError as error:
                logger.warning("%s could not be deleted: %s", checkpoint, error)


def _is_same(path: str, other: str) -> bool:
    return os.path.exists(other) and os.path.samefile(path, other)
