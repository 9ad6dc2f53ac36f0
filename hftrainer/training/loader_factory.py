"""The loaders of a Trainer: prepared for this process, and what is counted in their batches."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from hftrainer.arguments.accelerator_config import AcceleratorConfig
from hftrainer.assembly.rooms import Room
from hftrainer.compat import peers
from hftrainer.data.dispatch import Messenger
from hftrainer.data.loaders import PreparedDataLoader
from hftrainer.data.samplers import LengthGroupedSampler
from hftrainer.data.sharding import Share
from hftrainer.errors import UnsupportedArgument


class LoaderFactory(Room):
    """Makes data loaders, and counts what is in their batches."""

    @contextlib.contextmanager
    def preparing_training_data(self) -> Iterator[None]:
        """Loaders that are prepared in the block are for training."""
        own = self.own
        before, own.prepares_training_data = own.prepares_training_data, True
        try:
            yield
        finally:
            own.prepares_training_data = before

    def prepare(self, loader: DataLoader) -> PreparedDataLoader:
        """The loader with this process's share of the batches, on its device."""
        trainer, own = self.trainer, self.own
        if isinstance(loader, PreparedDataLoader):
            return loader
        processes, timeout = trainer.accelerator.processes, trainer.args.ddp_timeout_delta
        messenger = Messenger(
            processes.from_main,
            functools.partial(processes.scatter, timeout=timeout),
            functools.partial(processes.highest, timeout=timeout),
        )
        training, config = own.prepares_training_data, self.config()
        dispatched = isinstance(loader.dataset, IterableDataset) or config.dispatch_batches
        if training and dispatched and processes.tp_size > 1:
            raise UnsupportedArgument(
                "tp_size gives neighbouring processes the same batches, which streams and dispatch_batches do not: "
                "give a dataset with a length, without dispatch_batches."
            )
        return PreparedDataLoader.from_loader(
            loader,
            trainer.args.device,
            seed=trainer.accelerator.dataloader_config.data_seed,
            config=config,
            share=Share(processes.data_rank, processes.data_processes),
            messenger=messenger if training else None,
        )

    def config(self) -> AcceleratorConfig:
        """How loaders are prepared: by `accelerator_config`, and what has been set on the accelerator since.

        Raises:
            InvalidArgument: for values that cannot be.
            UnsupportedArgument: for stateful loaders.
        """
        given = self.trainer.accelerator.dataloader_config
        if getattr(given, "use_stateful_dataloader", False):
            raise UnsupportedArgument(
                "accelerator.dataloader_config.use_stateful_dataloader=True is not supported: leave it out, the "
                "Trainer finds its place in the data by its checkpoints."
            )
        keys = self.own.resolved.accelerator_config.to_dict()
        keys |= {name: getattr(given, name) for name in keys if hasattr(given, name)}
        return AcceleratorConfig.read(keys)

    def groups_training_by_length(self) -> bool:
        """Whether samples of similar length are trained on together; `sortish_sampler` is the old way to ask for it."""
        args = self.trainer.args
        return args.train_sampling_strategy == "group_by_length" or getattr(args, "sortish_sampler", False)

    def length_grouped_sampler(
        self, dataset: Any, batch_size: int, generator: torch.Generator | None = None
    ) -> LengthGroupedSampler:
        """Samples of similar length together; their lengths from `length_column_name`, or else counted once.

        Args:
            dataset: the samples.
            batch_size: samples that are used together.
            generator: draws the order.
        """
        column = self.trainer.args.length_column_name
        without_columns, source = self.own.with_all_columns
        source = source if without_columns is dataset else dataset
        known = peers.is_dataset(source) and column in source.column_names
        names = getattr(self.trainer.processing_class, "model_input_names", None)
        return LengthGroupedSampler(
            batch_size,
            dataset=dataset,
            lengths=source[column] if known else None,
            model_input_name=names[0] if names else None,
            generator=generator,
        )

    def counted_labels(self, batch: Any) -> Any:
        """The labels of a batch that its loss is made of."""
        labels = batch["labels"]
        if not self.own.behaviours.counts_shifted_labels:
            return labels
        if "shift_labels" in batch:
            return batch["shift_labels"]
        return labels[..., 1:] if self.trainer._loss_shifts_labels and isinstance(labels, torch.Tensor) else labels

    def sum_over_data(self, count: torch.Tensor) -> torch.Tensor:
        """The sum over all processes of what each has counted in its batches."""
        return self.trainer.accelerator.processes.gather(count.to(self.trainer.args.device), distinct=True).sum()

    def flos_per_token_of(self, model: Any) -> int:
        """Floating-point operations of forward and backward on a token; counted once for each model."""
        own = self.own
        if own.flos_per_token is None or own.flos_per_token[0] is not model:
            count = model.num_parameters(exclude_embeddings=True) if hasattr(model, "num_parameters") else 0
            own.flos_per_token = (model, 6 * count)
        return own.flos_per_token[1]
