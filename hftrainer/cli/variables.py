"""Environment variables that change what hftrainer does, as `doctor` shows them."""

from __future__ import annotations

import os
import re

from hftrainer.arguments.launched import row_of

#: Variables whose values may be printed → what they do.
EFFECTS = {
    "HFTRAINER_ENVIRONMENT": "the launcher whose variables are read",
    "WORLD_SIZE": "number of processes, set by a launcher",
    "RANK": "rank of this process, set by a launcher",
    "LOCAL_RANK": "rank on this machine, set by a launcher",
    "NODE_RANK": "rank of this machine, set by a launcher",
    "MASTER_ADDR": "host of rank 0",
    "MASTER_PORT": "port of rank 0",
    "SLURM_JOB_ID": "this is a SLURM job",
    "SLURM_JOB_NAME": "'bash' and 'interactive' count as a shell",
    "SLURM_PROCID": "rank in a step of srun",
    "PJRT_LOCAL_PROCESS_COUNT": "torch_xla has started this process",
    "CUDA_VISIBLE_DEVICES": "the GPUs that this process sees",
    "PJRT_DEVICE": "runs on XLA",
    "USE_TORCH_XLA": "0: never on XLA",
    "TPU_NAME": "this machine has a TPU",
    "DS_ACCELERATOR": "the device of DeepSpeed",
    "HF_HUB_OFFLINE": "nothing is downloaded or uploaded",
    "HF_HOME": "folder of downloads",
    "TRANSFORMERS_VERBOSITY": "log level",
    "OMP_NUM_THREADS": "threads of each process on the CPU",
    "TOKENIZERS_PARALLELISM": "threads of tokenizers",
    "CUBLAS_WORKSPACE_CONFIG": "determinism on GPUs",
    "CUDA_LAUNCH_BLOCKING": "waits for each kernel: slow",
    "FLASH_ATTENTION_DETERMINISTIC": "determinism of attention",
    "PYTORCH_ENABLE_MPS_FALLBACK": "operators that Apple's GPU lacks run on the CPU",
    "PYTORCH_CUDA_ALLOC_CONF": "memory of GPUs",
    "NCCL_DEBUG": "messages of NCCL",
    "TENSORBOARD_LOGGING_DIR": "folder of TensorBoard's files",
    "WANDB_DISABLED": "W&B is switched off",
    "WANDB_MODE": "W&B online, offline or disabled",
    "WANDB_PROJECT": "project in W&B",
    "WANDB_LOG_MODEL": "uploads of models to W&B",
    "WANDB_WATCH": "histograms in W&B",
    "MLFLOW_EXPERIMENT_NAME": "experiment in MLflow",
    "MLFLOW_RUN_ID": "the run of MLflow that is continued",
    "MLFLOW_MAX_LOG_PARAMS": "number of parameters that MLflow gets",
    "HF_MLFLOW_LOG_ARTIFACTS": "uploads of checkpoints to MLflow",
    "DISABLE_MLFLOW_INTEGRATION": "MLflow is switched off",
    "COMET_MODE": "Comet's mode",
    "COMET_LOG_ASSETS": "uploads of checkpoints to Comet",
    "DATABRICKS_RUNTIME_VERSION": "how notebooks show progress",
    "RAY_SCOPE": "which of a trial's values count",
    "GLIBC_TUNABLES": "how freed memory is kept",
}
#: Other variables of these libraries, and all that look like secrets: named, never with their values.
_NAMED = re.compile(
    r"^(HFTRAINER|HF|HUGGING|TRANSFORMERS|ACCELERATE|FSDP|WANDB|MLFLOW|COMET|CLEARML|SWANLAB|TRACKIO|NCCL|TORCH|PYTORCH"
    r"|CUDA|XLA|PJRT)_|TOKEN$|API_KEY$|SECRET|PASSWORD|CREDENTIAL"
)


def environment() -> dict[str, str]:
    """The variables that are set: value and effect of those in the table, 'set' for the others."""
    shown = {name: f"{os.environ[name]} ({effect})" for name, effect in EFFECTS.items() if name in os.environ}
    launched = {name: f"{os.environ[name]} ({row.effect})" for name in os.environ if (row := row_of(name)) is not None}
    shown = launched | shown
    return shown | {name: "set" for name in sorted(os.environ) if name not in shown and _NAMED.search(name)}
