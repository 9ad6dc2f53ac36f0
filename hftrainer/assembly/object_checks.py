"""Checks what a Trainer is created with: its objects, and that all ranks have the same arguments."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import logging
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from hftrainer.arguments.choices import as_text
from hftrainer.arguments.fields.argument import changed_arguments
from hftrainer.base.signatures import can_call
from hftrainer.base.tracebacks import describe_type
from hftrainer.compat.libraries import has_length
from hftrainer.compat.overrides import is_overridden
from hftrainer.data.loader_factory import check_dataset, evaluation_datasets
from hftrainer.data.mixture import MixtureDataset, MixtureStream
from hftrainer.errors import InvalidArgument, InvalidSetup, WrongObject
from hftrainer.parallel.processes import Processes
from hftrainer.training_args import TrainingArguments
from hftrainer.training_args_seq2seq import Seq2SeqTrainingArguments

if TYPE_CHECKING:
    from hftrainer.trainer import Trainer

logger = logging.getLogger(__name__)

#: Arguments that may differ between ranks. All others must be equal, or ranks would train different models.
PER_RANK = frozenset(
    [
        "local_rank",
        # Nodes may use different folders.
        *("output_dir", "logging_dir", "eval_memmap_dir"),
        # Logs and reports of a process do not affect training.
        *("log_level", "log_level_replica", "log_on_each_node", "disable_tqdm", "skip_memory_metrics"),
        # How a process loads its samples does not affect training.
        *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor"),
        *("dataloader_multiprocessing_context", "torch_empty_cache_steps"),
        # Only the script reads these.
        *("do_train", "do_eval", "do_predict", "resume_from_checkpoint", "overwrite_output_dir"),
        # Only the main process reads these.
        *("report_to", "run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
        *("save_on_each_node", "hub_token", "push_to_hub_token"),
    ]
)


def merge_tokenizer_argument(processing_class: Any, tokenizer: Any) -> Any:
    """The processing class, which scripts may also pass by its old name `tokenizer` (until v5.0)."""
    if tokenizer is None:
        return processing_class
    if processing_class is not None and processing_class is not tokenizer:
        raise InvalidArgument(
            "tokenizer is the old name of processing_class, but their values differ: pass only processing_class."
        )
    warnings.warn("Trainer(tokenizer=...) is now Trainer(processing_class=...)", FutureWarning, stacklevel=3)
    return tokenizer


def check_objects(args: Any, model: Any, processing_class: Any, functions: Mapping[str, Any]) -> None:
    """Refuse objects that scripts often pass by mistake as training arguments, model, tokenizer or functions.

    Raises:
        WrongObject: for a class, a string or a dict in place of one of them.
    """
    if isinstance(args, type):
        raise WrongObject(f"args is the class {args.__name__}: pass an instance, {args.__name__}('folder', ...).")
    if isinstance(args, (str, os.PathLike, Mapping)):
        arguments = "**args" if isinstance(args, Mapping) else repr(str(args))
        raise WrongObject(f"args is {describe_type(args)}: pass TrainingArguments({arguments}).")
    if isinstance(args, nn.Module):
        raise WrongObject(f"args is a model, {type(args).__name__}: pass the model first, as Trainer(model, args).")
    if not isinstance(args, (TrainingArguments, type(None))) and not hasattr(args, "should_log"):
        raise WrongObject(f"args is of type {_full_name(args)}: pass TrainingArguments('folder', ...).")
    if isinstance(model, type):
        raise WrongObject(f"model is the class {model.__name__}: pass a model, or the class as model_init.")
    if isinstance(model, str):
        raise WrongObject(f"model={model!r}: load it first, for example with AutoModel.from_pretrained({model!r}).")
    if model is not None and not hasattr(model, "children"):
        raise WrongObject(f"model is of type {_full_name(model)}: pass a torch.nn.Module.")
    if isinstance(processing_class, str):
        call = f"AutoTokenizer.from_pretrained({processing_class!r})"
        raise WrongObject(f"processing_class={processing_class!r}: load it first, for example with {call}.")
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise WrongObject(f"{name} is {describe_type(function)}: pass a function.")


def _full_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def check_optimizer(trainer: Trainer) -> None:
    """Check that only one argument sets the optimizer."""
    args = trainer.args
    objects = {"optimizers": trainer.optimizer, "optimizer_cls_and_kwargs": trainer.optimizer_cls_and_kwargs}
    optim = as_text(args.optim)
    default = TrainingArguments.__dataclass_fields__["optim"].default
    for name, value in objects.items():
        if value is not None and optim not in (default, "adamw_torch"):
            raise InvalidArgument(f"optim={optim!r} and {name} both set the optimizer: use only one of them.")
    if trainer.optimizer is not None:
        _warn_about_ignored_arguments(args, trainer.optimizer)
    if trainer.optimizer is not None and trainer.optimizer_cls_and_kwargs is not None:
        raise InvalidSetup("optimizers and optimizer_cls_and_kwargs both set the optimizer: pass only one.")
    if trainer.model_init is not None and (trainer.optimizer is not None or trainer.lr_scheduler is not None):
        raise InvalidSetup(
            "optimizers would hold the parameters of a model that model_init replaces: pass "
            "optimizer_cls_and_kwargs, or override create_optimizer_and_scheduler."
        )


def check_memmap(args: TrainingArguments) -> None:
    """Check `eval_memmap_dir`, the folder for memory-mapped predictions."""
    folder = args.eval_memmap_dir
    if folder is not None and not os.path.isdir(folder):
        raise InvalidArgument(f"eval_memmap_dir={folder!r} is not a folder: create it, or use another.")
    if folder is not None and not args.eval_do_concat_batches:
        both = "eval_memmap_dir writes one file for all batches, but eval_do_concat_batches=False needs one per batch"
        raise InvalidArgument(f"{both}: use only one of them.")


def _check_datasets(trainer: Trainer) -> None:
    """Refuse what no loader can read in place of the datasets, unless overrides of the Trainer read them."""
    if isinstance(trainer.train_dataset, (str, os.PathLike)) and not is_overridden(trainer, "get_train_dataloader"):
        check_dataset(trainer.train_dataset, "training")
    for name, dataset in evaluation_datasets(trainer).items():
        is_name = isinstance(dataset, (str, os.PathLike))
        # A run without evaluations may never read the others; the methods of what reads an iterable may come later, as
        # those of Ray's `prepare_trainer`.
        is_iterable = isinstance(dataset, Iterable) and not isinstance(dataset, (Iterator, DataLoader))
        is_for_later = is_iterable and not hasattr(dataset, "__getitem__")
        if is_name or (trainer.args.eval_strategy != "no" and not is_for_later):
            check_dataset(dataset, f"{name!r} evaluation" if name else "evaluation")


def check_data(trainer: Trainer) -> None:
    """Check the datasets, and that the length of the run can be computed, and log which arguments have no effect."""
    _check_datasets(trainer)
    args = trainer.args
    if args.max_steps > 0 and args.num_train_epochs > 0:
        logger.info("max_steps=%d is given and overrides num_train_epochs.", args.max_steps)
    is_mixture = isinstance(trainer.train_dataset, (MixtureDataset, MixtureStream))
    has_weights = args.mixture_weights is not None or args.mixture_temperature != 1
    if has_weights and trainer.train_dataset is not None and not is_mixture and args.mixture_column is None:
        raise InvalidArgument(
            "mixture_weights and mixture_temperature need several sources: pass train_dataset={'code': ..., "
            "'chat': ...}, or set mixture_column to the column that names the source of each sample."
        )
    if isinstance(trainer.train_dataset, IterableDataset):
        logger.log(
            logging.INFO if args.train_sampling_strategy == "random" else logging.WARNING,
            "train_sampling_strategy=%r has no effect: train_dataset is iterable and has its own order.",
            str(args.train_sampling_strategy),
        )
    if not callable(trainer.data_collator):
        raise InvalidArgument(
            f"data_collator must be callable, got {type(trainer.data_collator).__name__}. It is Trainer's third "
            "argument: pass datasets by name, as train_dataset=... and eval_dataset=..."
        )
    if isinstance(trainer.data_collator, type) and "__call__" in dir(trainer.data_collator):
        name = trainer.data_collator.__name__
        raise InvalidArgument(f"data_collator is the class {name}: pass an instance, {name}(...).")
    # An override may call the collator in another way.
    if not can_call(trainer.data_collator, []) and not is_overridden(trainer, "get_train_dataloader"):
        taken = inspect.signature(trainer.data_collator)
        raise WrongObject(f"data_collator is called with one argument, the list of samples, but yours takes {taken}.")
    if trainer.train_dataset is not None and not has_length(trainer.train_dataset) and args.max_steps <= 0:
        check_dataset(trainer.train_dataset, "training")
        raise InvalidArgument(
            "max_steps must be set: train_dataset has no length, so the number of optimizer steps cannot be "
            "computed from num_train_epochs."
        )


def _warn_about_ignored_arguments(args: TrainingArguments, optimizer: Any) -> None:
    """Warn about optimizer arguments that differ from the settings of the script's optimizer."""
    for name, key in (("learning_rate", "lr"), ("weight_decay", "weight_decay")):
        value = changed_arguments(args, [name]).get(name)
        groups = [group for group in getattr(optimizer, "param_groups", ()) if key in group]
        optimizer_values = {float(group.get(f"initial_{key}", group[key])) for group in groups}
        if value is not None and value not in optimizer_values:
            logger.warning(
                "%s=%s has no effect: the optimizer passed in optimizers has %s.", name, value, sorted(optimizer_values)
            )


def check_consistency(args: TrainingArguments, processes: Processes) -> None:
    """Check in a collective call that all ranks have the same arguments. Fields of a subclass may differ.

    Raises:
        InvalidArgument: on every rank, with each argument that differs and the ranks that have each value.
    """
    if not processes.is_distributed:
        return
    names = Seq2SeqTrainingArguments.__dataclass_fields__.keys() - PER_RANK
    texts = {}
    for name in [field.name for field in dataclasses.fields(args) if field.name in names]:
        value = getattr(args, name)
        text = repr(value.value if isinstance(value, enum.Enum) else value)
        # The addresses of objects differ between processes.
        texts[name] = re.sub(r" at 0x[0-9a-f]+", "", text)
    texts_by_rank: list[dict[str, str]] = processes.gather_objects([texts])
    problems = []
    for name in texts:
        ranks: dict[str, list[str]] = {}
        for rank, texts_of_rank in enumerate(texts_by_rank):
            ranks.setdefault(texts_of_rank.get(name, "nothing"), []).append(str(rank))
        if len(ranks) > 1:
            values_and_ranks = "; ".join(f"{value} in rank {', '.join(same)}" for value, same in ranks.items())
            problems.append(f"{name} is {values_and_ranks}.")
    if problems:
        heading = "The arguments differ between ranks; they must be the same on all:"
        raise InvalidArgument("\n".join([heading, *problems]))
