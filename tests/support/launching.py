"""Starting scripts with launchers: torchrun, accelerate, ours."""

import json
import pickle
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

from tests.support import warm

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Run a script, whose processes torchrun starts from the same Python."""
    return subprocess.run(
        [warm.PYTHON, *arguments],
        env={**warm.environment(), "PYTHON_EXEC": warm.PYTHON, **environment},
        capture_output=True,
        text=True,
        timeout=900,
    )


def of_both_libraries(script: Path, folder: Path) -> dict:
    """What a script wrote with transformers, then with ours, which reads their checkpoints: by library and rank."""
    for library in ("transformers", "hftrainer"):
        run = python(*TORCHRUN, str(script), library, str(folder))
        assert run.returncode == 0, run.stderr[-3000:]
    return {path.stem: pickle.loads(path.read_bytes()) for path in folder.glob("*.pkl")}


class Runs(dict):
    """What a script writes with either library, by library and rank; with transformers it is run when that is read."""

    def __init__(self, script: Path, folder: Path) -> None:
        super().__init__()
        self.script, self.folder = script, folder
        self.messages = self._run("hftrainer")

    def _run(self, library: str) -> str:
        run = python(*TORCHRUN, str(self.script), library, str(self.folder))
        assert run.returncode == 0, run.stderr[-3000:]
        self.update({path.stem: pickle.loads(path.read_bytes()) for path in self.folder.glob(f"{library}-*.pkl")})
        return run.stderr

    def __missing__(self, name: str) -> Any:
        assert name.startswith("transformers-"), name
        self._run("transformers")
        return self[name]


def torchrun(folder: Path, text: str) -> subprocess.CompletedProcess:
    """Run a script in two processes."""
    script = folder / "script.py"
    script.write_text(text)
    return python(*TORCHRUN, str(script))


#: A model that fails in one of two processes.
FAILS_IN_ONE = """
class Fails(Plain):
    def forward(self, x, labels=None):
        if os.environ["RANK"] == "1":
            raise RuntimeError("only here")
        return super().forward(x, labels)

args = TrainingArguments("out", use_cpu=True, disable_tqdm=True, ddp_timeout=120)
"""


SCRIPT = str(Path(__file__).with_name("launched.py"))


DEVICES = ["--lightning_config", '{"devices": 2}']


def start(folder, before, after=(), script=SCRIPT, **environment):
    """The script in a folder, by a launcher's words, with further arguments."""
    folder.mkdir(exist_ok=True)
    settings = ["--output_dir", str(folder), "--max_steps", "3", "--learning_rate", "0.1", "--use_cpu", "True"]
    settings += ["--disable_tqdm", "True", "--save_strategy", "no", "--report_to", "none"]
    return subprocess.Popen(
        [warm.PYTHON, *before, script, *settings, *after],
        env={**warm.environment(), **warm.AGAIN, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # A shell that runs the tests in the background has them ignore Ctrl-C, which Python then leaves so.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def launch(folder, *args, **environment):
    """What each of the two processes found."""
    process = start(folder, *args, **environment)
    printed = process.communicate(timeout=120)[0]
    assert process.returncode == 0, printed[-3000:]
    return read(folder)


def read(folder):
    assert (folder / "final" / "model.safetensors").is_file()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def accelerate(*options):
    return ["-m", "accelerate.commands.launch", *options]


#: Name → what stands before the script.
LAUNCHERS = {
    "torch.distributed.launch": lambda: [
        "-m",
        "torch.distributed.launch",
        "--nproc_per_node=2",
        f"--master_port={port()}",
    ],
    "accelerate": lambda: accelerate(
        *("--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"),
        f"--main_process_port={port()}",
    ),
    "hftrainer": lambda: ["-m", "hftrainer", "run", "--nproc", "2"],
}


#: The file with FSDP in the documentation of `accelerate launch`.
FSDP_FILE = """
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
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
