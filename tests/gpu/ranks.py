"""Runs in processes of their own: as ranks with a device each, or until they are killed.

A process that is forked where CUDA was used, or only looked for, cannot use it: on a GPU they are spawned. On the CPU
they are forked from a server, which spares them most imports.
"""

import copy
import multiprocessing
import os
import signal
import tempfile
from pathlib import Path
from unittest import mock

import torch
from torch import distributed

from hftrainer import TrainerCallback
from tests.gpu.support import HERE, ON_GPU, be_deterministic, build, comparable
from tests.support.processes import ranks

#: The variable that limits the devices, if the user has set it.
VISIBLE = {name: value for name, value in os.environ.items() if name == "CUDA_VISIBLE_DEVICES"}
#: Number of devices, which torch asks of the driver without using CUDA in this process.
DEVICES = torch.cuda.device_count() if ON_GPU else 2
#: Samples in an optimizer step of all ranks; 40 samples make 5 steps an epoch.
GLOBAL_BATCH = 8
START_METHOD = "spawn" if ON_GPU else "forkserver"
multiprocessing.set_forkserver_preload(["lightning.pytorch", "accelerate.data_loader", "transformers.trainer"])
SHARDED = {"state_dict_type": "SHARDED_STATE_DICT"}
#: Name → arguments.
STRATEGIES = {
    "ddp": {},
    "fsdp1": {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 1}},
    "fsdp1 sharded": {"fsdp": "full_shard", "fsdp_config": {"version": 1, **SHARDED}},
    "fsdp2": {"fsdp": True},
    "fsdp2 dcp": {"fsdp": True, "checkpoint_format": "dcp", "lightning_config": {"async_checkpoint": True}},
    "fsdp2 sharded bfloat16": {"fsdp": True, "fsdp_config": SHARDED, "bf16": True},
}


def _be_rank(rank, variables, folder, function, args):
    os.environ.update(variables[rank])
    be_deterministic()
    torch.save(function(*args), Path(folder, f"{rank}.pt"))


def run(function, count, *args):
    """What `function(*given)` of this module returns in each of `count` ranks.

    Raises:
        torch.multiprocessing.ProcessException: if one of them raises or is killed. The others are then ended.
    """
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ):
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # the tests' own process sees one device
        os.environ.update(VISIBLE)
        args = (ranks(count, store), folder, function, args)
        torch.multiprocessing.start_processes(_be_rank, args, count, start_method=START_METHOD)
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(count)]


class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 16:
            os.kill(os.getpid(), signal.SIGKILL)


def train_until_killed(model, folder, settings):
    """Train until the process ends itself without warning, after step 16."""
    build("hftrainer", model, folder, **settings, trainer={"callbacks": [Kill]})[0].train()


def _train_with(strategy, folder):
    """Three runs: without dropout; with it, saving in the second epoch; and resumed from there."""

    def train(model, name, resume=None, **saving):
        settings = {**HERE, **saving, "ddp_timeout": 60, "logging_steps": 1}
        settings["per_device_train_batch_size"] = GLOBAL_BATCH // int(os.environ["WORLD_SIZE"])
        trainer, _ = build("hftrainer", model, folder / name, **settings, **copy.deepcopy(strategy))
        trainer.train(resume_from_checkpoint=resume)
        weights = trainer.accelerator.get_state_dict(trainer.model)
        return {
            "logs": comparable(trainer.state.log_history),
            "weights": {key: value.detach().cpu().clone() for key, value in weights.items()},
            "device": str(trainer.args.device),
        }

    return {
        "plain": train("llama without dropout", "plain"),
        "saving": train("llama", "saving", save_strategy="steps", save_steps=7),
        "resumed": train("llama", "resumed", folder / "saving/checkpoint-7"),
        "backend": distributed.get_backend() if distributed.is_initialized() else None,
    }


def train_strategies(names, folder):
    return {name: _train_with(STRATEGIES[name], folder / name) for name in names}
