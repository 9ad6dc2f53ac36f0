"""Two processes with `metrics_port`, of which rank 1 hangs, or is only slow, in some way."""

import json
import re
import sys
import time
from pathlib import Path

import torch

from hftrainer import TrainerCallback
from hftrainer.data.collators import default_data_collator
from tests.reliability.hang_job import stop
from tests.support.checkpoints import make_trainer
from tests.support.small_models import Plain, plain_data

#: Seconds for which no rank may be without progress in the middle of an epoch.
SLOW = 20


def hang_for_good():
    while True:
        time.sleep(1)


def hang_in_c_code():
    """Without letting other threads run."""
    re.match("(a+)+$", "a" * 99 + "b")


def hang_in_the_collator():
    hang_for_good()


class Hangs(TrainerCallback):
    """Hangs in the second epoch.

    Args:
        act: what hangs.
        file: written before.
    """

    def __init__(self, act, file):
        self.act, self.file, self.is_due = act, file, False

    def on_train_begin(self, args, state, control, **kwargs):
        self.rank, self.state = args.process_index, state

    def __call__(self):
        if self.rank == 1 and self.state.global_step == 5:
            self.file.touch()
            self.act()


class Slow(TrainerCallback):
    def on_epoch_begin(self, args, state, control, **kwargs):
        if args.process_index == 1 and state.global_step:
            time.sleep(SLOW)

    def on_save(self, args, state, control, **kwargs):
        if args.process_index == 0 and state.global_step == 3:
            time.sleep(SLOW)


class Model(Plain):
    def __init__(self, hang):
        super().__init__()
        self.hang = hang

    def forward(self, x, labels=None):
        self.hang()
        return super().forward(x, labels)


def main(folder, kind, port):
    torch.set_num_threads(1)
    act = {"forward": hang_for_good, "collator": hang_in_the_collator, "c code": hang_in_c_code, "stopped": stop}
    hangs = Hangs(act.get(kind, lambda: None), Path(f"{folder}.hangs"))
    model = Model(hangs if kind != "collator" else lambda: None)
    samples = plain_data(32)  # four steps an epoch

    def collate(rows):
        if kind == "collator":
            hangs()
        return default_data_collator(rows)

    trainer_kwargs = {"model": model, "train_dataset": samples, "eval_dataset": samples, "data_collator": collate}
    callbacks = [hangs, Slow()] if kind == "slow" else [hangs]
    make_trainer(folder, callbacks=callbacks, metrics_port=port, trainer=trainer_kwargs).train()


if __name__ == "__main__":
    settings = json.loads(sys.argv[2])
    main(sys.argv[1], settings["kind"], settings["port"])
