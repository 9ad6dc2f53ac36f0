"""The arguments that transformers 5.24 no longer has, with the releases that had them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hftrainer.arguments.choices import as_text
from hftrainer.arguments.fields.argument import Rename, arg, old_name, split_words, to_item, to_key, to_name, to_value
from hftrainer.arguments.fields.own import OwnArguments
from hftrainer.errors import InvalidArgument

_JIT = (True, "torch discontinued TorchScript, so evaluation does not trace the model; use torch_compile=True")
_IPEX = (True, "Intel moved its extension into torch, so the model uses torch's kernels; remove the argument")
_BACKEND: dict[str, Any] = {
    "until": "4.57",
    "neutral_value": "auto",
    "accepted_values": ("auto", "amp", "cuda_amp", "cpu_amp", "apex"),
    "removed_feature": (
        "apex",
        "NVIDIA Apex has removed apex.amp: fp16=True uses torch's float16 autocast, as its level O1 did; remove the "
        "argument",
    ),
}
_AUTOCAST = "handled: auto, amp, cuda_amp, cpu_amp: torch's autocast; apex too, with a warning that it has removed amp"

#: FairScale's options → FSDP's.
_SHARDED_DDP = {
    "simple": "shard_grad_op",
    "zero_dp_2": "shard_grad_op",
    "zero_dp_3": "full_shard",
    "offload": "offload",
    "cpu_offload": "offload",
    "auto_wrap": "auto_wrap",
}


def _to_fsdp(_: Any, old: bool | str | list[Any]) -> str:
    words = ["simple"] if old is True else [as_text(word) for word in split_words(old)]
    unknown = [word for word in words if word not in _SHARDED_DDP]
    if unknown:
        raise InvalidArgument(f"sharded_ddp={old!r}: unknown {unknown}: use {', '.join(_SHARDED_DDP)}.")
    return " ".join(_SHARDED_DDP[word] for word in words)


def _with_organization(new: str | None, organization: str | None) -> str:
    name = (new or "").split("/")[-1]
    return f"{organization}/{name}" if organization else name


def _organization(new: str | None) -> str | None:
    return new.split("/")[0] if new and "/" in new else None


_RATIO = Rename("warmup_steps", "warmup_steps", lambda new, old: old, lambda new: new if new < 1 else 0.0)
_ORGANIZATION = Rename("hub_model_id", "hub_model_id", _with_organization, _organization, is_merged=True)


@dataclass(kw_only=True)
class OldArguments(OwnArguments):
    """Arguments of older releases, which are translated or keep their effect."""

    evaluation_strategy: str | None = old_name(None, to_name("eval_strategy"), "4.0", "4.48")
    no_cuda: bool = old_name(False, to_name("use_cpu"), "4.0", "4.57")
    warmup_ratio: float | None = old_name(
        None,
        _RATIO,
        "4.2",
        "5.0",
        "Fraction of all steps for warm-up, now `warmup_steps` below 1.",
        past_defaults={"4.57": 0.0},
    )
    adafactor: bool = old_name(False, to_value("optim", "adafactor"), "4.2", "4.57")
    group_by_length: bool = old_name(
        False, to_value("train_sampling_strategy", "group_by_length", otherwise="random"), "4.2", "5.0"
    )
    include_inputs_for_metrics: bool = old_name(False, to_item("include_for_metrics", "inputs"), "4.17", "4.57")
    torchdynamo: str | None = old_name(None, to_name("torch_compile_backend"), "4.22", "4.57")
    xpu_backend: str | None = old_name(None, to_name("ddp_backend"), "4.15", "4.30")
    push_to_hub_model_id: str | None = old_name(
        None, to_name("hub_model_id"), "4.7", "4.57", "Name part of `hub_model_id`."
    )
    push_to_hub_organization: str | None = old_name(
        None, _ORGANIZATION, "4.7", "4.57", "Organization part of `hub_model_id`."
    )
    push_to_hub_token: str | None = old_name(None, to_name("hub_token"), "4.7", "4.57")
    # With None as the second member, both argument parsers read one string. Scripts may pass a list.
    sharded_ddp: str | None | list[str] = old_name(
        None,
        Rename("fsdp", "fsdp", _to_fsdp, lambda new: None),
        "4.1",
        "4.30",
        "FairScale's sharding, now `fsdp`; without a value it means 'simple'.",
        const="simple",
    )
    fsdp_min_num_params: int | None = old_name(
        None, to_key("fsdp_config", "min_num_params"), "4.20", "4.57", past_defaults={"4.57": 0}
    )
    fsdp_transformer_layer_cls_to_wrap: str | None = old_name(
        None, to_key("fsdp_config", "transformer_layer_cls_to_wrap"), "4.22", "4.57"
    )
    dispatch_batches: bool | None = old_name(
        None, to_key("accelerator_config", "dispatch_batches", accepts_false=True), "4.35", "4.48"
    )
    split_batches: bool | None = old_name(None, to_key("accelerator_config", "split_batches"), "4.35", "4.48")
    tpu_metrics_debug: bool = old_name(False, to_item("debug", "tpu_metrics_debug"), "4.0", "4.57")

    logging_dir: str | None = arg(None, "Folder of the trackers' files.", "4.0", until="5.0")
    use_mps_device: bool = arg(
        False,
        "Train on Apple's GPU, which is now used automatically.",
        "4.21",
        "handled: an error without an Apple GPU",
        until="4.57",
    )
    save_safetensors: bool = arg(
        True, "Write safetensors instead of torch's pickles.", "4.28", until="4.57", neutral_value=True
    )
    fp16_backend: str | None = arg(None, "Library of mixed precision.", "4.0", _AUTOCAST, **_BACKEND)
    half_precision_backend: str | None = arg(None, "Library of mixed precision.", "4.15", _AUTOCAST, **_BACKEND)
    fp16_opt_level: str | None = arg(
        None,
        "Optimization level of Apex.",
        "4.0",
        "handled: O1 (or 01): torch's float16 autocast. O2 and O3 are refused, since Apex has removed apex.amp: remove "
        "the argument, or load the model with dtype=torch.bfloat16 for weights of half the size",
        until="4.57",
        neutral_value="O1",
        accepted_values=("O0", "O1", "01"),
    )
    past_index: int | None = arg(
        None, "Index of the output for the next step; -1: none.", "4.0", until="4.57", neutral_value=-1
    )
    use_legacy_prediction_loop: bool = arg(False, "Evaluate with `prediction_loop`.", "4.4", until="4.57")
    include_tokens_per_second: bool = arg(False, "Report tokens per second.", "4.35", until="4.57")
    jit_mode_eval: bool = arg(
        False,
        "Trace the model for evaluation.",
        "4.23",
        "inert: torch has dropped TorchScript",
        until="4.57",
        removed_feature=_JIT,
    )
    use_ipex: bool = arg(
        False,
        "Optimize with Intel's extension.",
        "4.23",
        "inert: its kernels are in torch",
        until="4.48",
        removed_feature=_IPEX,
    )
    ray_scope: str | None = arg(
        None,
        "Scope of Ray Tune's best trial.",
        "4.30",
        "handled: also set by RAY_SCOPE in the environment",
        until="4.57",
        neutral_value="last",
    )
    tpu_num_cores: int | None = arg(
        None,
        "Number of TPU cores, which launchers now set.",
        "4.0",
        "handled: number of cores; python -m hftrainer run --tpu starts a process for each. The extra tpu installs "
        "torch_xla 2.9 with torch 2.9; torch-tpu installs its successor torch_tpu, for torch 2.11 to 2.15",
        until="4.57",
    )
    mp_parameters: str | None = arg(
        None,
        "SageMaker's model parallelism.",
        "4.5",
        "refused: SageMaker's model-parallel library is not an engine of Lightning; use fsdp, and start the job with "
        "torchrun, as SageMaker's distribution={'torch_distributed': {'enabled': True}} does",
        until="4.57",
        neutral_value="",
    )
    model_parallel: bool = arg(
        False,
        "Naive model parallelism of GPT-2 and T5.",
        "4.0",
        "refused: naive model parallelism was removed after v4.1; load the model with device_map, or use fsdp",
        until="4.1",
    )
