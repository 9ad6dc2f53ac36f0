"""What becomes of each environment variable that accelerate's launchers set, or that accelerate reads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hftrainer.parallel.config_files import FALSE


@dataclass(frozen=True)
class Variable:
    """How a variable is handled.

    Attributes:
        effect: what it does here.
        accepted: the accepted values, in lower case; None accepts all.
        instead: what to do instead of other values.
    """

    effect: str
    accepted: tuple[str, ...] | None = None
    instead: str = ""


_OFF = ("", *FALSE)
#: For variables that change something in accelerate's own functions only, with this library as with any other.
_ITS_OWN = "of accelerate's own functions"
_WITH_DEEPSPEED = "in DeepSpeed's configuration, unless a file of one is given"

#: Name, or its beginning with '*' → how it is handled.
VARIABLES = {
    "ACCELERATE_USE_CPU": Variable("runs on the CPU"),
    "ACCELERATE_MIXED_PRECISION": Variable(
        "precision, unless fp16 or bf16 is set", ("", "no", "fp32", "bf16", "fp16"), "launch with bf16"
    ),
    "ACCELERATE_FP8_*": Variable("details of fp8, which is refused"),
    "ACCELERATE_DOWNCAST_BF16": Variable("nothing", ("",), "set XLA_DOWNCAST_BF16=1, which torch_xla reads"),
    "ACCELERATE_DYNAMO_BACKEND": Variable("compiles the model"),
    "ACCELERATE_DYNAMO_MODE": Variable("how the model is compiled"),
    "ACCELERATE_DYNAMO_USE_DYNAMIC": Variable("how the model is compiled"),
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": Variable("how the model is compiled"),
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": Variable(
        "nothing", _OFF, "launch without it, which compiles the whole model"
    ),
    "ACCELERATE_CPU_AFFINITY": Variable("binds each process to the CPU cores near its GPU"),
    "ACCELERATE_DEBUG_MODE": Variable("accelerate checks collective operations"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": Variable("must be gradient_accumulation_steps, with DeepSpeed"),
    "ACCELERATE_GRADIENT_CLIPPING": Variable(f"gradient_clipping {_WITH_DEEPSPEED}"),
    "ACCELERATE_USE_DEEPSPEED": Variable("DeepSpeed, unless the argument deepspeed is given"),
    "ACCELERATE_CONFIG_DS_FIELDS": Variable("names settings that contradict a DeepSpeed file, which are refused"),
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": Variable("the path of DeepSpeed's configuration"),
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": Variable(f"ZeRO's stage {_WITH_DEEPSPEED}"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_*": Variable(f"devices and paths of offloaded states {_WITH_DEEPSPEED}"),
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": Variable(f"whole weights in checkpoints {_WITH_DEEPSPEED}"),
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": Variable("nothing: models are partitioned with ZeRO-3, as by accelerate"),
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": Variable("classes of layers that ZeRO-3 gathers as one"),
    "ACCELERATE_USE_FSDP": Variable("FSDP, unless the argument fsdp is given"),
    "FSDP_*": Variable("settings of FSDP by their names in fsdp_config; unknown ones are refused by name"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": Variable("sizes of groups of processes, without parallelism_config"),
    "PARALLELISM_CONFIG_*": Variable("those sizes; cp_size and sp_size above 1 are refused by name"),
    "ACCELERATE_ALLOW_CP_STANDALONE": Variable("of cp_size, which is refused above 1"),
    "ACCELERATE_USE_MEGATRON_LM": Variable("nothing", _OFF, "launch with --use_fsdp or --use_deepspeed"),
    "MEGATRON_LM_*": Variable("settings of Megatron-LM, which is refused"),
    "ACCELERATE_USE_SAGEMAKER": Variable("nothing: processes are found by the variables of their launcher"),
    "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": Variable(
        "nothing", ("", "no"), "launch with 'NO', and start the processes with torchrun"
    ),
    "ACCELERATE_TORCH_DEVICE": Variable(
        "must be the device of the run", None, "select GPUs with CUDA_VISIBLE_DEVICES, or set use_cpu"
    ),
    "ACCELERATE_IN_TPU_POD": Variable("of accelerate's launcher"),
    "ACCELERATE_DEBUG_RDV_FILE": Variable("of accelerate's debug_launcher"),
    "ACCELERATE_BYPASS_DEVICE_MAP": Variable(_ITS_OWN),
    "ACCELERATE_INIT_INCLUDE_BUFFERS": Variable(_ITS_OWN),
    "ACCELERATE_LOG_LEVEL": Variable(_ITS_OWN),
    "ACCELERATE_ENABLE_RICH": Variable(_ITS_OWN),
    "ACCELERATE_NUM_PROCESSES": Variable("of accelerate's own tests"),
}


def row_of(name: str) -> Variable | None:
    """The row of a variable; None for one that is not in the table."""
    rows = (row for key, row in VARIABLES.items() if key.endswith("*") and name.startswith(key[:-1]))
    return VARIABLES.get(name) or next(rows, None)


def check_launched(device: Any, environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """A sentence for each setting of accelerate's launchers that is not supported.

    Args:
        device: the device of the run.
        environment: the environment variables.
    """
    for name, row in VARIABLES.items():
        value = environment.get(name, "")
        if row.accepted is not None and value.lower() not in row.accepted:
            yield f"The launcher asks for {name}={value}, which is not supported: {row.instead}."
    if given := environment.get("ACCELERATE_TORCH_DEVICE", ""):
        try:
            asked = torch.device(given)
        except RuntimeError as error:
            yield f"ACCELERATE_TORCH_DEVICE={given!r} is no device ({str(error).partition('.')[0]}): unset it."
        else:
            if asked.type != device.type or asked.index not in (None, device.index):
                instead = VARIABLES["ACCELERATE_TORCH_DEVICE"].instead
                yield f"ACCELERATE_TORCH_DEVICE={given!r}, but the run is on {str(device)!r}: {instead}."


def unknown_variables(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Variables of accelerate that are not in the table: misspelled, or of a newer release."""
    return sorted(name for name in environment if name.startswith("ACCELERATE_") and row_of(name) is None)
