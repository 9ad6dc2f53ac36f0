"""Arguments of hftrainer alone: no release of transformers has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hftrainer.arguments.fields.argument import OURS, arg
from hftrainer.arguments.fields.current import CurrentArguments


@dataclass(kw_only=True)
class OwnArguments(CurrentArguments):
    """The arguments that only hftrainer has."""

    # transformers' parser does not support a union with bool.
    observe: None | str | Literal[True, False] | list[str] = arg(
        False,
        "Measure the run: True, or some of 'speed' (tokens and samples per second, seconds per step), 'time' (shares "
        "of waiting for data, evaluations and saves), 'memory', 'mfu', 'warnings' (about slow steps and slow data) and "
        "'journal' (the file that `watch` reads). Each log line has the values of its interval.",
        OURS,
        const=True,
        accepts_several=True,
        read_once=True,
    )
    new_tracker_run: bool = arg(
        False, "Start new tracker runs when training resumes, instead of continuing those of the checkpoint.", OURS
    )
    metrics_port: int | str | None = arg(
        None,
        "Port of 127.0.0.1 on which the first process of each node serves /metrics for Prometheus, and /health, which "
        "names a rank that hangs; '0.0.0.0:9400' also sets the address.",
        OURS,
    )
    eval_minutes: float | None = arg(None, "Also evaluate this many minutes after the last evaluation.", OURS)
    eval_memmap_dir: str | None = arg(None, "Folder of temporary memory-mapped files for predictions.", OURS)
    save_minutes: float | None = arg(None, "Also save this many minutes after the last save.", OURS)
    storage_url: str | None = arg(
        None,
        "URL for all files of output_dir, such as 's3://bucket/run': uploaded in the background, and downloaded to "
        "resume. A URL as output_dir has the same effect, with local files in a cache folder.",
        OURS,
        read_once=True,
    )
    keep_local: int = arg(1, "With storage_url, local checkpoints to keep, besides the best.", OURS, minimum=1)
    checkpoint_format: str = arg(
        "transformers",
        "'dcp' saves weights and optimizer in one folder of torch.distributed.checkpoint, as torchtitan does.",
        OURS,
        choices=("transformers", "dcp"),
        read_once=True,
    )
    save_on_interrupt: bool = arg(
        True,
        "On SIGTERM, SIGUSR1, Ctrl-C or an error, save the last complete optimizer step before the run ends. Nothing "
        "is saved with save_strategy='no'.",
        OURS,
    )
    lightning_config: dict[str, Any] | str | None = arg(
        None,
        "Keyword arguments of `lightning.Trainer`, as a dict, a JSON object, or the path of a JSON or YAML file.",
        OURS,
        "mapped: keyword arguments of lightning.Trainer, which override the arguments, and of hftrainer",
        json=True,
    )

    # ---- Training data ---------------------------------------------------------------------------------------------

    elastic: bool = arg(
        False,
        "Keep the samples of an optimizer step when a run resumes on another number of processes or with another "
        "per_device_train_batch_size: gradient_accumulation_steps is adapted. The last step of an epoch is filled "
        "with the epoch's first samples.",
        OURS,
    )

    mixture_weights: dict[str, Any] | str | Any | None = arg(
        None,
        "With a dict of datasets as train_dataset, or mixture_column: the weight of each source in the samples, as a "
        "dict, as a JSON object, or as a function of the optimizer step; None weighs sources by size.",
        OURS,
        json=True,
    )
    mixture_temperature: float = arg(
        1.0,
        "Without mixture_weights, a source of n samples has the weight n ** (1 / mixture_temperature): 1 weighs by "
        "size, larger values bring the weights closer together.",
        OURS,
    )
    mixture_column: str | None = arg(None, "The column of train_dataset that names the source of each sample.", OURS)

    param_groups: list[dict[str, Any]] | str | None = arg(
        None,
        "Optimizer settings by parameter name: a list of dicts, or the path of a JSON file with one. Each dict "
        "has a `pattern`, and `lr`, `lr_scale`, `layer_decay`, `weight_decay` or other settings of a group.",
        OURS,
        json=True,
    )
    tokens_per_batch: int | None = arg(
        None,
        "Maximum number of tokens, including padding, in a training micro-batch of one process; replaces "
        "per_device_train_batch_size. A batch has samples of similar lengths.",
        OURS,
    )
    flatten_batches: bool = arg(
        False,
        "Train a causal LM on batches without padding: the samples of a batch form one row, with position_ids.",
        OURS,
    )
    on_divergence: str | None = arg(
        None,
        "What to do about a step whose loss is not finite or a spike (`divergence_threshold`), or whose gradients are "
        "not finite, before it changes the weights: 'rollback' goes back to the last checkpoint and skips the step's "
        "samples, listed in `skipped_samples.jsonl`; 'stop' raises an error that names them; None does nothing.",
        OURS,
        choices=("rollback", "stop"),
    )
    divergence_threshold: float | None = arg(
        None,
        "With `on_divergence`: the loss of a step is a spike if it exceeds the mean of the last 100 by this many "
        "standard deviations, such as 10; None detects no spikes.",
        OURS,
    )
    max_rollbacks: int = arg(
        3,
        "With `on_divergence='rollback'`: rollbacks after which the next divergence is an error; a resumed run "
        "continues the count.",
        OURS,
        minimum=0,
    )
