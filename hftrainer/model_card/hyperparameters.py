"""The hyperparameters in a model card: those that influence the result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hftrainer.arguments import legacy
from hftrainer.arguments.choices import ParallelMode, spelled

if TYPE_CHECKING:
    from hftrainer.training.components import Components


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
    """Batch sizes in samples, per process and in total, and how the processes work together."""
    trainer, args = components.trainer, components.trainer.args
    processes = trainer.accelerator.processes.data_processes
    train, evaluation = components.run.train_batch_size, args.eval_batch_size
    found: dict[str, Any] = {"train_batch_size": train, "eval_batch_size": evaluation}
    if spelled(args.parallel_mode) != ParallelMode.NOT_PARALLEL.value:  # also the enum of transformers
        kinds = {"xla": "TPU", "tpu": "TPU", "cpu": "multi-CPU"}
        strategy = f" ({components.strategy.card})" if components.strategy.card else ""
        found["distributed_type"] = kinds.get(args.device.type, "multi-GPU") + strategy
    if args.world_size > 1:
        found["num_devices"] = args.world_size
    if args.gradient_accumulation_steps > 1:
        found["gradient_accumulation_steps"] = args.gradient_accumulation_steps
    if (total := train * processes * args.gradient_accumulation_steps) != train:
        found["total_train_batch_size"] = total
    if (total := evaluation * processes) != evaluation:
        found["total_eval_batch_size"] = total
    return found


def _optimizer(components: Components) -> str:
    trainer, args = components.trainer, components.trainer.args
    own_optimizer, _ = components.optimizers_given
    if own_optimizer is not None:
        return _with_settings(type(own_optimizer).__name__, own_optimizer.defaults)
    if trainer.optimizer_cls_and_kwargs is not None:
        kind, settings = trainer.optimizer_cls_and_kwargs
        return _with_settings(kind.__name__, settings)
    name, settings = spelled(args.optim), {}
    if "adam" in name:
        settings = {"betas": (args.adam_beta1, args.adam_beta2), "epsilon": args.adam_epsilon}
    return _with_settings(name, {**settings, **({"optim_args": args.optim_args} if args.optim_args else {})})


def _with_settings(name: str, settings: Mapping[str, Any]) -> str:
    printable = {key: value for key, value in settings.items() if isinstance(value, (int, float, str, tuple))}
    return ", ".join([name, *(f"{key}={value}" for key, value in printable.items())])


def _schedule(components: Components) -> dict[str, Any]:
    args = components.trainer.args
    _, own_schedule = components.optimizers_given
    length = {"training_steps": args.max_steps} if args.max_steps != -1 else {"num_epochs": args.num_train_epochs}
    if own_schedule is not None:
        return {"lr_scheduler_type": type(own_schedule).__name__, **length}
    found: dict[str, Any] = {"lr_scheduler_type": spelled(args.lr_scheduler_type)}
    if args.lr_scheduler_kwargs:
        found["lr_scheduler_kwargs"] = args.lr_scheduler_kwargs
    if args.warmup_steps:
        found["lr_scheduler_warmup_steps"] = args.warmup_steps
    elif legacy.keeps_ratio("warmup_ratio") and args.warmup_ratio:
        found["lr_scheduler_warmup_ratio"] = args.warmup_ratio
    return {**found, **length}
