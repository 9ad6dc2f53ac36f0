"""Trainings of ranks that are laid out in several ways.

With the same global batch all layouts must find the losses, norms, weights and metrics of one process.
"""

import functools
import os

import torch
from torchmetrics import SumMetric

from hftrainer.evaluation.metrics import TorchMetrics
from tests.support.parity import build
from tests.support.small_models import MODELS, language_data, make_llama, without_dropout

SAMPLES, EVALUATED, GLOBAL_BATCH, SAVED_AT = 40, 10, 8, 3
#: Processes → name → sizes of `parallelism_config`.
LAYOUTS = {
    1: {"one": {}},
    2: {"dp_shard": {"dp_shard_size": 2}, "dp_replicate": {"dp_replicate_size": 2}, "tp": {"tp_size": 2}},
    4: {"hybrid": {"dp_replicate_size": 2, "dp_shard_size": 2}, "dp_shard x tp": {"dp_shard_size": 2, "tp_size": 2}},
}


def load(folder, sizes):
    """The model, split by transformers if there is tensor parallelism."""
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    distributed = None
    if "tp_size" in sizes:
        distributed = DistributedConfig(tp_size=sizes["tp_size"], fsdp_size=sizes.get("dp_shard_size", 1))
    return LlamaForCausalLM.from_pretrained(folder, distributed_config=distributed, attention_dropout=0.0)


def count(prediction):
    return {"rows": len(prediction.predictions), "sum": float(prediction.predictions.sum())}


def run(folder, model, sizes, resume=None):
    MODELS["llama"] = (functools.partial(load, model, sizes), functools.partial(language_data, SAMPLES))
    sharing = int(os.environ.get("WORLD_SIZE", "1")) // sizes.get("tp_size", 1)
    by_argument = {"parallelism_config": dict(sizes)} if sizes and "tp_size" not in sizes else {}
    settings = {"per_device_train_batch_size": GLOBAL_BATCH // sharing, "per_device_eval_batch_size": 2}
    settings |= {"gradient_accumulation_steps": 2, "logging_steps": 1, "save_strategy": "steps", "save_steps": SAVED_AT}
    trainer, _ = build("hftrainer", "llama", folder, include_num_input_tokens_seen=True, **settings, **by_argument)
    trainer.train(resume_from_checkpoint=resume)
    weights = {name: value.clone() for name, value in trainer.accelerator.get_state_dict(trainer.model).items()}
    trainer.compute_metrics = count
    whole = trainer.evaluate(trainer.train_dataset[:EVALUATED])
    trainer.compute_metrics = TorchMetrics(
        {"rows": SumMetric()}, adapter=lambda p: {"value": torch.tensor(float(len(p.label_ids)))}
    )
    return {
        "logs": trainer.state.log_history,
        "weights": weights,
        "metrics": {name: whole[name] for name in ("eval_rows", "eval_sum", "eval_loss")},
        "streamed": trainer.evaluate(trainer.train_dataset[:EVALUATED])["eval_rows"],
        "flos": trainer.state.total_flos,
    }


def train_all(folder, layouts):
    model, found = folder / "llama", {}
    if "one" in layouts:
        without_dropout(make_llama)().save_pretrained(model)
    for name, sizes in layouts.items():
        found[name] = run(folder / f"{name} saved", model, sizes)
        for suffix, writer in {"resumed": name, **({"from one": "one"} if name == "tp" else {})}.items():
            checkpoint = folder / f"{writer} saved" / f"checkpoint-{SAVED_AT}"
            found[f"{name}, {suffix}"] = run(folder / f"{name} {suffix}", model, sizes, checkpoint)
    return found
