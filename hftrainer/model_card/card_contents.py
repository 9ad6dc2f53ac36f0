"""The contents of a model card: results, hyperparameters, and the origins of model and data."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hftrainer.arguments import old_names
from hftrainer.arguments.choices import ParallelMode, as_text
from hftrainer.callbacks.state import is_measurement
from hftrainer.compat import libraries

if TYPE_CHECKING:
    from hftrainer.assembly.trainer_parts import TrainerParts

logger = logging.getLogger(__name__)

Line = Mapping[str, Any]

#: Metrics that the Hub accepts as tags of a model. 'rouge1' counts as 'rouge'.
METRIC_TAGS = "accuracy bleu f1 matthews_correlation pearsonr precision recall rouge sacrebleu spearmanr wer".split()


def evaluation_rows(log_history: Sequence[Line]) -> list[dict[str, Any]] | None:
    """One row (column → value) per evaluation during training; None without evaluations."""
    end = _end_of_training(log_history)
    lines = log_history[:end]
    # This was not a training run.
    if not any("loss" in line for line in lines) and end is None:
        return None
    rows = []
    training_loss: Any = "No log"
    for line in _merge_evaluations(lines):
        training_loss = line.get("loss", training_loss)
        if _is_evaluation(line):
            row = {"Training Loss": training_loss, "Epoch": line.get("epoch"), "Step": line.get("step")}
            for key, value in _metrics(line).items():
                row["Validation Loss" if key == "eval_loss" else _title(key)] = value
            rows.append(row)
    return rows or None


def final_results(log_history: Sequence[Line], best_step: int | None) -> dict[str, Any] | None:
    """The metrics of the final model, as title → value; None without an evaluation.

    Args:
        log_history: the log lines of the run.
        best_step: the step whose weights were loaded at the end of training; None if no weights were loaded.
    """
    lines, end = log_history, _end_of_training(log_history)
    if best_step is not None and end is not None and not any(map(_is_evaluation, lines[end:])):
        lines = [line for line in lines if line.get("step") == best_step] or lines
    evaluations = [line for line in _merge_evaluations(lines) if _is_evaluation(line)]
    return {_title(name): value for name, value in _metrics(evaluations[-1]).items()} if evaluations else None


def metric_tags(results: Mapping[str, Any]) -> dict[str, str]:
    """Tag → title, for the results that are tags on the Hub."""
    tags = {title.lower().replace(" ", "_").replace("rouge1", "rouge"): title for title in results}
    return {tag: title for tag, title in tags.items() if tag in METRIC_TAGS}


def format_value(value: Any) -> str:
    """Format a value: numbers with four decimals; in exponent notation with four digits."""
    text = str(value)
    if not isinstance(value, float) or "." not in text:
        return text
    if "e" in text:
        return f"{value:.4g}"
    return f"{value:.4f}" if len(text.partition(".")[2]) > 4 else text


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows as a Markdown table. A cell is empty if its row has no such column."""
    columns = []
    for name in dict.fromkeys(name for row in rows for name in row):
        texts = [name, *(format_value(row.get(name, "")) for row in rows)]
        cells = [text.replace("|", "\\|") for text in texts]
        width = max(map(len, cells))
        cells.insert(1, f":{'-' * (width - 2)}:")
        columns.append([cell.ljust(width) for cell in cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*columns, strict=True))


def _end_of_training(lines: Sequence[Line]) -> int | None:
    """The index of the last line that summarizes training; None without such a line."""
    indices = (i for i, line in enumerate(lines) if "train_runtime" in line and "train_loss" in line)
    return max(indices, default=None)


def _is_evaluation(line: Line) -> bool:
    return any(name.startswith("eval_") for name in line)


def _merge_evaluations(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """The lines, after merging evaluations of several datasets at the same step."""
    merged_lines: list[dict[str, Any]] = []
    for line in lines:
        names, last = {name for name in line if name.startswith("eval_")}, merged_lines[-1] if merged_lines else {}
        if names and _is_evaluation(last) and last.get("step") == line.get("step") and not names & last.keys():
            last.update(line)
        else:
            merged_lines.append(dict(line))
    return merged_lines


def _metrics(line: Line) -> dict[str, Any]:
    """The metrics in a line, with NumPy and torch numbers converted to Python numbers."""
    values = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in line.items()}
    return {
        name: value
        for name, value in values.items()
        if name not in ("step", "epoch", "total_flos")
        and not is_measurement(name)
        and isinstance(value, (int, float, str))
    }


def _title(name: str) -> str:
    words = name.removeprefix("eval_").removeprefix("num_").split("_")
    return " ".join(word.capitalize() for word in words)


# ---- Hyperparameters: those that influence the result ----------------------------------------------------------------


def hyperparameters(parts: TrainerParts) -> dict[str, Any]:
    """The hyperparameters as name → value, with the names of arguments if possible."""
    args = parts.trainer.args
    precision = "fp16" if args.fp16 else "bf16" if args.bf16 else None
    return {
        "learning_rate": args.learning_rate,
        **_batch_sizes(parts),
        "seed": args.seed,
        "optimizer": _format_optimizer(parts),
        **({"weight_decay": args.weight_decay} if args.weight_decay else {}),
        **_schedule(parts),
        **({"mixed_precision_training": f"Native AMP ({precision})"} if precision else {}),
        **({"label_smoothing_factor": args.label_smoothing_factor} if args.label_smoothing_factor else {}),
    }


def _batch_sizes(parts: TrainerParts) -> dict[str, Any]:
    """Batch sizes (samples or tokens) per process and in total, and the kind of parallelism."""
    trainer, args = parts.trainer, parts.trainer.args
    processes = trainer.accelerator.processes.data_world_size
    train_size, eval_size = args.tokens_per_batch or parts.run.train_batch_size, args.eval_batch_size
    name = "train_batch_size" if args.tokens_per_batch is None else "tokens_per_batch"
    sizes: dict[str, Any] = {name: train_size, "eval_batch_size": eval_size}
    # `as_text` also reads the enum of transformers.
    if as_text(args.parallel_mode) != ParallelMode.NOT_PARALLEL.value:
        kinds = {"xla": "TPU", "tpu": "TPU", "cpu": "multi-CPU"}
        strategy = f" ({parts.strategy.card_name})" if parts.strategy.card_name else ""
        sizes["distributed_type"] = kinds.get(args.device.type, "multi-GPU") + strategy
    if args.world_size > 1:
        sizes["num_devices"] = args.world_size
    if args.gradient_accumulation_steps > 1:
        sizes["gradient_accumulation_steps"] = args.gradient_accumulation_steps
    if (total := train_size * processes * args.gradient_accumulation_steps) != train_size:
        sizes[f"total_{name}"] = total
    if (total := eval_size * processes) != eval_size:
        sizes["total_eval_batch_size"] = total
    return sizes


def _format_optimizer(parts: TrainerParts) -> str:
    trainer, args = parts.trainer, parts.trainer.args
    script_optimizer, _ = parts.script_optimizers
    if script_optimizer is not None:
        return _format_settings(type(script_optimizer).__name__, script_optimizer.defaults)
    if trainer.optimizer_cls_and_kwargs is not None:
        optimizer_class, settings = trainer.optimizer_cls_and_kwargs
        return _format_settings(optimizer_class.__name__, settings)
    name, settings = as_text(args.optim), {}
    if "adam" in name:
        settings = {"betas": (args.adam_beta1, args.adam_beta2), "epsilon": args.adam_epsilon}
    return _format_settings(name, {**settings, **({"optim_args": args.optim_args} if args.optim_args else {})})


def _format_settings(name: str, settings: Mapping[str, Any]) -> str:
    values = {key: value for key, value in settings.items() if isinstance(value, (int, float, str, tuple))}
    return ", ".join([name, *(f"{key}={value}" for key, value in values.items())])


def _schedule(parts: TrainerParts) -> dict[str, Any]:
    args = parts.trainer.args
    _, script_schedule = parts.script_optimizers
    length = {"training_steps": args.max_steps} if args.max_steps != -1 else {"num_epochs": args.num_train_epochs}
    if script_schedule is not None:
        return {"lr_scheduler_type": type(script_schedule).__name__, **length}
    schedule: dict[str, Any] = {"lr_scheduler_type": as_text(args.lr_scheduler_type)}
    if args.lr_scheduler_kwargs:
        schedule["lr_scheduler_kwargs"] = args.lr_scheduler_kwargs
    if args.warmup_steps:
        schedule["lr_scheduler_warmup_steps"] = args.warmup_steps
    elif old_names.is_v4_warmup_ratio("warmup_ratio") and args.warmup_ratio:
        schedule["lr_scheduler_warmup_ratio"] = args.warmup_ratio
    return {**schedule, **length}


# ---- The origins of model and data, and the task ---------------------------------------------------------------------

_TASK_NAMES = {"fill-mask": "Masked Language Modeling", "text-generation": "Causal Language Modeling"}
#: Timeout in seconds for the licence on the Hub. After a timeout, the card has no licence.
LICENSE_TIMEOUT = 5.0


class DatasetSource(NamedTuple):
    """A dataset of the `datasets` library: the names of its builder, configuration and split."""

    tag: str
    config: str | None
    split: str | None


def task_name(task: str) -> str:
    """The name of a task on the Hub."""
    return _TASK_NAMES.get(task) or task.replace("-", " ").title()


def task_of(model: Any) -> str | None:
    """The task of a transformers model (also inside an adapter), from its class; None if unknown."""
    tasks = _tasks_by_class() if "transformers" in sys.modules else {}
    return tasks.get(type(libraries.unwrap_peft(model)).__name__.removeprefix("FSDP"))


@functools.lru_cache(maxsize=1)
def _tasks_by_class() -> dict[str, str]:
    from transformers.modelcard import TASK_MAPPING

    tables: dict[str, Any] = TASK_MAPPING
    classes_by_task = [(task, names) for task, models in tables.items() for names in models.values()]
    return {name: task for task, names in classes_by_task for name in ([names] if isinstance(names, str) else names)}


def base_model_of(model: Any) -> str | None:
    """The repository of the pretrained weights; None without pretrained weights or if they came from a folder."""
    name = getattr(getattr(model, "config", None), "_name_or_path", None)
    return name if isinstance(name, str) and not os.path.isdir(name) and is_repo_id(name) else None


def is_repo_id(name: str) -> bool:
    """Whether a name is a valid repository id."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented, but not in its __all__

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


@functools.lru_cache(maxsize=64)
def license_of(repo_id: str) -> str | None:
    """The licence of a model on the Hub; None if the Hub does not answer within `LICENSE_TIMEOUT`.

    The answer is cached, so that a process waits at most once for a repository.
    """
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        tags = HfApi().model_info(repo_id, timeout=LICENSE_TIMEOUT).tags or []
    # No failure of the Hub may prevent the card.
    except Exception as error:
        logger.info("The licence of %s is unknown: %s.", repo_id, type(error).__name__)
        return None
    return next((tag.removeprefix("license:") for tag in tags if tag.startswith("license:")), None)


def datasets_of(dataset: Any) -> list[DatasetSource]:
    """The named datasets among one dataset or a dict of datasets, without duplicates."""
    sources: dict[str, DatasetSource] = {}
    for part in dataset.values() if isinstance(dataset, Mapping) else [dataset]:
        name = part.builder_name if libraries.is_dataset_or_stream(part) else None
        # A generic reader of the `datasets` library, such as 'csv', does not name a dataset.
        if name is not None and importlib.util.find_spec(f"datasets.packaged_modules.{name}") is None:
            split = None if part.split is None else str(part.split)
            sources.setdefault(name, DatasetSource(name, part.config_name, split))
    return list(sources.values())
