"""Where this process stands among others: read from the environment in one place, in the words of each launcher."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

#: Chooses the launcher whose words are read, where `lightning_config` does not.
CHOICE = "HFTRAINER_ENVIRONMENT"
#: Set in processes that a script has started itself: the process id of the one that started them.
STARTED_BY = "HFTRAINER_STARTED_BY"
#: What the names of Open MPI, MVAPICH and Intel MPI or MPICH are: rank, size, local rank, local size.
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
#: Names of jobs that are shells, in which a script is started by hand.
_INTERACTIVE = ("bash", "interactive")
_PORT = 29500


class WrongEnvironment(ValueError):
    """A variable of a launcher cannot be read."""


@dataclass(frozen=True)
class RankInfo:
    """Where this process stands.

    Attributes:
        world_size: processes in all.
        rank: number of this process among all.
        local_rank: number of this process on its node.
        local_world_size: processes on this node.
        nodes: machines.
        launcher: who has said so: a name in `LAUNCHERS`.
        address: host of the first process; None while it is not known.
        port: its port.
        started: whether the other processes run; False in a script that starts them with its first Trainer.
        missing: variables that the launcher should have set and has not.
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
    def self_started(self) -> bool:
        """Whether the first process of the run is a script that starts, or has started, the others."""
        return not self.started or STARTED_BY in os.environ

    def device_index(self, visible: int) -> int:
        """Which of the visible GPUs is this process's: SLURM and MPI may show each process its own alone."""
        return 0 if visible == 1 and self.launcher in ("slurm", "mpi") else self.local_rank


def _number(*names: str, default: int = 0) -> int:
    """The first of some variables that is set.

    Raises:
        WrongEnvironment: when it is no number from 0.
    """
    for name in names:
        if (value := os.environ.get(name)) is not None:
            if not value.strip().isdecimal():
                raise WrongEnvironment(f"{name}={value!r}: it must be a number from 0, as a launcher sets it.")
            return int(value)
    return default


def _missing(*names: str) -> tuple[str, ...]:
    return tuple(name for name in names if name not in os.environ)


def _by_torchrun() -> RankInfo:
    """torchrun, torch.distributed.launch, accelerate launch and the deepspeed launcher."""
    size = _number("WORLD_SIZE", default=1)
    local = _number("LOCAL_WORLD_SIZE", "LOCAL_SIZE", default=size)
    return RankInfo(
        size,
        _number("RANK"),
        _number("LOCAL_RANK"),
        local,
        nodes=_number("GROUP_WORLD_SIZE", "CROSS_SIZE", default=-(-size // max(local, 1))),
        launcher="torchrun",
        address=os.environ.get("MASTER_ADDR"),
        port=_number("MASTER_PORT", default=_PORT),
        missing=_missing("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK"),
    )


def _by_kubeflow() -> RankInfo:
    """A PyTorchJob: one process on each node."""
    size = _number("WORLD_SIZE", default=1)
    return RankInfo(
        size,
        _number("RANK"),
        nodes=size,
        launcher="kubeflow",
        address=os.environ.get("MASTER_ADDR"),
        port=_number("MASTER_PORT", default=_PORT),
        missing=_missing("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK"),
    )


def _by_lightning(nodes: int = 1) -> RankInfo:
    """Processes of a script that starts them itself, or started by hand with the variables that Lightning names."""
    size = _number("WORLD_SIZE", default=1)
    local = _number("LOCAL_WORLD_SIZE", default=max(size // nodes, 1))
    return RankInfo(
        size,
        _number("NODE_RANK") * local + _number("LOCAL_RANK"),
        _number("LOCAL_RANK"),
        local,
        nodes=-(-size // max(local, 1)),
        address=os.environ.get("MASTER_ADDR"),
        port=_number("MASTER_PORT", default=_PORT),
        missing=_missing("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK") if size > 1 else (),
    )


def _by_mpi() -> RankInfo:
    """The mpirun of Open MPI, MVAPICH, Intel MPI or MPICH, without mpi4py."""
    rank, size, local_rank, local_size = next((names for names in _MPI if names[0] in os.environ), _MPI[0])
    world = _number(size, default=1)
    local = _number(local_size, default=world)
    several_nodes = local < world
    return RankInfo(
        world,
        _number(rank),
        _number(local_rank),
        local,
        nodes=-(-world // max(local, 1)),
        launcher="mpi",
        address=os.environ.get("MASTER_ADDR", None if several_nodes else "127.0.0.1"),
        port=_number("MASTER_PORT", default=_PORT),
        missing=_missing(rank, size) + (_missing("MASTER_ADDR") if several_nodes else ()),
    )


def _by_slurm() -> RankInfo:
    """A step of srun."""
    size = _number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", default=1)
    per_node = tasks_per_node(_first("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"))
    nodes = _number("SLURM_STEP_NUM_NODES", "SLURM_NNODES", default=max(len(per_node), 1))
    node = _number("SLURM_NODEID")
    local = -(-size // nodes) if not per_node else per_node[min(node, len(per_node) - 1)]
    hosts = _first("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    job = _number("SLURM_JOB_ID", "SLURM_JOBID") + _number("SLURM_STEP_ID", "SLURM_STEPID")
    return RankInfo(
        size,
        _number("SLURM_PROCID"),
        _number("SLURM_LOCALID"),
        local,
        nodes=nodes,
        launcher="slurm",
        address=os.environ.get("MASTER_ADDR") or first_host(hosts) or "127.0.0.1",
        port=_number("MASTER_PORT", default=15000 + job % 10000),  # the same in all processes of a step
        missing=_missing("SLURM_PROCID", "SLURM_LOCALID"),
    )


def _by_xla() -> RankInfo:
    """A process of torch_xla.launch, which alone knows where it stands."""
    from hftrainer.parallel.xla import devices as xla

    return xla.rank_info()


def _first(*names: str) -> str:
    return next((os.environ[name] for name in names if name in os.environ), "")


def tasks_per_node(text: str) -> list[int]:
    """Tasks on each node, as SLURM writes them: '2(x3),1' is 2, 2, 2, 1."""
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in counts for _ in range(int(times or 1))]


def first_host(hosts: str) -> str:
    """The first of SLURM's list of nodes: 'gpu-[03-07,9],cpu1' begins with gpu-03."""
    return re.sub(r"^([^\[,\s]*)\[(\d+)[^\]]*\]([^,\s]*).*", r"\1\2\3", hosts, flags=re.DOTALL).split(",")[0].strip()


#: Launchers → how their variables are read, and how their processes are started.
LAUNCHERS: Mapping[str, tuple[Callable[[], RankInfo], str]] = {
    "torchrun": (_by_torchrun, "start the script with torchrun"),
    "slurm": (_by_slurm, "start the script with srun"),
    "mpi": (_by_mpi, "start the script with mpirun, and set MASTER_ADDR to the host of its first process"),
    "kubeflow": (_by_kubeflow, "start the script as a PyTorchJob, or with torchrun"),
    "lightning": (_by_lightning, "start the script with torchrun"),
    "xla": (_by_xla, "start the script with python -m hftrainer run --tpu"),
}
#: Lightning's environments, given as a plugin → the launcher that they stand for.
_PLUGINS = {
    "TorchElasticEnvironment": "torchrun",
    "SLURMEnvironment": "slurm",
    "KubeflowEnvironment": "kubeflow",
    "LightningEnvironment": "lightning",
}


def detect() -> str:
    """The launcher that has started this process; 'lightning' when none has.

    Launchers inside others come first: torch_xla's in any, torchrun started by srun or mpirun, mpirun within a job of
    SLURM.
    """
    if "PJRT_LOCAL_PROCESS_COUNT" in os.environ:
        return "xla"
    if "WORLD_SIZE" in os.environ:
        if "RANK" in os.environ:
            return "torchrun" if "LOCAL_RANK" in os.environ else "kubeflow"
        return "lightning" if "LOCAL_RANK" in os.environ and "NODE_RANK" in os.environ else "torchrun"
    if any(names[0] in os.environ and names[2] in os.environ for names in _MPI):
        return "mpi"
    # Only a step of srun counts its tasks; a batch script or a shell in an allocation has the job's variables alone.
    in_step = "SLURM_PROCID" in os.environ and _number("SLURM_STEP_NUM_TASKS", default=1) > 1
    if in_step and os.environ.get("SLURM_JOB_NAME") not in _INTERACTIVE:
        return "slurm"
    return "mpi" if _MPI[2][0] in os.environ and _MPI[2][1] in os.environ else "lightning"


def find_rank_info(config: Mapping[str, Any], gpus: Callable[[], int]) -> RankInfo:
    """Where this process stands.

    Args:
        config: `lightning_config`; 'environment' or an environment among 'plugins' chooses the launcher.
        gpus: counts the GPUs that this process may use, none when it trains on the CPU.

    Raises:
        WrongEnvironment: when a variable of the launcher cannot be read.
    """
    plugin = cluster_environment(config.get("plugins"))
    chosen = _PLUGINS.get(type(plugin).__name__) or config.get("environment") or os.environ.get(CHOICE)
    if plugin is not None and type(plugin).__name__ not in _PLUGINS:
        return _by_plugin(plugin, _as_count(config.get("num_nodes")) or 1)
    launcher = str(chosen) if chosen in LAUNCHERS else detect()
    if launcher == "lightning":
        rank_info = _by_lightning(_as_count(config.get("num_nodes")) or 1)
        return rank_info if "LOCAL_RANK" in os.environ else _by_the_script(config.get("devices"), gpus)
    return LAUNCHERS[launcher][0]()


def _by_plugin(plugin: Any, nodes: int) -> RankInfo:
    """What an environment of the user's own says."""
    size = plugin.world_size()
    return RankInfo(
        size,
        plugin.global_rank(),
        plugin.local_rank(),
        max(size // nodes, 1),
        nodes=nodes,
        launcher=type(plugin).__name__,
        address=plugin.main_address,
        port=plugin.main_port,
    )


def _by_the_script(devices: Any, gpus: Callable[[], int]) -> RankInfo:
    """Plain python: one process, or one for each device, which the script starts itself."""
    wanted = _as_count(devices)
    if wanted is None:
        # accelerate launch has started one process, and means it.
        alone = "ACCELERATE_MIXED_PRECISION" in os.environ or not can_start_again()
        wanted = 1 if alone else max(gpus(), 1)
    return RankInfo(wanted, local_world_size=wanted, started=wanted == 1)


def _as_count(value: Any) -> int | None:
    """A number of devices or nodes; None for 'auto', -1 and what is no number."""
    if isinstance(value, bool) or not str(value).isdecimal():
        return None
    return int(value) or None


def can_start_again() -> bool:
    """Whether the command line of this process can be run once more; not in notebooks, shells, and child processes."""
    ipython = sys.modules.get("IPython")
    interactive = hasattr(sys, "ps1") or sys.flags.interactive or (ipython is not None and ipython.get_ipython())
    multiprocessing = sys.modules.get("multiprocessing")
    child = multiprocessing is not None and multiprocessing.parent_process() is not None
    from_stdin = sys.argv[:1] in ([], [""], ["-"])
    return not (interactive or child or from_stdin)


def cluster_environment(plugins: Any) -> Any:
    """The `ClusterEnvironment` among Lightning's plugins, or None; it can only be there when Lightning is imported."""
    module = sys.modules.get("lightning.fabric.plugins.environments.cluster_environment")
    kind = getattr(module, "ClusterEnvironment", None)
    given = plugins if isinstance(plugins, (list, tuple)) else [plugins]
    return next((plugin for plugin in given if kind is not None and isinstance(plugin, kind)), None)


def check_choices(config: Mapping[str, Any]) -> list[str]:
    """A sentence for each choice of devices, nodes or launcher that cannot be one."""
    found = []
    devices, nodes, chosen = config.get("devices"), config.get("num_nodes"), os.environ.get(CHOICE)
    if isinstance(devices, (list, tuple)):
        found.append(
            f"lightning_config['devices']={devices!r}: give their number, and choose with CUDA_VISIBLE_DEVICES."
        )
    elif devices not in (None, "auto", -1, "-1") and _as_count(devices) is None:
        found.append(f"lightning_config['devices']={devices!r}: it must be a number from 1, -1 or 'auto'.")
    if nodes is not None and _as_count(nodes) is None:
        found.append(f"lightning_config['num_nodes']={nodes!r}: it must be a number from 1.")
    if chosen is not None and chosen not in LAUNCHERS:
        found.append(f"{CHOICE}={chosen!r}: it must be {' or '.join(map(repr, LAUNCHERS))}.")
    return found


def check_rank_info(rank_info: RankInfo, config: Mapping[str, Any], gpus: int | None) -> list[str]:
    """A sentence for each reason why training cannot begin in this place.

    Args:
        rank_info: where this process stands.
        config: `lightning_config`.
        gpus: GPUs that this process sees; None when it trains on something else.
    """
    found = []
    start = LAUNCHERS.get(rank_info.launcher, LAUNCHERS["torchrun"])[1]
    if rank_info.missing:
        who = (
            f"WORLD_SIZE={rank_info.world_size} asks" if "WORLD_SIZE" in os.environ else f"{rank_info.launcher!r} asks"
        )
        verb = "are" if len(rank_info.missing) > 1 else "is"
        found.append(f"{who} for several processes, but {' and '.join(rank_info.missing)} {verb} not set: {start}.")
    elif rank_info.rank >= rank_info.world_size or rank_info.local_rank >= rank_info.local_world_size:
        found.append(
            f"The launcher says that this is process {rank_info.rank} of {rank_info.world_size}, and "
            f"{rank_info.local_rank} of {rank_info.local_world_size} on its node: numbers must be below their count; "
            f"{start}."
        )
    shared = gpus == 1 and rank_info.launcher in ("slurm", "mpi")  # each process may see its own
    if gpus is not None and rank_info.local_world_size > gpus and not shared:
        found.append(
            f"{rank_info.local_world_size} processes on this node need a GPU each, and there are {gpus}: start as many "
            "processes, or set use_cpu=True."
        )
    devices, nodes = _as_count(config.get("devices")), _as_count(config.get("num_nodes"))
    if not rank_info.started or (rank_info.launcher == "lightning" and rank_info.world_size == 1):
        if nodes is not None and nodes > 1:
            found.append(f"lightning_config['num_nodes']={nodes} needs a launcher on each node: use torchrun.")
        if not rank_info.started and not can_start_again():
            found.append(
                f"lightning_config['devices']={devices} needs a script that can be started again for each device, "
                "which a notebook or shell is not: leave it out, or run a script."
            )
        return found
    for name, wanted, have in (("devices", devices, rank_info.local_world_size), ("num_nodes", nodes, rank_info.nodes)):
        if wanted is not None and wanted != have:
            found.append(
                f"lightning_config[{name!r}]={wanted}, and the launcher has started {have}: leave it out, or launch as "
                "many."
            )
    return found
