"""Trains what `test_interchange.py` asks for, each job with one library: run with the Python of one environment.

python -m tests.compat.interchange '[["hftrainer", "bert", "folder", false, {}], ...]'
"""

import importlib
import json
import sys
from pathlib import Path

import torch

from tests.support.parity import EVERY_STEP, build, comparable
from tests.support.small_models import make_peft

#: model → micro-batches in a step, steps between checkpoints, the step to resume from. BERT does not accumulate, since
#: the model of v5 leaves its loss undivided then.
SHAPES = {"plain": (1, 4, 12), "bert": (1, 4, 12), "llama": (3, 2, 2)}
SHAPES |= {"tied": (3, 2, 2), "peft": (3, 2, 2), "adapters": (3, 2, 6)}


def make_adapters():
    from peft import LoraConfig

    model = make_peft()
    torch.manual_seed(3)
    model.add_adapter("second", LoraConfig(r=3, lora_dropout=0.1, target_modules=["q_proj"]))
    model.set_adapter("second")
    return model


def make_tied():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True))


#: Models that tests.support.small_models lacks, each with the one there whose data it takes.
OWN_MODELS = {"adapters": (make_adapters, "peft"), "tied": (make_tied, "llama")}


def train(library: str, model: str, folder: str, resume: bool, more: dict) -> None:
    """Train in `folder`, from its checkpoint if `resume`; the report lies there afterwards."""
    accumulation, steps, _ = SHAPES[model]
    module = importlib.import_module(library)
    make, like = OWN_MODELS.get(model, (None, model))
    settings = {
        **{**EVERY_STEP, "eval_steps": steps, "save_steps": steps, "logging_steps": 1},
        **{"gradient_accumulation_steps": accumulation, "optim": "adamw_torch", "metric_for_best_model": "loss"},
        "load_best_model_at_end": model != "adapters",  # transformers loads the first adapter into the second
        "restore_callback_states_from_checkpoint": True,
        **({"lightning_config": {"behaviour": "4.57"}} if library == "hftrainer" else {}),
    }
    trainer, _ = build(library, like, Path(folder), trainer={"model": make()} if make else {}, **settings, **more)
    trainer.add_callback(module.EarlyStoppingCallback(50, early_stopping_threshold=5.0))
    trainer.train(resume_from_checkpoint=resume)
    torch.save(trainer.model.state_dict(), Path(folder) / "final.pt")
    state = trainer.state
    (stopper,) = [found for found in trainer.callback_handler.callbacks if hasattr(found, "early_stopping_patience")]
    report = {
        "logs": comparable(state.log_history)[:-1],  # the last line has the mean loss of this call alone
        "best": [state.best_metric, state.best_global_step, Path(state.best_model_checkpoint).name],
        "end": [state.global_step, state.epoch, state.total_flos],
        "patience": [stopper.early_stopping_patience, stopper.early_stopping_patience_counter],
    }
    (Path(folder) / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for job in json.loads(sys.argv[1]):
        train(*job)
