"""Checks of the arguments against the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import distributed

from hftrainer.arguments import legacy
from hftrainer.arguments.base import BaseArguments
from hftrainer.errors import suggest
from hftrainer.parallel.devices import OTHERS, own_backend
from hftrainer.parallel.tpu import unused_tpu

#: Devices that are not supported → why.
REFUSED = {
    "hpu": "Gaudi needs replaced torch operators and graph marks in the loop; optimum-habana has both",
    "sdaa": "the Trainer of transformers does not use it either",
    "neuron": "it compiles whole graphs, which the loop does not support; use optimum-neuron",
}
#: Documented backends → the devices that they connect, and where they come from.
BACKENDS = {
    "nccl": (("cuda",), "it comes with torch for CUDA or ROCm"),
    "gloo": (("cpu", "cuda"), "it comes with torch"),
    "mpi": (("cpu", "cuda"), "it needs torch built from source with MPI"),
    "ccl": (("cpu", "xpu"), "the script must import oneccl_bindings_for_pytorch, which Intel has replaced by 'xccl'"),
    "xccl": (("xpu",), "it comes with torch for Intel GPUs"),
    "smddp": (("cuda",), "the script must import smdistributed.dataparallel.torch.torch_smddp, of SageMaker's images"),
    "hccl": (("npu",), "it comes with torch_npu"),
    "cncl": (("mlu",), "it comes with torch_mlu"),
    "mccl": (("musa",), "it comes with torch_musa"),
    "tpu_dist": (("tpu",), "it comes with torch_tpu"),
}


def check_device(args: BaseArguments, precision: str, processes: int, spreads: bool) -> Iterator[str]:
    """A sentence for each setting that the device does not support.

    Args:
        args: the arguments.
        precision: Lightning's precision.
        processes: world size.
        spreads: whether each process has only a part of the model.
    """
    kind = args.device.type
    if legacy.value(args, "use_mps_device") and kind != "mps":
        yield f"use_mps_device=True, but {_why_no_mps(args)}: leave it out to train on {kind}."
    here = [name for name in REFUSED if hasattr(torch, name) and getattr(torch, name).is_available()]
    if kind == "cpu" and here and not _asks_for_cpu(args):
        yield (
            f"torch.{here[0]} is available, but hftrainer cannot train on it: {REFUSED[here[0]]}. Set use_cpu=True to "
            "train on the CPU."
        )
    elif kind == "cpu" and not _asks_for_cpu(args) and (reason := unused_tpu()):
        yield reason
    if kind == "mps":
        yield from _check_mps(precision, processes, spreads)
    elif kind in OTHERS and spreads:
        yield f"Models can be sharded and split on CUDA and CPU only, and this device is {kind}: leave out fsdp."
    several = processes > 1 and kind not in ("mps", "xla")
    if args.ddp_backend and (reason := _check_backend(args.ddp_backend.lower(), kind, several)):
        yield f"ddp_backend={args.ddp_backend!r}{reason}"


def _asks_for_cpu(args: BaseArguments) -> bool:
    return getattr(args, "_on_cpu", args.use_cpu)


def _why_no_mps(args: BaseArguments) -> str:
    if _asks_for_cpu(args):
        return "use_cpu=True contradicts it"
    if not torch.backends.mps.is_built():
        return "this torch was built without MPS, Apple's GPU"
    return "there is no Apple GPU, or macOS is too old for it"


def _check_mps(precision: str, processes: int, spreads: bool) -> Iterator[str]:
    if processes > 1 or spreads:
        what = f"{processes} processes are" if processes > 1 else "A sharded or split model is"
        yield (
            f"{what} not possible on Apple's GPU: it is one device, and neither gloo nor nccl works on mps. Start one "
            "process, without fsdp and devices; gradient_accumulation_steps makes larger batches. Or set use_cpu=True."
        )
    if precision == "16-mixed" and torch.__version__ < "2.8":  # https://github.com/pytorch/pytorch/pull/150255
        yield f"fp16=True on Apple's GPU needs torch 2.8, whose GradScaler supports mps; this is {torch.__version__}."
    if precision == "bf16-mixed" and not torch.backends.mps.is_macos_or_newer(14, 0):
        yield "bf16=True on Apple's GPU needs macOS 14: use fp16=True, or use_cpu=True."


def _check_backend(given: str, kind: str, several: bool) -> str | None:
    """Why a backend, or one of several as in 'cpu:gloo,cuda:nccl', cannot be used; one process needs none."""
    registered = distributed.Backend.backend_capability
    known = {*registered, *BACKENDS}
    serves: set[str] = set()
    instead = f"use {own_backend(kind)!r}, or leave it out."
    for part in given.split(","):
        *device, name = part.split(":")
        if name not in known:
            return f": no backend is called {name!r}{suggest(name, known, f': {instead}')}"
        if several and not distributed.is_backend_available(name):
            source = f" ({BACKENDS[name][1]})" if name in BACKENDS else ""
            return f": this torch has no {name!r}{source}: {instead}"
        serves.update(device or registered.get(name) or BACKENDS[name][0])
    return f" does not connect processes on {kind}: {instead}" if several and kind not in serves else None
