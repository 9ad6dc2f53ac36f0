"""Trains sharded models in many settings and writes what came of it: run by one, two or four processes.

python shard_sets.py FOLDER GROUP...

With the same global batch the processes must find the losses, norms and weights of one.
"""

import functools
import os
import pickle
import sys
from pathlib import Path

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from hftrainer import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer
from tests.support.parity import build
from tests.support.tiny import MODELS, make_t5, t5_data, without_dropout

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
#: Samples in a step of all processes; 40 of them make five steps an epoch, or two with accumulation.
GLOBAL_BATCH = 8


FIRST = {"version": 1}
#: Name → arguments.
STRATEGIES = {
    "ddp": {},
    "fsdp1 full_shard": {"fsdp": "full_shard auto_wrap", "fsdp_config": FIRST},
    "fsdp1 shard_grad_op": {"fsdp": "shard_grad_op", "fsdp_config": FIRST},
    "fsdp1 no_shard": {"fsdp": "no_shard"},
    "fsdp1 hybrid_shard": {"fsdp": "hybrid_shard auto_wrap"},
    "fsdp1 hybrid_shard_zero2": {"fsdp": "hybrid_shard_zero2"},
    "fsdp1 flat": {"fsdp": True, "fsdp_config": {"fsdp_use_orig_params": False, "backward_prefetch": "backward_pre"}},
    "fsdp1 by size": {"fsdp": "full_shard", "fsdp_config": {**FIRST, "min_num_params": 100}},
    "fsdp1 recomputed": {"fsdp": "full_shard", "fsdp_config": {**FIRST, "activation_checkpointing": True}},
    "fsdp2": {"fsdp": True},
    "fsdp2 shard_grad_op": {"fsdp": "shard_grad_op"},
    "fsdp2 offload": {"fsdp": "full_shard offload"},
    "fsdp2 by size": {"fsdp": True, "fsdp_config": {"min_num_params": 100}},
    "fsdp2 recomputed": {"fsdp": True, "fsdp_config": {"activation_checkpointing": True}},
    "fairscale simple": {"sharded_ddp": "simple"},
    "fairscale zero_dp_2": {"sharded_ddp": "zero_dp_2 auto_wrap"},
    "fairscale zero_dp_3": {"sharded_ddp": "zero_dp_3 auto_wrap offload"},
}
SETTINGS = {
    "plain": {},
    "bert": {"average_tokens_across_devices": False},  # which would double the loss of BERT, as in transformers
    "llama": {"gradient_accumulation_steps": 3},
    "peft": {},
    "odd": {},
    "vit": {},
}
COMPARED = ("plain", "bert", "llama")
PARTS = {"state_dict_type": "SHARDED_STATE_DICT"}
#: Name → arguments, for checkpoints.
SAVED = {
    "ddp": {},
    "fsdp1 whole": {"fsdp": True, "fsdp_config": FIRST},
    "fsdp1 parts": {"fsdp": True, "fsdp_config": {**FIRST, **PARTS}},
    "fsdp1 flat": {"fsdp": True, "fsdp_config": {**FIRST, "use_orig_params": False}},
    "fsdp1 shard_grad_op parts": {"fsdp": "shard_grad_op", "fsdp_config": {**FIRST, **PARTS}},
    "fsdp1 no_shard whole": {"fsdp": "no_shard"},
    "fsdp1 hybrid parts": {"fsdp": "hybrid_shard", "fsdp_config": PARTS},
    "fsdp1 hybrid_shard_zero2 whole": {"fsdp": "hybrid_shard_zero2"},
    "fsdp1 recomputed": {"fsdp": True, "fsdp_config": {**FIRST, "activation_checkpointing": True}},
    "fsdp2 whole": {"fsdp": True},
    "fsdp2 parts": {"fsdp": True, "fsdp_config": PARTS},
    "fsdp2 offload": {"fsdp": "full_shard offload"},
    "fsdp2 recomputed": {"fsdp": True, "fsdp_config": {"activation_checkpointing": True}},
}
#: Written by two processes, read by any number, with any of the others.
EXCHANGED = ("ddp", "fsdp1 whole", "fsdp1 parts", "fsdp2 whole", "fsdp2 parts")
#: With which Lightning's own checkpoints are written.
LIGHTNING = ("ddp", "fsdp1 whole", "fsdp2 parts")
#: Processes → who reads; one has no launcher, and so no FSDP.
READERS = {1: ("ddp",), 2: EXCHANGED, 4: ("fsdp1 parts", "fsdp2 whole")}


def copied(settings):
    return {key: dict(value) if isinstance(value, dict) else value for key, value in settings.items()}


def run(model, strategy, folder, resume=None, **settings):
    trainer, _ = build(
        "hftrainer",
        model,
        folder,
        per_device_train_batch_size=GLOBAL_BATCH // WORLD,
        logging_steps=1,
        **{**SETTINGS[model], **copied(strategy), **settings},
    )
    trainer.train(resume_from_checkpoint=resume)
    weights = trainer.accelerator.get_state_dict(trainer.model)
    return {"logs": trainer.state.log_history, "weights": {name: value.clone() for name, value in weights.items()}}


def compared(folder):
    """Each model with each strategy; alone only without one."""
    for model in COMPARED:
        for strategy in STRATEGIES if WORLD > 1 else ["ddp"]:
            yield f"{model} {strategy}", run(model, STRATEGIES[strategy], folder / f"{model}-{strategy}")


#: Model → a step in the middle of the second epoch.
RESUMED_AT = (("plain", 8), ("llama", 3))


def saved(folder):
    """Runs that save, and runs that go on from their checkpoints in the middle of the second epoch."""
    for model, step in RESUMED_AT:
        for name, strategy in SAVED.items():
            where = folder / "saved" / f"{model} {name}"
            saving = {"save_strategy": "steps", "save_steps": min(step, 4)}
            yield f"{model} {name}", run(model, strategy, where, **saving)
            yield f"{model} {name}, resumed", run(model, strategy, folder / "resumed", where / f"checkpoint-{step}")


def exchanged(folder):
    """Checkpoints of two processes, read by these with another strategy, by one and by four."""
    for reader in READERS[WORLD]:
        for writer in EXCHANGED:
            for model, step in RESUMED_AT:
                if WORLD == 2 and reader == writer:
                    continue  # `saved` goes on from it in the same way
                checkpoint = folder / "saved" / f"{model} {writer}" / f"checkpoint-{step}"
                yield f"{model} {writer} {reader}", run(model, SAVED[reader], folder / "exchanged", checkpoint)


def chained(folder):
    """A run that two processes have begun, gone on in one, which saves, and then in four."""
    if WORLD == 1:
        begun = folder / "saved" / "plain fsdp2 parts" / "checkpoint-4"
        for name in LIGHTNING:
            yield name, run("plain", {}, folder / "resumed", folder / "lightning" / name / "step=5.ckpt")
        yield "alone", run("plain", {}, folder / "chained", begun, save_strategy="steps", save_steps=4)
        return
    for reader in READERS[WORLD]:
        yield reader, run("plain", SAVED[reader], folder / "resumed", folder / "chained" / "checkpoint-8")


EVALUATED = {name: SAVED[name] for name in ("ddp", "fsdp1 whole", "fsdp1 parts", "fsdp2 parts")}


def evaluated(folder):
    """Evaluations before, in and after training, the best model loaded, and what save_model writes then."""
    for name, strategy in EVALUATED.items():
        where = folder / "evaluated" / name
        best = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
        settings = {**best, "load_best_model_at_end": True, "save_total_limit": 1, **copied(strategy)}
        trainer, _ = build("hftrainer", "llama", where, per_device_train_batch_size=4, **settings)
        before = trainer.evaluate()
        trainer.train()
        trainer.save_model(str(where / "final"))
        after = trainer.predict(trainer.eval_dataset)
        weights = trainer.accelerator.get_state_dict(trainer.model)
        yield name, {"before": before, "logs": trainer.state.log_history, "after": after, "weights": weights}
        generating = Seq2SeqTrainingArguments(
            str(where / "tokens"), use_cpu=True, predict_with_generate=True, report_to="none", **copied(strategy)
        )
        seq2seq = Seq2SeqTrainer(make_t5(), generating)
        yield f"{name} tokens", seq2seq.predict(t5_data(5), max_length=9, num_beams=2).predictions


HALF = {
    f"{name} {precision}": {**SAVED[name], precision: True}
    for name in ("ddp", "fsdp1 whole", "fsdp2 whole")
    for precision in ("bf16", "fp16")
}


def others(folder):
    """Half precision, adapters, and Lightning's own checkpoints."""
    for name, strategy in HALF.items():
        yield name, run("llama", strategy, folder / "half" / name, save_strategy="steps", save_steps=4)
    for name in ("ddp", "fsdp1 whole", "fsdp2 whole", "fsdp2 parts"):
        where = folder / "peft" / name
        yield f"peft {name}", run("peft", SAVED[name], where, save_strategy="steps", save_steps=4, num_train_epochs=1)
        again = run("peft", SAVED[name], folder / "resumed", where / "checkpoint-4", num_train_epochs=1)
        yield f"peft {name}, resumed", again
    for name in LIGHTNING:
        where = folder / "lightning" / name
        kept = ModelCheckpoint(dirpath=where, filename="{step}", every_n_train_steps=5, save_top_k=-1)
        best = ModelCheckpoint(dirpath=where / "best", monitor="eval_loss")  # saves when an evaluation has just ended
        evaluating = {"eval_strategy": "steps", "eval_steps": 5, "trainer": {"callbacks": [kept, best]}}
        yield f"lightning {name}", run("plain", SAVED[name], where, **evaluating)


class Odd(torch.nn.Module):
    """With running statistics, two names for one parameter, and a layer that no step uses."""

    def __init__(self):
        super().__init__()
        self.first, self.same = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.same.weight = self.first.weight
        self.norm, self.last, self.unused = torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3), torch.nn.Linear(4, 4)

    def forward(self, x, labels=None):
        logits = self.last(self.norm(self.same(self.first(x).relu())))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def make_odd():
    torch.manual_seed(3)
    return Odd()


def make_vit():
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = ViTConfig(**sizes, image_size=8, patch_size=4, num_channels=1, num_labels=3, hidden_dropout_prob=0.0)
    return ViTForImageClassification(config)


def image_data(count=40):
    generator = torch.Generator().manual_seed(0)
    return [{"pixel_values": torch.randn(1, 8, 8, generator=generator), "labels": i % 3} for i in range(count)]


class OwnLoader(Trainer):
    """Nobody asks for the model's columns before it is sharded."""

    def get_train_dataloader(self):
        return self.accelerator.prepare(torch.utils.data.DataLoader(self.train_dataset, batch_size=4))


def overflowing(strategy, folder):
    """The first losses are scaled so far that all processes find infinite gradients."""
    trainer, _ = build("hftrainer", "llama", folder, fp16=True, max_steps=20, logging_steps=1, **copied(strategy))
    trainer.accelerator.scaler._init_scale = 2.0**30
    trainer.train()
    return {"logs": trainer.state.log_history, "weights": trainer.accelerator.get_state_dict(trainer.model)}


REVIEWED = ("ddp", "fsdp1 whole", "fsdp1 parts", "fsdp2 whole", "fsdp2 parts")


def reviewed(folder):
    """What went wrong once."""
    MODELS["odd"], MODELS["vit"] = (make_odd, MODELS["plain"][1]), (make_vit, image_data)
    saving = {"save_strategy": "steps", "save_steps": 3, "num_train_epochs": 1}
    for name in REVIEWED:
        where, strategy = folder / "reviewed" / name, SAVED[name]
        yield f"overflow {name}", overflowing(strategy, where / "overflow")
        smooth = {"label_smoothing_factor": 0.1, "max_steps": 3}
        yield f"label smoothing {name}", run("llama", strategy, where / "smooth", **smooth)
        own = {"trainer_class": lambda library: OwnLoader, "eval_strategy": "epoch", "num_train_epochs": 1}
        yield f"own loader {name}", run("plain", strategy, where / "own", **own)
        for model, settings in (("odd", {}), ("vit", {}), ("plain", {"optim": "schedule_free_adamw", **CONSTANT})):
            yield f"{model} {name}", run(model, strategy, where / model, **saving, **settings)
            again = run(
                model, strategy, folder / "resumed", where / model / "checkpoint-3", num_train_epochs=1, **settings
            )
            yield f"{model} {name}, resumed", again
        begun = folder / "reviewed" / "ddp" / "vit" / "checkpoint-3"
        yield f"vit {name}, from ddp", run("vit", strategy, folder / "resumed", begun, num_train_epochs=1)


CONSTANT = {"lr_scheduler_type": "constant", "warmup_steps": 0}


def main(folder, groups):
    torch.set_num_threads(1)
    MODELS["peft"] = (without_dropout(MODELS["peft"][0]), MODELS["peft"][1])
    for name in COMPARED:
        make_model, make_data = MODELS[name]
        MODELS[name] = (without_dropout(make_model), functools.partial(make_data, 40))
    for group in groups:
        found = dict(GROUPS[group](folder))
        (folder / f"{group}-{WORLD}-{os.environ.get('RANK', '0')}.pkl").write_bytes(pickle.dumps(found))


GROUPS = {each.__name__: each for each in (compared, saved, exchanged, chained, evaluated, others, reviewed)}

if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
