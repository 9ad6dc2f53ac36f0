"""A run in ranks whose data has bad samples on one of them."""

import os
import signal

import torch

from hftrainer import TrainerCallback
from tests.support.divergence import fit

STRATEGIES = {"replicas": {}, "fsdp": {"fsdp": True}}


class DiesAfterRollback(TrainerCallback):
    """`kill -9` when training begins the second time: after a rollback, before any step."""

    begun = 0

    def on_train_begin(self, args, state, control, **kwargs):
        self.begun += 1
        if self.begun == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder, data, settings, strategy="replicas", dies=False, resume=None):
    torch.set_num_threads(1)
    callbacks = [DiesAfterRollback()] if dies else []
    trainer = fit(folder, data, resume, callbacks=callbacks, **STRATEGIES[strategy], ddp_timeout=60, **settings)
    weights = trainer.accelerator.get_state_dict(trainer.model)
    return {name: value.clone() for name, value in weights.items()}, trainer.state.global_step
