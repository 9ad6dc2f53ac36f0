"""`python -m hftrainer doctor`: what this machine has for training, what is missing, and how to install it."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hftrainer.base.messages import format_bytes, wrap_text
from hftrainer.cli.parser import Parser, paint_headings
from hftrainer.compat.version import __version__

#: Extra of pyproject.toml → the features that need it.
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
    "tpu": "TPUs, with torch_xla",
    "torch-tpu": "TPUs, with torch_tpu",
    "tf": "TFTrainer",
    "optimizers": "optimizers of other libraries",
    "demo": "the demo and the examples",
}
#: fsspec package → the prefix of the URLs that it opens.
FILE_SYSTEMS = {"s3fs": "s3://", "gcsfs": "gs://", "adlfs": "abfs://"}
LAUNCHERS = {
    "torchrun": "comes with torch",
    "accelerate": "pip install 'hftrainer[transformers]'",
    "deepspeed": "pip install 'hftrainer[deepspeed]'",
    "srun": "comes with SLURM",
    "mpirun": "comes with Open MPI, MPICH or Intel MPI",
}
#: Libraries whose versions matter, in addition to those of pyproject.toml.
_LIBRARIES = ("datasets", "peft", "trl", "tokenizers", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "triton", *FILE_SYSTEMS)
#: Packages of trackers that `report_to` accepts, in addition to those of pyproject.toml.
_TRACKERS = "azureml-core clearml codecarbon dagshub dvclive flytekit mlflow-skinny swanlab tensorboardX trackio"
#: Package → one that does for hftrainer what it does.
_SUBSTITUTES = {"mlflow": "mlflow-skinny", "tensorboard": "tensorboardX"}
#: Folder → minimum of free bytes, and advice for less. In Docker /dev/shm has 64 MB.
_MIN_FREE_SPACE = {
    "folder": (5 << 30, "checkpoints may not fit; set output_dir on another disk, or save_total_limit"),
    "temporary": (1 << 30, "set TMPDIR to a folder on another disk"),
    "/dev/shm": (
        1 << 30,
        "loader workers pass batches through it; in Docker use --shm-size=8g, or set dataloader_num_workers=0",
    ),
}
#: Entry of the report → its label in the text.
_LABELS = {
    "used": "a Trainer uses",
    "number": "how many",
    "processes by": "processes are started by",
    "lightning": "Lightning, if several are requested, since there is no launcher",
}


def _text(report: dict[str, Any]) -> str:
    """The report of `make_report`, as text."""
    launchers, disks, missing = report["launchers"].items(), report["disks"].items(), report["missing"].items()
    devices = report["devices"].items()
    lines = {
        "Result": [f"A Trainer {'can train' if report['ready'] else 'cannot train'} here."],
        "Problems": report["problems"] or ["none found"],
        "Devices": [f"{_LABELS.get(name, name)}: {_LABELS.get(value, value)}" for name, value in devices if value != 0],
        "Versions": [f"{name} {version or 'not installed'}" for name, version in report["versions"].items()],
        "Launchers": [f"{name}: {path or f'not found; {LAUNCHERS[name]}'}" for name, path in launchers],
        "Free space": [
            f"{name}: {format_bytes(disk['free'])} of {format_bytes(disk['total'])} at {disk['path']}"
            for name, disk in disks
        ],
        "Missing optional packages, by feature": [
            f"{feature.partition(' [')[0]} (needs {', '.join(gap['packages'])}): {gap['install']}"
            for feature, gap in missing
        ],
        "Environment variables": [f"{name}: {text}" for name, text in report["environment"].items()],
    }
    sections = {title: items for title, items in lines.items() if items or title == "Devices"}
    return "\n\n".join("\n  ".join([title, *items]) for title, items in sections.items())


def add_subcommand(commands: Any) -> None:
    """Add the subcommand."""
    commands.add_parser(
        "doctor",
        help="show versions, devices, launchers, disk space, missing packages and how to install them",
        epilog="example: %(prog)s --json",
        description="Show what this machine has for training. Secrets are listed by name only. Exits "
        "with 1 if a library that hftrainer needs is missing or too old.",
    )


def execute(parser: Parser, options: argparse.Namespace) -> None:
    """Run the subcommand."""
    report = make_report()
    print(json.dumps(report, indent=2) if options.json else paint_headings(wrap_text(_text(report), sys.stdout)))
    parser.exit(0 if report["ready"] else 1)


def make_report() -> dict[str, Any]:
    """Build the report, with torch as the heaviest import, and without allocating on a device.

    Returns:
        versions: of Python and of libraries, None for those that are not installed.
        devices: what a run with `use_cpu=False` uses here.
        launchers: name → path, or None.
        disks: 'folder', 'temporary' and '/dev/shm' → path, free and total bytes.
        missing: feature → packages that are missing or too old, and the command that installs them.
        environment: variables that change behaviour; secrets only as 'set'.
        problems: what prevents or slows training, each with advice.
        ready: whether a Trainer can train here.
    """
    from hftrainer.parallel.environment import InvalidEnvironment
    from hftrainer.releases.followed import describe_newer_release

    gaps = dict(_find_missing_packages())
    broken = gaps.pop("", None)
    problems = [f"hftrainer needs {', '.join(broken['packages'])}: {broken['install']}"] if broken else []
    if (peer := _version("transformers")) and (newer := describe_newer_release(peer)):
        problems.append(newer)
    device_report: dict[str, Any] = {}
    if not _requirements():
        folder = Path(__file__).parents[2]
        problem = f"hftrainer runs from {folder}, not installed with pip, so its requirements are not checked"
        problems.append(f"{problem}: pip install {shlex.quote(str(folder))}")
    try:
        device_report, device_problems = _devices()
        problems += device_problems
    # A library that torch loads is missing.
    except (ImportError, OSError) as error:
        problems.append(f"torch cannot be imported ({error}): pip install --force-reinstall torch")
    except InvalidEnvironment as error:
        problems.append(str(error))
    disks = dict(_disks())
    problems += [
        f"{name} has {format_bytes(disk['free'])} free at {disk['path']}: {_MIN_FREE_SPACE[name][1]}"
        for name, disk in disks.items()
        if disk["free"] < _MIN_FREE_SPACE[name][0]
    ]
    # The folder of the programs that belong to this Python.
    program_folder = os.path.dirname(sys.executable)
    return {
        "versions": _versions(),
        "devices": device_report,
        "launchers": {name: shutil.which(name) or shutil.which(name, path=program_folder) for name in LAUNCHERS},
        "disks": disks,
        "missing": {f"{EXTRAS[extra]} [{extra}]": gap for extra, gap in gaps.items()}
        | {
            f"output_dir='{urls}...'": {"packages": [name], "install": f"pip install {name}"}
            for name, urls in FILE_SYSTEMS.items()
            if _version(name) is None
        },
        "environment": environment(),
        "problems": problems,
        "ready": broken is None and bool(device_report),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _requirements() -> list[Any]:
    """The requirements of the installed package; empty if it was not installed with pip."""
    try:
        from packaging.requirements import Requirement

        return [Requirement(text) for text in importlib.metadata.requires("hftrainer") or []]
    # Also raised if hftrainer is not installed.
    except ImportError:
        return []


def _versions() -> dict[str, str | None]:
    names = ["torch", "lightning", "transformers", "accelerate"]
    versions: dict[str, str | None] = {"python": platform.python_version(), "hftrainer": __version__}
    versions |= {name: _version(name) for name in names}
    required = (requirement.name for requirement in _requirements() if _extra(requirement) in ("", *EXTRAS))
    others = {*_LIBRARIES, *_TRACKERS.split(), *required}
    versions |= {name: version for name in sorted(others - versions.keys()) if (version := _version(name))}
    return versions


def _extra(requirement: Any) -> str:
    """The extra of a requirement; '' for a required package, 'other' for an extra for developers."""
    if "extra ==" not in str(requirement.marker):
        return ""
    return next((extra for extra in EXTRAS if f'extra == "{extra}"' in str(requirement.marker)), "other")


def _find_missing_packages() -> Iterator[tuple[str, dict[str, Any]]]:
    """Extra → its missing or unsupported packages, and the command that installs them."""
    # What pip installs → its name in the report.
    packages_by_extra: dict[str, dict[str, str]] = {}
    for requirement in _requirements():
        extra, version = _extra(requirement), _version(requirement.name)
        pip_name = f"{requirement.name}{requirement.specifier}"
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            # The requirement is for another system.
            continue
        if version is None and _version(_SUBSTITUTES.get(requirement.name, requirement.name)) is None:
            packages_by_extra.setdefault(extra, {})[pip_name] = requirement.name
        elif version is not None and not requirement.specifier.contains(version, prereleases=True):
            packages_by_extra.setdefault(extra, {})[pip_name] = f"{pip_name}, not {version}"
    for extra, packages in packages_by_extra.items():
        if extra != "other":
            target = f"'hftrainer[{extra}]'" if extra else shlex.join(packages)
            yield extra, {"packages": list(packages.values()), "install": f"pip install {target}"}


def _devices() -> tuple[dict[str, Any], list[str]]:
    """The devices that a run would use, as in `TrainingArguments.device`, and problems with them."""
    import torch
    from torch.utils import collect_env

    from hftrainer.parallel import devices
    from hftrainer.parallel.environment import detect_launcher

    kind = "xla" if devices.uses_xla() else devices.detect_device_type()
    build = torch.version.cuda or torch.version.hip
    report: dict[str, Any] = {
        "used": kind,
        "number": devices.device_count(kind) if kind != "xla" else "known when torch_xla starts",
        "torch is built for": f"CUDA {build}" if torch.version.cuda else f"ROCm {build}" if build else "CPU",
        "CPU cores": devices.cpu_count(),
        "processes by": detect_launcher(),
    }
    # Ask nvidia-smi, since torch would create a context on the first GPU to get the name.
    names = (collect_env.get_gpu_info(collect_env.run) or "").splitlines()
    problems = []
    if names:
        report["NVIDIA GPUs"] = names
    if names and kind == "cpu":
        is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        advice = (
            "CUDA_VISIBLE_DEVICES hides them: unset it" if is_hidden else "update the driver, or use an older torch"
        )
        if torch.version.cuda is None:
            advice = "this torch is built without CUDA: install another as described at https://pytorch.org/get-started"
        problems.append(f"There are NVIDIA GPUs that torch does not see; {advice}.")
    if kind == "cpu" and (message := devices.unused_tpu_message()):
        problems.append(message)
    return report, problems


def _disks() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, path in (("folder", os.getcwd()), ("temporary", tempfile.gettempdir()), ("/dev/shm", "/dev/shm")):
        if os.path.isdir(path):
            usage = shutil.disk_usage(path)
            yield name, {"path": path, "free": usage.free, "total": usage.total}


#: Environment variables whose values are not secret.
PRINTABLE = """
    HFTRAINER_ENVIRONMENT WORLD_SIZE RANK LOCAL_RANK NODE_RANK MASTER_ADDR MASTER_PORT SLURM_JOB_ID SLURM_JOB_NAME
    SLURM_PROCID TORCHELASTIC_RESTART_COUNT TORCHELASTIC_USE_AGENT_STORE PJRT_LOCAL_PROCESS_COUNT
    CUDA_VISIBLE_DEVICES PJRT_DEVICE USE_TORCH_XLA TPU_NAME DS_ACCELERATOR
    HF_HUB_OFFLINE HF_HOME TRANSFORMERS_VERBOSITY OMP_NUM_THREADS TOKENIZERS_PARALLELISM CUBLAS_WORKSPACE_CONFIG
    CUDA_LAUNCH_BLOCKING FLASH_ATTENTION_DETERMINISTIC PYTORCH_ENABLE_MPS_FALLBACK PYTORCH_CUDA_ALLOC_CONF
    NCCL_DEBUG TENSORBOARD_LOGGING_DIR WANDB_DISABLED WANDB_MODE WANDB_PROJECT WANDB_LOG_MODEL WANDB_WATCH
    MLFLOW_EXPERIMENT_NAME MLFLOW_RUN_ID MLFLOW_MAX_LOG_PARAMS HF_MLFLOW_LOG_ARTIFACTS DISABLE_MLFLOW_INTEGRATION
    COMET_MODE COMET_LOG_ASSETS RAY_SCOPE GLIBC_TUNABLES
""".split()
#: Other variables of these libraries, and likely secrets: only their names are shown.
_SHOWN_BY_NAME = re.compile(
    r"^(HFTRAINER|HF|HUGGING|TRANSFORMERS|ACCELERATE|FSDP|WANDB|MLFLOW|COMET|CLEARML|SWANLAB|TRACKIO|NCCL|TORCH|PYTORCH"
    r"|CUDA|XLA|PJRT)_|TOKEN$|API_KEY$|SECRET|PASSWORD|CREDENTIAL"
)


def environment() -> dict[str, str]:
    """The variables that are set, with value or effect if known, else 'set'."""
    from hftrainer.arguments.accelerate import find_variable

    values = {name: os.environ[name] for name in PRINTABLE if name in os.environ}
    effects = {name: row.effect for name in os.environ if (row := find_variable(name)) is not None}
    values |= {name: f"{os.environ[name]} ({effect})" for name, effect in effects.items()}
    return values | {name: "set" for name in sorted(os.environ) if name not in values and _SHOWN_BY_NAME.search(name)}
