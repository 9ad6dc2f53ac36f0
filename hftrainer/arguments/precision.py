"""Number formats, compilation, and settings that trade time for memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hftrainer.arguments._field import arg


@dataclass(kw_only=True)
class PrecisionArguments:
    """The number format and the kernels with which the model computes."""

    bf16: bool = arg(False, "Run the model's forward pass under bfloat16 autocast; weights stay float32.")
    fp16: bool = arg(False, "Run the model's forward pass under float16 autocast with loss scaling.")
    bf16_full_eval: bool = arg(False, "Cast the weights to bfloat16 for evaluation.")
    fp16_full_eval: bool = arg(False, "Cast the weights to float16 for evaluation.")
    tf32: bool | None = arg(None, "Allow or forbid TF32 matrix products; None keeps torch's setting.")
    activation_checkpointing: bool | None = arg(
        None, "Recompute activations in backward to save memory (v5 name).", bare=True
    )
    activation_checkpointing_kwargs: dict[str, Any] | str | None = arg(
        None, "Keywords for `activation_checkpointing`, as a dict or as a JSON object."
    )
    gradient_checkpointing: bool | None = arg(
        None, "Recompute activations in backward to save memory (v4 name).", bare=True
    )
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = arg(
        None, "Keywords for `gradient_checkpointing`, as a dict or as a JSON object."
    )
    torch_compile: bool = arg(False, "Compile the model with `torch.compile`.")
    torch_compile_backend: str | None = arg(None, "Backend of `torch.compile`; giving it turns compilation on.")
    torch_compile_mode: str | None = arg(None, "Mode of `torch.compile`; giving it turns compilation on.")
    use_liger_kernel: bool = arg(False, "Replace layers with Liger kernels.")
    liger_kernel_config: dict[str, Any] | str | None = arg(
        None, "Which Liger kernels to apply, as a dict or as a JSON object."
    )
    use_cache: bool = arg(False, "Value given to `model.config.use_cache` during training.")
    torch_empty_cache_steps: int | None = arg(
        None, "Optimizer steps after which the device's cache is emptied, each time."
    )
