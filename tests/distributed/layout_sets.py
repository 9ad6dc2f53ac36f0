"""Trains with processes laid out in several ways and writes what came of it: run by one, two or four processes.

python layout_sets.py FOLDER

With the same global batch all layouts must find the losses, norms, weights and metrics of one process.
"""

import functools
import os
import pickle
import sys
from pathlib import Path

import torch

from tests.support.parity import build
from tests.support.tiny import MODELS, make_llama, without_dropout

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
SAMPLES, EVALUATED, GLOBAL_BATCH, SAVED_AT = 40, 10, 8, 3
#: Processes → name → sizes of `parallelism_config`, and whether transformers splits the model by them.
LAYOUTS = {
    1: {"one": ({}, False)},
    2: {
        "dp_shard": ({"dp_shard_size": 2}, False),
        "dp_replicate": ({"dp_replicate_size": 2}, False),
        "tp": ({"tp_size": 2}, True),
    },
    4: {
        "hybrid": ({"dp_replicate_size": 2, "dp_shard_size": 2}, False),
        "dp_shard x tp": ({"dp_shard_size": 2, "tp_size": 2}, True),
    },
}


def llama(folder, split):
    """The model, loaded from `folder` and split as transformers does."""
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    sizes = {"tp_size": split["tp_size"], "fsdp_size": split.get("dp_shard_size", 1)} if split else {}
    distributed = DistributedConfig(**sizes) if sizes else None
    return LlamaForCausalLM.from_pretrained(folder, distributed_config=distributed, attention_dropout=0.0)


def counted(prediction):
    return {"rows": len(prediction.predictions), "sum": float(prediction.predictions.sum())}


def streamed():
    from torchmetrics import SumMetric

    from hftrainer.evaluation.metrics import TorchMetrics

    return TorchMetrics(
        {"rows": SumMetric()},
        adapter=lambda p: {"value": torch.tensor(float(len(p.label_ids)))},
    )


def run(folder, model, sizes, split, resume=None, **settings):
    MODELS["llama"] = (lambda: llama(model, sizes if split else {}), MODELS["llama"][1])
    sharing = WORLD // sizes.get("tp_size", 1)
    trainer, _ = build(
        "hftrainer",
        "llama",
        folder,
        per_device_train_batch_size=GLOBAL_BATCH // sharing,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        save_strategy="steps",
        save_steps=SAVED_AT,
        include_num_input_tokens_seen=True,
        **settings,
    )
    trainer.train(resume_from_checkpoint=resume)
    weights = trainer.accelerator.get_state_dict(trainer.model)
    trainer.compute_metrics = counted
    whole = trainer.evaluate(trainer.train_dataset[:EVALUATED])
    trainer.compute_metrics = streamed()
    streams = trainer.evaluate(trainer.train_dataset[:EVALUATED])
    return {
        "logs": trainer.state.log_history,
        "weights": {name: value.clone() for name, value in weights.items()},
        "metrics": {name: whole[name] for name in ("eval_rows", "eval_sum", "eval_loss")},
        "streamed": streams["eval_rows"],
        "flos": trainer.state.total_flos,
    }


def main(folder):
    torch.set_num_threads(1)
    model = folder / "llama"
    MODELS["llama"] = (None, functools.partial(MODELS["llama"][1], SAMPLES))
    if WORLD == 1:
        without_dropout(make_llama)().save_pretrained(model)
    found = {}
    for name, (sizes, split) in LAYOUTS[WORLD].items():
        asked = {"parallelism_config": dict(sizes)} if sizes and not split else {}
        where = folder / f"{name} saved"
        found[name] = run(where, model, sizes, split, **asked)
        checkpoint = where / f"checkpoint-{SAVED_AT}"
        found[f"{name}, resumed"] = run(folder / f"{name} resumed", model, sizes, split, checkpoint, **asked)
        if name == "tp":
            one = folder / "one saved" / f"checkpoint-{SAVED_AT}"
            found[f"{name}, from one"] = run(folder / f"{name} other", model, sizes, split, one, **asked)
    (folder / f"{WORLD}-{os.environ.get('RANK', '0')}.pkl").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
