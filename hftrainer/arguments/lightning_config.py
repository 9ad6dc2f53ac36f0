"""`lightning_config`: which keyword arguments of Lightning's Trainer are allowed, and the errors for the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hftrainer.arguments.base import BaseArguments
from hftrainer.errors import SYNONYMS, suggest
from hftrainer.parallel.environment import LAUNCHERS, check_launcher_config

#: Keyword arguments that are forwarded to `lightning.Trainer` unchanged.
FORWARDED = frozenset(
    """
    benchmark detect_anomaly deterministic default_root_dir enable_autolog_hparams limit_predict_batches
    limit_test_batches limit_val_batches max_time model_registry plugins profiler
    """.split()
)
#: Keyword arguments that the Trainer's own arguments set → what to use instead.
RESERVED = {
    "accelerator": "use_cpu=True for the CPU; other devices are found",
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "callbacks": "Trainer(callbacks=[...])",
    "check_val_every_n_epoch": "eval_strategy and eval_steps",
    "enable_checkpointing": "save_strategy",
    "enable_model_summary": "a ModelSummary in Trainer(callbacks=[...])",
    "enable_progress_bar": "disable_tqdm",
    "fast_dev_run": "max_steps",
    "gradient_clip_algorithm": "max_grad_norm",
    "gradient_clip_val": "max_grad_norm",
    "limit_train_batches": "max_steps",
    "log_every_n_steps": "logging_steps",
    "logger": "report_to or Trainer(loggers=[...])",
    "max_epochs": "num_train_epochs",
    "max_steps": "max_steps",
    "min_epochs": "num_train_epochs",
    "min_steps": "max_steps",
    "num_sanity_val_steps": "eval_on_start",
    "overfit_batches": "a smaller train_dataset",
    "reload_dataloaders_every_n_epochs": "an override of get_train_dataloader",
    "use_distributed_sampler": "_get_train_sampler",
    "val_check_interval": "eval_strategy and eval_steps",
}
#: The same, and keyword arguments of `lightning.Trainer.fit`.
_REPLACEMENTS = RESERVED | {"datamodule": "its datasets: data.setup('fit'), Trainer(..., train_dataset=data.train)"}
#: Other keyword arguments → their allowed values. The last three are hftrainer's, the others Lightning's.
ALLOWED: dict[str, tuple[Any, ...]] = {
    "barebones": (False, None),
    "inference_mode": (True, False),
    "precision": ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true", "32", 32),
    "strategy": ("auto", "ddp"),
    "sync_batchnorm": (False,),
    "async_checkpoint": (False, True),
    "environment": tuple(LAUNCHERS),
    "on_save_error": ("continue", "stop"),
}
_PROFILERS = ("simple", "advanced", "pytorch", "xla")
#: Keyword arguments that are checked elsewhere: the number of processes, and the release that is followed.
RELEASE_KEYWORDS = ("devices", "num_nodes", "behaviour")
#: Keyword arguments → the arguments that they override.
OVERRIDDEN_ARGUMENTS = {"precision": ("bf16", "fp16"), "deterministic": ("full_determinism",)}


def explain_keyword(name: str, value: Any, known_names: Iterable[str], otherwise: str = "") -> str:
    """The end of an error about an unknown argument: how to pass one of `lightning.Trainer`, or as `suggest`."""
    if name in (*FORWARDED, *ALLOWED, *RELEASE_KEYWORDS):
        if problems := check_keywords({name: value}):
            return f": it is a key of lightning_config; there, {problems[0]}"
        return f": pass TrainingArguments(..., lightning_config={{{name!r}: {value!r}}})"
    is_replaced = name in _REPLACEMENTS and name not in SYNONYMS and name not in BaseArguments.__dataclass_fields__
    return f": use {_REPLACEMENTS[name]}" if is_replaced else suggest(name, known_names, otherwise)


def check_keywords(config: Mapping[str, Any]) -> list[str]:
    """Error messages for keyword arguments that are unknown or not supported."""
    errors = list(check_launcher_config(config))
    for name, value in config.items():
        allowed = _PROFILERS if name == "profiler" and isinstance(value, str) else ALLOWED.get(name, (value,))
        if name in RESERVED:
            errors.append(f"lightning_config[{name!r}] is reserved for the Trainer: use {RESERVED[name]}.")
        elif value not in allowed:
            choices = " or ".join(map(repr, allowed))
            more = " For sharding, set the argument fsdp or deepspeed." if name == "strategy" else ""
            errors.append(f"lightning_config[{name!r}]={value!r} is not supported: it must be {choices}.{more}")
        elif name not in FORWARDED and name not in ALLOWED and name not in RELEASE_KEYWORDS:
            hint = suggest(name, [*FORWARDED, *RESERVED, *ALLOWED, *RELEASE_KEYWORDS], ".")
            errors.append(f"lightning_config[{name!r}]: lightning.Trainer has no such argument{hint}")
    return errors
