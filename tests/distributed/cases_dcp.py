"""Trainings whose checkpoints are in torch's distributed format, for one, two or four processes."""

import errno
import os
import signal
import threading
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemWriter

from hftrainer import TrainerCallback
from hftrainer.checkpointing import sharded
from tests.distributed.cases_sharding import run, world_size
from tests.support.checkpoints import AtStep
from tests.support.jobs import names_in

#: Name → arguments. One process has no launcher, and so no FSDP.
DCP = {"checkpoint_format": "dcp", "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
BACKGROUND = {**DCP, "lightning_config": {"async_checkpoint": True}}
WAYS = {
    "replicas": BACKGROUND,
    "fsdp1": {**DCP, "fsdp": True, "fsdp_config": {"version": 1}},
    "fsdp2": {**BACKGROUND, "fsdp": True},
}
#: Number of processes → ways that it writes and reads.
PLACES = {1: ("replicas",), 2: tuple(WAYS), 4: ("fsdp1", "fsdp2")}
#: Number of reading processes → numbers of writing ones.
OTHERS = {1: (2, 4), 2: (1, 4), 4: (1, 2)}


def write_all(folder):
    """Each way writes a checkpoint at its second step, and ends with it."""
    return {name: run("plain", WAYS[name], folder / f"{world_size()} {name}", max_steps=2) for name in _here()}


def _here():
    return PLACES[world_size()]


def read_all(folder):
    """Each way goes on from each other's checkpoint: to its own step, and to one more."""
    found = {}
    for count in OTHERS[world_size()]:
        for writer in PLACES[count]:
            checkpoint = folder / f"{count} {writer}" / "checkpoint-2"
            for reader in _here():
                for steps in (2, 3):
                    settings = {"max_steps": steps, "save_strategy": "no"}
                    found[count, writer, reader, steps] = run(
                        "plain", WAYS[reader], folder / "read", checkpoint, **settings
                    )
    return found


def read_given(folder, way, checkpoints):
    settings = {"max_steps": 2, "save_strategy": "no"}
    return [run("plain", WAYS[way], folder / "read", each, **settings)["weights"] for each in checkpoints]


def adapt(folder):
    """Adapters, whose frozen weights no checkpoint holds: undisturbed and resumed."""
    found = {}
    for name in ("replicas", "fsdp2"):
        whole = run("peft", WAYS[name], folder / name, max_steps=4)
        found[name] = whole, run("peft", WAYS[name], folder / "resumed", folder / name / "checkpoint-2", max_steps=4)
    return found


class Late(TrainerCallback):
    """The first layer has no gradient before the third step, and so no state in the checkpoint before it."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step < 2:
            for name, parameter in model.named_parameters():
                if "layers.0." in name:
                    parameter.grad = None


class Steps(TrainerCallback):
    """Counts the optimizer's own steps."""

    count = 0

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        getattr(optimizer, "optimizer", optimizer).register_step_post_hook(self._add)

    def _add(self, *args):
        self.count += 1


def late(folder, way):
    """Undisturbed, and resumed before the first layer's first step."""
    settings = {**WAYS[way], "max_steps": 4}
    whole = run("plain", settings, folder / way, trainer={"callbacks": [Late()]})
    checkpoint = folder / way / "checkpoint-2"
    resumed = run("plain", settings, folder / "resumed", checkpoint, trainer={"callbacks": [Late()]})
    return whole["weights"], resumed["weights"]


def count_steps(folder, way):
    """The steps of an optimizer without a state, and the processes that collect states for a checkpoint."""
    steps, collected, original = Steps(), [], sharded.states_for_dcp
    sharded.states_for_dcp = lambda *args, **kwargs: collected.append(1) or original(*args, **kwargs)
    run("plain", {**WAYS[way], "optim": "sgd"}, folder / way, max_steps=4, trainer={"callbacks": [steps]})
    sharded.states_for_dcp = original
    return steps.count, len(collected)


class _Interferes:
    """Calls `act` when a rank's thread is about to write a part of `checkpoint-2`."""

    def __init__(self, rank, act):
        self.rank, self.act, self.threads, self.original = rank, act, [], FileSystemWriter.write_data
        FileSystemWriter.write_data = lambda writer, *args: self(writer, *args)

    def __call__(self, writer, *args):
        self.threads.append(threading.current_thread())
        if int(os.environ["RANK"]) == self.rank and "checkpoint-2" in str(writer.path):
            self.act()
        return self.original(writer, *args)

    def end(self):
        FileSystemWriter.write_data = self.original


def fail(folder):
    """The shard of one rank cannot be written; another rank's is held back until the step after the next."""
    found = {}

    def raise_error():
        raise OSError(errno.ENOSPC, "No space left on device")

    for name, way in (("now", DCP), ("later", BACKGROUND)):
        interferes = _Interferes(1, raise_error)
        run("plain", {**way, "fsdp": True}, folder / name, max_steps=4)
        interferes.end()
        found[name] = names_in(folder / name), threading.main_thread() in interferes.threads
    after = threading.Event()
    interferes, callbacks = _Interferes(0, after.wait), [AtStep(3, after.set)]
    run("plain", WAYS["fsdp2"], folder / "held", max_steps=4, trainer={"callbacks": callbacks})
    interferes.end()
    return {**found, "held": names_in(folder / "held")}


def die(folder):
    """One rank is killed while it writes its part in the background."""
    _Interferes(1, lambda: os.kill(os.getpid(), signal.SIGKILL))
    run("plain", WAYS["fsdp2"], Path(folder), max_steps=4)
