"""THE TABLE: how each training argument is handled, and the plan made from the arguments."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hftrainer.arguments import legacy
from hftrainer.arguments.checks.devices import check_device
from hftrainer.arguments.checks.fsdp import check_fsdp
from hftrainer.arguments.checks.xla import check_xla
from hftrainer.arguments.installed import is_set_by_release
from hftrainer.arguments.launched import check_launched, unknown_variables
from hftrainer.arguments.lightning_config import (
    ALSO_SET_BY,
    brings_async_checkpoints,
    check_keywords,
    passed_on,
)
from hftrainer.errors import WrongConfig
from hftrainer.parallel.devices import OTHERS, count_of, own_backend
from hftrainer.parallel.environment import can_start_again, check_rank_info
from hftrainer.parallel.layout import check_layout
from hftrainer.parallel.plan import LightningPlan
from hftrainer.parallel.processes import Processes
from hftrainer.plugins import load

if TYPE_CHECKING:
    from hftrainer.arguments.base import BaseArguments
    from hftrainer.arguments.resolved import ResolvedArguments


@dataclass(frozen=True)
class Row:
    """How one argument is handled.

    Attributes:
        kind: 'mapped' (to a Lightning setting), 'handled' (by a module of hftrainer), 'inert' (accepted without
            effect), 'refused' (only its neutral value is accepted).
        detail: the setting, the module, the reason, or what to use instead.
    """

    kind: str
    detail: str = ""


def _rows(kind: str, **details: str) -> dict[str, Row]:
    return {name: Row(kind, detail) for name, detail in details.items()}


_TRACKIO = "integrations: read by the Trackio callback of transformers"

TABLE: dict[str, Row] = {
    **_rows(
        "mapped",
        gradient_accumulation_steps="accumulate_grad_batches",
        bf16="precision plugin: bf16-mixed",
        fp16="precision plugin: 16-mixed, with loss scaling",
        use_cpu="accelerator",
        full_determinism="deterministic",
        output_dir="default_root_dir",
        ddp_backend="strategy: process_group_backend",
        ddp_timeout="strategy: timeout",
        fsdp="strategy: FSDPStrategy or ModelParallelStrategy",
        deepspeed="strategy: DeepSpeedStrategy",
        fsdp_config="parallel.fsdp: how the model is sharded",
        parallelism_config="strategy: ModelParallelStrategy; dp_shard_size means FSDP2, also without fsdp",
        ddp_find_unused_parameters="strategy: find_unused_parameters",
        ddp_bucket_cap_mb="strategy: bucket_cap_mb",
        ddp_broadcast_buffers="strategy: broadcast_buffers",
        ddp_static_graph="strategy: static_graph",
        lightning_config="keywords of lightning.Trainer, which override the arguments, and of hftrainer",
    ),
    **_rows(
        "handled",
        per_device_train_batch_size="trainer: train loader",
        num_train_epochs="data.schedule",
        max_steps="data.schedule",
        lr_scheduler_type="optimization",
        lr_scheduler_kwargs="optimization",
        warmup_steps="optimization",
        learning_rate="trainer_optimizer",
        optim="trainer_optimizer",
        optim_args="trainer_optimizer",
        optim_target_modules="optimizers.low_rank",
        weight_decay="trainer_optimizer",
        adam_beta1="trainer_optimizer",
        adam_beta2="trainer_optimizer",
        adam_epsilon="trainer_optimizer",
        average_tokens_across_devices="trainer: num_items_in_batch",
        max_grad_norm="training.loop: clipping and grad_norm",
        use_cache="trainer: model.config",
        seed="trainer_utils.set_seed",
        data_seed="data.loaders",
        dataloader_drop_last="trainer: loaders",
        dataloader_num_workers="trainer: loaders",
        dataloader_pin_memory="trainer: loaders",
        dataloader_persistent_workers="trainer: loaders",
        dataloader_prefetch_factor="trainer: loaders",
        dataloader_multiprocessing_context="trainer: loaders",
        dataloader_in_order="trainer: loaders",
        remove_unused_columns="data.columns",
        label_names="trainer: prediction_step",
        train_sampling_strategy="trainer: _get_train_sampler",
        length_column_name="data.samplers",
        accelerator_config="data.delivery; strategy: sync_each_batch",
        logging_strategy="trainer_callback",
        logging_steps="trainer_callback",
        logging_first_step="trainer_callback",
        logging_nan_inf_filter="training.loop, evaluation",
        report_to="integrations: Lightning loggers, or the callbacks of transformers",
        run_name="trackers: name of the run in wandb, mlflow and comet_ml",
        project=_TRACKIO,
        trackio_space_id=_TRACKIO,
        trackio_bucket_id=_TRACKIO,
        trackio_static_space_id=_TRACKIO,
        log_on_each_node="training_args: should_log",
        debug="debug_utils: underflow_overflow; xla: tpu_metrics_debug",
        skip_memory_metrics="reporting.memory",
        log_level="trainer: log level of hftrainer, and of transformers if it is imported",
        log_level_replica="training_args: get_process_log_level",
        disable_tqdm="trainer_callback",
        eval_strategy="trainer_callback",
        eval_steps="trainer_callback",
        eval_delay="trainer_callback",
        eval_on_start="training.loop",
        per_device_eval_batch_size="trainer: eval loader",
        prediction_loss_only="trainer: evaluation_loop",
        eval_accumulation_steps="evaluation",
        eval_do_concat_batches="evaluation",
        eval_use_gather_object="evaluation",
        eval_memmap_dir="evaluation: growing_array",
        batch_eval_metrics="evaluation: metrics",
        bf16_full_eval="trainer: evaluation_loop",
        fp16_full_eval="trainer: evaluation_loop",
        include_num_input_tokens_seen="trainer: log",
        tf32="model.changes",
        activation_checkpointing="model.changes",
        activation_checkpointing_kwargs="model.changes",
        gradient_checkpointing="model.changes; the name of activation_checkpointing until v5.23",
        gradient_checkpointing_kwargs="model.changes",
        torch_compile="model.changes",
        torch_compile_backend="model.changes",
        torch_compile_mode="model.changes",
        use_liger_kernel="model.changes",
        liger_kernel_config="model.changes",
        label_smoothing_factor="trainer_pt_utils.LabelSmoother",
        neftune_noise_alpha="model.changes",
        auto_find_batch_size="training.out_of_memory",
        torch_empty_cache_steps="training.out_of_memory",
        include_for_metrics="evaluation",
        metric_for_best_model="trainer: _determine_best_metric",
        greater_is_better="trainer: _determine_best_metric",
        save_strategy="trainer_callback",
        save_steps="trainer_callback",
        save_total_limit="checkpointing.folders",
        save_on_interrupt="training.stopping",
        enable_jit_checkpoint="training.stopping",
        save_only_model="trainer: _save_checkpoint",
        save_on_each_node="training_args: should_save",
        load_best_model_at_end="trainer",
        ignore_data_skip="trainer: resume",
        restore_callback_states_from_checkpoint="trainer: resume",
        push_to_hub="hub.uploads",
        hub_model_id="hub.repository",
        hub_strategy="hub.uploads",
        hub_token="hub.repository",
        hub_private_repo="hub.repository",
        hub_always_push="trainer: _push_from_checkpoint",
        hub_revision="hub.repository",
    ),
    **_rows(
        "inert",
        do_train="a switch for your script",
        do_eval="a switch for your script",
        do_predict="a switch for your script",
        resume_from_checkpoint="for your script to pass to train()",
        local_rank="for launchers that add it to the command line; the rank is read from the environment",
    ),
}

#: Old names. `hftrainer.arguments.legacy` translates them to the current ones.
TABLE |= _rows(
    "handled",
    evaluation_strategy="old name of eval_strategy",
    no_cuda="old name of use_cpu",
    per_gpu_train_batch_size="old name of per_device_train_batch_size",
    per_gpu_eval_batch_size="old name of per_device_eval_batch_size",
    warmup_ratio="warmup_steps below 1",
    adafactor="optim='adafactor'",
    group_by_length="train_sampling_strategy='group_by_length'",
    include_inputs_for_metrics="include_for_metrics=['inputs']",
    torchdynamo="old name of torch_compile_backend",
    xpu_backend="old name of ddp_backend",
    push_to_hub_model_id="hub_model_id",
    push_to_hub_organization="hub_model_id",
    push_to_hub_token="old name of hub_token",
    sharded_ddp="fsdp",
    fsdp_min_num_params="fsdp_config['min_num_params']",
    fsdp_transformer_layer_cls_to_wrap="fsdp_config['transformer_layer_cls_to_wrap']",
    dispatch_batches="accelerator_config['dispatch_batches']",
    split_batches="accelerator_config['split_batches']",
    tpu_metrics_debug="debug='tpu_metrics_debug'",
    tpu_num_cores="TPUs: number of cores; python -m hftrainer run --tpu starts a process for each. The extra tpu "
    "installs torch_xla 2.9 with torch 2.9, torch-tpu its successor torch_tpu, for torch 2.11 to 2.15",
    use_legacy_prediction_loop="trainer: prediction_loop",
    save_safetensors="checkpointing.weights",
    past_index="trainer: compute_loss",
    ray_scope="hftrainer_ray: which objectives of a trial are compared; also set by RAY_SCOPE in the environment",
    include_tokens_per_second="trainer: the metrics of train()",
    logging_dir="trackers: folder of tensorboard and csv",
    use_mps_device="parallel.devices: Apple's GPU is used automatically; an error if there is none",
    fp16_backend=(
        _AUTOCAST := "auto, amp, cuda_amp, cpu_amp: torch's autocast; apex too, with a warning: its amp is gone"
    ),
    half_precision_backend=_AUTOCAST,
    fp16_opt_level="O1 (or 01): torch's float16 autocast. O2 and O3 are refused, since apex.amp is gone: leave it out, "
    "or load the model with dtype=torch.bfloat16 for weights of half the size",
)
TABLE |= _rows(
    "inert",
    overwrite_output_dir="a switch for your script",
    jit_mode_eval="a warning: torch has discontinued TorchScript, and evaluations run the model as it is",
    use_ipex="a warning: Intel has moved its extension into torch",
)
TABLE |= _rows(
    "refused",
    mp_parameters="SageMaker's model-parallel library is not an engine of Lightning; use fsdp, and start the job with "
    "torchrun, as SageMaker's distribution={'torch_distributed': {'enabled': True}} does",
    model_parallel="naive model parallelism was removed after v4.1; load the model with device_map, or use fsdp",
)
#: The fields of Seq2SeqTrainingArguments.
TABLE |= _rows(
    "handled",
    predict_with_generate="trainer_seq2seq",
    generation_max_length="trainer_seq2seq",
    generation_num_beams="trainer_seq2seq",
    generation_config="trainer_seq2seq",
    sortish_sampler="trainer_seq2seq: _get_train_sampler",
)
#: Old arguments that take only these values; others are refused.
ACCEPTED: dict[str, tuple[str, ...]] = {
    "fp16_backend": (_BACKENDS := ("auto", "amp", "cuda_amp", "cpu_amp", "apex")),
    "half_precision_backend": _BACKENDS,
    "fp16_opt_level": ("O0", "O1", "01"),
}


#: Arguments that transformers reads once, when the Trainer is made. Later changes have no effect.
READ_ONCE = (
    *("use_cpu", "bf16", "fp16", "full_determinism", "ddp_backend", "ddp_timeout", "ddp_find_unused_parameters"),
    *("ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "fsdp", "fsdp_config", "deepspeed"),
    *("parallelism_config", "lightning_config", "accelerator_config", "data_seed"),
    *("torch_compile", "torch_compile_backend", "torch_compile_mode", "tf32", "neftune_noise_alpha"),
    *("label_names", "label_smoothing_factor", "use_cache", "report_to", "disable_tqdm", "log_level"),
    *("log_level_replica", "skip_memory_metrics", "enable_jit_checkpoint", "per_device_train_batch_size"),
)

#: Arguments with the default None → their value when not given.
_KEPT = {
    "save_safetensors": True,
    "past_index": -1,
    "ray_scope": "last",
    "activation_checkpointing": False,
    "gradient_checkpointing": False,
    "disable_tqdm": False,
    "output_dir": "trainer_output",
    "fp16_backend": "auto",
    "half_precision_backend": "auto",
    "fp16_opt_level": "O1",
}

#: Keywords of `DistributedDataParallel` that are arguments with the prefix ddp_.
_DDP = ("find_unused_parameters", "bucket_cap_mb", "broadcast_buffers", "static_graph")


def given_rows(args: BaseArguments) -> Iterator[tuple[str, Row]]:
    """Each argument whose value is not neutral, with its row; without the own fields of the user's subclass."""
    own = legacy.redeclared(type(args))
    known = {field.name: field for field in dataclasses.fields(args)}
    hidden = {name: field for name, field in legacy.HIDDEN.items() if name in vars(args)}
    for field in {**hidden, **known}.values():
        if field.name in TABLE and field.name not in own and not is_set_by_release(args, field.name):
            row, is_given = _row_of(args, field)
            if is_given:
                yield field.name, row


def _row_of(args: BaseArguments, field: dataclasses.Field[Any]) -> tuple[Row, bool]:
    """The row of one argument with its value, and whether that value differs from a neutral one."""
    row, value = TABLE[field.name], getattr(args, field.name)
    if field.name in ACCEPTED and value not in (None, *ACCEPTED[field.name]):
        row = Row("refused", row.detail)
    if field.name in _KEPT:
        return row, value not in (None, _KEPT[field.name])
    return row, not _is_neutral(value, field.default)


def check_supported(resolved: ResolvedArguments, *, own_optimizer: bool = False) -> list[str]:
    """A sentence for each argument that this release does not support.

    Args:
        resolved: the training arguments, with the model if it exists: the way it was loaded is checked too.
        own_optimizer: whether the script has made the optimizer.
    """
    args, found = resolved.args, []
    for name, row in given_rows(args):
        if row.kind == "refused":
            found.append(f"{name}={getattr(args, name)!r} is not supported: {row.detail}.")
    found += check_launched(args.device)
    try:
        found += check_keywords(resolved.lightning_config)
        found += _check_sharding(resolved, own_optimizer)
        if resolved.deepspeed is not None:
            found += load("deepspeed", "settings").check_deepspeed(args, resolved.deepspeed, resolved.lightning_config)
        found += check_layout(resolved.layout, resolved.fsdp, args.world_size)
        spreads = resolved.sharding is not None or resolved.layout.tp_size > 1
        found += check_device(args, resolved.precision_without_deepspeed, resolved.rank_info.world_size, spreads)
    except WrongConfig as error:
        found.append(str(error))
    return found + check_launch(resolved)


def check_launch(resolved: ResolvedArguments) -> list[str]:
    """A sentence for each reason why the processes that the launcher has started cannot train."""
    args, rank_info = resolved.args, resolved.rank_info
    of_xla = check_xla(args, rank_info, legacy.value(args, "tpu_num_cores") or None)
    return [*check_rank_info(rank_info, resolved.readable_config, count_of(args.device)), *of_xla]


def _check_sharding(resolved: ResolvedArguments, own_optimizer: bool) -> list[str]:
    args, settings, config = resolved.args, resolved.fsdp, resolved.lightning_config
    if settings is None or args.device.type in ("mps", *OTHERS):  # `check_device` reports these
        return []
    launched = resolved.rank_info.launcher != "lightning"
    return list(check_fsdp(args, settings, config, launched=launched, own_optimizer=own_optimizer))


def _is_neutral(value: Any, default: Any) -> bool:
    """Whether `value` is the default or empty. `transformers` fills in accelerate's defaults."""
    if type(value).__name__ == "AcceleratorConfig":
        return value == type(value)()
    nothing = value is None or (not value and not isinstance(value, (bool, int, float)))
    return nothing or value == default or value in ("no", "none")


def process_group_backend(resolved: ResolvedArguments) -> str | None:
    """The backend of the process group; with offloading, gradients are clipped in CPU memory, which needs gloo too."""
    kind = resolved.device.type
    offloads = resolved.sharding is not None and resolved.sharding.cpu_offload and kind == "cuda"
    own = "cpu:gloo,cuda:nccl" if offloads else own_backend(kind) if kind in OTHERS else None
    return own if resolved.args.ddp_backend is None else resolved.args.ddp_backend


def make_plan(resolved: ResolvedArguments) -> LightningPlan:
    """The plan for these arguments and the model, which may have been split while it was loaded."""
    args, device, config = resolved.args, resolved.device, resolved.lightning_config
    return LightningPlan(
        accelerator=device.type,
        device=str(device),
        precision=resolved.precision,  # type: ignore[arg-type]
        accumulate_grad_batches=args.gradient_accumulation_steps,
        deterministic=args.full_determinism,
        default_root_dir=str(args.output_dir),
        processes=Processes.at(resolved.rank_info, resolved.layout.tp_size),
        process_group_backend=process_group_backend(resolved),
        timeout=args.ddp_timeout,
        ddp=MappingProxyType(
            {name: value for name in _DDP if (value := getattr(args, f"ddp_{name}", None)) is not None}
        ),
        sharding=resolved.sharding,
        layout=resolved.layout,
        deepspeed=resolved.deepspeed,
        async_checkpoint=config.get("async_checkpoint", False) or brings_async_checkpoints(config.get("plugins")),
        stop_on_save_error=config.get("on_save_error") == "stop",
        read_once=MappingProxyType({name: copy.copy(getattr(args, name, None)) for name in READ_ONCE}),
        config=MappingProxyType(passed_on(config)),
    )


def overridden(resolved: ResolvedArguments) -> list[str]:
    """A sentence for each setting without effect: overridden by `lightning_config` or an argument, or unused."""
    args, config, found = resolved.args, resolved.lightning_config, []
    steps = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "")
    if steps.isdecimal() and int(steps) != args.gradient_accumulation_steps:  # as transformers decides
        found.append(
            f"gradient_accumulation_steps={args.gradient_accumulation_steps} overrides the launcher's "
            f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS={steps}."
        )
    if unknown := unknown_variables():
        found.append(f"{' and '.join(unknown)}: no release of accelerate that is known here reads that; no effect.")
    gpus = 1 if "devices" in config else count_of(args.device) or 1
    if gpus > resolved.rank_info.world_size == 1 and not can_start_again():
        found.append(
            f"Only one of {gpus} GPUs is used: the others need processes, which a script or a launcher can start."
        )
    if resolved.deepspeed is not None:
        found += resolved.deepspeed.notes
    if "tpu_metrics_debug" in (args.debug or ()) and args.device.type != "xla":
        found.append(
            f"debug='tpu_metrics_debug' prints nothing: training is on {args.device}, which is not an XLA device."
        )
    if args.fsdp_config and not args.fsdp and not is_set_by_release(args, "fsdp_config"):
        found.append("fsdp_config has no effect without fsdp=True.")
    if args.fsdp and (given := [f"ddp_{name}" for name in _DDP if getattr(args, f"ddp_{name}", None) is not None]):
        found.append(f"{' and '.join(given)} have no effect with fsdp: there are no replicas.")
    return found + [
        f"lightning_config[{name!r}]={config[name]!r} overrides {argument}={getattr(args, argument)!r}."
        for name, arguments in ALSO_SET_BY.items()
        for argument in arguments
        if name in config and getattr(args, argument)
    ]
