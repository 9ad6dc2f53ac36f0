"""Two processes, of which one stops before a collective operation: the other waits for it."""

import functools
import json
import os
import signal
import sys
import threading
from datetime import timedelta

import torch
from torch.distributed import distributed_c10d

from hftrainer import TrainerCallback
from hftrainer.parallel.environment import find_rank_info
from hftrainer.parallel.processes import Processes
from tests.support.checkpoints import make_trainer

#: Until the ranks have met, and from then on.
LONG_TIMEOUT, TIMEOUT = timedelta(seconds=60), timedelta(seconds=2)


def stop():
    """Stop this process, as a machine that hangs does not answer."""
    os.kill(os.getpid(), signal.SIGSTOP)


def shorten_timeout():
    """From here on only the rank that has stopped is late."""
    distributed_c10d._set_pg_timeout(TIMEOUT)


def stop_while_connecting(seconds):
    """Stop so long after the ranks have met at the store, and begin to connect to each other."""
    make = distributed_c10d._new_process_group_helper

    def stopping(*args, **kwargs):
        threading.Timer(seconds, stop).start()
        return make(*args, **kwargs)

    distributed_c10d._new_process_group_helper = stopping


class Stops(TrainerCallback):
    def __init__(self, victim):
        self.victim = victim

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            shorten_timeout()
            if args.process_index == self.victim:
                stop()


def make_hanging(folder, callbacks=(), **settings):
    more = {"ddp_timeout": LONG_TIMEOUT.seconds, "save_strategy": "no"}
    return make_trainer(folder, callbacks=callbacks, **more, **settings)


def train(folder, victim, **settings):
    make_hanging(folder, [Stops(victim)], **settings).train()


def evaluate(folder, victim):
    trainer = make_hanging(folder)
    shorten_timeout()
    if trainer.args.process_index == victim:
        stop()
    trainer.evaluate()


#: Kind of collective operation → a function that begins it in one rank alone.
ALONE = {
    "connecting": lambda processes: processes.barrier(),  # they have connected before the other stopped
    "barrier": lambda processes: processes.barrier(),
    "vote": lambda processes: processes.start_max_over_ranks([1])(),
    "decision": lambda processes: processes.broadcast_from_main(lambda: 1),
    "scatter": lambda processes: processes.scatter(lambda: [1, 2]),
    "rows": lambda processes: processes.gather(torch.ones(2)),
    "numbers": lambda processes: processes.gather_numbers(torch.ones(1)),
    "objects": lambda processes: processes.gather_objects([1]),
    "reduction": lambda processes: processes.reduce(torch.ones(2)),
    "sizes": lambda processes: processes.pad(torch.ones(2), 0, 0, False),
    "metrics": lambda processes: processes.gather_for_torchmetrics(torch.ones(2)),
}
#: Kind → what both do, until one stops.
TOGETHER = {"gradients": train, "shards": functools.partial(train, fsdp=True), "evaluation": evaluate}


def main(folder, settings):
    torch.set_num_threads(1)
    kind, victim = settings["kind"], settings["victim"]
    if kind in TOGETHER:
        TOGETHER[kind](folder, victim)
        return
    timeout = TIMEOUT if kind in ("meeting", "connecting") else LONG_TIMEOUT
    processes = Processes.from_ranks(find_rank_info({}, lambda: 0), timeout=timeout)
    if kind == "meeting" and processes.rank == victim:
        stop()
    if kind == "connecting" and processes.rank == victim:
        stop_while_connecting(settings["after"])
    processes.connect(torch.device("cpu"), None, timeout)
    processes.barrier()  # each is connected to the others
    shorten_timeout()
    if processes.rank == victim:
        stop()
    ALONE[kind](processes)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
