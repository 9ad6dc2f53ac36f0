"""`lightning_config`: keywords passed to `lightning.Trainer`, and those that the Trainer's own arguments set."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from hftrainer.errors import suggest
from hftrainer.parallel.environment import LAUNCHERS, check_choices

#: Keywords that are passed to `lightning.Trainer` unchanged.
PASSED = frozenset(
    """
    benchmark detect_anomaly deterministic default_root_dir enable_autolog_hparams limit_predict_batches
    limit_test_batches limit_val_batches max_time model_registry plugins precision profiler
    """.split()
)
#: Keywords that the Trainer's own arguments set → what to use instead.
RULED = {
    "accelerator": "use_cpu",
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
#: Keywords that this release does not support yet → the values that change nothing.
PLANNED = {
    "barebones": (False, None),
    "inference_mode": (True, False),
    "strategy": ("auto", "ddp"),
    "sync_batchnorm": (False,),
}
PROFILERS = ("simple", "advanced", "pytorch", "xla")
PRECISIONS = ("32-true", "32", 32, "bf16-mixed", "16-mixed")
#: Keywords that arguments also set → those arguments.
ALSO_SET_BY = {"precision": ("bf16", "fp16"), "deterministic": ("full_determinism",)}


#: Keywords of hftrainer, not of Lightning → their allowed values.
OWN: dict[str, tuple[Any, ...]] = {
    "async_checkpoint": (False, True),
    "environment": tuple(LAUNCHERS),
    "on_save_error": ("continue", "stop"),
}
#: Keywords of hftrainer that `releases.followed` checks.
CHECKED_ELSEWHERE = ("behaviour",)
#: Keywords that set the number of processes.
PLACE = ("devices", "num_nodes")


def check_keywords(config: Mapping[str, Any]) -> list[str]:
    """A sentence for each keyword that is unknown or not supported."""
    found = list(check_choices(config))
    for name, value in config.items():
        if name in RULED:
            found.append(f"lightning_config[{name!r}]: the Trainer decides this; use {RULED[name]}.")
        elif name in PLANNED and value not in PLANNED[name]:
            found.append(f"lightning_config[{name!r}]={value!r} is not supported yet: leave it out.")
        elif name == "precision" and value not in PRECISIONS:
            found.append(
                f"lightning_config['precision']={value!r} is not supported yet: use '32-true', 'bf16-mixed' or "
                "'16-mixed'."
            )
        elif name in OWN and value not in OWN[name]:
            allowed = " or ".join(map(repr, OWN[name]))
            found.append(f"lightning_config[{name!r}]={value!r}: it must be {allowed}.")
        elif name == "profiler" and isinstance(value, str) and value not in PROFILERS:
            found.append(f"lightning_config['profiler']={value!r}: it must be {' or '.join(map(repr, PROFILERS))}.")
        elif not any(name in known for known in (PASSED, PLANNED, OWN, PLACE, CHECKED_ELSEWHERE)):
            hint = suggest(name, [*PASSED, *RULED, *PLANNED, *OWN, *PLACE, *CHECKED_ELSEWHERE], ".")
            found.append(f"lightning_config[{name!r}]: lightning.Trainer has no such keyword{hint}")
    return found


def passed_on(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords that are passed to `lightning.Trainer`."""
    return {name: value for name, value in config.items() if name in PASSED and name != "precision"}


def brings_async_checkpoints(plugins: Any) -> bool:
    """Whether Lightning's `AsyncCheckpointIO` is among the plugins; only possible if Lightning is imported."""
    module = sys.modules.get("lightning.pytorch.plugins.io")
    kind = getattr(module, "AsyncCheckpointIO", None)
    given = plugins if isinstance(plugins, (list, tuple)) else [plugins]
    return kind is not None and any(isinstance(plugin, kind) for plugin in given)
