"""Checks of the arguments against TPUs: XLA devices, and that of torch_tpu."""

from __future__ import annotations

import os
from collections.abc import Iterator

from hftrainer.arguments.base import BaseArguments
from hftrainer.parallel import tpu
from hftrainer.parallel.environment import RankInfo
from hftrainer.plugins import load


def check_xla(args: BaseArguments, here: RankInfo, cores: int | None) -> Iterator[str]:
    """A sentence for each setting that TPUs do not support.

    Args:
        args: the training arguments.
        here: rank of this process.
        cores: `tpu_num_cores`.
    """
    kind = args.device.type
    if cores is not None and kind not in ("xla", "tpu") and not args.use_cpu:
        reason = (
            f"torch_xla is missing: {tpu.INSTALL}" if not tpu.has_torch_xla() else "there is none: set PJRT_DEVICE=TPU"
        )
        yield f"tpu_num_cores={cores} needs a TPU, but {reason}."
    if kind not in ("xla", "tpu"):
        return
    if cores is not None and cores != here.local_world_size:
        yield (
            f"tpu_num_cores={cores}, but this run uses {here.local_world_size} of this machine's cores: start "
            "the script with python -m hftrainer run --tpu, which starts a process for each."
        )
    launched = here.launcher == "xla" if kind == "xla" else tpu.ADDRESSES in os.environ
    if here.world_size > 1 and not launched:
        yield (
            f"{here.launcher!r} has started {here.world_size} processes, which have no TPU core of their own: start "
            "the script with python -m hftrainer run --tpu."
        )
    if here.launcher == "xla" and load("xla", "devices").cores_in_this_process() > 1:
        yield (
            "On TPU v2 and v3 two cores share a process, which is not supported: use one core, or shard over all "
            "with fsdp_config={'xla': True, 'xla_fsdp_v2': True} in one process."
        )
    if args.fp16 or args.fp16_full_eval:
        yield "fp16: TPUs compute in bfloat16, which needs no scaled losses: use bf16."
    if args.torch_compile and kind == "xla":
        yield "torch_compile=True: XLA already compiles the whole step; leave it out."
    elif args.torch_compile and args.torch_compile_backend == "inductor":
        yield "torch_compile=True: inductor does not compile for TPUs: set torch_compile_backend='tpu'."
