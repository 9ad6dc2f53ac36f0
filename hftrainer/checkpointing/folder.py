"""Inspects, publishes, discards and removes `checkpoint-N` folders, so that each is complete or absent.

One process writes all files into a staging folder beside `checkpoint-N`, and the manifest after them. It flushes all
to the disk, and then renames the folder to `checkpoint-N`. Overrides of `_save` find the run's folder as the parent of
the staging folder, and the step at the end of its name. The name also identifies the process: another run in the same
output folder completes or removes only folders of processes that have ended (`parallel/environment.py`).

Where a folder cannot be renamed (some network file systems, object stores), we copy the files one by one. The manifest
and then `trainer_state.json` are last, since a folder without `trainer_state.json` is not a checkpoint.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hftrainer.checkpointing import names
from hftrainer.checkpointing.file_checks import has_format, unreadable_reason
from hftrainer.checkpointing.files import Entry, crc32_of_file, flush_to_disk, list_files, read_manifest, write_manifest
from hftrainer.checkpointing.weights import has_deepspeed_shards, has_weights, missing_shard
from hftrainer.errors import CheckpointNotFound, DamagedCheckpoint
from hftrainer.parallel.environment import has_writer_ended, process_identifier

logger = logging.getLogger(__name__)

#: Files with weights, and indices of their shards.
_WEIGHTS = re.compile(r"(\.safetensors|model.*\.bin|\.index\.json|model_states\.pt)$")
#: Files that hold weights, in a folder without a manifest.
_WEIGHTS_FILE = re.compile(r"(\.safetensors|model(_fsdp)?\.bin|pytorch_model-.*\.bin|\.distcp)$")
#: All files that a resumed run reads. Added files with other names are not checked.
_RESUME_FILES = re.compile(
    rf"{_WEIGHTS.pattern}|^((optimizer|rng_state|progress)[\w-]*|scheduler|scaler|lightning_callbacks)\.(pt|pth|bin)$"
    rf"|^{re.escape(names.TRAINER_STATE_NAME)}$"
)
#: Suffixes of the files in torch's distributed checkpoints.
_SHARD_SUFFIXES = (names.SHARD_SUFFIX, names.LIST_OF_SHARDS)
_REPLACED, _REMOVED = "replaced_", "removed_"
_RESIZED = "has changed size since it was written"
#: Temporary folders of one process; `name` is the final name. The leading underscore keeps them out of repositories.
#: The only hyphen is the one before the step, since some scripts split names there.
_TEMPORARY_FOLDER = re.compile(
    rf"^_tmp_(?P<owner>.+\.\d+\.\d*)_(?P<prefix>{_REPLACED}|{_REMOVED}|)"
    rf"(?P<name>({names.PREFIX_CHECKPOINT_DIR}|uploads)-\d+)$"
)


def _is_weights_file(name: str) -> bool:
    """Whether a file holds weights, a shard of them, or a list of their shards."""
    if name.endswith(_SHARD_SUFFIXES):
        return not name.startswith(f"{names.SHARD_FOLDERS['optimizer']}/")
    return _WEIGHTS.search(Path(name).name) is not None


@dataclasses.dataclass(frozen=True)
class Inspection:
    """How a checkpoint differs from its manifest, and why a run cannot resume from it.

    Converting weights adds, removes and resizes files. Different bytes in a file of the same size are typical of a
    failing disk.

    Attributes:
        folder: the checkpoint.
        added: new files.
        removed: missing files.
        resized: files with a different size.
        altered: files with the same size but different contents.
        fault: why the checkpoint is unusable even if all changes are intended; it names the file. The state or weights
            are missing, or the manifest or a changed file cannot be read. None if a run can resume.
    """

    folder: Path
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    resized: tuple[str, ...] = ()
    altered: tuple[str, ...] = ()
    fault: str | None = None

    @property
    def changes(self) -> str:
        """All differences from the manifest as text; '' without differences."""
        kinds = {"added": self.added, "removed": self.removed, "different size": self.resized}
        kinds["same size, different contents"] = self.altered
        return "; ".join(f"{kind}: {', '.join(files)}" for kind, files in kinds.items() if files)

    @property
    def skip_reason(self) -> str | None:
        """Why automatic selection skips this checkpoint: a fault, or a change to a listed file."""
        kinds = {"is missing": self.removed, _RESIZED: self.resized}
        change = next((f"{self.folder / files[0]} {reason}" for reason, files in kinds.items() if files), None)
        return change or self.unusable_reason

    @property
    def unusable_reason(self) -> str | None:
        """Why a script cannot use this checkpoint by name: a fault, or altered contents."""
        if self.altered:
            path = self.folder / self.altered[0]
            return f"the contents of {path} have changed since it was written, but not its size"
        return self.fault

    @property
    def can_be_accepted(self) -> bool:
        """Whether `accept` can resolve the damage: altered files, or a damaged manifest."""
        return names.MANIFEST_NAME in (self.fault or "") or (bool(self.altered) and self.fault is None)


class CheckpointFolder:
    """A checkpoint's folder, which need not exist.

    Args:
        path: the `checkpoint-N` folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.staging, self._replaced_folder = staging_folder(path), staging_folder(path, _REPLACED)

    # ---- Inspecting --------------------------------------------------------------------------------------------

    def inspect(self, *, contents: bool = True, only_weights: bool = False) -> Inspection:
        """Compare the folder with its manifest, or find visible damage if it has none.

        Args:
            contents: compare checksums too, which reads all files.
            only_weights: check only the weights.
        """
        try:
            return self._inspect_contents(contents, only_weights)
        # The checkpoint is being deleted, or the disk fails.
        except OSError as error:
            fault = f"{error.filename or self.path} cannot be read ({error.strerror or error})"
        # The manifest, or another file that lists files, is damaged.
        except DamagedCheckpoint as error:
            fault = str(error).rstrip(".")
        return Inspection(self.path, fault=fault)

    def _inspect_contents(self, contents: bool, only_weights: bool) -> Inspection:
        state = self.path / names.TRAINER_STATE_NAME
        if not (only_weights or state.is_file()):
            return Inspection(self.path, fault=f"{state} is missing")
        manifest = read_manifest(self.path)
        if manifest is None:
            return Inspection(self.path, fault=self._visible_damage())
        comparison = self._compare_with_manifest(manifest, contents, only_weights)
        return dataclasses.replace(comparison, fault=self._find_fault(comparison))

    def _compare_with_manifest(self, manifest: Mapping[str, Entry], contents: bool, only_weights: bool) -> Inspection:
        """How the folder differs from its manifest, without a fault."""
        is_selected = _is_weights_file if only_weights else bool
        entries = [name for name in manifest if is_selected(name)]
        files = {name: self.path / name for name in list_files(self.path) if is_selected(name)}
        added = tuple(name for name in files if name not in manifest)
        removed = tuple(name for name in entries if name not in files)
        common = [name for name in entries if name in files]
        resized = tuple(name for name in common if files[name].stat().st_size != manifest[name].size)
        same_size = (name for name in common if contents and name not in resized)
        altered = tuple(name for name in same_size if crc32_of_file(files[name]) != manifest[name].crc32)
        return Inspection(self.path, added, removed, resized, altered)

    def _find_fault(self, inspection: Inspection) -> str | None:
        """Why a run cannot resume from the changed folder."""
        inputs = [name for name in inspection.resized if not name.endswith(_SHARD_SUFFIXES)]
        inputs += [name for name in inspection.added if _RESUME_FILES.search(Path(name).name)]
        for path in (self.path / name for name in inputs):
            if (reason := unreadable_reason(path)) is not None:
                return f"{path} {reason}"
        # The next checks rely on indices, which must not be altered.
        return None if inspection.altered else self._missing_weights(inspection) or self._damaged_shard(inspection)

    def _visible_damage(self) -> str | None:
        """The damage that is visible without a manifest; None without damage."""
        file_names = list_files(self.path)
        for path in (self.path / name for name in file_names):
            if has_format(path) and (reason := unreadable_reason(path, load_content=False)):
                return f"{path} {reason}"
        if (shard := missing_shard(str(self.path))) is not None:
            return f"{shard} is missing"
        holds_weights_file = any(_WEIGHTS_FILE.search(Path(name).name) for name in file_names)
        return None if holds_weights_file or has_deepspeed_shards(str(self.path)) else f"{self.path} holds no weights"

    def _missing_weights(self, inspection: Inspection) -> str | None:
        """Which weights are missing without a replacement. Other formats of a subclass are unknown here."""
        if (shard := missing_shard(str(self.path))) is not None:
            return f"{shard} is missing"
        weights = next((self.path / name for name in inspection.removed if _WEIGHTS.search(Path(name).name)), None)
        is_replaced = weights is None or has_weights(str(self.path))
        return None if is_replaced else f"{weights} is missing, and no weights replace it"

    def _damaged_shard(self, inspection: Inspection) -> str | None:
        """Which shard is missing or resized, although its list of shards is unchanged."""
        removed, resized = inspection.removed, inspection.resized
        for name in (*removed, *resized):
            is_removed, list_path = name in removed, Path(name).with_name(names.LIST_OF_SHARDS)
            is_listed = (self.path / list_path).is_file() and list_path.as_posix() not in (*inspection.added, *resized)
            if name.endswith(names.SHARD_SUFFIX) and is_listed:
                return f"{self.path / name} {'is missing' if is_removed else _RESIZED}"
        return None

    @property
    def not_a_checkpoint_reason(self) -> str | None:
        """Why the folder is not a checkpoint; None if it has a trainer state."""
        if (self.path / names.TRAINER_STATE_NAME).is_file():
            return None
        if self.path.is_dir():
            return f"it lacks {names.TRAINER_STATE_NAME}"
        return "it is not a folder" if self.path.exists() else "the folder does not exist"

    def accept(self) -> Inspection:
        """Accept the checkpoint in its current state.

        Check that its files can be read, and write a new manifest.

        Returns:
            The differences from the old manifest; empty if the manifest was missing or could not be read.

        Raises:
            CheckpointNotFound: if the folder is not a checkpoint, or lacks weights.
            DamagedCheckpoint: if a file cannot be read; the error names it.
        """
        if (reason := self.not_a_checkpoint_reason) is not None:
            raise CheckpointNotFound(f"{self.path} is not a checkpoint: {reason}. Pass a checkpoint-xxx folder.")
        inspection = self.inspect()
        for name in list_files(self.path):
            path = self.path / name
            is_read = name not in inspection.added or _RESUME_FILES.search(path.name)
            if is_read and has_format(path) and (reason := unreadable_reason(path)):
                raise DamagedCheckpoint(f"{path} {reason}: a run cannot resume from it. Restore the file.")
        if (reason := self._missing_weights(inspection)) is not None:
            raise CheckpointNotFound(f"{reason}: a run cannot resume from the checkpoint. Restore the file.")
        write_manifest(self.path)
        return inspection

    # ---- Writing -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Create an empty staging folder."""
        shutil.rmtree(self.staging, ignore_errors=True)
        self.staging.mkdir(parents=True)

    def publish(self, known_entries: Mapping[str, Entry] | None = None) -> None:
        """Write the manifest, flush, and rename the staging folder to its final name.

        `known_entries` is that of `write_manifest`.
        """
        write_manifest(self.staging, known_entries)
        # An earlier run in the same output folder wrote this step, perhaps only in part.
        if self.path.exists():
            shutil.rmtree(self._replaced_folder, ignore_errors=True)
            _move_folder(self.path, self._replaced_folder)
        _move_folder(self.staging, self.path)
        flush_to_disk(self.path.parent)
        shutil.rmtree(self._replaced_folder, ignore_errors=True)

    def discard(self) -> None:
        """Remove the partial checkpoint, and restore the one that it would have replaced."""
        replaced = CheckpointFolder(self._replaced_folder)
        should_restore = self.inspect().skip_reason and not replaced.inspect().skip_reason
        if should_restore or (replaced.path.exists() and not self.path.exists()):
            shutil.rmtree(self.path, ignore_errors=True)
            _move_folder(self._replaced_folder, self.path)
        shutil.rmtree(self.staging, ignore_errors=True)
        shutil.rmtree(self._replaced_folder, ignore_errors=True)

    def remove(self) -> None:
        """Delete the checkpoint. Rename it first, so that a partial one is never visible."""
        if self.path.is_symlink():
            self.path.unlink()
            return
        path = staging_folder(self.path, _REMOVED)
        shutil.rmtree(path, ignore_errors=True)
        try:
            self.path.rename(path)
        # The folder cannot be renamed: first delete the file that makes it a checkpoint.
        except OSError:
            path = self.path
            (path / names.TRAINER_STATE_NAME).unlink(missing_ok=True)
        shutil.rmtree(path)

    def complete(self, source: Path) -> None:
        """Publish the folder of a process that was killed before the last rename."""
        is_intact = (source / names.MANIFEST_NAME).is_file() and CheckpointFolder(source).inspect().skip_reason is None
        if is_intact and self.inspect().skip_reason is not None:
            if self.path.exists():
                shutil.rmtree(self.path)
            _move_folder(source, self.path)
            logger.warning(
                "%s was complete but not yet renamed when its process was killed: it is now renamed.", self.path
            )


def _move_folder(source: Path, target: Path) -> None:
    """Rename a folder; copy it if renaming fails."""
    try:
        source.rename(target)
    except OSError as error:
        logger.warning("%s cannot be renamed (%s): copying its files one by one.", source, error)
        _copy_in_order(source, target)
        shutil.rmtree(source)


def _copy_in_order(source: Path, target: Path) -> None:
    """Copy a checkpoint so that the target becomes a checkpoint only with its last file."""
    last_names = (names.MANIFEST_NAME, names.TRAINER_STATE_NAME)
    files = [
        path for path in source.rglob("*") if path.is_file() and path.relative_to(source).as_posix() not in last_names
    ]
    for path in [*files, *(source / name for name in last_names if (source / name).is_file())]:
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        flush_to_disk(copy)


def staging_folder(folder: str | Path, prefix: str = "") -> Path:
    """The temporary folder of this process beside `folder`.

    Args:
        folder: the final folder.
        prefix: '' for staging; or the prefix for the folder that is replaced or removed.
    """
    owner = process_identifier().replace("-", "~").replace(" ", ".")
    return Path(folder).with_name(f"_tmp_{owner}_{prefix}{Path(folder).name}")


def final_folder(folder: str) -> str:
    """The final folder of a staging folder; any other folder is returned unchanged."""
    path = Path(folder)
    match = _TEMPORARY_FOLDER.match(path.name)
    return str(path.with_name(match["name"])) if match else folder


def clear_stale(output_dir: str) -> None:
    """Complete the checkpoints of ended processes in `output_dir`, and remove their other folders."""
    if not os.path.isdir(output_dir):
        return
    folders = [
        (match["prefix"], path, match)
        for path in Path(output_dir).iterdir()
        if (match := _TEMPORARY_FOLDER.match(path.name))
    ]
    # A staging folder comes before the folder that it would have replaced.
    for prefix, path, match in sorted(folders):
        try:
            if not has_writer_ended(path, " ".join(match["owner"].replace("~", "-").rsplit(".", 2))):
                continue
            if prefix != _REMOVED:
                CheckpointFolder(path.with_name(match["name"])).complete(path)
            if path.exists():
                shutil.rmtree(path)
        except OSError as error:
            logger.warning("%s of a killed process could not be removed: %s", path, error)


# ---- The checkpoints of a run ----------------------------------------------------------------------------------------


def _step_of(folder: Path) -> int | None:
    step = names.step_of(folder.name)
    return step if step is not None and folder.is_dir() else None


def checkpoints_newest_first(folder: str) -> Iterator[str]:
    """The `checkpoint-xxx` folders, the one with the most optimizer steps first."""
    steps = {step: path for path in Path(folder).iterdir() if (step := _step_of(path)) is not None}
    return (os.path.join(folder, steps[step].name) for step in sorted(steps, reverse=True))


def get_last_checkpoint(folder: str) -> str | None:
    """The intact `checkpoint-xxx` folder with the most optimizer steps in `folder`, or None.

    Damaged folders are skipped, with a warning that names the file. transformers returns the folder with the most
    steps even if it is damaged.
    """
    return find_intact(folder)[0]


def find_intact(folder: str) -> tuple[str | None, list[str]]:
    """The result of `get_last_checkpoint`, and the name and damage of each folder that it skipped."""
    damages: list[str] = []
    for path in checkpoints_newest_first(folder) if os.path.isdir(folder) else ():
        reason = CheckpointFolder(path).inspect().skip_reason
        if reason is None:
            return path, damages
        logger.warning("%s is damaged and is skipped: %s.", path, reason)
        damages.append(f"{os.path.basename(path)} is damaged: {reason.replace(os.path.join(path, ''), '')}")
    return None, damages


def sort_checkpoints(output_dir: str) -> list[str]:
    """The checkpoint folders that a Trainer has written, oldest first.

    They are sorted by modification time, so that an earlier run's higher step in the same folder does not count as
    newer. If all times lie within a second, as on file systems that do not keep them, they are sorted by step.
    """
    folders = [
        (path.stat().st_mtime, step, str(path))
        for path in Path(output_dir).iterdir()
        if (step := _step_of(path)) is not None and (path / names.TRAINER_STATE_NAME).is_file()
    ]
    times = [time for time, _, _ in folders]
    has_times = bool(times) and max(times) - min(times) >= 1.0
    return [path for _, _, path in sorted(folders if has_times else ((0.0, step, path) for _, step, path in folders))]


def rotate_checkpoints(
    output_dir: str,
    save_total_limit: int | None,
    best: str | None,
    keep: Sequence[str] = (),
    checkpoints: Sequence[str] | None = None,
) -> None:
    """Delete the oldest checkpoints beyond `save_total_limit`.

    The newest intact one and the best one are always kept.

    Args:
        output_dir: the folder of the checkpoints.
        save_total_limit: maximum number to keep; None for all.
        best: the best one, if any.
        keep: others to keep, such as the one just written.
        checkpoints: existing checkpoints, oldest first; None for all in `output_dir`.
    """
    if save_total_limit is None or save_total_limit <= 0:
        return
    checkpoints = sort_checkpoints(output_dir) if checkpoints is None else checkpoints
    protected = [path for path in (best, *keep) if path is not None]
    kept_paths = {path for path in checkpoints if any(_is_same(path, other) for other in protected)}
    kept_paths.update(checkpoints[-1:])
    for path in reversed(checkpoints):
        if CheckpointFolder(path).inspect(contents=False).skip_reason is None:
            kept_paths.add(path)
            break
    surplus = len(checkpoints) - max(int(save_total_limit), len(kept_paths))
    for checkpoint in [path for path in checkpoints if path not in kept_paths][: max(surplus, 0)]:
        logger.info("Deleting older checkpoint %s: save_total_limit=%s.", checkpoint, save_total_limit)
        CheckpointFolder(checkpoint).remove()


def delete_all_but_best(best: str, output_dir: str) -> None:
    """Delete every checkpoint except `best`, for `save_total_limit=1` at the end of a run.

    If `best` is damaged, nothing is deleted.
    """
    if CheckpointFolder(best).inspect(only_weights=True).unusable_reason is not None:
        return
    for checkpoint in sort_checkpoints(output_dir):
        if not _is_same(checkpoint, best):
            logger.info("Deleting checkpoint %s: save_total_limit=1 keeps the best, %s.", checkpoint, best)
            try:
                CheckpointFolder(checkpoint).remove()
            except OSError as error:
                logger.warning("%s could not be deleted: %s", checkpoint, error)


def _is_same(path: str, other: str) -> bool:
    return os.path.exists(other) and os.path.samefile(path, other)
