"""The contents of a model card: results, hyperparameters, and where model and data come from."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hftrainer.arguments import legacy
from hftrainer.arguments.choices import ParallelMode, as_text
from hftrainer.compat import peers
from hftrainer.compat.overrides import is_measurement

if TYPE_CHECKING:
    from hftrainer.training.components import Components

logger = logging.getLogger(__name__)

Line = Mapping[str, Any]

#: Entries of log lines that are not metrics.
_NOT_METRICS = ("step", "epoch", "total_flos")
#: Metrics that the Hub knows as tags of a model. 'rouge1' counts as 'rouge'.
METRIC_TAGS = "accuracy bleu f1 matthews_correlation pearsonr precision recall rouge sacrebleu spearmanr wer".split()


def evaluation_rows(log_history: Sequence[Line]) -> list[dict[str, Any]] | None:
    """A row for each evaluation during training, as column → value; None without an evaluation."""
    end = _end_of_training(log_history)
    lines = log_history[:end]
    if not any("loss" in line for line in lines) and end is None:  # not a training run
        return None
    rows = []
    training_loss: Any = "No log"
    for line in _merge_evaluations(lines):
        training_loss = line.get("loss", training_loss)
        if _is_evaluation(line):
            row = {"Training Loss": training_loss, "Epoch": line.get("epoch"), "Step": line.get("step")}
            metrics = _metrics(line).items()
            rows.append(
                row | {"Validation Loss" if key == "eval_loss" else _title(key): value for key, value in metrics}
            )
    return rows or None


def final_results(log_history: Sequence[Line], best_step: int | None) -> dict[str, Any] | None:
    """Title → value for the metrics of the final model; None without an evaluation.

    Args:
        log_history: the log lines of the run.
        best_step: the optimizer step whose weights were loaded at the end of training; None if none were loaded.
    """
    lines, end = log_history, _end_of_training(log_history)
    if best_step is not None and end is not None and not any(map(_is_evaluation, lines[end:])):
        lines = [line for line in lines if line.get("step") == best_step] or lines
    found = [line for line in _merge_evaluations(lines) if _is_evaluation(line)]
    return {_title(name): value for name, value in _metrics(found[-1]).items()} if found else None


def metric_tags(results: Mapping[str, Any]) -> dict[str, str]:
    """Tag → title, for the results that the Hub knows."""
    tags = {title.lower().replace(" ", "_").replace("rouge1", "rouge"): title for title in results}
    return {tag: title for tag, title in tags.items() if tag in METRIC_TAGS}


def format_value(value: Any) -> str:
    """Format a value for the card: numbers with four decimals, very small and very large ones with four digits."""
    text = str(value)
    if not isinstance(value, float) or "." not in text:
        return text
    if "e" in text:
        return f"{value:.4g}"
    return f"{value:.4f}" if len(text.partition(".")[2]) > 4 else text


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows as a table. A cell is empty if its row does not have the column."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [columns, *([format_value(row.get(name, "")) for name in columns] for row in rows)]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in cells]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    lines.insert(1, " | ".join(f":{'-' * (width - 2)}:" for width in widths))
    return "\n".join(f"| {line} |" for line in lines)


def _end_of_training(lines: Sequence[Line]) -> int | None:
    """The index of the last line that summarizes training, or None."""
    found = (i for i, line in enumerate(lines) if "train_runtime" in line and "train_loss" in line)
    return max(found, default=None)


def _is_evaluation(line: Line) -> bool:
    return any(name.startswith("eval_") for name in line)


def _merge_evaluations(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """The lines, with the evaluations of several datasets at one step merged into one line."""
    merged: list[dict[str, Any]] = []
    for line in lines:
        names, last = {name for name in line if name.startswith("eval_")}, merged[-1] if merged else {}
        if names and _is_evaluation(last) and last.get("step") == line.get("step") and not names & last.keys():
            last.update(line)
        else:
            merged.append(dict(line))
    return merged


def _metrics(line: Line) -> dict[str, Any]:
    """The metrics in a line, with numbers of NumPy and torch converted to Python's."""
    values = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in line.items()}
    return {
        name: value
        for name, value in values.items()
        if name not in _NOT_METRICS and not is_measurement(name) and isinstance(value, (int, float, str))
    }


def _title(name: str) -> str:
    words = name.removeprefix("eval_").removeprefix("num_").split("_")
    return " ".join(word.capitalize() for word in words)


# ---- Hyperparameters: those that influence the result ----------------------------------------------------------------


def hyperparameters(components: Components) -> dict[str, Any]:
    """Name → value, named after the arguments where possible."""
    args = components.trainer.args
    precision = "fp16" if args.fp16 else "bf16" if args.bf16 else None
    return {
        "learning_rate": args.learning_rate,
        **_batches(components),
        "seed": args.seed,
        "optimizer": _optimizer(components),
        **({"weight_decay": args.weight_decay} if args.weight_decay else {}),
        **_schedule(components),
        **({"mixed_precision_training": f"Native AMP ({precision})"} if precision else {}),
        **({"label_smoothing_factor": args.label_smoothing_factor} if args.label_smoothing_factor else {}),
    }


def _batches(components: Components) -> dict[str, Any]:
    """Batch sizes in samples or tokens, per process and in total, and how the processes work together."""
    trainer, args = components.trainer, components.trainer.args
    processes = trainer.accelerator.processes.data_world_size
    train, evaluation = args.tokens_per_batch or components.run.train_batch_size, args.eval_batch_size
    name = "train_batch_size" if args.tokens_per_batch is None else "tokens_per_batch"
    found: dict[str, Any] = {name: train, "eval_batch_size": evaluation}
    if as_text(args.parallel_mode) != ParallelMode.NOT_PARALLEL.value:  # also the enum of transformers
        kinds = {"xla": "TPU", "tpu": "TPU", "cpu": "multi-CPU"}
        strategy = f" ({components.strategy.card})" if components.strategy.card else ""
        found["distributed_type"] = kinds.get(args.device.type, "multi-GPU") + strategy
    if args.world_size > 1:
        found["num_devices"] = args.world_size
    if args.gradient_accumulation_steps > 1:
        found["gradient_accumulation_steps"] = args.gradient_accumulation_steps
    if (total := train * processes * args.gradient_accumulation_steps) != train:
        found[f"total_{name}"] = total
    if (total := evaluation * processes) != evaluation:
        found["total_eval_batch_size"] = total
    return found


def _optimizer(components: Components) -> str:
    trainer, args = components.trainer, components.trainer.args
    own_optimizer, _ = components.script_optimizers
    if own_optimizer is not None:
        return _format_settings(type(own_optimizer).__name__, own_optimizer.defaults)
    if trainer.optimizer_cls_and_kwargs is not None:
        kind, settings = trainer.optimizer_cls_and_kwargs
        return _format_settings(kind.__name__, settings)
    name, settings = as_text(args.optim), {}
    if "adam" in name:
        settings = {"betas": (args.adam_beta1, args.adam_beta2), "epsilon": args.adam_epsilon}
    return _format_settings(name, {**settings, **({"optim_args": args.optim_args} if args.optim_args else {})})


def _format_settings(name: str, settings: Mapping[str, Any]) -> str:
    printable = {key: value for key, value in settings.items() if isinstance(value, (int, float, str, tuple))}
    return ", ".join([name, *(f"{key}={value}" for key, value in printable.items())])


def _schedule(components: Components) -> dict[str, Any]:
    args = components.trainer.args
    _, own_schedule = components.script_optimizers
    length = {"training_steps": args.max_steps} if args.max_steps != -1 else {"num_epochs": args.num_train_epochs}
    if own_schedule is not None:
        return {"lr_scheduler_type": type(own_schedule).__name__, **length}
    found: dict[str, Any] = {"lr_scheduler_type": as_text(args.lr_scheduler_type)}
    if args.lr_scheduler_kwargs:
        found["lr_scheduler_kwargs"] = args.lr_scheduler_kwargs
    if args.warmup_steps:
        found["lr_scheduler_warmup_steps"] = args.warmup_steps
    elif legacy.keeps_ratio("warmup_ratio") and args.warmup_ratio:
        found["lr_scheduler_warmup_ratio"] = args.warmup_ratio
    return {**found, **length}


# ---- The provenance of model and data, and the task, as far as the objects tell --------------------------------------

_TASK_NAMES = {"fill-mask": "Masked Language Modeling", "text-generation": "Causal Language Modeling"}
#: Seconds to wait for the Hub when asking for a licence. After that, the card has no licence.
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
    """The task of a transformers model, or of the model inside an adapter, by its class; None if unknown."""
    tasks = _tasks_by_class() if "transformers" in sys.modules else {}
    return tasks.get(type(peers.unwrap_peft(model)).__name__.removeprefix("FSDP"))


@functools.lru_cache(maxsize=1)
def _tasks_by_class() -> dict[str, str]:
    from transformers.modelcard import TASK_MAPPING

    tables: dict[str, Any] = TASK_MAPPING
    listed = [(task, names) for task, models in tables.items() for names in models.values()]
    return {name: task for task, names in listed for name in ([names] if isinstance(names, str) else names)}


def base_model_of(model: Any) -> str | None:
    """The repository of the pretrained weights. None without such weights, or if they came from a folder."""
    name = getattr(getattr(model, "config", None), "_name_or_path", None)
    return name if isinstance(name, str) and not os.path.isdir(name) and is_repo_id(name) else None


def is_repo_id(name: str) -> bool:
    """Whether this is a valid repository name."""
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

    The answer is cached, so that a process waits at most once for a network that does not answer.
    """
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        tags = HfApi().model_info(repo_id, timeout=LICENSE_TIMEOUT).tags or []
    except Exception as error:  # no failure of the Hub may prevent the card
        logger.info("The licence of %s is unknown: %s.", repo_id, type(error).__name__)
        return None
    return next((tag.removeprefix("license:") for tag in tags if tag.startswith("license:")), None)


def datasets_of(dataset: Any) -> list[DatasetSource]:
    """The named datasets among one dataset or a dict of datasets, without duplicates."""
    found: dict[str, DatasetSource] = {}
    for one in dataset.values() if isinstance(dataset, Mapping) else [dataset]:
        name = one.builder_name if peers.is_dataset_or_stream(one) else None
        # A generic reader of the `datasets` library, such as 'csv', does not name a dataset.
        if name is not None and importlib.util.find_spec(f"datasets.packaged_modules.{name}") is None:
            split = None if one.split is None else str(one.split)
            found.setdefault(name, DatasetSource(name, one.config_name, split))
    return list(found.values())
