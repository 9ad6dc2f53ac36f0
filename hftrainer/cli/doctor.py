"""`python -m hftrainer doctor`: what this machine has for training, what is missing, and what to do about it."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from hftrainer.cli.parser import Parser
from hftrainer.compat.version import __version__

#: Extra of pyproject.toml → what it is for.
EXTRAS = {
    "transformers": "models of transformers, run and install()",
    "deepspeed": "deepspeed=...",
    "ray": "hyperparameter_search(backend='ray')",
    "plot": "plot, PlotCallback, plots in model cards",
    "watch": "watch",
    "metrics": "metrics_port=..., for Prometheus",
    "tensorboard": "report_to='tensorboard'",
    "wandb": "report_to='wandb'",
    "mlflow": "report_to='mlflow'",
    "comet": "report_to='comet_ml'",
    "tpu": "TPUs, by torch_xla",
    "torch-tpu": "TPUs, by torch_tpu",
    "tf": "TFTrainer",
    "optimizers": "optimizers of other libraries",
    "demo": "the demo and the examples",
}
#: Package of fsspec → the URLs that it opens.
FILE_SYSTEMS = {"s3fs": "s3://", "gcsfs": "gs://", "adlfs": "abfs://"}
LAUNCHERS = {
    "torchrun": "comes with torch",
    "accelerate": "pip install 'hftrainer[transformers]'",
    "deepspeed": "pip install 'hftrainer[deepspeed]'",
    "srun": "comes with SLURM",
    "mpirun": "comes with Open MPI, MPICH or Intel MPI",
}
#: Libraries whose versions matter besides those of pyproject.toml.
_OTHERS = ("datasets", "peft", "trl", "tokenizers", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "triton", *FILE_SYSTEMS)
#: Folder → bytes below which it is reported as small, and what to do. Docker gives /dev/shm 64 MB.
_SMALL = {
    "folder": (5 << 30, "checkpoints may not fit; set output_dir on another disk, or save_total_limit"),
    "temporary": (1 << 30, "set TMPDIR to a folder on another disk"),
    "/dev/shm": (
        1 << 30,
        "loader workers pass batches through it; in Docker use --shm-size=8g, or set dataloader_num_workers=0",
    ),
}
#: Entry of the report → what the text says instead.
_LABELS = {
    "used": "a Trainer uses",
    "number": "how many",
    "processes by": "processes are started by",
    "lightning": "no launcher, so by Lightning where several are asked for",
}


def _text(report: dict[str, Any]) -> str:
    """The report of `examine`, as text."""
    launchers, disks, missing = report["launchers"].items(), report["disks"].items(), report["missing"].items()
    devices = report["devices"].items()
    lines = {
        "Result": [f"A Trainer {'can train' if report['ready'] else 'cannot train'} here."],
        "Problems": report["problems"] or ["none was found"],
        "Devices": [f"{_LABELS.get(name, name)}: {_LABELS.get(value, value)}" for name, value in devices if value != 0],
        "Versions": [f"{name} {version or 'not installed'}" for name, version in report["versions"].items()],
        "Launchers": [f"{name}: {path or f'not found; {LAUNCHERS[name]}'}" for name, path in launchers],
        "Free space": [f"{at}: {_gb(on['free'])} of {_gb(on['total'])} at {on['path']}" for at, on in disks],
        "Optional packages that are missing, by feature": [
            f"{what.partition(' [')[0]}, for lack of {', '.join(gap['packages'])}: {gap['install']}"
            for what, gap in missing
        ],
        "Environment variables": [f"{name}: {text}" for name, text in report["environment"].items()],
    }
    shown = {title: found for title, found in lines.items() if found or title == "Devices"}
    return "\n\n".join("\n  ".join([title, *found]) for title, found in shown.items())


def add(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "doctor",
        help="show versions, devices, launchers, disk space, missing packages and how to install them",
        description="Show what this machine has for training. Secrets are named as set, and never printed. Exits "
        "with 1 if a library that hftrainer needs is missing or too old.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(execute=_doctor, parser=parser)


def _doctor(parser: Parser, options: argparse.Namespace) -> None:
    report = examine()
    print(json.dumps(report, indent=2) if options.json else _text(report))
    parser.exit(0 if report["ready"] else 1)


def examine() -> dict[str, Any]:
    """Collect the report. Imports nothing heavier than torch, and allocates nothing on a device.

    Returns:
        versions: of Python and of libraries, None for those that are not installed.
        devices: what a run uses here, by `use_cpu=False`.
        launchers: name → path, or None.
        disks: 'folder', 'temporary' and '/dev/shm' → path, free and total bytes.
        missing: feature → packages that are missing or too old, and the command that installs them.
        environment: variables that change behaviour; secrets are only named as set.
        problems: what stops or slows training, each with what to do.
        ready: whether a Trainer can train here.
    """
    from hftrainer.parallel.environment import InvalidEnvironment
    from hftrainer.releases.followed import describe_newer_release

    gaps = dict(_find_missing_packages())
    broken = gaps.pop("", None)
    problems = [f"hftrainer needs {', '.join(broken['packages'])}: {broken['install']}"] if broken else []
    if (peer := _version("transformers")) and (newer := describe_newer_release(peer)):
        problems.append(newer)
    found: dict[str, Any] = {}
    if not _requirements():
        problems.append("hftrainer is not installed by pip, so its requirements are not checked: pip install .")
    try:
        found, wrong = _devices()
        problems += wrong
    except (ImportError, OSError) as error:  # a library that torch loads is missing
        problems.append(f"torch cannot be imported ({error}): pip install --force-reinstall torch")
    except InvalidEnvironment as error:
        problems.append(str(error))
    disks = dict(_disks())
    problems += [
        f"{where} has {_gb(at['free'])} free at {at['path']}: {_SMALL[where][1]}"
        for where, at in disks.items()
        if at["free"] < _SMALL[where][0]
    ]
    beside = os.path.dirname(sys.executable)  # the programs that belong to this Python
    return {
        "versions": _versions(),
        "devices": found,
        "launchers": {name: shutil.which(name) or shutil.which(name, path=beside) for name in LAUNCHERS},
        "disks": disks,
        "missing": {f"{EXTRAS[extra]} [{extra}]": gap for extra, gap in gaps.items()}
        | {
            f"output_dir='{urls}...'": {"packages": [name], "install": f"pip install {name}"}
            for name, urls in FILE_SYSTEMS.items()
            if _version(name) is None
        },
        "environment": environment(),
        "problems": problems,
        "ready": broken is None and bool(found),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _requirements() -> list[Any]:
    """The requirements of pyproject.toml, as the installed package has them; none if it was not installed by pip."""
    try:
        from packaging.requirements import Requirement

        return [Requirement(text) for text in importlib.metadata.requires("hftrainer") or []]
    except ImportError:  # also raised if hftrainer is not installed
        return []


def _versions() -> dict[str, str | None]:
    names = ["torch", "lightning", "transformers", "accelerate"]
    shown: dict[str, str | None] = {"python": platform.python_version(), "hftrainer": __version__}
    shown |= {name: _version(name) for name in names}
    others = {*_OTHERS, *(requirement.name for requirement in _requirements() if _extra(requirement) in ("", *EXTRAS))}
    shown |= {name: found for name in sorted(others - shown.keys()) if (found := _version(name))}
    return shown


def _extra(requirement: Any) -> str:
    """The extra that a requirement belongs to; '' for those of hftrainer itself, 'other' for those of developers."""
    if "extra ==" not in str(requirement.marker):
        return ""
    return next((extra for extra in EXTRAS if f'extra == "{extra}"' in str(requirement.marker)), "other")


def _find_missing_packages() -> Iterator[tuple[str, dict[str, Any]]]:
    """Extra → the packages that are missing or of a release that is not supported, and how to install them."""
    lacking: dict[str, list[str]] = {}
    for requirement in _requirements():
        extra, installed = _extra(requirement), _version(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue  # for another system
        if installed is None:
            lacking.setdefault(extra, []).append(requirement.name)
        elif not requirement.specifier.contains(installed, prereleases=True):
            lacking.setdefault(extra, []).append(f"{requirement.name}{requirement.specifier}, not {installed}")
    for extra, packages in lacking.items():
        if extra != "other":
            target = f"'hftrainer[{extra}]'" if extra else "--upgrade hftrainer"
            yield extra, {"packages": packages, "install": f"pip install {target}"}


def _devices() -> tuple[dict[str, Any], list[str]]:
    """The devices that a run would use, as `TrainingArguments.device` chooses, and problems with them."""
    import torch
    from torch.utils import collect_env

    from hftrainer.parallel import devices
    from hftrainer.parallel.environment import detect_launcher

    kind = "xla" if devices.uses_xla() else devices.detect_device_type()
    build = torch.version.cuda or torch.version.hip
    shown: dict[str, Any] = {
        "used": kind,
        "number": devices.device_count(kind) if kind != "xla" else "known when torch_xla starts",
        "torch is built for": f"CUDA {build}" if torch.version.cuda else f"ROCm {build}" if build else "CPU",
        "CPU cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "processes by": detect_launcher(),
    }
    # Ask nvidia-smi: to get the name, torch would create a context on the first GPU.
    names, problems = (collect_env.get_gpu_info(collect_env.run) or "").splitlines(), []
    if names:
        shown["NVIDIA GPUs"] = names
    if names and kind == "cpu":
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        why = "CUDA_VISIBLE_DEVICES hides them: unset it" if hidden else "update the driver, or install an older torch"
        if torch.version.cuda is None:
            why = "this torch is built without CUDA: install one as https://pytorch.org/get-started says"
        problems.append(f"There are NVIDIA GPUs that torch does not see; {why}.")
    if kind == "cpu" and (unused := devices.unused_tpu_message()):
        problems.append(unused)
    return shown, problems


def _disks() -> Iterator[tuple[str, dict[str, Any]]]:
    for where, path in (("folder", os.getcwd()), ("temporary", tempfile.gettempdir()), ("/dev/shm", "/dev/shm")):
        if os.path.isdir(path):
            usage = shutil.disk_usage(path)
            yield where, {"path": path, "free": usage.free, "total": usage.total}


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


#: Environment variables whose values are not secret.
PRINTABLE = """
    HFTRAINER_ENVIRONMENT WORLD_SIZE RANK LOCAL_RANK NODE_RANK MASTER_ADDR MASTER_PORT SLURM_JOB_ID SLURM_JOB_NAME
    SLURM_PROCID PJRT_LOCAL_PROCESS_COUNT CUDA_VISIBLE_DEVICES PJRT_DEVICE USE_TORCH_XLA TPU_NAME DS_ACCELERATOR
    HF_HUB_OFFLINE HF_HOME TRANSFORMERS_VERBOSITY OMP_NUM_THREADS TOKENIZERS_PARALLELISM CUBLAS_WORKSPACE_CONFIG
    CUDA_LAUNCH_BLOCKING FLASH_ATTENTION_DETERMINISTIC PYTORCH_ENABLE_MPS_FALLBACK PYTORCH_CUDA_ALLOC_CONF
    NCCL_DEBUG TENSORBOARD_LOGGING_DIR WANDB_DISABLED WANDB_MODE WANDB_PROJECT WANDB_LOG_MODEL WANDB_WATCH
    MLFLOW_EXPERIMENT_NAME MLFLOW_RUN_ID MLFLOW_MAX_LOG_PARAMS HF_MLFLOW_LOG_ARTIFACTS DISABLE_MLFLOW_INTEGRATION
    COMET_MODE COMET_LOG_ASSETS DATABRICKS_RUNTIME_VERSION RAY_SCOPE GLIBC_TUNABLES
""".split()
#: Other variables of these libraries, and likely secrets: shown by name only.
_NAMED = re.compile(
    r"^(HFTRAINER|HF|HUGGING|TRANSFORMERS|ACCELERATE|FSDP|WANDB|MLFLOW|COMET|CLEARML|SWANLAB|TRACKIO|NCCL|TORCH|PYTORCH"
    r"|CUDA|XLA|PJRT)_|TOKEN$|API_KEY$|SECRET|PASSWORD|CREDENTIAL"
)


def environment() -> dict[str, str]:
    """The variables that are set, with value or effect where known, and 'set' for the others."""
    from hftrainer.arguments.accelerate import find_variable

    shown = {name: os.environ[name] for name in PRINTABLE if name in os.environ}
    launched = {name: row.effect for name in os.environ if (row := find_variable(name)) is not None}
    shown |= {name: f"{os.environ[name]} ({effect})" for name, effect in launched.items()}
    return shown | {name: "set" for name in sorted(os.environ) if name not in shown and _NAMED.search(name)}
