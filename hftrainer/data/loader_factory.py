"""Makes and prepares the data loaders of a Trainer."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from hftrainer.arguments.accelerator_config import AcceleratorConfig
from hftrainer.base.part import Part, temporary_attributes
from hftrainer.base.signatures import number_of_arguments
from hftrainer.base.tracebacks import describe_type
from hftrainer.compat import libraries
from hftrainer.compat.libraries import has_length
from hftrainer.compat.overrides import is_overridden
from hftrainer.data import collators, mixture_batches
from hftrainer.data.loaders import PreparedDataLoader
from hftrainer.data.mixture import MixtureBatchSampler, MixtureDataset, MixtureStream, as_mixture, group_by_column
from hftrainer.data.randomness import seed_worker
from hftrainer.data.samplers import UNSHARDED, LengthGroupedSampler, ShardSpec, count_lengths, innermost, seed_of_order
from hftrainer.data.token_batches import BucketCollator, FlatCollator, PackedBatchSampler, TokenBatchSampler
from hftrainer.errors import InvalidArgument, UnknownDataset, UnsupportedArgument, WrongObject, suggest
from hftrainer.parallel.devices import UNPINNED
from hftrainer.training_args import TrainingArguments

logger = logging.getLogger(__name__)


class LoaderFactory(Part):
    """Makes data loaders that yield the batches of this rank on its device."""

    #: A dataset without the columns that the model does not accept, and the original dataset.
    _column_source: tuple[Any, Any] = None, None
    _prepares_training_data = False

    # ---- The loaders of the Trainer ----------------------------------------------------------------------------

    def make_evaluation_loader(self, eval_dataset: Any) -> DataLoader[Any]:
        """The loader of an evaluation set, by default the Trainer's. One with persistent workers is kept."""
        trainer = self.trainer
        if eval_dataset is None and trainer.eval_dataset is None:
            raise InvalidArgument("Evaluation needs an eval_dataset: pass one to Trainer or to evaluate().")
        # Only loaders with a name are kept.
        name, dataset, description = None, eval_dataset, "evaluation"
        if eval_dataset is None:
            name, dataset = "eval", trainer.eval_dataset
        elif isinstance(eval_dataset, str):
            name, description = eval_dataset, f"{eval_dataset!r} evaluation"
        if name in trainer._eval_dataloaders:
            return trainer._eval_dataloaders[name]
        if isinstance(eval_dataset, str):
            dataset = _find_evaluation_dataset(trainer.eval_dataset, eval_dataset)
        loader = trainer._get_dataloader(dataset, description, trainer.args.eval_batch_size, trainer._get_eval_sampler)
        # Without this, each evaluation would start new persistent workers.
        if trainer.args.dataloader_persistent_workers and name is not None:
            trainer._eval_dataloaders[name] = loader
            progress = None if self.run.loop is None else self.run.resumed_progress
            if progress is not None and name in progress.evaluation_workers and isinstance(loader, PreparedDataLoader):
                loader.skip_worker_seed_draw()
        return loader

    def make_test_loader(self, test_dataset: Any) -> DataLoader[Any]:
        """A loader for `predict`, in the order of the dataset unless `_get_eval_sampler` is overridden."""
        trainer = self.trainer
        sampler = trainer._get_eval_sampler if is_overridden(trainer, "_get_eval_sampler") else _sequential_sampler
        return trainer._get_dataloader(test_dataset, "test", trainer.args.eval_batch_size, sampler)

    def make_loader(
        self, dataset: Any, description: str, batch_size: int, sampler_fn: Callable[..., Any] | None, is_training: bool
    ) -> DataLoader[Any]:
        """A loader of a dataset's batches, prepared for this rank."""
        trainer, args = self.trainer, self.trainer.args
        source = as_mixture(dataset) if is_training else dataset
        self._check_source(source, description, is_training)
        # As in transformers, only an evaluation refuses a float.
        if isinstance(batch_size, float) and not is_training:
            raise WrongObject(f"per_device_eval_batch_size={batch_size!r} is a float: use a whole number.")
        collator = self.make_flat_collator() if is_training and args.flatten_batches else trainer.data_collator
        dataset, collator = self._without_unused_columns(source, collator, description)
        num_workers = args.dataloader_num_workers
        settings: dict[str, Any] = {
            "batch_size": batch_size,
            "collate_fn": collator,
            "num_workers": min(num_workers, 1) if isinstance(source, MixtureStream) else num_workers,
            "pin_memory": args.dataloader_pin_memory and args.device.type not in UNPINNED,
            "persistent_workers": args.dataloader_persistent_workers,
            "multiprocessing_context": args.dataloader_multiprocessing_context,
            "prefetch_factor": args.dataloader_prefetch_factor,
            "in_order": args.dataloader_in_order,
        }
        if not isinstance(dataset, IterableDataset):
            # Samplers may need columns that the model does not accept.
            self._column_source = dataset, source
            self._set_sampler(settings, dataset, sampler_fn, description)
            if is_training:
                by_rank = self.parts.policy.seeds_workers_by_rank
                rank = trainer.accelerator.processes.data_rank if by_rank else 0
                settings["worker_init_fn"] = functools.partial(seed_worker, num_workers=num_workers, rank=rank)
        if is_training and args.tokens_per_batch is not None and "batch_sampler" not in settings:
            raise UnsupportedArgument(
                f"tokens_per_batch={args.tokens_per_batch} needs a dataset with a length and no override of "
                "_get_train_sampler: pass such a dataset, remove the override, or remove tokens_per_batch."
            )
        with self.treat_as_training_data() if is_training else contextlib.nullcontext():
            loader: DataLoader[Any] = trainer.accelerator.prepare(DataLoader(dataset, **settings))
        return loader

    def _check_source(self, source: Any, description: str, is_training: bool) -> None:
        check_dataset(source, description)
        if is_training and self.trainer.args.mixture_column is not None:
            mixture_batches.check_column(self.trainer.args.mixture_column, source)
        if isinstance(source, MixtureStream) and not is_training:
            raise InvalidArgument(
                f"The {description} dataset is the endless stream of a mixture: pass a dict of its sources."
            )

    def _without_unused_columns(self, dataset: Any, collator: Any, description: str) -> tuple[Any, Any]:
        """The dataset and its collator, one of which removes the columns that the model does not accept."""
        trainer = self.trainer
        if isinstance(dataset, MixtureStream):
            dataset = mixture_batches.plan_stream(self.parts, dataset)
        if isinstance(dataset, MixtureDataset) and all(map(libraries.is_map_style_dataset, dataset.sources.values())):
            sources = dataset.sources.items()
            dataset = MixtureDataset({name: trainer._remove_unused_columns(source, name) for name, source in sources})
        elif libraries.is_map_style_dataset(dataset):
            dataset = trainer._remove_unused_columns(dataset, description)
        else:
            collator = trainer._get_collator_with_removed_columns(collator, description)
        return dataset, collator

    def _set_sampler(
        self, settings: dict[str, Any], dataset: Any, make_sampler: Callable[..., Any] | None, description: str
    ) -> None:
        """Add the sampler to a loader's settings, or the sampler of whole batches in place of the batch size."""
        trainer, sampler = self.trainer, None
        if make_sampler is not None:
            sampler = make_sampler(dataset) if number_of_arguments(make_sampler) else make_sampler()
        if isinstance(sampler, TokenBatchSampler) and trainer.args.torch_compile:
            collator: Any = BucketCollator(trainer.data_collator, sampler.boundaries, self._main_input)
            if settings["collate_fn"] is not trainer.data_collator:
                collator = trainer._get_collator_with_removed_columns(collator, description)
            settings["collate_fn"] = collator
        if libraries.is_rebalanced(sampler) or isinstance(sampler, (TokenBatchSampler, MixtureBatchSampler)):
            settings["batch_sampler"] = sampler
            del settings["batch_size"]
        elif sampler is None and not has_length(dataset):
            raise InvalidArgument(
                f"The {description} dataset is {describe_type(dataset)} without a length: give it a __len__, or pass "
                "an IterableDataset."
            )
        else:
            settings |= {"sampler": sampler, "drop_last": trainer.args.dataloader_drop_last}

    def make_training_sampler(self, dataset: Any) -> Sampler[Any] | None:
        """The sampler of a training set, as the arguments say; None for a dataset without a length."""
        args = self.trainer.args
        if dataset is None or not has_length(dataset):
            return None
        if isinstance(dataset, MixtureDataset):
            return mixture_batches.make_batch_sampler(self.parts, dataset.indices())
        if args.mixture_column is not None:
            sources = group_by_column(self._find_original_dataset(dataset)[args.mixture_column])
            return mixture_batches.make_batch_sampler(self.parts, sources)
        if args.tokens_per_batch is not None:
            return self._make_token_sampler(dataset)
        # `sortish_sampler` is the old argument for grouping by length.
        if args.train_sampling_strategy == "group_by_length" or getattr(args, "sortish_sampler", False):
            size = self._global_batch_size() or self.run.train_batch_size * args.gradient_accumulation_steps
            return LengthGroupedSampler(size, lengths=self._find_lengths(dataset))
        if args.train_sampling_strategy == "batch_rebalance":
            return self._make_rebalance_sampler(dataset)
        return SequentialSampler(dataset) if args.train_sampling_strategy == "sequential" else RandomSampler(dataset)

    def make_evaluation_sampler(self, dataset: Any) -> Sampler[Any] | None:
        """A sampler by length, if training has one, or in order; None for a dataset without a length."""
        args = self.trainer.args
        if has_length(dataset) and args.train_sampling_strategy == "group_by_length":
            order = self.parts.policy.evaluation_generator(seed_of_order(args))
            return LengthGroupedSampler(args.eval_batch_size, lengths=self._find_lengths(dataset), generator=order)
        return _sequential_sampler(dataset)

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Number of samples in a loader, estimated from its batches if its dataset has no length."""
        is_prepared = isinstance(dataloader, PreparedDataLoader)
        dataset: Any = dataloader.source if is_prepared else getattr(dataloader, "dataset", None)  # type: ignore[attr-defined]
        return len(dataset) if has_length(dataset) else len(dataloader) * self.trainer.args.per_device_train_batch_size

    def check_evaluation_data(self) -> None:
        """Refuse an empty evaluation dataset before the first step, if the run will evaluate it."""
        trainer, args = self.trainer, self.trainer.args
        if args.eval_strategy == "no" or args.eval_delay or not self.parts.policy.evaluates_last_step:
            return
        if isinstance(trainer.eval_dataset, dict) and not trainer.eval_dataset:
            logger.warning("eval_dataset={} names no dataset: nothing will be evaluated.")
        for name, dataset in evaluation_datasets(trainer).items():
            if has_length(dataset) and not len(dataset):
                key = f"[{name!r}]" if name else ""
                raise InvalidArgument(f"eval_dataset{key} is empty: add samples, or use eval_strategy='no'.")

    # ---- Columns -----------------------------------------------------------------------------------------------

    def remove_unused_columns(self, dataset: Any, description: str | None) -> Any:
        """The dataset with only the columns that the model accepts."""
        return collators.remove_unused_columns(dataset, self._columns(), description, type(self.trainer.model).__name__)

    def wrap_collator(self, collator: Any, description: str | None) -> Any:
        """The collator, wrapped to drop the keys that the model does not accept."""
        columns = frozenset(self._columns())
        return collators.RemoveColumnsCollator(collator, columns, type(self.trainer.model).__name__, description)

    def _columns(self) -> list[str]:
        self.trainer._set_signature_columns_if_needed()
        assert self.trainer._signature_columns is not None
        return self.trainer._signature_columns

    @contextlib.contextmanager
    def explain_removed_columns(self, *datasets: Any) -> Iterator[None]:
        """Explain errors in the block that come from missing or unexpected keys of a batch.

        Args:
            datasets: the datasets that the block reads, or dicts of several.
        """
        try:
            yield
        except (TypeError, KeyError, ValueError) as error:
            # Our other errors name their cause, and an evaluation within training may have explained the error.
            is_clear = type(error).__module__ == InvalidArgument.__module__ and type(error) is not InvalidArgument
            if is_clear or "_is_explained" in vars(error):
                raise
            vars(error)["_is_explained"] = True
            all_datasets: list[Any] = []
            for data in datasets:
                sources = getattr(data, "sources", data)
                all_datasets += sources.values() if isinstance(sources, dict) else [sources]
            signature_columns = self.trainer._signature_columns
            if isinstance(error, TypeError):
                collators.explain_call_error(error, self.trainer.model, all_datasets)
            if signature_columns is not None and self.trainer.args.remove_unused_columns:
                if isinstance(error, KeyError):
                    collators.explain_removed_column(error, all_datasets, signature_columns)
                collators.note_columns(error, all_datasets, signature_columns, self.trainer.data_collator)
            raise

    # ---- Preparing ---------------------------------------------------------------------------------------------

    def treat_as_training_data(self) -> contextlib.AbstractContextManager[None]:
        """Treat loaders that are prepared in the block as training loaders."""
        return temporary_attributes(self, _prepares_training_data=True)

    def prepare_loader(self, loader: DataLoader[Any]) -> PreparedDataLoader:
        """Prepare a loader: shard its batches for this rank, and move them to the device."""
        trainer = self.trainer
        if isinstance(loader, PreparedDataLoader):
            return loader
        processes = trainer.accelerator.processes
        is_training = self._prepares_training_data
        config = self.read_config()
        is_dispatched = isinstance(loader.dataset, IterableDataset) or config.dispatch_batches
        if is_training and is_dispatched and processes.tp_size > 1:
            raise UnsupportedArgument(
                "tp_size needs the same batches on adjacent ranks, but iterable datasets and dispatch_batches send "
                "them different ones: use a dataset with a length, without dispatch_batches."
            )
        # This batch sampler yields only the batches of this rank.
        is_sharded = libraries.is_rebalanced(loader.batch_sampler)
        return PreparedDataLoader(
            loader,
            trainer.args.device,
            seed=trainer.accelerator.dataloader_config.data_seed,
            config=config,
            shard_spec=UNSHARDED if is_sharded else ShardSpec(processes.data_rank, processes.data_world_size),
            processes=processes if is_training else None,
            global_batch=self._global_batch_size() if is_training else None,
        )

    def _global_batch_size(self) -> int | None:
        """Samples per optimizer step over all ranks with `elastic`; None without it."""
        args = self.trainer.args
        process_samples = self.run.train_batch_size * args.gradient_accumulation_steps
        return process_samples * self.trainer.accelerator.processes.data_world_size if args.elastic else None

    def read_config(self) -> AcceleratorConfig:
        """`accelerator_config` with later changes to `accelerator.dataloader_config`.

        Raises:
            InvalidArgument: for invalid values.
            UnsupportedArgument: for stateful loaders.
        """
        loader_config = self.trainer.accelerator.dataloader_config
        if getattr(loader_config, "use_stateful_dataloader", False):
            raise UnsupportedArgument(
                "accelerator.dataloader_config.use_stateful_dataloader=True is not supported: leave it out. The "
                "Trainer restores the position in the data from its checkpoints."
            )
        settings = self.parts.resolved.accelerator_config.to_dict()
        settings |= {name: getattr(loader_config, name) for name in settings if hasattr(loader_config, name)}
        return AcceleratorConfig.read(settings)

    def _make_rebalance_sampler(self, dataset: Any) -> Sampler[Any]:
        """The `BatchRebalanceSampler` of transformers, which yields batches of equal cost for this rank."""
        args, processes = self.trainer.args, self.trainer.accelerator.processes
        accumulation, ranks = args.gradient_accumulation_steps, processes.data_world_size
        argument = "train_sampling_strategy='batch_rebalance'"
        sampler_class = libraries.import_from_transformers("trainer_pt_utils", "BatchRebalanceSampler", argument)
        return sampler_class(
            lengths=self._find_lengths(dataset),
            effective_batch_size=self.run.train_batch_size * accumulation * ranks,
            dp_size=ranks,
            grad_accum=accumulation,
            rank=processes.data_rank,
            drop_last=args.dataloader_drop_last,
        )

    def _find_original_dataset(self, dataset: Any) -> Any:
        """The dataset before the columns that the model does not accept were removed."""
        without_columns, source = self._column_source
        return source if without_columns is dataset else dataset

    def _make_token_sampler(self, dataset: Any) -> Sampler[Any]:
        """The sampler for `tokens_per_batch`, which yields the batches of all ranks."""
        args, lengths = self.trainer.args, self._find_lengths(dataset)
        assert args.tokens_per_batch is not None
        multiple = getattr(self.trainer.data_collator, "pad_to_multiple_of", None)
        if multiple and not args.flatten_batches:
            lengths = [-(-length // multiple) * multiple for length in lengths]
        sampler_class = PackedBatchSampler if args.flatten_batches else TokenBatchSampler
        return sampler_class(
            lengths,
            args.tokens_per_batch,
            seed_of_order(args),
            drop_last=args.dataloader_drop_last,
            complete=args.torch_compile,
        )

    def make_flat_collator(self) -> FlatCollator:
        """The collator for `flatten_batches`, which replaces the script's."""
        trainer, argument = self.trainer, "flatten_batches=True"
        if not trainer._loss_shifts_labels:
            raise UnsupportedArgument(
                f"{argument} is for causal language models, whose loss compares each token with the next label; that "
                f"of {type(self.parts.unwrapped_model).__name__} does not: remove the argument."
            )
        name = "DataCollatorWithFlattening"
        collator_class = libraries.import_from_transformers("data.data_collator", name, argument)
        attention = getattr(trainer.model.config, "_attn_implementation", None) or ""
        return FlatCollator(collator_class(return_flash_attn_kwargs="flash" in attention))

    @property
    def _main_input(self) -> str:
        names = getattr(self.trainer.processing_class, "model_input_names", None)
        return names[0] if names else "input_ids"

    def warn_about_custom_loader(self, loader: Any) -> None:
        """Warn of arguments that an override of `get_train_dataloader` makes ineffective.

        Raises:
            InvalidArgument: if its DataLoader treats our batches as samples.
        """
        args, trainer = self.trainer.args, self.trainer
        arguments = {name: getattr(args, name) for name in ("tokens_per_batch", "mixture_column", "mixture_weights")}
        argument_names = [name for name, value in arguments.items() if value is not None]
        batches = innermost(getattr(loader, "batch_sampler", None))
        our_samplers = (TokenBatchSampler, MixtureBatchSampler)
        if isinstance(getattr(batches, "sampler", None), our_samplers):
            raise InvalidArgument(
                f"The sampler of {type(trainer).__name__}.get_train_dataloader yields batches, with "
                f"{' and '.join(argument_names) or 'a mixture'}: pass it to the DataLoader as batch_sampler, not as "
                "sampler."
            )
        uses_our_sampler = isinstance(batches, our_samplers)
        if argument_names and not uses_our_sampler and not isinstance(trainer.train_dataset, MixtureStream):
            logger.warning(
                "%s has no effect: %s.get_train_dataloader or _get_train_sampler chooses the batches itself.",
                " and ".join(argument_names),
                type(trainer).__name__,
            )

    def _find_lengths(self, dataset: Any) -> list[int]:
        """The length of each sample, from `length_column_name` or counted in the model's main input.

        Raises:
            InvalidArgument: if the samples have neither.
        """
        column = self.trainer.args.length_column_name
        source = self._find_original_dataset(dataset)
        if libraries.is_map_style_dataset(source) and column in source.column_names:
            return list(map(int, source[column]))
        if column != TrainingArguments.__dataclass_fields__["length_column_name"].default:
            logger.warning(
                "length_column_name=%r has no effect: train_dataset is not a datasets.Dataset with that column, so the "
                "lengths are counted.",
                column,
            )
        return count_lengths(dataset, self._main_input)


def _sequential_sampler(dataset: Any) -> Sampler[Any] | None:
    """A sequential sampler; None for a dataset without a length."""
    return SequentialSampler(dataset) if has_length(dataset) else None


def _find_evaluation_dataset(datasets: Any, name: str) -> Any:
    """One of the Trainer's evaluation datasets, by name."""
    names = list(datasets) if isinstance(datasets, Mapping) else []
    try:
        return datasets[name]
    except (LookupError, TypeError):
        known = ", ".join(map(repr, names))
        description = f"it has {known}" if names else f"its eval_dataset is {describe_type(datasets)}"
        text = f"eval_dataset={name!r}: Trainer has no evaluation dataset of that name, {description}"
        suggestion = suggest(name, names, ".")
        raise UnknownDataset(f"{text}{suggestion} Pass a dataset, or pass Trainer a dict of datasets.") from None


def evaluation_datasets(trainer: Any) -> dict[str, Any]:
    """The Trainer's evaluation datasets by name, "" for a single one; empty if overrides may read others."""
    if is_overridden(trainer, "evaluate", "evaluation_loop", "get_eval_dataloader"):
        return {}
    return trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {"": trainer.eval_dataset}


def check_dataset(dataset: Any, description: str) -> None:
    """Refuse objects that no loader can read: a dict of datasets, an iterator, a loader, or an empty dataset.

    Raises:
        InvalidArgument: the error names the type of the object, and what to pass instead.
    """
    dataset_type = describe_type(dataset)
    if isinstance(dataset, (MixtureDataset, MixtureStream)):
        for name, source in dataset.sources.items():
            check_dataset(source, f"{description} source {name!r}")
    if isinstance(dataset, Mapping) and dataset and 0 not in dataset:
        is_sample = any(isinstance(value, (torch.Tensor, int, float, str)) for value in dataset.values())
        remedy = "a list of samples, such as [sample]" if is_sample else "one of its datasets"
        raise InvalidArgument(
            f"The {description} dataset is {dataset_type} with the keys {', '.join(map(str, dataset))}: pass {remedy}."
        )
    if isinstance(dataset, IterableDataset):
        return
    if isinstance(dataset, DataLoader):
        name = "train" if description.startswith("training") else "eval"
        raise InvalidArgument(
            f"The {description} dataset is {dataset_type}: pass its dataset, with its collate_fn as data_collator and "
            f"per_device_{name}_batch_size; or override get_{name}_dataloader to return it."
        )
    if dataset_type == "a DataFrame":
        raise InvalidArgument(
            f"The {description} dataset is a DataFrame: pass a list of its rows, frame.to_dict('records'), or "
            "datasets.Dataset.from_pandas(frame)."
        )
    is_name = isinstance(dataset, (str, os.PathLike))
    if is_name or not hasattr(dataset, "__getitem__"):
        hint = "; for a LightningDataModule, pass its datasets" if hasattr(dataset, "train_dataloader") else ""
        hint = f"; {str(dataset)!r} is only its name: load it first" if is_name else hint
        raise InvalidArgument(
            f"The {description} dataset is {dataset_type}: pass a list, a Dataset or an IterableDataset{hint}."
        )
    if description == "training" and has_length(dataset) and not len(dataset):
        raise InvalidArgument("The training dataset has no samples: check its filters or split.")
