"""Two processes on an XLA device each. XLA's CPU has no collective operations: gradients meet in the host's memory.

All but that one function is what runs on a TPU: torch_xla says where the processes stand, and gloo carries the rest.
"""

import os
import sys

import torch
import torch_xla.core.xla_model as xm
from torch import distributed
from torch_xla import runtime

from tests.adapters.xla.support import make_trainer, numbers, weights

RANK, SIZE = int(os.environ["PJRT_LOCAL_PROCESS_RANK"]), int(os.environ["PJRT_LOCAL_PROCESS_COUNT"])
runtime.world_size = lambda: SIZE
runtime.global_ordinal = lambda: RANK


def reduce_gradients(optimizer):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            mean = parameter.grad.cpu()
            distributed.all_reduce(mean)
            parameter.grad.copy_(mean / SIZE)


xm.reduce_gradients = reduce_gradients

if __name__ == "__main__":
    folder = sys.argv[1]
    settings = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 3}
    settings |= {"eval_strategy": "steps", "eval_steps": 6}
    saved = {"save_strategy": "steps", "save_steps": 6, "tpu_num_cores": SIZE}
    trainer = make_trainer(folder, "llama", samples=40, **settings, **saved)
    with torch.no_grad():  # replicas begin with the weights of the first
        next(trainer.model.parameters()).add_(RANK)
    trainer.train()
    predicted = trainer.predict(trainer.eval_dataset)
    resumed = make_trainer(folder, "llama", samples=40, **settings, **saved)
    resumed.train(resume_from_checkpoint=os.path.join(folder, "checkpoint-6"))
    found = {
        "place": vars(trainer.args._rank_info),
        "strategy": type(trainer.lightning_trainer.strategy).__name__,
        "should_save": trainer.args.should_save,
        "numbers": numbers(trainer),
        "weights": weights(trainer),
        "resumed": weights(resumed),
        "predictions": torch.tensor(predicted.predictions),
    }
    torch.save(found, os.path.join(folder, f"found{RANK}.pt"))
