"""Reads rank and world size from a launcher's variables, and checks whether a process still runs."""

from __future__ import annotations

import multiprocessing
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hftrainer.plugins import import_adapter

#: Environment variable that selects the launcher, unless `lightning_config` does.
LAUNCHER_VARIABLE = "HFTRAINER_ENVIRONMENT"
#: Environment variable with the process id of the script, if the script starts the other processes.
PARENT_PID_VARIABLE = "HFTRAINER_STARTED_BY"
#: Variables of Open MPI, MVAPICH, and Intel MPI or MPICH: rank, size, local rank, local size.
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
#: Names of SLURM jobs that are shells, in which users start scripts by hand.
_INTERACTIVE = ("bash", "interactive")
_PORT = 29500
#: A larger number of processes on the CPU is probably a typo, and would exhaust memory.
_PROCESSES_PER_CORE = 8
#: Seconds without a write after which a process of another machine counts as ended.
_MAX_SILENCE = 24 * 3600


class InvalidEnvironment(ValueError):
    """A launcher's environment variable has an invalid value."""


@dataclass(frozen=True)
class RankInfo:
    """Rank and world size of this process.

    Attributes:
        world_size: number of processes.
        rank: global rank of this process.
        local_rank: rank of this process on its node.
        local_world_size: processes on this node.
        nodes: number of machines.
        launcher: the source of the values: a name in `LAUNCHERS`, or the class of a user-defined environment.
        address: hostname of rank 0; None if it is not known yet.
        port: port of rank 0.
        started: whether all processes are running; False in a script whose first Trainer starts the others.
        missing: variables that the launcher should have set but has not.
    """

    world_size: int = 1
    rank: int = 0
    local_rank: int = 0
    local_world_size: int = 1
    nodes: int = 1
    launcher: str = "lightning"
    address: str | None = None
    port: int = _PORT
    started: bool = True
    missing: tuple[str, ...] = ()

    @property
    def is_self_launched(self) -> bool:
        """Whether rank 0 is a script that starts, or has started, the other processes itself."""
        return not self.started or PARENT_PID_VARIABLE in os.environ

    def device_index(self, visible: int) -> int:
        """Index of this process's GPU. SLURM and MPI may make only that GPU visible."""
        return 0 if visible == 1 and self.launcher in ("slurm", "mpi") else self.local_rank


def _read_number(*names: str, default: int = 0) -> int:
    """The value of the first variable that is set.

    Raises:
        InvalidEnvironment: if the value is not a non-negative integer.
    """
    for name in names:
        if (value := os.environ.get(name)) is not None:
            if not value.strip().isdecimal():
                raise InvalidEnvironment(
                    f"{name}={value!r} is not a non-negative integer. Launchers set this variable: unset it, or "
                    "start the script with a launcher."
                )
            return int(value)
    return default


def _make_rank_info(
    launcher: str,
    ranks: tuple[int, int, int, int],
    variables: tuple[str, ...],
    *,
    nodes: int = 0,
    address: str | None = None,
    port: int = _PORT,
) -> RankInfo:
    """Build the rank information of a launcher.

    Args:
        launcher: name of the launcher.
        ranks: world size, rank, local rank and local world size.
        variables: the variables that the launcher should have set.
        nodes: number of machines; by default as many as the processes need.
        address: hostname of rank 0, unless `MASTER_ADDR` is set.
        port: port of rank 0, unless `MASTER_PORT` is set.
    """
    world_size, *_, local_world_size = ranks
    return RankInfo(
        *ranks,
        nodes=nodes or -(-world_size // max(local_world_size, 1)),
        launcher=launcher,
        address=os.environ.get("MASTER_ADDR") or address,
        port=_read_number("MASTER_PORT", default=port),
        missing=tuple(name for name in variables if name not in os.environ),
    )


_RENDEZVOUS = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK")


def _read_torchrun() -> RankInfo:
    """Read the variables of torchrun, torch.distributed.launch, accelerate launch and the deepspeed launcher."""
    size = _read_number("WORLD_SIZE", default=1)
    local_size = _read_number("LOCAL_WORLD_SIZE", "LOCAL_SIZE", default=size)
    ranks = size, _read_number("RANK"), _read_number("LOCAL_RANK"), local_size
    return _make_rank_info("torchrun", ranks, _RENDEZVOUS, nodes=_read_number("GROUP_WORLD_SIZE", "CROSS_SIZE"))


def _read_kubeflow() -> RankInfo:
    """Read the variables of a PyTorchJob, which runs one process on each node."""
    return _make_rank_info("kubeflow", (_read_number("WORLD_SIZE", default=1), _read_number("RANK"), 0, 1), _RENDEZVOUS)


def _read_lightning(nodes: int = 1) -> RankInfo:
    """Read Lightning's variables, for processes that a script or a user started."""
    size = _read_number("WORLD_SIZE", default=1)
    local_rank = _read_number("LOCAL_RANK")
    local_size = _read_number("LOCAL_WORLD_SIZE", default=max(size // nodes, 1))
    rank = _read_number("NODE_RANK") * local_size + local_rank
    variables = ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK") if size > 1 else ()
    return _make_rank_info("lightning", (size, rank, local_rank, local_size), variables)


def _read_mpi() -> RankInfo:
    """Read the variables of mpirun (Open MPI, MVAPICH, Intel MPI or MPICH), without mpi4py."""
    names = next((names for names in _MPI if names[0] in os.environ), _MPI[0])
    size = _read_number(names[1], default=1)
    local_size = _read_number(names[3], default=size)
    is_one_node = local_size >= size
    variables = names[:2] if is_one_node else (*names[:2], "MASTER_ADDR")
    ranks = size, _read_number(names[0]), _read_number(names[2]), local_size
    return _make_rank_info("mpi", ranks, variables, address="127.0.0.1" if is_one_node else None)


def _read_slurm() -> RankInfo:
    """Read the variables of an srun step."""
    size = _read_number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", default=1)
    node_sizes = tasks_per_node(
        _read_variable("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
    )
    nodes = _read_number("SLURM_STEP_NUM_NODES", "SLURM_NNODES", default=max(len(node_sizes), 1))
    job = _read_number("SLURM_JOB_ID", "SLURM_JOBID") + _read_number("SLURM_STEP_ID", "SLURM_STEPID")
    local_size = node_sizes[min(_read_number("SLURM_NODEID"), len(node_sizes) - 1)] if node_sizes else -(-size // nodes)
    return _make_rank_info(
        "slurm",
        (size, _read_number("SLURM_PROCID"), _read_number("SLURM_LOCALID"), local_size),
        ("SLURM_PROCID", "SLURM_LOCALID"),
        nodes=nodes,
        address=first_host(_read_variable("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"))
        or "127.0.0.1",
        # From the job's number, so that all processes get the same port.
        port=15000 + job % 10000,
    )


def _read_xla() -> RankInfo:
    return import_adapter("xla", "devices").rank_info()


def _read_variable(*names: str) -> str:
    return next((os.environ[name] for name in names if name in os.environ), "")


def tasks_per_node(text: str) -> list[int]:
    """Tasks on each node, as SLURM writes them: '2(x3),1' is 2, 2, 2, 1."""
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in counts for _ in range(int(times or 1))]


def first_host(hosts: str) -> str:
    """The first node in SLURM's list: gpu-03 in 'gpu-[03-07,9],cpu1'."""
    return re.sub(r"^([^\[,\s]*)\[(\d+)[^\]]*\]([^,\s]*).*", r"\1\2\3", hosts, flags=re.DOTALL).split(",")[0].strip()


#: Launcher → (the function that reads its variables, how to start processes with it).
LAUNCHERS: Mapping[str, tuple[Callable[[], RankInfo], str]] = {
    "torchrun": (_read_torchrun, "start the script with torchrun"),
    "slurm": (_read_slurm, "start the script with srun"),
    "mpi": (_read_mpi, "start the script with mpirun, and set MASTER_ADDR to the host of its first process"),
    "kubeflow": (_read_kubeflow, "start the script as a PyTorchJob, or with torchrun"),
    "lightning": (_read_lightning, "start the script with torchrun"),
    "xla": (_read_xla, "start the script with python -m hftrainer run --tpu"),
}
#: Class of Lightning's environment plugins → its launcher.
_PLUGINS = {
    "TorchElasticEnvironment": "torchrun",
    "SLURMEnvironment": "slurm",
    "KubeflowEnvironment": "kubeflow",
    "LightningEnvironment": "lightning",
}


def detect_launcher() -> str:
    """The launcher that started this process; 'lightning' without a launcher.

    The innermost launcher counts: torch_xla within any other, torchrun within srun or mpirun, mpirun within a SLURM
    job.
    """
    if "PJRT_LOCAL_PROCESS_COUNT" in os.environ:
        return "xla"
    if "WORLD_SIZE" in os.environ:
        if "RANK" in os.environ:
            return "torchrun" if "LOCAL_RANK" in os.environ else "kubeflow"
        return "lightning" if "LOCAL_RANK" in os.environ and "NODE_RANK" in os.environ else "torchrun"
    if any(names[0] in os.environ and names[2] in os.environ for names in _MPI):
        return "mpi"
    # Only an srun step sets its number of tasks. A batch script or shell in an allocation has only the job's variables.
    in_step = "SLURM_PROCID" in os.environ and _read_number("SLURM_STEP_NUM_TASKS", default=1) > 1
    if in_step and os.environ.get("SLURM_JOB_NAME") not in _INTERACTIVE:
        return "slurm"
    return "mpi" if _MPI[2][0] in os.environ and _MPI[2][1] in os.environ else "lightning"


def find_rank_info(config: Mapping[str, Any], gpus: Callable[[], int]) -> RankInfo:
    """Rank and world size of this process.

    Args:
        config: `lightning_config`; 'environment' or an environment among 'plugins' selects the launcher.
        gpus: returns the number of GPUs that this process may use; 0 if it trains on the CPU.

    Raises:
        InvalidEnvironment: if a variable of the launcher is invalid.
    """
    plugin = find_plugin(config.get("plugins"), "ClusterEnvironment")
    choice = _PLUGINS.get(type(plugin).__name__) or config.get("environment") or os.environ.get(LAUNCHER_VARIABLE)
    if plugin is not None and type(plugin).__name__ not in _PLUGINS:
        return _read_plugin(plugin, _as_count(config.get("num_nodes")) or 1)
    launcher = str(choice) if choice in LAUNCHERS else detect_launcher()
    if launcher == "lightning":
        rank_info = _read_lightning(_as_count(config.get("num_nodes")) or 1)
        return rank_info if "LOCAL_RANK" in os.environ else _plan_plain_python(config.get("devices"), gpus)
    return LAUNCHERS[launcher][0]()


def _read_plugin(plugin: Any, nodes: int) -> RankInfo:
    """The rank information of a user-defined `ClusterEnvironment`."""
    size = plugin.world_size()
    address = (plugin.main_address, plugin.main_port)
    ranks = size, plugin.global_rank(), plugin.local_rank(), max(size // nodes, 1)
    return RankInfo(*ranks, nodes, type(plugin).__name__, *address)


def _plan_plain_python(devices: Any, gpus: Callable[[], int]) -> RankInfo:
    """Plan a run that the script starts itself: one process, or one per device."""
    # accelerate launch started one process because the user requested one.
    needs_one_process = "ACCELERATE_MIXED_PRECISION" in os.environ or not can_rerun_script()
    size = _as_count(devices) or (1 if needs_one_process else max(gpus(), 1))
    return RankInfo(size, local_world_size=size, started=size == 1)


def _as_count(value: Any) -> int | None:
    """A number of devices or nodes; None for 'auto', -1 and anything that is not a number."""
    if isinstance(value, bool) or not str(value).isdecimal():
        return None
    return int(value) or None


def can_rerun_script() -> bool:
    """Whether this command line can be started again: False in notebooks, shells and child processes."""
    ipython = sys.modules.get("IPython")
    is_interactive = hasattr(sys, "ps1") or sys.flags.interactive or (ipython is not None and ipython.get_ipython())
    return not (is_interactive or multiprocessing.parent_process() is not None or sys.argv[:1] in ([], [""], ["-"]))


def find_plugin(plugins: Any, name: str) -> Any:
    """The plugin of Lightning's class `name`, or None. Does not import Lightning."""
    candidates = plugins if isinstance(plugins, (list, tuple)) else [plugins]
    named = (found for found in candidates if name in {kind.__name__ for kind in type(found).__mro__})
    return next(named, None)


def check_launcher_config(config: Mapping[str, Any]) -> Iterator[str]:
    """An error message for each invalid choice of devices, nodes or launcher."""
    devices = config.get("devices")
    nodes = config.get("num_nodes")
    launcher = os.environ.get(LAUNCHER_VARIABLE)
    if isinstance(devices, (list, tuple)):
        yield f"lightning_config['devices']={devices!r}: use a number, and select devices with CUDA_VISIBLE_DEVICES."
    elif devices not in (None, "auto", -1, "-1") and _as_count(devices) is None:
        yield f"lightning_config['devices']={devices!r}: it must be a positive integer, -1 or 'auto'."
    if nodes is not None and _as_count(nodes) is None:
        yield f"lightning_config['num_nodes']={nodes!r}: it must be a positive integer."
    if launcher is not None and launcher not in LAUNCHERS:
        yield f"{LAUNCHER_VARIABLE}={launcher!r}: it must be {' or '.join(map(repr, LAUNCHERS))}."


def check_rank_info(rank_info: RankInfo, config: Mapping[str, Any], gpus: int | None) -> list[str]:
    """An error message for each reason why training cannot start with these processes.

    Args:
        rank_info: rank and world size of this process.
        config: `lightning_config`.
        gpus: number of GPUs that this process sees; None if it trains on another device.
    """
    is_launched = rank_info.started and (rank_info.launcher, rank_info.world_size) != ("lightning", 1)
    return [
        *_check_launcher(rank_info),
        *_check_devices(rank_info, config.get("devices"), gpus),
        *(_check_sizes if is_launched else _check_plain_python)(rank_info, config),
    ]


def _check_launcher(rank_info: RankInfo) -> Iterator[str]:
    """Yield an error if a variable of the launcher is not set, or a rank is too large."""
    start = LAUNCHERS.get(rank_info.launcher, LAUNCHERS["torchrun"])[1]
    size = rank_info.world_size
    local_size = rank_info.local_world_size
    if missing := rank_info.missing:
        subject = f"WORLD_SIZE={size}" if "WORLD_SIZE" in os.environ else repr(rank_info.launcher)
        verb = "are" if len(missing) > 1 else "is"
        yield f"{subject} asks for several processes, but {' and '.join(missing)} {verb} not set: {start}."
    elif rank_info.rank >= size or rank_info.local_rank >= local_size:
        yield (
            f"The launcher sets rank {rank_info.rank} of {size}, and local rank {rank_info.local_rank} of "
            f"{local_size}: a rank must be below the number of processes; {start}."
        )


def _check_devices(rank_info: RankInfo, devices: Any, gpus: int | None) -> Iterator[str]:
    """Yield an error if the processes on this node outnumber its GPUs, or far outnumber its cores."""
    processes = rank_info.local_world_size
    cores = os.cpu_count() or 1
    sees_only_own_gpu = gpus == 1 and rank_info.launcher in ("slurm", "mpi")
    if gpus is not None and processes > gpus and not sees_only_own_gpu:
        yield (
            f"{processes} processes on this node need one GPU each, but there are {gpus}: start at most as many "
            "processes, or set use_cpu=True."
        )
    if gpus is None and not rank_info.started and processes > _PROCESSES_PER_CORE * cores:
        yield (
            f"lightning_config['devices']={devices!r} asks for as many processes, but this machine has {cores} cores: "
            f"use at most {_PROCESSES_PER_CORE * cores}."
        )


def _check_plain_python(rank_info: RankInfo, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error for each setting that needs a launcher."""
    if (nodes := _as_count(config.get("num_nodes")) or 1) > 1:
        yield f"lightning_config['num_nodes']={nodes} needs a launcher on each node: use torchrun."
    if not rank_info.started and not can_rerun_script():
        yield (
            f"lightning_config['devices']={_as_count(config.get('devices'))} needs a script that can be started once "
            "per device, which is not possible in a notebook or shell: remove the key, or run a script."
        )


def _check_sizes(rank_info: RankInfo, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error for each setting that differs from the launcher's number."""
    for name, count in (("devices", rank_info.local_world_size), ("num_nodes", rank_info.nodes)):
        setting = _as_count(config.get(name))
        if setting not in (None, count):
            yield (
                f"lightning_config[{name!r}]={setting}, but the launcher has started {count}: remove the key, or "
                "launch as many."
            )


def process_identifier() -> str:
    """An identifier of this process, with which `has_ended` checks whether the process has ended."""
    return f"{socket.gethostname()} {os.getpid()} {_read_state(os.getpid())[1]}"


def _read_state(process: int) -> tuple[str, str]:
    """A process's state, such as 'Z', and its start in ticks since boot, by which the same id may differ; or ''."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def has_ended(owner: str) -> bool:
    """Whether a process of this machine has ended; False for processes of other machines.

    Args:
        owner: a result of `process_identifier`, or host name and process id with a space between them.
    """
    host, process, start_time = f"{owner} ".split(" ")[:3]
    if host != socket.gethostname() or os.name != "posix":
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        # The process runs as another user.
        return False
    state, current_start_time = _read_state(int(process))
    # In a container nobody may ask for the status of a killed process, which then stays a zombie.
    return state == "Z" or (bool(start_time) and current_start_time != start_time)


def has_writer_ended(folder: Path, owner: str) -> bool:
    """Whether the process that writes into `folder` has ended.

    A process of another machine (perhaps a container on this one) cannot be checked. It counts as
    ended if the folder did not change for a day.
    """
    if owner.split(" ")[0] == socket.gethostname():
        return has_ended(owner)
    return time.time() - max(path.stat().st_mtime for path in [folder, *folder.rglob("*")]) > _MAX_SILENCE
