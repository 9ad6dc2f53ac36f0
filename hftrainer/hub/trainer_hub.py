"""Decides what a Trainer pushes to the Hub, and when; `upload_queue.py` uploads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hftrainer.arguments.choices import HubStrategy, SaveStrategy
from hftrainer.base.part import Part


class TrainerHub(Part):
    """What a Trainer does with the Hub: opens its repository, and decides what of model and checkpoints is pushed."""

    def open_repository(self, token: str | None, private: bool | None) -> None:
        """Open or create the repository, and begin a queue of uploads to it, in the main process only."""
        if not self.trainer.is_world_process_zero():
            return
        from hftrainer.hub.repository import open_repository
        from hftrainer.hub.snapshots import UploadSnapshots
        from hftrainer.hub.upload_queue import UploadQueue

        args = self.trainer.args
        self.trainer._finish_current_push()
        repository = open_repository(
            args.hub_model_id or Path(str(args.output_dir)).absolute().name,
            token=args.hub_token if token is None else token,
            private=args.hub_private_repo if private is None else private,
            revision=args.hub_revision,
            is_for_run=args.push_to_hub,
        )
        snapshots = UploadSnapshots(str(args.output_dir), self.trainer.processing_class)
        self.parts.upload_queue = UploadQueue(repository, snapshots)
        self.trainer.hub_model_id = repository.id
        self.trainer.push_in_progress = None

    def push_model(
        self,
        commit_message: str,
        *,
        blocking: bool,
        token: str | None,
        revision: str | None,
        private: bool | None,
        card: dict[str, Any],
    ) -> Any:
        """Save the model, write its card, and upload the folder."""
        trainer = self.trainer
        self.parts.call_callbacks("on_push_begin")
        trainer.save_model(_internal_call=True)
        if self.parts.upload_queue is None:
            trainer.init_hf_repo(token=token, private=private)
        # Only the main process has a queue.
        if self.parts.upload_queue is None:
            return None
        name = (trainer.args.hub_model_id or Path(str(trainer.args.output_dir)).name).split("/")[-1]
        card["model_name"] = card.get("model_name") or name
        if (model_tags := getattr(trainer.model, "model_tags", None)) is not None:
            tags = card.get("tags", [])
            card_tags = [tags] if isinstance(tags, str) else list(tags or [])
            card["tags"] = [*card_tags, *(tag for tag in model_tags if tag not in card_tags)]
        trainer.create_model_card(**card)
        return self.parts.upload_queue.push_folder(
            str(trainer.args.output_dir), commit_message, blocking=blocking, token=token, revision=revision
        )

    def push_checkpoint(self, folder: str) -> None:
        """Start uploading the parts of a checkpoint that `hub_strategy` selects."""
        trainer, queue = self.trainer, self.parts.upload_queue
        if queue is None or trainer.args.hub_strategy == HubStrategy.END:
            return
        from hftrainer.hub.upload_queue import PushInProgress

        names_step = trainer.args.save_strategy == SaveStrategy.STEPS
        commits = queue.make_commits(folder, trainer.args.hub_strategy, names_step=names_step)
        if not commits:
            return
        is_done = trainer.push_in_progress is None or trainer.push_in_progress.is_done()
        if not is_done and not trainer.args.hub_always_push:
            queue.postpone(commits)
            return
        self.parts.call_callbacks("on_push_begin")
        jobs = queue.push(commits)
        trainer.push_in_progress = PushInProgress(jobs if is_done else [*trainer.push_in_progress.jobs, *jobs])

    def finish_uploads(self) -> None:
        """Wait for the uploads, retry failed ones, and log which succeeded and which are missing."""
        if self.parts.upload_queue is not None:
            self.parts.upload_queue.drain(is_urgent=lambda: self.run.signal_listener.signal_number is not None)
