"""A model that lies on two virtual devices, which one process drives (`CPU_NUM_DEVICES=2`)."""

import os
import sys

import torch
import torch_xla
from torch_xla.debug import metrics

from hftrainer import TrainerCallback
from tests.adapters.xla.support import make_trainer, numbers, weights


class Counts(TrainerCallback):
    def __init__(self):
        self.compiled = {}

    def on_step_end(self, args, state, control, **kwargs):
        self.compiled[state.global_step] = metrics.metric_data("CompileTime")[0]


def layout(tensors) -> dict:
    return {name: torch_xla._XLAC._get_xla_sharding_spec(tensor) for name, tensor in tensors.items()}


if __name__ == "__main__":
    folder, found = sys.argv[1], {}
    fsdp = {"fsdp": True, "eval_strategy": "steps", "eval_steps": 6, "save_strategy": "steps", "save_steps": 6}
    for kind, config in {"plain": {}, "checkpointed": {"xla_fsdp_grad_ckpt": True}}.items():
        fsdp["fsdp_config"] = {
            "xla": True,
            "xla_fsdp_v2": True,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            **config,
        }
        path, counts = os.path.join(folder, kind), Counts()
        trainer = make_trainer(path, "llama", callbacks=[], **fsdp)
        trainer.train()
        make_trainer(path, "llama", callbacks=[counts], max_steps=30, **{**fsdp, "save_strategy": "no"}).train()
        resumed = make_trainer(path, "llama", **fsdp)
        resumed.train(resume_from_checkpoint=os.path.join(path, "checkpoint-6"))
        moments = {name: trainer.optimizer.state[value]["exp_avg"] for name, value in trainer.model.named_parameters()}
        found[kind] = {
            "numbers": numbers(trainer),
            "weights": weights(trainer),
            "resumed": weights(resumed),
            "layout": layout(dict(trainer.model.named_parameters())),
            "layout_resumed": layout(dict(resumed.model.named_parameters())),
            "layout_moments": layout(moments),
            "compiled": counts.compiled,
            "predictions": torch.tensor(trainer.predict(trainer.eval_dataset).predictions),
        }
    torch.save(found, os.path.join(folder, "found.pt"))
