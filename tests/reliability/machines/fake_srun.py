"""Stands for SLURM's `srun` of SLURM_NTASKS tasks on one node: its variables, and signals that reach each task."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

master = str(random.SystemRandom().randrange(10_000, 32_000))  # below the ports that connections get
count = os.environ["SLURM_NTASKS"]
shared = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": count, "SLURM_STEP_TASKS_PER_NODE": count}
shared |= {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "localhost", "SLURM_NODEID": "0", "MASTER_PORT": master}
tasks = [
    subprocess.Popen(sys.argv[1:], env={**os.environ, **shared, "SLURM_PROCID": rank, "SLURM_LOCALID": rank})
    for rank in map(str, range(int(count)))
]
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, frame: [task.send_signal(number) for task in tasks])
Path(__file__).with_name("srun.pid").write_text(str(os.getpid()))
sys.exit(max(abs(task.wait()) for task in tasks))
