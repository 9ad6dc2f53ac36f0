"""The storage of a Trainer: its output folder at a URL, with `storage_url`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hftrainer.arguments.storage import staging_folder_of
from hftrainer.callbacks.state import TrainerState
from hftrainer.checkpointing import names
from hftrainer.compat.overrides import is_overridden
from hftrainer.errors import CheckpointNotFound, CheckpointNotWritten
from hftrainer.reporting.tracking import RunPlace
from hftrainer.training.component import Component

if TYPE_CHECKING:
    from hftrainer.storage.mirror import Mirror
    from hftrainer.trainer import Trainer


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
        if isinstance(wanted, str) and "://" in wanted and not wanted.endswith(".ckpt"):
            return self._fetch_url(wanted)
        if (mirror := self.mirror) is None:
            return wanted
        from_main = self.trainer.accelerator.processes.from_main
        run_dir = str(self.trainer.args.output_dir)
        from_main(lambda: mirror.begin(run_dir, resumes=bool(wanted)))
        name = None
        if wanted is True or wanted == "auto":
            name = from_main(lambda: mirror.fetch_newest(run_dir))
        elif isinstance(wanted, (str, os.PathLike)) and not os.path.isdir(wanted):
            name = os.path.relpath(wanted, run_dir)
            name = name if from_main(lambda: mirror.holds(str(name))) else None
        if name is not None:
            self._fetch_on_each_node(mirror, name)
        return wanted

    def _fetch_url(self, url: str) -> str:
        """Fetch the checkpoint at a URL; returns its local folder."""
        parent, _, name = url.rstrip("/").rpartition("/")
        if not name.startswith(f"{names.PREFIX_CHECKPOINT_DIR}-"):
            raise CheckpointNotFound(
                f"resume_from_checkpoint={url!r}: give the URL of a checkpoint-xxx folder, or True for the newest at "
                "storage_url."
            )
        own = self.mirror
        is_own = own is not None and own.remote.url == parent
        mirror = own if own is not None and is_own else self._make_mirror(parent, staging_folder_of(parent))
        from_main = self.trainer.accelerator.processes.from_main
        if own is not None:
            from_main(lambda: own.begin(str(own.local), resumes=True))
        if not from_main(lambda: mirror.holds(name)):
            raise CheckpointNotFound(f"Can't find a valid checkpoint at {url}: it has no {names.MANIFEST_NAME}.")
        self._fetch_on_each_node(mirror, name)
        return str(mirror.local / name)

    def _fetch_on_each_node(self, mirror: Mirror, name: str) -> None:
        """Fetch a checkpoint on each node, and the best one that it names; the main process first."""
        trainer = self.trainer
        processes = trainer.accelerator.processes
        for first in (True, False):
            if trainer.is_world_process_zero() == first and trainer.is_local_process_zero():
                self._fetch_all(mirror, name)
            processes.barrier()
        if mirror is self.mirror and trainer.is_world_process_zero() and not mirror.is_uploaded(name):
            # A process that was killed has written it, but not uploaded it.
            mirror.add(str(mirror.local / name), None, [])

    @staticmethod
    def _fetch_all(mirror: Mirror, name: str) -> None:
        folder = mirror.local / name
        if not folder.is_dir() or mirror.is_uploaded(name):
            mirror.fetch(name)
        state = TrainerState.load_from_json(os.path.join(folder, names.TRAINER_STATE_NAME))
        best = os.path.join(os.path.dirname(name), os.path.basename(state.best_model_checkpoint or ""))
        if state.best_model_checkpoint and not (mirror.local / best).is_dir() and mirror.holds(best):
            mirror.fetch(best)
        mirror.fetch_files()

    def uploading(self, checkpoint: str, keep: Sequence[str | None]) -> Callable[[], None] | None:
        """A function that uploads a checkpoint once it is written, and deletes older ones; None without a URL."""
        mirror, limit = self.mirror, self.trainer.args.save_total_limit
        if mirror is None or not self.trainer.is_world_process_zero():
            return None
        kept = [path for path in keep if path is not None]
        return lambda: mirror.add(checkpoint, limit, kept)

    def finish(self, best: str | None = None) -> None:
        """Wait for the uploads at the end of a run.

        Args:
            best: the only checkpoint to keep, if any.
        """
        if (mirror := self.mirror) is None:
            return

        def finish() -> None:
            mirror.finish()
            if best is not None:
                mirror.delete_all_but(best)

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
