"""Checks what a Trainer is created with: its objects, and that all ranks have the same arguments."""

from __future__ import annotations

import dataclasses
import enum
import os
import re
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from hftrainer.errors import InvalidArgument, WrongObject
from hftrainer.parallel.processes import Processes
from hftrainer.training_args import TrainingArguments
from hftrainer.training_args_seq2seq import Seq2SeqTrainingArguments

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


def one_processing_class(processing_class: Any, tokenizer: Any) -> Any:
    """The processing class, which scripts may also pass by its old name `tokenizer` (until v5.0)."""
    if tokenizer is None:
        return processing_class
    if processing_class is not None and processing_class is not tokenizer:
        raise InvalidArgument(
            "tokenizer is the old name of processing_class, but their values differ: pass only processing_class."
        )
    warnings.warn("Trainer(tokenizer=...) is now Trainer(processing_class=...)", FutureWarning, stacklevel=3)
    return tokenizer


def check_objects(args: Any, model: Any, processing_class: Any) -> None:
    """Refuse objects that scripts often pass by mistake as training arguments, model or tokenizer.

    Raises:
        WrongObject: for a class, a string or a dict in place of one of them.
    """
    if isinstance(args, type):
        raise WrongObject(f"args is the class {args.__name__}: pass an instance, {args.__name__}('folder', ...).")
    if isinstance(args, (str, os.PathLike, Mapping)):
        arguments = "**args" if isinstance(args, Mapping) else repr(str(args))
        raise WrongObject(f"args is a {type(args).__name__}: pass TrainingArguments({arguments}).")
    if isinstance(args, nn.Module):
        raise WrongObject(f"args is a model, {type(args).__name__}: pass the model first, as Trainer(model, args).")
    if not isinstance(args, (TrainingArguments, type(None))) and not hasattr(args, "should_log"):
        raise WrongObject(f"args is a {_full_name(args)}: pass TrainingArguments('folder', ...).")
    if isinstance(model, type):
        raise WrongObject(f"model is the class {model.__name__}: pass a model, or the class as model_init.")
    if isinstance(model, str):
        raise WrongObject(f"model={model!r}: load it first, for example with AutoModel.from_pretrained({model!r}).")
    if model is not None and not hasattr(model, "children"):
        raise WrongObject(f"model is a {_full_name(model)}: pass a torch.nn.Module.")
    if isinstance(processing_class, str):
        call = f"AutoTokenizer.from_pretrained({processing_class!r})"
        raise WrongObject(f"processing_class={processing_class!r}: load it first, for example with {call}.")


def _full_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def check_consistency(args: Any, processes: Processes) -> None:
    """Check in a collective call that all ranks have the same arguments. Fields of a subclass may differ.

    Raises:
        InvalidArgument: on every rank, with each argument that differs and the ranks that have each value.
    """
    if not processes.several:
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
        for rank, values in enumerate(texts_by_rank):
            ranks.setdefault(values.get(name, "nothing"), []).append(str(rank))
        if len(ranks) > 1:
            values_and_ranks = "; ".join(
                f"{value} in rank {', '.join(ranks_of_value)}" for value, ranks_of_value in ranks.items()
            )
            problems.append(f"{name} is {values_and_ranks}.")
    if problems:
        raise InvalidArgument(
            "\n".join(["The arguments differ between ranks; they must be the same on all:", *problems])
        )
