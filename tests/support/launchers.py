"""Starting scripts with launchers: torchrun, accelerate, ours. Each process imports everything itself, as a user's."""

import contextlib
import json
import pickle
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

from tests.support import processes

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def run_python(*words: str, **variables: str) -> subprocess.CompletedProcess:
    line, env = [sys.executable, *map(str, words)], {**processes.environment(), **variables}
    return subprocess.run(line, env=env, capture_output=True, text=True)


def run_with_both(script: Path, folder: Path) -> dict:
    """What a script wrote with transformers, then with ours, which reads their checkpoints: by library and rank."""
    for library in ("transformers", "hftrainer"):
        run = run_python(*TORCHRUN, str(script), library, str(folder))
        assert run.returncode == 0, run.stderr[-3000:]
    return {path.stem: pickle.loads(path.read_bytes()) for path in folder.glob("*.pkl")}


SCRIPT = str(Path(__file__).with_name("launched_script.py"))
DEVICES = ["--lightning_config", '{"devices": 2}']


def settings(folder):
    words = "--max_steps 3 --learning_rate 0.1 --use_cpu True --disable_tqdm True --save_strategy no --report_to none"
    return ["--output_dir", str(folder), *words.split()]


def start(folder, before, after=(), script=SCRIPT, **environment):
    """The script in a folder, by a launcher's words, with further arguments."""
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, *before, script, *settings(folder), *after],
        env={**processes.environment(), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # A shell that runs the tests in the background has them ignore Ctrl-C, which Python then leaves so.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def launch(folder, *args, **environment):
    process = start(folder, *args, **environment)
    printed = process.communicate()[0]
    assert process.returncode == 0, printed[-3000:]
    return read(folder)


def read(folder):
    assert (folder / "final" / "model.safetensors").is_file()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def free_port():
    """A port that no connection gets from the system before a process listens there."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)  # tests seed the other generator
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return str(port)


def accelerate(*options):
    return ["-m", "accelerate.commands.launch", *options]


#: Launcher → words of the command line before the script.
LAUNCHERS = {
    "torch.distributed.launch": lambda: (
        f"-m torch.distributed.launch --nproc_per_node=2 --master_port={free_port()}".split()
    ),
    "accelerate": lambda: accelerate(
        *("--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"),
        f"--main_process_port={free_port()}",
    ),
    "hftrainer": lambda: ["-m", "hftrainer", "run", "--nproc", "2"],
}
#: Last lines of each of accelerate's files.
END_OF_FILE = """\
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
#: The file with FSDP in the documentation of `accelerate launch`.
FSDP_FILE = f"""
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_forward_prefetch: true
  fsdp_offload_params: false
  fsdp_sharding_strategy: 1
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
{END_OF_FILE}"""
