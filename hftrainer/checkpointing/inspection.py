"""Inspects a checkpoint: compares its folder with its manifest, and finds files that cannot be read."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path

from hftrainer.checkpointing import layout
from hftrainer.checkpointing.file_checks import has_format, unreadable_reason
from hftrainer.checkpointing.weights import has_deepspeed_shards, has_weights, missing_shard
from hftrainer.checkpointing.writing.files import Entry, crc32_of_file, list_files, read_manifest, write_manifest
from hftrainer.errors import CheckpointNotFound, DamagedCheckpoint

#: Files with weights, and indices of their shards.
_WEIGHTS = re.compile(r"(\.safetensors|model.*\.bin|\.index\.json|model_states\.pt)$")
#: Files that hold weights, in a folder without a manifest.
_WEIGHTS_FILE = re.compile(r"(\.safetensors|model(_fsdp)?\.bin|pytorch_model-.*\.bin|\.distcp)$")
#: All files that a resumed run reads. Added files with other names are not checked.
_RESUME_FILES = re.compile(
    rf"{_WEIGHTS.pattern}|^((optimizer|rng_state|progress)[\w-]*|scheduler|scaler|lightning_callbacks)\.(pt|pth|bin)$"
    rf"|^{re.escape(layout.TRAINER_STATE_NAME)}$"
)
#: Suffixes of the files in torch's distributed checkpoints.
_SHARD_SUFFIXES = (layout.SHARD_SUFFIX, layout.LIST_OF_SHARDS)
_RESIZED = "has changed size since it was written"


def _is_weights_file(name: str) -> bool:
    """Whether a file holds weights, a shard of them, or a list of their shards."""
    if name.endswith(_SHARD_SUFFIXES):
        return not name.startswith(f"{layout.SHARD_FOLDERS['optimizer']}/")
    return _WEIGHTS.search(Path(name).name) is not None


@dataclasses.dataclass(frozen=True)
class Inspection:
    """How a checkpoint differs from its manifest, and why a run cannot resume from it.

    Converting weights adds, removes and resizes files. Different bytes in a file of the same size are typical of a
    failing disk. Three judgements, the strictest first; each includes the next:

    - `skip_reason`: why `resume_from_checkpoint=True` skips the checkpoint. Any change to a listed file is one.
    - `refusal_reason`: why we refuse it even if the script names it. Added, removed and resized files may be intended.
    - `fault`: why no run can resume from it, even if all changes are intended.

    Attributes:
        folder: the checkpoint.
        added: new files.
        removed: missing files.
        resized: files with a different size.
        altered: files with the same size but different contents.
        fault: names the file: the state or weights are missing, or the manifest or a changed file cannot be read. None
            if a run can resume.
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
        """A fault, or a change to a listed file; automatic selection then skips the checkpoint."""
        kinds = {"is missing": self.removed, _RESIZED: self.resized}
        change = next((f"{self.folder / files[0]} {reason}" for reason, files in kinds.items() if files), None)
        return change or self.refusal_reason

    @property
    def relative_skip_reason(self) -> str | None:
        """`skip_reason` for a message that names the checkpoint: its files by their paths within it."""
        reason = self.skip_reason
        return None if reason is None else reason.replace(os.path.join(self.folder, ""), "")

    @property
    def refusal_reason(self) -> str | None:
        """A fault, or altered contents; a script then cannot use the checkpoint by name."""
        if self.altered:
            path = self.folder / self.altered[0]
            return f"the contents of {path} have changed since it was written, but not its size"
        return self.fault

    @property
    def can_be_accepted(self) -> bool:
        """Whether `accept_checkpoint` can resolve the damage: altered files, or a damaged manifest."""
        return layout.MANIFEST_NAME in (self.fault or "") or (bool(self.altered) and self.fault is None)


def inspect_checkpoint(folder: str | Path, *, contents: bool = True, only_weights: bool = False) -> Inspection:
    """Compare the folder with its manifest, or find visible damage if it has none.

    Args:
        folder: the `checkpoint-N` folder, which need not exist.
        contents: compare checksums too, which reads all files.
        only_weights: check only the weights.
    """
    folder = Path(folder)
    try:
        return _inspect_contents(folder, contents, only_weights)
    # The checkpoint is being deleted, or the disk fails.
    except OSError as error:
        fault = f"{error.filename or folder} cannot be read ({error.strerror or error})"
    # The manifest, or another file that lists files, is damaged.
    except DamagedCheckpoint as error:
        fault = str(error).removesuffix(DamagedCheckpoint.REMEDY).rstrip(".")
    return Inspection(folder, fault=fault)


def _inspect_contents(folder: Path, contents: bool, only_weights: bool) -> Inspection:
    state = folder / layout.TRAINER_STATE_NAME
    if not (only_weights or state.is_file()):
        return Inspection(folder, fault=f"{state} is missing")
    manifest = read_manifest(folder)
    if manifest is None:
        return Inspection(folder, fault=_visible_damage(folder))
    comparison = _compare_with_manifest(folder, manifest, contents, only_weights)
    return dataclasses.replace(comparison, fault=_find_fault(comparison))


def _compare_with_manifest(
    folder: Path, manifest: Mapping[str, Entry], contents: bool, only_weights: bool
) -> Inspection:
    """How the folder differs from its manifest, without a fault."""
    is_selected = _is_weights_file if only_weights else bool
    entries = [name for name in manifest if is_selected(name)]
    files = {name: folder / name for name in list_files(folder) if is_selected(name)}
    added = tuple(name for name in files if name not in manifest)
    removed = tuple(name for name in entries if name not in files)
    common = [name for name in entries if name in files]
    resized = tuple(name for name in common if files[name].stat().st_size != manifest[name].size)
    same_size = (name for name in common if contents and name not in resized)
    altered = tuple(name for name in same_size if crc32_of_file(files[name]) != manifest[name].crc32)
    return Inspection(folder, added, removed, resized, altered)


def _find_fault(inspection: Inspection) -> str | None:
    """Why a run cannot resume from the changed folder."""
    inputs = [name for name in inspection.resized if not name.endswith(_SHARD_SUFFIXES)]
    inputs += [name for name in inspection.added if _RESUME_FILES.search(Path(name).name)]
    for path in (inspection.folder / name for name in inputs):
        if (reason := unreadable_reason(path)) is not None:
            return f"{path} {reason}"
    # The next checks read the lists of shards, and an altered one cannot be relied on.
    return None if inspection.altered else _missing_weights(inspection) or _damaged_shard(inspection)


def _visible_damage(folder: Path) -> str | None:
    """The damage that is visible without a manifest; None without damage."""
    file_names = list_files(folder)
    for path in (folder / name for name in file_names):
        if has_format(path) and (reason := unreadable_reason(path, load_content=False)):
            return f"{path} {reason}"
    if (shard := missing_shard(str(folder))) is not None:
        return f"{shard} is missing"
    holds_weights_file = any(_WEIGHTS_FILE.search(Path(name).name) for name in file_names)
    return None if holds_weights_file or has_deepspeed_shards(str(folder)) else f"{folder} holds no weights"


def _missing_weights(inspection: Inspection) -> str | None:
    """Which weights are missing without a replacement. Other formats of a subclass are unknown here."""
    if (shard := missing_shard(str(inspection.folder))) is not None:
        return f"{shard} is missing"
    weights = next((inspection.folder / name for name in inspection.removed if _WEIGHTS.search(Path(name).name)), None)
    is_replaced = weights is None or has_weights(str(inspection.folder))
    return None if is_replaced else f"{weights} is missing, and no weights replace it"


def _damaged_shard(inspection: Inspection) -> str | None:
    """Which shard is missing or resized, although its list of shards is unchanged."""
    folder = inspection.folder
    removed = inspection.removed
    resized = inspection.resized
    for name in (*removed, *resized):
        is_removed = name in removed
        list_path = Path(name).with_name(layout.LIST_OF_SHARDS)
        is_listed = (folder / list_path).is_file() and list_path.as_posix() not in (*inspection.added, *resized)
        if name.endswith(layout.SHARD_SUFFIX) and is_listed:
            return f"{folder / name} {'is missing' if is_removed else _RESIZED}"
    return None


def accept_checkpoint(folder: str | Path) -> Inspection:
    """Accept the checkpoint in its current state.

    Check that its files can be read, and write a new manifest.

    Returns:
        The differences from the old manifest; empty if the manifest was missing or could not be read.

    Raises:
        CheckpointNotFound: if the folder is not a checkpoint, or lacks weights.
        DamagedCheckpoint: if a file cannot be read; the error names it.
    """
    folder = Path(folder)
    if (reason := layout.not_a_checkpoint_reason(folder)) is not None:
        raise CheckpointNotFound(f"{folder} is not a checkpoint: {reason}. Pass a checkpoint-xxx folder.")
    inspection = inspect_checkpoint(folder)
    for name in list_files(folder):
        path = folder / name
        is_read = name not in inspection.added or _RESUME_FILES.search(path.name)
        if is_read and has_format(path) and (reason := unreadable_reason(path)):
            raise DamagedCheckpoint(f"{path} {reason}: a run cannot resume from it. Restore the file.")
    if (reason := _missing_weights(inspection)) is not None:
        raise CheckpointNotFound(f"{reason}: a run cannot resume from the checkpoint. Restore the file.")
    write_manifest(folder)
    return inspection
