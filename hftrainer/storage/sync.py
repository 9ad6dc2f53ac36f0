"""Mirrors the output folder of a Trainer at `storage_url`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hftrainer.arguments.storage_url import check_url, staging_folder_of
from hftrainer.base.messages import tell
from hftrainer.base.part import Part
from hftrainer.callbacks.state import TrainerState
from hftrainer.checkpointing import layout
from hftrainer.checkpointing.writing.folder import CheckpointFolder
from hftrainer.errors import CheckpointNotFound, CheckpointNotWritten, DamagedCheckpoint
from hftrainer.trackers.base_callbacks import CheckpointPlace

if TYPE_CHECKING:
    from hftrainer.storage.mirror import Mirror


T = TypeVar("T")
logger = logging.getLogger(__name__)


class StorageSync(Part):
    """Decides which process fetches and uploads what. Without `storage_url`, all methods do nothing.

    Attributes:
        mirror: the mirror of the output folder; None without `storage_url`.
    """

    mirror: Mirror | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "mirror": None}

    def open_mirror(self) -> None:
        """Create the mirror, for a new Trainer or a copy.

        Raises:
            InvalidArgument, MissingPackage: if no package for the URL's protocol is known or installed.
        """
        args = self.trainer.args
        if (url := args.storage_url) is not None:
            self.mirror = self._make_mirror(url, str(args.output_dir))
        elif (keep := args.keep_local) != 1:
            logger.warning("keep_local=%s has no effect without storage_url, or a URL as output_dir.", keep)

    def _make_mirror(self, url: str, local: str) -> Mirror:
        from hftrainer.storage.mirror import Mirror  # imports fsspec
        from hftrainer.storage.remote import RemoteFolder

        stop_on_error = self.parts.checkpoint_writer.stop_on_error
        return Mirror(RemoteFolder(url), local, self.trainer.args.keep_local, stop_on_error=stop_on_error)

    def checkpoint_place(self, trial: Any) -> CheckpointPlace:
        """Where a run, or the run of a trial, keeps its checkpoints."""
        folder = os.path.abspath(self.parts.run_folder_without_override(trial))
        if self.mirror is None:
            return CheckpointPlace(folder, folder)
        return CheckpointPlace(folder, f"{self.mirror.remote.url}/{os.path.relpath(folder, self.mirror.local)}")

    # ---- A run -------------------------------------------------------------------------------------------------

    def fetch_checkpoint(self, checkpoint: str | bool | None) -> str | bool | None:
        """Download the checkpoint to resume from to the disk of this node.

        Args:
            checkpoint: the value of `resume_from_checkpoint`.

        Returns:
            The value, or the local folder of a checkpoint at a URL.

        Raises:
            StorageError: if the URL cannot be read or written.
            CheckpointNotFound: for a URL without a checkpoint.
        """
        # A command line passes True as text.
        checkpoint = True if str(checkpoint).lower() == "true" else checkpoint
        is_url = isinstance(checkpoint, str) and "://" in checkpoint and not checkpoint.endswith(".ckpt")
        mirror, run_folder = self.mirror, str(self.trainer.args.output_dir)
        if mirror is not None:
            self._run_on_main(lambda: mirror.begin(run_folder, resumes=bool(checkpoint)))
        if is_url:
            return self._fetch_url(str(checkpoint))
        if mirror is None or not checkpoint:
            return checkpoint

        def choose_checkpoint() -> str | None:
            if checkpoint is True or checkpoint == "auto":
                return mirror.fetch_newest(run_folder)
            path = os.fspath(checkpoint)
            return os.path.relpath(path, run_folder) if not os.path.isdir(path) and mirror.holds(path) else None

        name = self._run_on_main(choose_checkpoint)
        if name is not None:
            return self._fetch_on_each_node(mirror, name)
        if checkpoint is True:
            raise CheckpointNotFound(
                f"resume_from_checkpoint=True: neither {run_folder} nor {mirror.remote.url} has a complete "
                "checkpoint. Train without it first, or pass 'auto' to start from the beginning."
            )
        return None if checkpoint == "auto" else checkpoint

    def _fetch_url(self, url: str) -> str:
        """Fetch the checkpoint at a URL, and return its local folder."""
        check_url("resume_from_checkpoint", url)
        parent, _, name = url.rstrip("/").rpartition("/")
        if not name.startswith(f"{layout.PREFIX_CHECKPOINT_DIR}-"):
            raise CheckpointNotFound(
                f"resume_from_checkpoint={url!r}: pass the URL of a checkpoint-xxx folder, or True for the newest at "
                "storage_url."
            )
        mirror = self.mirror
        if mirror is None or mirror.remote.url != parent:
            mirror = self._make_mirror(parent, staging_folder_of(parent))

        def fetch() -> None:
            if not mirror.holds(str(mirror.local / name)):
                raise CheckpointNotFound(f"Can't find a valid checkpoint at {url}: it has no {layout.MANIFEST_NAME}.")
            mirror.fetch(name)

        self._run_on_main(fetch)
        return self._fetch_on_each_node(mirror, name)

    def _fetch_on_each_node(self, mirror: Mirror, name: str) -> str:
        """Fetch a checkpoint and the best one that it names on each node, and return its local folder."""
        trainer, folder = self.trainer, str(mirror.local / name)

        def begin() -> None:
            if mirror is self.mirror and not mirror.is_uploaded(name):
                # A process that was killed wrote the checkpoint, but did not upload it.
                mirror.add_checkpoint(folder, None, [])
                # Other nodes may need it.
                if trainer.args.world_size > 1:
                    mirror.wait()
            self._fetch_best_checkpoint(mirror, name)

        self._run_on_main(begin)
        message = None
        if trainer.is_local_process_zero() and not trainer.is_world_process_zero():
            try:
                mirror.fetch(name)
                self._fetch_best_checkpoint(mirror, name)
            # All ranks must raise it, since the others would wait.
            except Exception as error:
                message = f"{type(error).__name__}: {error}"
        if messages := [text for text in trainer.accelerator.processes.gather_objects([message]) if text is not None]:
            raise CheckpointNotFound(f"{mirror.remote.url}/{name} cannot be fetched on each node: {messages[0]}")
        return folder

    @staticmethod
    def _fetch_best_checkpoint(mirror: Mirror, name: str) -> None:
        """Fetch the best checkpoint that another one names, if it is at the URL and intact."""
        state = TrainerState.load_from_json(os.path.join(mirror.local, name, layout.TRAINER_STATE_NAME))
        best_name = os.path.join(os.path.dirname(name), os.path.basename(state.best_model_checkpoint or ""))
        path = mirror.local / best_name
        if not state.best_model_checkpoint or path.is_dir() or not mirror.holds(str(path)):
            return
        try:
            mirror.fetch(best_name)
        except DamagedCheckpoint as error:
            logger.warning("The best checkpoint was not fetched: %s", error)

    def _run_on_main(self, action: Callable[[], T]) -> T:
        """The result of `action` in the main process, which may take any time."""
        results: list[T] = []
        processes = self.trainer.accelerator.processes
        processes.run_on_main(lambda: results.append(action()))
        return processes.broadcast_from_main(lambda: results[0])

    def wait_for_space(self) -> None:
        """Wait until the local disk has space for another checkpoint."""
        if (mirror := self.mirror) is not None:
            self.trainer.accelerator.processes.run_on_main(mirror.wait_for_local_space)

    def make_upload(self, checkpoint: str, keep: Sequence[str | None]) -> Callable[[], None] | None:
        """A function that uploads a complete checkpoint and deletes older ones; None without a URL."""
        mirror, limit = self.mirror, self.trainer.args.save_total_limit
        if mirror is None or not self.trainer.is_world_process_zero():
            return None
        paths_to_keep = [path for path in keep if path is not None]
        return lambda: mirror.add_checkpoint(checkpoint, limit, paths_to_keep)

    def discard_checkpoints(self, checkpoints: Sequence[str]) -> None:
        """Delete the checkpoints of an attempt that restarts with smaller batches."""
        if self.mirror is not None:
            self.mirror.discard_checkpoints(checkpoints)
        # Rotation may have deleted some checkpoints.
        for folder in filter(os.path.isdir, checkpoints):
            CheckpointFolder(Path(folder)).remove()

    def finish_uploads(self, run_folder: str, best: str | None) -> None:
        """Wait for the uploads at the end of a run.

        Args:
            run_folder: the run's folder.
            best: the only checkpoint to keep in this folder, if any.
        """
        if (mirror := self.mirror) is None:
            return

        def drain() -> None:
            if mirror.drain():
                tell(f"Uploaded to {mirror.remote.url}.")
            if best is not None:
                mirror.delete_other_checkpoints(best, run_folder)

        self.trainer.accelerator.processes.run_on_main(drain)

    def finish_after_error(self) -> None:
        """Wait for the uploads of a run that ends with an error or an interruption."""
        if self.mirror is not None and self.trainer.is_world_process_zero():
            try:
                self.mirror.drain()
            except CheckpointNotWritten:
                # The mirror has logged it, and the caller raises the run's error.
                return

    def upload_files(self) -> None:
        """Upload files that a method of the Trainer wrote; during a run, a checkpoint uploads them."""
        if self.mirror is not None and self.trainer.is_world_process_zero() and not self.trainer.is_in_train:
            self.mirror.upload_files()
