"""The storage of a Trainer: its output folder at a URL, with `storage_url`."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from hftrainer.arguments.storage import check_url, staging_folder_of
from hftrainer.callbacks.state import TrainerState
from hftrainer.checkpointing import names
from hftrainer.compat.messages import tell
from hftrainer.compat.overrides import is_overridden
from hftrainer.errors import CheckpointNotFound, CheckpointNotWritten, DamagedCheckpoint
from hftrainer.reporting.tracking import RunPlace
from hftrainer.training.component import Component

if TYPE_CHECKING:
    from hftrainer.storage.mirror import Mirror
    from hftrainer.trainer import Trainer


T = TypeVar("T")
logger = logging.getLogger(__name__)


def run_folder(trainer: Trainer, trial: Any) -> str:
    """The folder of the run, or of the trial. An override is not called for it, since it may count its calls."""
    is_replaced = is_overridden(trainer, "_get_output_dir")
    return str(trainer.args.output_dir) if is_replaced else trainer._get_output_dir(trial)


class Storage(Component):
    """Decides which process fetches and uploads what. Without `storage_url`, all methods do nothing.

    Attributes:
        mirror: the mirror of the output folder; None without `storage_url`.
    """

    mirror: Mirror | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "mirror": None}

    def open(self) -> None:
        """Make the mirror, for a new Trainer or a copy.

        Raises:
            InvalidArgument, MissingPackage: if no package for the URL's kind of storage is known, or installed.
        """
        args = self.trainer.args
        if (url := getattr(args, "storage_url", None)) is not None:
            self.mirror = self._make_mirror(url, str(args.output_dir))
        elif (keep := getattr(args, "keep_local", 1)) != 1:
            logger.warning("keep_local=%s has no effect without storage_url, or a URL as output_dir.", keep)

    def _make_mirror(self, url: str, local: str) -> Mirror:
        from hftrainer.storage.mirror import Mirror  # imports fsspec
        from hftrainer.storage.remote import RemoteFolder

        stops = self.components.checkpoint_writer.stop_on_error
        return Mirror(RemoteFolder(url), local, self.trainer.args.keep_local, stop_on_error=stops)

    def place(self, trial: Any) -> RunPlace:
        """Where the run of a trial, or of none, keeps its checkpoints."""
        folder = os.path.abspath(run_folder(self.trainer, trial))
        if self.mirror is None:
            return RunPlace(folder, folder)
        return RunPlace(folder, f"{self.mirror.remote.url}/{os.path.relpath(folder, self.mirror.local)}")

    # ---- A run -------------------------------------------------------------------------------------------------

    def fetch(self, wanted: str | bool | None) -> str | bool | None:
        """Bring the checkpoint to resume from to the disk of this node, before it is looked for there.

        Args:
            wanted: the value of `resume_from_checkpoint`.

        Returns:
            The same, or the local folder of a URL.

        Raises:
            StorageError: if the URL cannot be read or written.
            CheckpointNotFound: for a URL without a checkpoint.
        """
        url = wanted if isinstance(wanted, str) and "://" in wanted and not wanted.endswith(".ckpt") else None
        mirror, run_dir = self.mirror, str(self.trainer.args.output_dir)
        if mirror is not None:
            self._on_main(lambda: mirror.begin(run_dir, resumes=bool(wanted)))
        if url is not None:
            return self._fetch_url(url)
        if mirror is None or not wanted:
            return wanted

        def choose() -> str | None:
            if wanted is True or wanted == "auto":
                return mirror.fetch_newest(run_dir)
            path = os.fspath(wanted)
            return os.path.relpath(path, run_dir) if not os.path.isdir(path) and mirror.holds(path) else None

        name = self._on_main(choose)
        if name is not None:
            return self._fetch_on_each_node(mirror, name)
        if wanted is True:
            raise CheckpointNotFound(
                f"resume_from_checkpoint=True: there is no whole checkpoint, neither in {run_dir} nor at "
                f"{mirror.remote.url}. Train without it first, or pass 'auto' to start from the beginning."
            )
        return None if wanted == "auto" else wanted

    def _fetch_url(self, url: str) -> str:
        """Fetch the checkpoint at a URL; returns its local folder."""
        check_url("resume_from_checkpoint", url)
        parent, _, name = url.rstrip("/").rpartition("/")
        if not name.startswith(f"{names.PREFIX_CHECKPOINT_DIR}-"):
            raise CheckpointNotFound(
                f"resume_from_checkpoint={url!r}: give the URL of a checkpoint-xxx folder, or True for the newest at "
                "storage_url."
            )
        own = self.mirror
        is_own = own is not None and own.remote.url == parent
        mirror = own if own is not None and is_own else self._make_mirror(parent, staging_folder_of(parent))

        def fetch() -> None:
            if not mirror.holds(str(mirror.local / name)):
                raise CheckpointNotFound(f"Can't find a valid checkpoint at {url}: it has no {names.MANIFEST_NAME}.")
            mirror.fetch(name)

        self._on_main(fetch)
        return self._fetch_on_each_node(mirror, name)

    def _fetch_on_each_node(self, mirror: Mirror, name: str) -> str:
        """Fetch a checkpoint that the main process has, and the best one that it names; returns its local folder."""
        trainer = self.trainer
        folder = str(mirror.local / name)

        def begin() -> None:
            if mirror is self.mirror and not mirror.is_uploaded(name):
                # A process that was killed has written it, but not uploaded it.
                mirror.add(folder, None, [])
                if trainer.args.world_size > 1:  # other nodes may need it
                    mirror.wait()
            self._fetch_best(mirror, name)

        self._on_main(begin)
        error = None
        if trainer.is_local_process_zero() and not trainer.is_world_process_zero():
            try:
                mirror.fetch(name)
                self._fetch_best(mirror, name)
            except Exception as caught:  # all ranks raise it: the others would wait
                error = f"{type(caught).__name__}: {caught}"
        if errors := [each for each in trainer.accelerator.processes.gather_objects([error]) if each is not None]:
            raise CheckpointNotFound(f"{mirror.remote.url}/{name} cannot be fetched on each node: {errors[0]}")
        return folder

    @staticmethod
    def _fetch_best(mirror: Mirror, name: str) -> None:
        """Fetch the best checkpoint that another one names, if it is at the URL; a damaged one is left out."""
        state = TrainerState.load_from_json(os.path.join(mirror.local, name, names.TRAINER_STATE_NAME))
        best = os.path.join(os.path.dirname(name), os.path.basename(state.best_model_checkpoint or ""))
        path = mirror.local / best
        if not state.best_model_checkpoint or path.is_dir() or not mirror.holds(str(path)):
            return
        try:
            mirror.fetch(best)
        except DamagedCheckpoint as error:
            logger.warning("The best checkpoint is left out: %s", error)

    def _on_main(self, act: Callable[[], T]) -> T:
        """The result of `act` in the main process, however long it takes."""
        found: list[T] = []
        processes = self.trainer.accelerator.processes
        processes.run_on_main(lambda: found.append(act()))
        result: T = processes.from_main(lambda: found[0])
        return result

    def wait_for_room(self) -> None:
        """Before a save, wait until there is room for another checkpoint on the local disk."""
        if (mirror := self.mirror) is not None:
            self.trainer.accelerator.processes.run_on_main(mirror.wait_for_local_space)

    def uploading(self, checkpoint: str, keep: Sequence[str | None]) -> Callable[[], None] | None:
        """A function that uploads a checkpoint once it is written, and deletes older ones; None without a URL."""
        mirror, limit = self.mirror, self.trainer.args.save_total_limit
        if mirror is None or not self.trainer.is_world_process_zero():
            return None
        kept = [path for path in keep if path is not None]
        return lambda: mirror.add(checkpoint, limit, kept)

    def discard(self, checkpoints: Sequence[str]) -> None:
        """Delete the checkpoints of an attempt that begins again with smaller batches."""
        if self.mirror is not None:
            self.mirror.discard(checkpoints)
        for folder in filter(os.path.isdir, checkpoints):  # rotation may have deleted some
            shutil.rmtree(folder)

    def finish(self, run_dir: str, best: str | None) -> None:
        """Wait for the uploads at the end of a run.

        Args:
            run_dir: the run's folder.
            best: the only checkpoint to keep there, if any.
        """
        if (mirror := self.mirror) is None:
            return

        def finish() -> None:
            if mirror.finish():
                tell(f"Uploaded to {mirror.remote.url}.")
            if best is not None:
                mirror.delete_others(best, run_dir)

        self.trainer.accelerator.processes.run_on_main(finish)

    def finish_after_error(self) -> None:
        """Wait for the uploads when a run ends with an error, also that of an interrupted run's last checkpoint."""
        if self.mirror is not None and self.trainer.is_world_process_zero():
            try:
                self.mirror.finish()
            except CheckpointNotWritten:  # logged; the run's own error is raised
                return

    def upload_files(self) -> None:
        """Upload files that a method of the Trainer has written; during a run they follow with a checkpoint."""
        if self.mirror is not None and self.trainer.is_world_process_zero() and not self.trainer.is_in_train:
            self.mirror.upload_files()
